"""LMI's text schema, and text-generation-inference's, which LMI calls `tgi_compat`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from container.answers.answer import Record
from container.failures import Failure
from container.generation import Generation
from container.schemas.text import TextRequest
from core.sampling import Finish
from core.text.answer import TokenText
from core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextStyle:
    """What is the same for all answers of a server."""

    tokenizer: Tokenizer
    is_tgi: bool = False
    """A list around the document, `logprob` for `log_prob`, and details always."""

    def token(self, token_id: int, text: str, logprob: float | None) -> Record:
        record: Record = {"id": token_id, "text": text}
        if not self.is_tgi:
            return {**record, "log_prob": logprob}
        return {**record, "logprob": logprob, "special": self.tokenizer.is_special(token_id)}

    def no_token(self) -> Record:
        """LMI's stand-in where a terminal line has no token of its own."""
        if self.is_tgi:
            return {"id": -1, "text": "", "logprob": -1, "special": True}
        return {"id": -1, "text": "", "log_prob": -1, "special_token": True}


class TextAnswer:
    """The answer to one text."""

    ends_with_done = False

    def __init__(
        self, generation: Generation, inputs: str, request: TextRequest, style: TextStyle
    ) -> None:
        self._generation = generation
        self._inputs = inputs
        self._request = request
        self._style = style
        self._has_details = request.details or style.is_tgi

    def whole(self) -> object:
        """The document."""
        document = self.document()
        return [document] if self._style.is_tgi else document

    def document(self) -> Record:
        """Without the list that text-generation-inference puts around it."""
        self._generation.run()
        document: Record = {"generated_text": self._text()}
        if self._has_details:
            details = self._details(self._generation.finish)
            details["tokens"] = [self._token(token) for token in self._generation.tokens]
            if self._request.prompt_details or self._style.is_tgi:
                details["prefill"] = self._prefill() if self._request.prompt_details else []
            document["details"] = details
        return document

    def pieces(self) -> Iterator[list[Record]]:
        """A record for each token; the last one is the only terminal one."""
        num_sent = 0
        for batch in self._generation.batches():
            records: list[Record] = [{"token": self._token(token)} for token in batch]
            if self._generation.finish is not None:
                records = records or [{"token": self._style.no_token()}]
                records[-1] |= self._end()
            if self._style.is_tgi:
                records = [
                    {"index": at, "generated_text": None, "details": None, **record}
                    for at, record in enumerate(records, num_sent + 1)
                ]
            num_sent += len(records)
            yield records

    def failure(self, failure: Failure) -> Record:
        """LMI's terminal record of a stream that failed, and TGI's `error`."""
        record: Record = {
            "token": {**self._style.no_token(), "error_msg": failure.message},
            "generated_text": "",
            "details": self._details(Finish.ERROR),
        }
        error = {"error": failure.message, "error_type": "generation"}
        return {**record, **error} if self._style.is_tgi else record

    def abort(self) -> None:
        self._generation.abort()

    def _text(self) -> str:
        prompt = self._inputs if self._request.return_full_text else ""
        return prompt + self._generation.text

    def _end(self) -> Record:
        end: Record = {"generated_text": self._text()}
        if self._has_details:
            end["details"] = self._details(self._generation.finish)
        return end

    def _token(self, token: TokenText) -> Record:
        return self._style.token(token.id, token.text, token.logprob)

    def _prefill(self) -> list[Record]:
        """The prompt's tokens. Their log-probabilities are not computed, and so are null."""
        decode = self._style.tokenizer.decode
        return [
            self._style.token(each, decode([each], skip_special_tokens=False), None)
            for each in self._generation.prompt_token_ids
        ]

    def _details(self, finish: Finish | None) -> Record:
        details: Record = {
            "finish_reason": finish,
            "generated_tokens": len(self._generation.tokens),
            "inputs": self._inputs,
        }
        if self._style.is_tgi:
            details["input_length"] = len(self._generation.prompt_token_ids)
            details["seed"] = self._request.decoding.params.seed
        timing = self._generation.timing
        if self._request.timings and timing is not None:
            details["timings"] = msgspec.structs.asdict(timing)
        return details
