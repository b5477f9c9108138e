"""Formats of tool calls as response templates, for models whose tokenizer has none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.text.tools.base import Piece, ToolCall
from core.text.tools.notation import Notation, json_head
from core.text.tools.response_template.parser import ResponseParser
from core.text.tools.response_template.template import ResponseTemplate, read_template

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WHOLE_CALL = {"type": "function", "function": "{content}"}
_LISTED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls."""

    template: ResponseTemplate
    notation: Notation | None
    """See `ToolParser.notation`."""


def _format(notation: Notation | None = None, *, end: str = "", **field: Any) -> CallFormat:
    """Return the format in which such a field of a response template has the calls.

    end: a pattern of what ends a section of calls. Everything else is content, blanks included.
    """
    content = {"content": "text", "content_args": {"strip": False}}
    fields = {"tool_calls": {"repeats": True, **field}, "content": content}
    if end:
        fields["end"] = {"open_pattern": end, "close_pattern": "(?=.)"}
    return CallFormat(read_template({"start_anchor": "\0", "fields": fields}), notation)


def _kimi_head(name: str) -> str:
    return f"{_KIMI_CALL[0]}functions.{name}:0{_KIMI_CALL[1]}"


def _glm() -> CallFormat:
    """GLM 4.5 to 4.7: a name, and arguments whose keys and values stand in tags of their own."""
    return _format(
        open_pattern=r"\s*<tool_call>\s*(?P<name>[^\s<]+)",
        close_pattern=r"</tool_call>\s*",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*"
            r"<arg_value>(?P<value>.*?)</arg_value>"
        },
        transform=_CALL,
    )


def _minimax() -> CallFormat:
    """MiniMax M2: a section of calls, `<invoke name="f"><parameter name="x">1</parameter>...`."""
    return _format(
        open_pattern=r'\s*(?:<minimax:tool_call>\s*)?<invoke name="?(?P<name>[^">]+)"?>',
        close_pattern=r"</invoke>\s*",
        end=r"</minimax:tool_call>\s*",
        content="xml-inline",
        content_args={
            "tag_pattern": r'<parameter name="?(?P<key>[^">]+)"?>\n?(?P<value>.*?)\n?</parameter>'
        },
        transform=_CALL,
    )


def _kimi() -> CallFormat:
    """Kimi K2: a section of calls, each with an id `functions.NAME:NUMBER`.

    Its chat template shows ids to the model again, which takes up how they look.
    """
    return _format(
        Notation(_kimi_head, _KIMI_CALL[2], "", opening=_KIMI_SECTION[0], closing=_KIMI_SECTION[1]),
        open_pattern=r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        close_pattern=r"<\|tool_call_end\|>\s*",
        end=r"<\|tool_calls_section_end\|>\s*",
        content="json",
        transform={**_CALL, "id": "{id}"},
    )


def _ernie() -> CallFormat:
    """ERNIE 4.5: one JSON object for each call."""
    return _format(
        Notation(
            lambda name: f"<tool_call>\n{json_head('arguments')(name)}", "}\n</tool_call>\n", ""
        ),
        open_pattern=r"\s*<tool_call>",
        close_pattern=r"</tool_call>\s*",
        content="json",
        transform=_WHOLE_CALL,
        end=r"\s*</?response>\s*",
    )


def _hunyuan() -> CallFormat:
    """Hunyuan: a JSON list of calls."""
    head = json_head("arguments")
    return _format(
        Notation(head, "}", ", ", opening="<tool_calls>[", closing="]</tool_calls>"),
        open_pattern=r"\s*<tool_calls>",
        close_pattern=r"</tool_calls>\s*",
        content="json",
        transform=_LISTED_CALL,
        transform_each=True,
    )


FORMATS: Mapping[str, Callable[[], CallFormat]] = {
    "glm45": _glm, "minimax_m2": _minimax, "kimi_k2": _kimi, "ernie45": _ernie,
    "hunyuan_a13b": _hunyuan,
}  # fmt: skip
"""By the names of vLLM's parsers."""


class FormatParser:
    """A `ToolParser` of one of these formats."""

    def __init__(self, name: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._format = FORMATS[name]()
        self._parser = ResponseParser(self._format.template, "", tools)
        self.special_tokens = self._parser.special_tokens

    def notation(self, special_tokens: Collection[str]) -> Notation | None:
        """See `ToolParser.notation`."""
        return self._format.notation

    def push(self, text: str) -> list[Piece]:
        return _pieces(self._parser.push(text))

    def flush(self) -> list[Piece]:
        return _pieces(self._parser.flush())


def _pieces(parts: Sequence[object]) -> list[Piece]:
    """Return the parts: such a template has no reasoning."""
    return [part for part in parts if isinstance(part, str | ToolCall)]
