"""The messages and blocks of Anthropic's API, turned into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from container.apis.generation.media import ANTHROPIC_MEDIA, Media, Part, content_of, text_part
from container.schema.kinds import is_list
from core.errors import RequestError

_ROLES = ("user", "assistant", "system")


def read_messages(
    given: Sequence[Mapping[str, Any]], system: object
) -> tuple[tuple[Mapping[str, object], ...], Media]:
    """Return the messages, beginning with the system message if there is one, and their media.

    The results of tools become messages of their own, before the rest of the user's message.

    Raises RequestError that names the first bad message.
    """
    messages: list[Mapping[str, object]] = []
    media = Media("messages", ANTHROPIC_MEDIA)
    if system:
        text = _content(system, "system", media.only(False))
        messages.append({"role": "system", "content": text})
    for index, message in enumerate(given):
        field, role = f"messages[{index}]", message.get("role")
        if role not in _ROLES:
            raise RequestError(f"{field}.role", f"expected one of {', '.join(_ROLES)}")
        blocks = _blocks(message.get("content"), f"{field}.content")
        if role == "assistant":
            messages.append(_assistant(blocks, f"{field}.content"))
        else:
            allowed = media.only(role == "user")
            messages += _results_first(role, blocks, f"{field}.content", allowed)
    return tuple(messages), media


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
                pass  # the thinking of another model, encrypted
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict()}:
                function = {"name": name, "arguments": block["input"]}
                calls.append({"id": id, "type": "function", "function": function})
            case _:
                raise _unsupported(block, f"{field}[{index}]", "text, thinking or tool_use")
    message: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _results_first(
    role: str, blocks: Sequence[Mapping[str, Any]], field: str, media: Media
) -> list[Mapping[str, object]]:
    """Return the results of tools, then the message with the other blocks, if there are any.

    Media are added in the order of these messages.
    """
    others: list[tuple[str, Mapping[str, Any]]] = []
    results: list[Mapping[str, object]] = []
    for index, block in enumerate(blocks):
        place = f"{field}[{index}]"
        match block:
            case {"type": "tool_result", "tool_use_id": str(id)}:
                content = _content(block.get("content") or "", f"{place}.content", media)
                results.append({"role": "tool", "tool_call_id": id, "content": content})
            case _:
                others.append((place, block))
    kinds = f"text, {media.form.type} or tool_result"
    parts = [_part(block, place, media, kinds) for place, block in others]
    if parts or not results:
        results.append({"role": role, "content": content_of(parts)})
    return results


def _blocks(content: object, field: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not is_list(content) or not all(isinstance(block, dict) for block in content):
        raise RequestError(field, "expected a string or a list of blocks")
    return cast(Sequence[Mapping[str, Any]], content)


def _content(content: object, field: str, media: Media) -> str | list[Part]:
    kinds = f"text or {media.form.type}" if media.allowed else "text"
    blocks = enumerate(_blocks(content, field))
    return content_of([_part(block, f"{field}[{index}]", media, kinds) for index, block in blocks])


def _part(block: Mapping[str, Any], field: str, media: Media, kinds: str) -> Part:
    match block:
        case {"type": "text", "text": str(text)}:
            return text_part(text)
        case _:
            part = media.part(block, field)
            if part is None:
                raise _unsupported(block, field, kinds)
            return part


def _unsupported(block: Mapping[str, Any], field: str, kinds: str) -> RequestError:
    return RequestError(field, f"expected a complete block of type {kinds}, not {block!r:.80}")
