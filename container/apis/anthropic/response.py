"""Responses of Anthropic's messages API: one message, or the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from container.apis.chat.blocks import Block, Blocks
from container.apis.chat.turn import StartedTurn
from container.apis.generation.reply import Format, Record
from container.http.failures import Failure
from core.sampling import Finish
from core.text.answer import TokenText
from core.text.answers import Delta
from core.text.tools.base import call_id

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status; its own status for an overload is 529."""


class MessageFormat(Format):
    """Writes a turn's single answer. Each of its blocks becomes a content block.

    A stream has the events of the message's start, of its blocks, and of its stop.
    """

    def __init__(self, turn: StartedTurn, id: str) -> None:
        self._generation = turn.generation
        self._parser = turn.parsers[0]
        self._id = id
        self._model = turn.model
        self._blocks = Blocks(self)

    def begin(self, index: int) -> list[Record]:
        return [{"type": "message_start", "message": self._message()}]

    def delta(self, delta: Delta) -> list[Record]:
        return self._push(delta.tokens, is_last=delta.finish is not None)

    def end(self, index: int) -> list[Record]:
        return [
            {"type": "message_delta", "delta": self._stop(), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def document(self) -> object:
        """Return the `message` object."""
        self._push(self._generation.answers[0].tokens, is_last=True)
        content = [self._content(block) for block in self._blocks.all]
        return {**self._message(content), **self._stop()}

    def failure(self, failure: Failure) -> Record:
        return anthropic_error(failure)

    def start_records(self, block: Block) -> list[Record]:
        """See `BlockEvents`."""
        start = {"content_block": self._content(block)}
        return [{"type": "content_block_start", "index": block.index, **start}]

    def delta_records(self, block: Block, text: str) -> list[Record]:
        """See `BlockEvents`."""
        match block.kind:
            case "text":
                delta = {"type": "text_delta", "text": text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": text}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def stop_records(self, block: Block) -> list[Record]:
        """See `BlockEvents`."""
        return [{"type": "content_block_stop", "index": block.index}]

    def _push(self, tokens: Sequence[TokenText], *, is_last: bool) -> list[Record]:
        return self._blocks.push(self._parser.push(tokens, is_last=is_last), is_last=is_last)

    def _message(self, content: object = ()) -> Record:
        """Return the message as it is before it stops."""
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model,
            "content": content, "stop_reason": None, "stop_sequence": None, "usage": self._usage(),
        }  # fmt: skip

    def _content(self, block: Block) -> Record:
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "reasoning":
                return {"type": "thinking", "thinking": block.text, "signature": ""}
            case "call":
                id = block.call_id or call_id(f"{self._id} {block.index}")
                arguments = msgspec.json.decode(block.text or "{}")
                return {"type": "tool_use", "id": id, "name": block.name, "input": arguments}

    def _stop(self) -> Record:
        (answer,) = self._generation.answers
        if answer.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
        reason = "tool_use" if self._blocks.has_calls else "end_turn"
        reason = "max_tokens" if answer.finish == Finish.LENGTH else reason
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> Record:
        return {
            "input_tokens": len(self._generation.prompt_token_ids),
            "output_tokens": self._generation.num_generated_tokens,
        }


def anthropic_error(failure: Failure) -> Record:
    """Return the body of an error response, which is also the last event of a failed stream."""
    default = "invalid_request_error" if failure.is_client_error else "api_error"
    kind = _ERRORS.get(failure.code, default)
    return {"type": "error", "error": {"type": kind, "message": failure.message}}
