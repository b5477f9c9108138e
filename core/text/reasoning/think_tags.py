"""Reasoning between two tags: `<think>...</think>` of Qwen 3, DeepSeek R1 and many others.

```
<think>\\n reasoning \\n</think>\\n\\n content
```

Templates may write the opening tag, or both tags, at the end of the prompt. Tags in the prompt
are not part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.text.reasoning.base import Reasoning
from core.text.stopping import partial_match_length


class ThinkTags:
    """Parses one pair of tags at the start of the answer. Whitespace around the tags is dropped."""

    def __init__(
        self, opening: str, closing: str, prompt: str, *, starts_inside: bool = False
    ) -> None:
        """prompt: at least the end of the prompt.

        starts_inside: the answer is reasoning from its start to the closing tag, even without the
        opening tag. That is always so if the prompt ends with the opening tag.
        """
        prompt = prompt.rstrip()
        self.special_tokens: Sequence[str] = (opening, closing)
        self.is_inside = False
        self._opening = opening
        self._closing = closing
        self._starts_inside = starts_inside or prompt.endswith(opening)
        self._has_begun = prompt.endswith(closing)
        self._drops_spaces = not self._has_begun
        self._held = ""

    def push(self, text: str) -> list[Reasoning | str]:
        self._held += text
        if not self._has_begun and not self._begin():
            return []
        parts: list[Reasoning | str] = []
        if self.is_inside:
            parts += self._reasoning()
        if not self.is_inside:
            parts += self._content()
        return parts

    def flush(self) -> list[Reasoning | str]:
        """See `ReasoningParser.flush`. An answer that is cut off may be all reasoning."""
        rest, self._held = self._held, ""
        if self._drops_spaces and not rest.strip():
            return []
        is_reasoning = self.is_inside if self._has_begun else self._starts_inside
        return [Reasoning(rest) if is_reasoning else rest] if rest else []

    def _begin(self) -> bool:
        """Decide whether the answer begins with reasoning; False if it is too early to say."""
        start = self._held.lstrip()
        is_tagged = start.startswith(self._opening)
        if not is_tagged and self._opening.startswith(start):
            return False
        if is_tagged:
            self._held = start.removeprefix(self._opening)
        self._has_begun = True
        self.is_inside = self._drops_spaces = is_tagged or self._starts_inside
        return True

    def _reasoning(self) -> list[Reasoning | str]:
        """Release text that is certainly reasoning. Hold back spaces, which may precede the tag."""
        if self._drops_spaces:
            self._held = self._held.lstrip()
            self._drops_spaces = not self._held
        at = self._held.find(self._closing)
        end = at if at >= 0 else len(self._held) - partial_match_length(self._held, [self._closing])
        text = self._held[:end].rstrip()
        if at >= 0:
            self._held = self._held[at + len(self._closing) :]
            self.is_inside, self._drops_spaces = False, True
        else:
            self._held = self._held[len(text) :]
        return [Reasoning(text)] if text else []

    def _content(self) -> list[Reasoning | str]:
        if self._drops_spaces:
            self._held = self._held.lstrip()
            self._drops_spaces = not self._held
        text, self._held = self._held, ""
        return [text] if text else []
