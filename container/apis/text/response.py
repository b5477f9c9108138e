"""Responses in LMI's two text schemas and text-generation-inference's (`tgi_compat`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from container.apis.generation.generation import Generation
from container.apis.generation.logprobs import prompt_logprobs
from container.apis.generation.response import Record
from container.apis.text.schema import TextRequest
from container.http.failures import Failure
from core.configuration.options import Options
from core.sampling import Finish
from core.text.answer import AnswerText, TokenText
from core.text.tokenizer import Tokenizer

Form = Literal["rolling", "async", "tgi", "generate"]
"""The shape of answers. rolling: as in LMI's rolling batch. async: as in LMI's asynchronous mode,
its default since version 17. tgi: text-generation-inference's list of one document, always with
details. generate: the document of its route /generate."""


def form_of(options: Options) -> Form:
    """Return the shape that the options ask for."""
    if options.server.tgi_compat:
        return "tgi"
    default = options.strategy.rolling_batch in (None, "auto")
    is_async = default if options.server.async_mode is None else options.server.async_mode
    return "async" if is_async else "rolling"


@dataclass(frozen=True, slots=True)
class TextStyle:
    """The format of tokens, which is the same for all responses of a `TextApi`."""

    tokenizer: Tokenizer
    form: Form

    @property
    def is_rolling(self) -> bool:
        return self.form == "rolling"

    @property
    def is_tgi(self) -> bool:
        """Whether answers are text-generation-inference's, of either route."""
        return self.form in ("tgi", "generate")

    def token(self, token_id: int, text: str, logprob: float | None) -> Record:
        record: Record = {"id": token_id, "text": text, self._logprob: logprob}
        return record | {"special": self.tokenizer.is_special(token_id)} if self.is_tgi else record

    def no_token(self) -> Record:
        """Return LMI's placeholder, with id -1, for the last record of an answer without tokens."""
        special = "special" if self.is_tgi else "special_token"
        return {"id": -1, "text": "", self._logprob: -1, special: True}

    def in_stream(self, record: Record, number: int) -> Record:
        """Return the record of a token in a stream. number: the token's number in it, from 1."""
        if self.is_rolling:
            return record
        index = number if self.is_tgi else 0
        return {"index": index, "generated_text": None, "details": None, **record}

    @property
    def _logprob(self) -> str:
        return "log_prob" if self.is_rolling else "logprob"


class TextResponse:
    """The response to one input. Answers after the first are in its details."""

    ends_with_done = False

    def __init__(
        self, generation: Generation, inputs: str, request: TextRequest, style: TextStyle
    ) -> None:
        self._generation = generation
        self._inputs = inputs
        self.stream = request.stream
        self._request = request
        self._style = style

    def full(self) -> object:
        document = self.document()
        return [document] if self._style.form == "tgi" else document

    def document(self) -> Record:
        """Run the generation and return the document, without text-generation-inference's list."""
        self._generation.run()
        first, *others = self._generation.answers
        document = self._text(first)
        if self._request.details:
            details = {**self._details(first.finish), **self._tokens(first)}
            if self._request.prompt_details or not self._style.is_rolling:
                details["prefill"] = self._prefill() if self._request.prompt_details else []
            if self._request.shows_prompt_logprobs:
                details["prompt_logprobs"] = self._prompt_logprobs()
            if others:
                details["best_of_sequences"] = [self._sequence_record(answer) for answer in others]
            document["details"] = details
        return document

    def chunks(self) -> Iterator[list[Record]]:
        """Yield a record for each token. Only the last one has the generated text."""
        num_sent = 0
        for delta in self._generation.deltas():
            records = [self._token_record(token) for token in delta.tokens]
            if delta.finish is not None:
                records = records or [{"token": self._style.no_token()}]
                records[-1] |= self._end(delta.finish)
            numbered = enumerate(records, num_sent + 1)
            num_sent += len(records)
            yield [self._style.in_stream(record, number) for number, record in numbered]

    def failure(self, failure: Failure) -> Record:
        """Return LMI's last record of a failed stream.

        In the two forms of text-generation-inference, it also has the `error` that TGI sends.
        """
        record: Record = {
            "token": {**self._style.no_token(), "error_msg": failure.message},
            "generated_text": "",
            "details": self._details(Finish.ERROR),
        }
        if self._style.is_tgi:
            return {**record, "error": failure.message, "error_type": "generation"}
        return record if self._style.is_rolling else {"index": 0, **record}

    def abort(self) -> None:
        self._generation.abort()

    def _text(self, answer: AnswerText) -> Record:
        prompt = self._inputs if self._request.return_full_text else ""
        return {"generated_text": prompt + answer.text}

    def _token_record(self, token: TokenText) -> Record:
        record: Record = {"token": self._token(token)}
        return {**record, "top_tokens": self._top(token)} if token.top_logprobs else record

    def _end(self, finish: Finish) -> Record:
        end = self._text(self._generation.answers[0])
        return {**end, "details": self._details(finish)} if self._request.details else end

    def _sequence_record(self, answer: AnswerText) -> Record:
        sequence = {**self._text(answer), **self._finish(answer, answer.finish)}
        if not self._style.is_rolling:
            sequence |= {"seed": None, "prefill": []}
        return {**sequence, **self._tokens(answer)}

    def _details(self, finish: Finish | None) -> Record:
        details = self._finish(self._generation.answers[0], finish)
        if self._style.form != "async":
            details["inputs"] = self._inputs
        if not self._style.is_rolling:
            details["input_length"] = len(self._generation.prompt_token_ids)
            details["seed"] = self._request.decoding.params.seed
        timing = self._generation.timing
        if self._request.timings and timing is not None:
            details["timings"] = msgspec.structs.asdict(timing)
        return details

    def _finish(self, answer: AnswerText, finish: Finish | None) -> Record:
        return {"finish_reason": finish, "generated_tokens": len(answer.tokens)}

    def _tokens(self, answer: AnswerText) -> Record:
        tokens: Record = {"tokens": [self._token(token) for token in answer.tokens]}
        if self._request.top_n_tokens is not None:
            tokens["top_tokens"] = [self._top(token) for token in answer.tokens]
        return tokens

    def _token(self, token: TokenText) -> Record:
        return self._style.token(token.id, token.text, token.logprob)

    def _top(self, token: TokenText) -> list[Record]:
        assert token.top_logprobs is not None
        ranked = zip(token.top_logprobs.token_ids, token.top_logprobs.logprobs, strict=True)
        return [self._style.token(id, self._piece(id), logprob) for id, logprob in ranked]

    def _prefill(self) -> list[Record]:
        """Return the prompt's tokens. The first has no logprob, since no token precedes it."""
        logprobs = [None, *(score.logprob for score in self._generation.prompt_logprobs)]
        return [
            self._style.token(id, self._piece(id), logprob)
            for id, logprob in zip(self._generation.prompt_token_ids, logprobs, strict=True)
        ]

    def _prompt_logprobs(self) -> object:
        prompt, scores = self._generation.prompt_token_ids, self._generation.prompt_logprobs
        return prompt_logprobs(prompt, scores, self._style.tokenizer)

    def _piece(self, token_id: int) -> str:
        return self._style.tokenizer.piece(token_id)
