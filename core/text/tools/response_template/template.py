"""`response_template` of tokenizer_config.json, as transformers 5 and vLLM read it.

It names the fields of a message, and for each the marks between which an answer has it:

```
{"start_anchor": "<|im_start|>assistant\\n",
 "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                           "repeats": true,
                           "transform": {"type": "function", "function": "{content}"}},
            "content": {"close": "<|im_end|>"}}}
```

Marks are texts, or regular expressions (`open_pattern`) in the dialect of the package regex. The
field without an opening mark is open wherever no other is. A prompt may write the start of a
message: what follows its last anchor counts as part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
import regex

from core.errors import ConfigurationError

Role = Literal["content", "reasoning", "calls", "other"]
_ROLES: Mapping[str, Role] = {
    "content": "content", "reasoning_content": "reasoning", "reasoning": "reasoning",
    "thinking": "reasoning", "tool_calls": "calls",
}  # fmt: skip
PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
"""A string of a transform that stands for a value."""
_SPECIAL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""How special tokens look."""


class _Field(msgspec.Struct, forbid_unknown_fields=True):
    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: Literal["text", "int", "float", "bool", "json", "xml-inline", "kv-lines"] = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False


class _Template(msgspec.Struct, forbid_unknown_fields=True):
    fields: dict[str, _Field]
    version: Literal[1] = 1
    defaults: dict[str, Any] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """What opens or closes a field."""

    pattern: regex.Pattern[str]
    may_grow: bool
    """Whether a match at the end of a text may become longer when the text goes on."""


@dataclass(frozen=True, slots=True)
class Field:
    """A part of an answer."""

    name: str
    role: Role
    opening: Mark | None
    closing: Mark | None
    content: str
    """How the text between the marks is parsed; see `content.py`."""
    content_args: Mapping[str, Any]
    join: str | None
    """The text between repeated parts."""
    transform: Any
    """The shape of the value, with placeholders such as `{content}`; None: as it was parsed."""
    transforms_each: bool

    @property
    def streams(self) -> bool:
        """Whether each piece of the text is a piece of the value."""
        return self.content == "text" and self.transform is None and self.role != "calls"


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """Raises nothing: `read_template` has checked it."""

    fields: tuple[Field, ...]
    implicit: Field | None
    """The field that is open wherever no other is; None: such text is dropped."""
    anchor: regex.Pattern[str] | None
    """Where a message starts in a prompt."""
    special_tokens: Sequence[str]
    """Texts of the template that may be special tokens."""


def read_template(spec: object) -> ResponseTemplate:
    """Return a template from its JSON. Raises ConfigurationError if it is not valid."""
    cure = "; correct or remove it, and set option.tool_call_parser if tools are used"
    try:
        given = msgspec.convert(spec, _Template)
        fields = tuple(_field(name, field) for name, field in given.fields.items())
        anchor = _mark(given.start_anchor, given.start_anchor_pattern)
    except (msgspec.ValidationError, ValueError, regex.error) as error:
        raise ConfigurationError(f"response_template: {error}{cure}") from None
    implicit = [field for field in fields if field.opening is None]
    if not fields or len(implicit) > 1:
        raise ConfigurationError(
            f"response_template: {len(implicit)} of {len(fields)} fields have no opening mark, "
            f"which at most one may lack{cure}"
        )
    texts = " ".join(_texts(spec)).replace("\\", "")
    special = tuple(dict.fromkeys(_SPECIAL.findall(texts)))
    return ResponseTemplate(
        fields, next(iter(implicit), None), anchor.pattern if anchor else None, special
    )


def _field(name: str, given: _Field) -> Field:
    if given.join is not None and not given.repeats:
        raise ValueError(f"{name}: join needs repeats")
    if given.transform_each and given.transform is None:
        raise ValueError(f"{name}: transform_each needs a transform")
    if given.content == "xml-inline":
        groups = regex.compile(given.content_args.get("tag_pattern", "")).groupindex
        if not {"key", "value"} <= set(groups):
            raise ValueError(f"{name}: tag_pattern needs the groups key and value")
    for text in _texts(given.transform):
        if PLACEHOLDER.search(text) and not PLACEHOLDER.fullmatch(text):
            raise ValueError(f"{name}: {text!r} mixes a placeholder with other text")
    return Field(
        name=name,
        role=_ROLES.get(name, "other"),
        opening=_mark(given.open, given.open_pattern),
        closing=_mark(given.close, given.close_pattern),
        content=given.content,
        content_args=given.content_args,
        join=given.join,
        transform=given.transform,
        transforms_each=given.transform_each,
    )


def _mark(literals: str | list[str] | None, pattern: str | None) -> Mark | None:
    """Return a mark; None if neither is given. The longest of several literals counts."""
    if literals is not None and pattern is not None:
        raise ValueError("a mark is a text or a pattern, not both")
    if pattern is not None:
        return Mark(regex.compile(pattern, regex.DOTALL), may_grow=True)
    if literals is None:
        return None
    texts = sorted([literals] if isinstance(literals, str) else literals, key=len, reverse=True)
    if not texts or not texts[-1]:
        raise ValueError("a mark must not be empty")
    may_grow = any(a != b and a.startswith(b) for a in texts for b in texts)
    return Mark(regex.compile("|".join(map(regex.escape, texts)), regex.DOTALL), may_grow)


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*cast(dict[str, object], value).values()])
    elif isinstance(value, list):
        for item in cast(list[object], value):
            yield from _texts(item)
