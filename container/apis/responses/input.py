"""The `input` of a response: items, turned into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from container.apis.generation.conversation import read_arguments
from container.apis.generation.media import RESPONSES_MEDIA, Media, Part, content_of, text_part
from container.schema.kinds import Kind, content_schema, is_list, object_schema
from core.errors import RequestError

_TEXT = object_schema({"type": {"const": "input_text"}, "text": {"type": "string"}})
_CONTENT = content_schema(_TEXT, RESPONSES_MEDIA.schema)
INPUT = Kind(
    "a string or a list of objects",
    lambda value: (
        isinstance(value, str) or (is_list(value) and all(isinstance(item, dict) for item in value))
    ),
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "items": object_schema(
                    {
                        "type": {"const": "message"},
                        "role": {"enum": ["user", "assistant", "system", "developer"]},
                        "content": _CONTENT,
                    },
                    ["role", "content"],
                ),
            },
        ]
    },
)
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def read_input(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> tuple[tuple[Mapping[str, object], ...], Media]:
    """Return the messages and their media.

    `instructions` and a system message at the start become one message. Raises RequestError that
    names the first bad item.
    """
    conversation = _Messages()
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items:
        raise RequestError("input", "expected a string or at least one item")
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    messages = conversation.messages
    if instructions:
        is_system = messages[0]["role"] == "system"
        first = f"{instructions}\n\n{messages.pop(0)['content']}" if is_system else instructions
        messages.insert(0, {"role": "system", "content": first})
    return tuple(messages), conversation.media


class _Messages:
    """Collects messages. Reasoning, text and calls of one turn become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.media = Media("input", RESPONSES_MEDIA)

    def add(self, item: Mapping[str, Any], field: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(item, field)
            case "function_call":
                self._call(item, field)
            case "function_call_output":
                call_id = _string(item, "call_id", field)
                content = _content(item.get("output"), f"{field}.output", self.media)
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "reasoning":
                name = "content" if item.get("content") else "summary"
                reasoning = _content(item.get(name), f"{field}.{name}", self.media.only(False))
                self.messages.append(
                    {"role": "assistant", "reasoning": reasoning, "reasoning_content": reasoning,
                     "content": ""}
                )  # fmt: skip
            case "item_reference":
                raise RequestError(f"{field}.type", "nothing is stored; send the item itself")
            case kind:
                raise RequestError(f"{field}.type", f"{kind!s:.50} is not supported")

    def _message(self, item: Mapping[str, Any], field: str) -> None:
        role = _ROLES.get(_string(item, "role", field))
        if role is None:
            raise RequestError(f"{field}.role", f"expected one of {', '.join(_ROLES)}")
        allowed = self.media.only(role == "user")
        content = _content(item.get("content"), f"{field}.content", allowed)
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and "reasoning" in last and not last["content"]:
            last["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _call(self, item: Mapping[str, Any], field: str) -> None:
        arguments = read_arguments(_string(item, "arguments", field), f"{field}.arguments")
        function = {"name": _string(item, "name", field), "arguments": arguments}
        id = _string(item, "call_id", field)
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})


def _string(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{field}.{name}", "expected a string")
    return value


def _content(content: object, field: str, media: Media) -> str | list[Part]:
    """Return a message's content for the chat template: a string, unless it has media."""
    if isinstance(content, str):
        return content
    if not is_list(content):
        raise RequestError(field, "expected a string or a list of parts")
    return content_of(
        [_part(part, f"{field}[{index}]", media) for index, part in enumerate(content)]
    )


def _part(part: object, field: str, media: Media) -> Part:
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return text_part(text)
        case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
            return text_part(text)
        case {"type": str(kind)} if kind not in _TEXT_PARTS:
            found = media.part(part, field)
            if found is None:
                kinds = f"only text and {RESPONSES_MEDIA.type} are"
                raise RequestError(f"{field}.type", f"{kind:.50} is not supported; {kinds}")
            return found
        case _:
            raise RequestError(field, 'expected a part such as {"type": "input_text", "text": ""}')
