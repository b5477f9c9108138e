"""Responses of Anthropic's messages API: one message, or the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from container.apis.chat.blocks import Block, Blocks
from container.apis.chat.turn import StartedTurn
from container.apis.generation.response import Record
from container.http.failures import Failure
from core.sampling import Finish
from core.text.tools.base import call_id


class MessagesResponse:
    """Formats a turn's single answer. Each of its blocks becomes a content block."""

    ends_with_done = False

    def __init__(self, started: StartedTurn, id: str, *, stream: bool) -> None:
        self.stream = stream
        self._generation = started.generation
        self._parser = started.parsers[0]
        self._id = id
        self._model = started.model
        self._blocks = Blocks(self)

    def full(self) -> object:
        """Run the generation and return the `message` object."""
        self._generation.run()
        (answer,) = self._generation.answers
        self._blocks.push(self._parser.push(answer.tokens, is_last=True), is_last=True)
        content = [self._content(block) for block in self._blocks.all]
        return {**self._message(content), **self._stop(answer.finish)}

    def chunks(self) -> Iterator[list[Record]]:
        """Yield the events: the message starts, its blocks come one by one, and it stops."""
        has_started = False
        for delta in self._generation.deltas():
            records: list[Record] = []
            if not has_started:
                records.append({"type": "message_start", "message": self._message()})
            has_started, is_last = True, delta.finish is not None
            pieces = self._parser.push(delta.tokens, is_last=is_last)
            records += self._blocks.push(pieces, is_last=is_last)
            if is_last:
                stop, usage = self._stop(delta.finish), self._usage()
                records.append({"type": "message_delta", "delta": stop, "usage": usage})
                records.append({"type": "message_stop"})
            yield records

    def failure(self, failure: Failure) -> Record:
        return failure.as_anthropic()

    def abort(self) -> None:
        self._generation.abort()

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
                id = call_id(f"{self._id} {block.index}")
                arguments = msgspec.json.decode(block.text or "{}")
                return {"type": "tool_use", "id": id, "name": block.name, "input": arguments}

    def _stop(self, finish: Finish | None) -> Record:
        stop_string = self._generation.answers[0].stop_string
        if stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        reason = "tool_use" if self._blocks.has_calls else "end_turn"
        reason = "max_tokens" if finish == Finish.LENGTH else reason
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> Record:
        return {
            "input_tokens": len(self._generation.prompt_token_ids),
            "output_tokens": self._generation.num_generated_tokens,
        }
