"""Responses of OpenAI's responses API: one document, or the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from container.apis.chat.blocks import Block, BlockKind, Blocks
from container.apis.chat.turn import StartedTurn
from container.apis.generation.generation import Generation
from container.apis.generation.logprobs import chat_logprobs
from container.apis.generation.reply import Format, Record
from container.apis.responses.schema import ResponsesRequest
from container.http.failures import Failure
from core.sampling import Finish
from core.text.answer import TokenText
from core.text.answer_parser import AnswerParser
from core.text.answers import Delta
from core.text.tools.base import call_id

_PARTS: Mapping[BlockKind, str] = {"text": "output_text", "reasoning": "reasoning_text"}
"""The type of the only content part of an item, which also names its events."""
_ITEM_PREFIXES: Mapping[BlockKind, str] = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponseFormat(Format):
    """Writes a turn's single answer. Each of its blocks becomes an output item.

    A stream has the events of the response's start, of its items, and of its end.
    """

    def __init__(
        self,
        turn: StartedTurn,
        request: ResponsesRequest,
        id: str,
        created_at: int,
        name: Callable[[int], str],
    ) -> None:
        """created_at: seconds since 1970; name: returns the string of a token id, for logprobs."""
        self._generation = turn.generation
        self._parser = turn.parsers[0]
        self._request = request
        self._id = id
        self._blocks = Blocks(self)
        self._finish: Finish | None = None
        self._num_events = 0
        self._name = name
        self._unplaced: list[TokenText] = []
        """The tokens that belong to the next piece of text, if the request has logprobs."""
        self._logprobs: dict[int, list[Record]] = {}
        """Logprobs of the tokens of each block of text, by the block's index."""
        self._envelope: Record = {
            "id": id, "object": "response", "created_at": created_at, "model": turn.model,
            **request.echo,
        }  # fmt: skip

    def begin(self, index: int) -> list[Record]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._document("in_progress")) for name in names]

    def delta(self, delta: Delta) -> list[Record]:
        self._finish = delta.finish
        return self._push(delta.tokens, is_last=delta.finish is not None)

    def end(self, index: int) -> list[Record]:
        response = self._ended()
        return [self._event(f"response.{response['status']}", response=response)]

    def document(self) -> object:
        """Return the `response` object."""
        (answer,) = self._generation.answers
        self._finish = answer.finish
        self._push(answer.tokens, is_last=True)
        return self._ended()

    def failure(self, failure: Failure) -> Record:
        error = {"code": "server_error", "message": failure.message}
        response = {**self._document("failed"), "error": error}
        return self._event("response.failed", response=response)

    def start_records(self, block: Block) -> list[Record]:
        """See `BlockEvents`."""
        item = {**self._item(block, "in_progress"), **({} if block.kind == "call" else _EMPTY)}
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return [added]
        return [added, self._of_part("response.content_part.added", block, part=self._part(block))]

    def delta_records(self, block: Block, text: str) -> list[Record]:
        """See `BlockEvents`."""
        tokens, self._unplaced = self._unplaced, []
        if block.kind == "call":
            return [self._of_item("response.function_call_arguments.delta", block, delta=text)]
        name = f"response.{_PARTS[block.kind]}.delta"
        if block.kind == "reasoning":
            return [self._of_part(name, block, delta=text)]
        logprobs = chat_logprobs(tokens, self._name)
        self._logprobs.setdefault(block.index, []).extend(logprobs)
        return [self._of_part(name, block, delta=text, logprobs=logprobs)]

    def stop_records(self, block: Block) -> list[Record]:
        """See `BlockEvents`."""
        if block.kind == "call":
            arguments = {"name": block.name, "arguments": block.text}
            events = [self._of_item("response.function_call_arguments.done", block, **arguments)]
        else:
            name = f"response.{_PARTS[block.kind]}.done"
            events = [
                self._of_part(name, block, text=block.text, **self._scores(block)),
                self._of_part("response.content_part.done", block, part=self._part(block)),
            ]
        item = self._item(block, self._item_status(block))
        done = self._event("response.output_item.done", output_index=block.index, item=item)
        return [*events, done]

    def _push(self, tokens: Sequence[TokenText], *, is_last: bool) -> list[Record]:
        if not self._request.logprobs or not tokens:
            pieces = self._parser.push(tokens, is_last=is_last)
            return self._blocks.push(pieces, is_last=is_last)
        records: list[Record] = []
        # Tokens are parsed one by one, since the parser does not say which tokens form a piece.
        for number, token in enumerate(tokens, 1):
            is_text = not self._parser.is_reasoning
            ends = is_last and number == len(tokens)
            pieces = self._parser.push([token], is_last=ends)
            if is_text:
                self._unplaced.append(token)
            records += self._blocks.push(pieces, is_last=ends)
        return records

    def _ended(self) -> Record:
        if self._finish == Finish.LENGTH:
            details = {"reason": "max_output_tokens"}
            return {**self._document("incomplete"), "incomplete_details": details}
        return self._document("completed")

    def _document(self, status: str) -> Record:
        """Return the document, with its items unless the answer has just begun."""
        blocks = [] if status == "in_progress" else self._blocks.all
        return {
            **self._envelope,
            "status": status,
            "output": [self._item(block, self._item_status(block)) for block in blocks],
            "usage": _usage(self._generation, self._parser) if self._finish is not None else None,
        }

    def _item_status(self, block: Block) -> str:
        """Return the final status of an item: incomplete for the last one of a cut-off answer."""
        is_last = block.index == len(self._blocks.all) - 1
        return "incomplete" if is_last and self._finish == Finish.LENGTH else "completed"

    def _item(self, block: Block, status: str) -> Record:
        item: Record = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": [self._part(block)]}
            case "text":
                content = [self._part(block)]
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "call":
                id = block.call_id or call_id(self._item_id(block))
                return {
                    **item, "type": "function_call", "call_id": id,
                    "name": block.name, "arguments": block.text,
                }  # fmt: skip

    def _item_id(self, block: Block) -> str:
        return f"{_ITEM_PREFIXES[block.kind]}_{self._id.removeprefix('resp_')}_{block.index}"

    def _part(self, block: Block) -> Record:
        part: Record = {"type": _PARTS[block.kind], "text": block.text, **self._scores(block)}
        return {**part, "annotations": []} if block.kind == "text" else part

    def _scores(self, block: Block) -> Record:
        """Return the field `logprobs`, which clients expect in every text.

        Its list is empty unless the request's `include` asks for logprobs.
        """
        return {"logprobs": self._logprobs.get(block.index, [])} if block.kind == "text" else {}

    def _of_part(self, event: str, block: Block, /, **fields: object) -> Record:
        return self._of_item(event, block, content_index=0, **fields)

    def _of_item(self, event: str, block: Block, /, **fields: object) -> Record:
        item_id = self._item_id(block)
        return self._event(event, item_id=item_id, output_index=block.index, **fields)

    def _event(self, event: str, /, **fields: object) -> Record:
        number = self._num_events
        self._num_events += 1
        return {"type": event, "sequence_number": number, **fields}


_EMPTY: Record = {"content": []}
"""The content of an item before its first part."""


def _usage(generation: Generation, parser: AnswerParser) -> Record:
    num_input = len(generation.prompt_token_ids)
    num_output = generation.num_generated_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": parser.num_reasoning_tokens},
        "total_tokens": num_input + num_output,
    }
