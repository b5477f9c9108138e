"""The messages and blocks of Anthropic's API, turned into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from container.schema.kinds import is_list
from core.errors import RequestError

_ROLES = ("user", "assistant", "system")


def read_messages(
    given: Sequence[Mapping[str, Any]], system: object
) -> tuple[Mapping[str, object], ...]:
    """Return the messages, the system's first. Raises RequestError that names the first bad one.

    The results of tools become messages of their own, before the rest of the user's message.
    """
    messages: list[Mapping[str, object]] = []
    if system:
        messages.append({"role": "system", "content": _text(system, "system")})
    for index, message in enumerate(given):
        field, role = f"messages[{index}]", message.get("role")
        if role not in _ROLES:
            raise RequestError(f"{field}.role", f"expected one of {', '.join(_ROLES)}")
        blocks = _blocks(message.get("content"), f"{field}.content")
        if role == "assistant":
            messages.append(_assistant(blocks, f"{field}.content"))
        else:
            messages += _others(role, blocks, f"{field}.content")
    return tuple(messages)


def _assistant(blocks: Sequence[Mapping[str, Any]], field: str) -> Mapping[str, object]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[object] = []
    for index, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(thinking)}:
                thoughts.append(thinking)
            case {"type": "redacted_thinking"}:
                pass  # another model's, and encrypted
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict()}:
                function = {"name": name, "arguments": block["input"]}
                calls.append({"id": id, "type": "function", "function": function})
            case _:
                raise _unsupported(block, f"{field}[{index}]", "text, thinking or tool_use")
    message: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _others(
    role: str, blocks: Sequence[Mapping[str, Any]], field: str
) -> list[Mapping[str, object]]:
    texts: list[str] = []
    results: list[Mapping[str, object]] = []
    for index, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(id)}:
                content = _text(block.get("content") or "", f"{field}[{index}].content")
                results.append({"role": "tool", "tool_call_id": id, "content": content})
            case _:
                raise _unsupported(block, f"{field}[{index}]", "text or tool_result")
    if texts or not results:
        results.append({"role": role, "content": "\n".join(texts)})
    return results


def _blocks(content: object, field: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not is_list(content) or not all(isinstance(block, dict) for block in content):
        raise RequestError(field, "expected a string or a list of blocks")
    return cast(Sequence[Mapping[str, Any]], content)


def _text(content: object, field: str) -> str:
    """Return the text of a content that may only have text blocks."""
    texts: list[str] = []
    for index, block in enumerate(_blocks(content, field)):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _unsupported(block, f"{field}[{index}]", "text")
    return "\n".join(texts)


def _unsupported(block: Mapping[str, Any], field: str, kinds: str) -> RequestError:
    return RequestError(field, f"expected a complete block of type {kinds}, not {block!r:.80}")
