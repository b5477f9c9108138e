"""Answers in LMI's two text schemas: of its asynchronous mode, and of its rolling batch."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from container.apis.generation.generation import Generation
from container.apis.generation.reply import Format, Record
from container.apis.scores import scored_prompt
from container.apis.text.schema import TextRequest
from container.http.failures import Failure
from core.sampling import Finish
from core.text.answer import AnswerText, TokenText
from core.text.answers import Delta
from core.text.tokenizer import Tokenizer


class TextFormat(Format):
    """Writes the answers to one input as LMI's asynchronous mode does, the default of LMI 17.

    A stream has a record for each token, and only the last one has the generated text. Of a
    document, answers after the first are in the details.
    """

    always_details: ClassVar[bool] = False
    """Whether requests are read as if they had `details=true`."""
    _logprob: ClassVar[str] = "logprob"
    _special: ClassVar[str] = "special_token"
    _of_sequence: ClassVar[Record] = {"seed": None, "prefill": []}
    """Fields of the answers after the first that have always these values."""

    def __init__(self, generation: Generation, request: TextRequest, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._request = request
        self._tokenizer = tokenizer

    def delta(self, delta: Delta) -> list[Record]:
        records = [self._token_record(token) for token in delta.tokens]
        if delta.finish is not None:
            records = records or [{"token": self._no_token()}]
            records[-1] |= self._end(delta.finish)
        return [self._in_stream(record) for record in records]

    def document(self) -> object:
        first, *others = self._generation.answers
        document = self._text(first)
        if self._request.details:
            details = {**self._details(first.finish), **self._tokens(first), **self._prompt()}
            if others:
                details["best_of_sequences"] = [self._sequence(answer) for answer in others]
            document["details"] = details
        return document

    def failure(self, failure: Failure) -> Record:
        return {"index": 0, **self._failed(failure)}

    def _in_stream(self, record: Record) -> Record:
        """Return the record of a token as a stream has it."""
        return {"index": 0, "generated_text": None, "details": None, **record}

    def _own_details(self) -> Record:
        """Return the details of this form that others lack."""
        num_tokens = len(self._generation.prompt_token_ids)
        return {"input_length": num_tokens, "seed": self._request.decoding.params.seed}

    def _prompt(self) -> Record:
        """Return the details about the prompt."""
        prefill = self._prefill() if self._request.prompt_details else []
        return {"prefill": prefill, **self._prompt_fields()}

    def _token(self, token_id: int, text: str, logprob: float | None) -> Record:
        return {"id": token_id, "text": text, self._logprob: logprob}

    def _no_token(self) -> Record:
        """Return LMI's placeholder, with id -1, for the last record of an answer without tokens."""
        return {"id": -1, "text": "", self._logprob: -1, self._special: True}

    def _failed(self, failure: Failure) -> Record:
        """Return LMI's last record of a failed stream."""
        return {
            "token": {**self._no_token(), "error_msg": failure.message},
            "generated_text": "",
            "details": self._details(Finish.ERROR),
        }

    def _text(self, answer: AnswerText) -> Record:
        prompt = self._request.text if self._request.return_full_text else ""
        return {"generated_text": prompt + answer.text}

    def _token_record(self, token: TokenText) -> Record:
        record: Record = {"token": self._token(token.id, token.text, token.logprob)}
        return {**record, "top_tokens": self._top(token)} if token.top_logprobs else record

    def _end(self, finish: Finish) -> Record:
        end = self._text(self._generation.answers[0])
        return {**end, "details": self._details(finish)} if self._request.details else end

    def _sequence(self, answer: AnswerText) -> Record:
        finish = self._finish(answer, answer.finish)
        return {**self._text(answer), **finish, **self._of_sequence, **self._tokens(answer)}

    def _details(self, finish: Finish | None) -> Record:
        details = self._finish(self._generation.answers[0], finish) | self._own_details()
        timing = self._generation.timing
        if self._request.timings and timing is not None:
            details["timings"] = msgspec.structs.asdict(timing)
        if self._request.receipt:
            receipt = self._generation.receipt
            details["receipt"] = receipt and msgspec.structs.asdict(receipt)
        return details

    def _finish(self, answer: AnswerText, finish: Finish | None) -> Record:
        return {"finish_reason": finish, "generated_tokens": len(answer.tokens)}

    def _tokens(self, answer: AnswerText) -> Record:
        records = [self._token(token.id, token.text, token.logprob) for token in answer.tokens]
        tokens: Record = {"tokens": records}
        if self._request.top_n_tokens is not None:
            tokens["top_tokens"] = [self._top(token) for token in answer.tokens]
        return tokens

    def _top(self, token: TokenText) -> list[Record]:
        assert token.top_logprobs is not None
        ranked = zip(token.top_logprobs.token_ids, token.top_logprobs.logprobs, strict=True)
        return [self._token(id, self._tokenizer.piece(id), logprob) for id, logprob in ranked]

    def _prefill(self) -> list[Record]:
        """Return the prompt's tokens. The first has no logprob."""
        return [
            self._token(id, self._tokenizer.piece(id), score and score.logprob)
            for id, score in scored_prompt(self._generation)
        ]

    def _prompt_fields(self) -> Record:
        return self._request.prompt_fields(self._generation, self._tokenizer)


class RollingFormat(TextFormat):
    """Writes answers as LMI's rolling batch does."""

    _logprob = "log_prob"
    _of_sequence: ClassVar[Record] = {}

    def failure(self, failure: Failure) -> Record:
        return self._failed(failure)

    def _in_stream(self, record: Record) -> Record:
        return record

    def _own_details(self) -> Record:
        return {"inputs": self._request.text}

    def _prompt(self) -> Record:
        return super()._prompt() if self._request.prompt_details else self._prompt_fields()
