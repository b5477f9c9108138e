"""The message of one chat choice: its reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from container.apis.generation.reply import Record
from core.text.answer import TokenText
from core.text.answer_parser import AnswerParser, AnswerPiece
from core.text.reasoning.base import Reasoning
from core.text.tools.base import ToolCall, call_id


class ChoiceMessage:
    """Formats a choice's reasoning, content and tool calls as they arrive."""

    def __init__(
        self,
        parser: AnswerParser,
        seed: str,
        *,
        uses_functions: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        """seed: the id of a tool call is a hash of this text and the call's number.

        uses_functions: return the first call as OpenAI's former `function_call`, and leave out the
        others, which that format cannot hold. shows_reasoning: False leaves out the reasoning.
        """
        self._parser = parser
        self._uses_functions = uses_functions
        self._shows_reasoning = shows_reasoning
        self._seed = seed
        self._num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, shown or not."""
        return self._parser.num_reasoning_tokens

    @property
    def has_calls(self) -> bool:
        """Whether the text so far has a tool call."""
        return self._num_calls > 0

    def full(self, tokens: Sequence[TokenText]) -> Record:
        """Return the message of a complete answer."""
        pieces = self._parser.push(tokens, is_last=True)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        has_other = bool(calls or reasoning)
        message: Record = {"role": "assistant", "content": content or (None if has_other else "")}
        message |= self._reasoning(reasoning)
        if not calls:
            return message
        if self._uses_functions:
            return {**message, "function_call": calls[0]["function"]}
        return {**message, "tool_calls": calls}

    def deltas(self, tokens: Sequence[TokenText], *, is_last: bool) -> list[Record]:
        """Return the deltas for the next tokens; `is_last` says that they are the last."""
        deltas = [self._delta(piece) for piece in self._parser.push(tokens, is_last=is_last)]
        return [delta for delta in deltas if delta]

    def _delta(self, piece: AnswerPiece) -> Record:
        if isinstance(piece, str):
            return {"content": piece}
        if isinstance(piece, Reasoning):
            return self._reasoning(piece.text)
        index, call = self._num_calls, self._call(piece)
        if self._uses_functions:
            return {} if index else {"function_call": call["function"]}
        return {"tool_calls": [{"index": index, **call}]}

    def _reasoning(self, text: str) -> Record:
        """Return the reasoning in two fields: under vLLM's current name and its former one."""
        shown = text if self._shows_reasoning else ""
        return {"reasoning": shown, "reasoning_content": shown} if shown else {}

    def _call(self, call: ToolCall) -> Record:
        id = call.id or call_id(f"{self._seed} {self._num_calls}")
        self._num_calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": id, "type": "function", "function": function}
