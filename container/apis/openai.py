"""The request fields and response parts that OpenAI's completions and chat completions share.

The responses API and Anthropic's messages have some of the fields, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from container.apis.generation.generation import Generation
from container.apis.generation.reply import Record
from container.apis.generation.sampling import (
    SAMPLING_FIELDS,
    Decoding,
    Dialect,
    bounded,
    read_decoding,
)
from container.apis.generation.structured_outputs import RESPONSE_FORMAT
from container.apis.named_model import MODEL_FIELDS
from container.apis.scores import prompt_logprobs
from container.http.failures import Failure
from container.schema.fields import Field, Fields, Values, ignored, read_fields, unsupported
from container.schema.kinds import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    STRING_OR_STRINGS,
    with_schema,
)
from core.errors import RequestError
from core.protocol.stats import Receipt
from core.sampling import Finish
from core.text.answer import TokenText
from core.text.tokenizer import Tokenizer

_STREAM_OPTIONS: Fields = {
    "include_usage": Field(BOOLEAN, "Send token counts in a last chunk."),
    "continuous_usage_stats": Field(
        BOOLEAN, "With include_usage: send the token counts so far in every chunk."
    ),
    "include_obfuscation": ignored(),
}

OPENAI_FIELDS: Fields = {
    **SAMPLING_FIELDS,
    "stop": Field(
        STRING_OR_STRINGS, "Stop strings. A stop string ends the answer and is not part of it."
    ),
    "ignore_eos": Field(BOOLEAN, "Keep generating after the end-of-sequence token."),
    "stream": Field(BOOLEAN, "Stream the answer as server-sent events."),
    "stream_options": Field(
        with_schema(
            OBJECT,
            {"properties": {name: field.kind.schema for name, field in _STREAM_OPTIONS.items()}},
        ),
        "include_usage: send token counts in a last chunk. continuous_usage_stats: send them in "
        "every chunk, too.",
    ),
    "receipt": Field(
        BOOLEAN,
        "Return in `usage` what the request has cost. null without option.receipts.",
    ),
    "response_format": RESPONSE_FORMAT,
    **MODEL_FIELDS,
    "truncate_prompt_tokens": Field(
        bounded(INTEGER, "truncate_prompt_tokens"),
        "Keep only this many tokens from the end of the prompt. -1: keep as many as fit.",
    ),
    "request_id": Field(
        with_schema(STRING, {"pattern": "^[!-~]{1,128}$"}),
        "The response's id is made from this id (default: a random id).",
    ),
    "return_token_ids": Field(BOOLEAN, "Also return the token ids of the prompt and the answer."),
    "return_tokens_as_token_ids": Field(
        BOOLEAN, "With logprobs: write each token as `token_id:NUMBER`."
    ),
    "guided_whitespace_pattern": unsupported(STRING),
    "logits_processors": unsupported(
        ANYTHING, [], instead="use logit_bias, bad_words or allowed_token_ids"
    ),
    "vllm_xargs": ignored(),
    "kv_transfer_params": ignored("Each container keeps its own KV cache."),
    "user": ignored(),
    "metadata": ignored(),
    "store": ignored(),
    "service_tier": ignored(),
    "safety_identifier": ignored(),
    "prompt_cache_key": ignored(),
    "prompt_cache_retention": ignored(),
    "aws_region_name": ignored("litellm's own parameter, which its SageMaker client sends along."),
}


def read_openai_decoding(
    values: Values, dialect: Dialect, *, max_tokens: int | None, **more: object
) -> Decoding:
    """Check the sampling parameters as `read_decoding` does; the default temperature is 1."""
    stop: str | list[str] = values.get("stop", [])
    if "prompt_logprobs" in values and values.get("stream", False):
        raise RequestError("prompt_logprobs", "cannot be combined with stream")
    return read_decoding(
        values,
        dialect,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        temperature=values.get("temperature", 1.0),
        ignore_eos=values.get("ignore_eos", False),
        truncate_prompt_tokens=values.get("truncate_prompt_tokens", None),
        **more,
    )


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """vLLM's fields that choose what a response shows."""

    request_id: str | None
    """The client's id, from which the response's id is made. None: the server makes one."""
    shows_token_ids: bool
    """Whether to show the token ids of prompts and answers."""
    names_tokens_by_id: bool
    """Whether logprobs name tokens by their ids."""
    shows_prompt_logprobs: bool

    def token_namer(self, tokenizer: Tokenizer) -> Callable[[int], str]:
        """Return the function that names a token in logprobs."""
        return "token_id:{}".format if self.names_tokens_by_id else tokenizer.piece

    def prompt_fields(self, generation: Generation) -> Record:
        """Return the field with the prompt's token ids, or no field."""
        return {"prompt_token_ids": [*generation.prompt_token_ids]} if self.shows_token_ids else {}

    def document_fields(self, generation: Generation, tokenizer: Tokenizer) -> Record:
        """Return the fields about the prompt that a document has, but no chunk of a stream."""
        shown = prompt_logprobs(generation, tokenizer) if self.shows_prompt_logprobs else None
        return {"prompt_logprobs": shown}

    def answer_fields(self, tokens: Sequence[TokenText]) -> Record:
        """Return the field with the token ids of an answer or a part of it, or no field."""
        return {"token_ids": [token.id for token in tokens]} if self.shows_token_ids else {}


def read_response_options(values: Values) -> ResponseOptions:
    """Read the fields of `ResponseOptions`. Raises RequestError for an unusable `request_id`."""
    return ResponseOptions(
        read_request_id(values),
        values.get("return_token_ids", False),
        values.get("return_tokens_as_token_ids", False),
        "prompt_logprobs" in values,
    )


def read_request_id(values: Values) -> str | None:
    """Return `request_id`, or None. Raises RequestError if it cannot be part of an id."""
    request_id: str | None = values.get("request_id", None)
    if request_id is not None and not re.fullmatch("[!-~]{1,128}", request_id):
        raise RequestError("request_id", "expected 1 to 128 printable ASCII characters")
    return request_id


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Which chunks of a stream have token counts, and what is beside the counts."""

    is_included: bool
    """Whether the stream ends with a chunk of the response's token counts, without choices."""
    is_continuous: bool
    """Whether each chunk has the token counts so far of its prompt and that prompt's choices."""
    has_receipt: bool
    """Whether the counts of a stream or a document say what the request has cost."""
    warnings: tuple[str, ...]

    def field(self, counts: Callable[[], Record]) -> Record:
        """Return the field `usage` of a chunk with choices, or no field."""
        if not self.is_included:
            return {}
        return {"usage": counts() if self.is_continuous else None}


def read_stream_usage(values: Values) -> StreamUsage:
    """Read `stream_options`. Raises RequestError, naming the first bad field."""
    options: Mapping[str, object] = values.get("stream_options", {})
    fields = read_fields(options, _STREAM_OPTIONS, "stream_options.")
    is_included: bool = fields.get("include_usage", False)
    is_continuous = is_included and fields.get("continuous_usage_stats", False)
    has_receipt: bool = values.get("receipt", False)
    return StreamUsage(is_included, is_continuous, has_receipt, fields.warnings)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that identify a response and that all its records carry."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    digest: str | None
    """Of what may change the answer's bits."""

    def record(self, object: str, **more: object) -> Record:
        """Return a record of the type `object` with further fields."""
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.digest,
            **more,
        }


_PLACE = "\x00text"
"""Stands for the text in a record from which a template is made. Encoded, it cannot be in ids."""


class Chunks:
    """Writes the records of a stream. Their common fields are encoded only once."""

    def __init__(self, envelope: Envelope, object: str) -> None:
        """object: the type of the records."""
        self._head = msgspec.json.encode(envelope.record(object))[:-1] + b","

    def chunk(self, choices: Sequence[Record], **more: object) -> bytes:
        """Return the record with these choices and further fields."""
        return self._head + msgspec.json.encode({"choices": choices, **more})[1:]


class TextChunk:
    """Writes records that differ only in their text."""

    def __init__(self, write: Callable[[str], bytes]) -> None:
        """write: writes the record with a text."""
        self._before, _, self._after = write(_PLACE).rpartition(msgspec.json.encode(_PLACE))

    def __call__(self, text: str) -> bytes:
        """Return the record with a text."""
        return self._before + msgspec.json.encode(text) + self._after


def openai_error(failure: Failure) -> Record:
    """Return the body of an error response, which is also the last record of a failed stream."""
    kind = "invalid_request_error" if failure.is_client_error else "server_error"
    error = {"message": failure.message, "type": kind, "param": failure.field, "code": failure.code}
    return {"error": error}


def finish_reason(finish: Finish | None) -> str | None:
    """Return OpenAI's name for a finish reason; None for an answer that is still running."""
    return None if finish is None else finish.public_name


def usage(generations: Sequence[Generation], *, has_receipt: bool = False) -> Record:
    """Count the tokens so far: each prompt once, and every sampled answer."""
    num_prompt = num_completion = 0
    for generation in generations:
        num_prompt += len(generation.prompt_token_ids)
        num_completion += generation.num_generated_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        **({"receipt": _receipt(generations)} if has_receipt else {}),
    }


def _receipt(generations: Iterable[Generation]) -> Record | None:
    """Return the sum of the receipts of generations that have one; None if none has."""
    receipts = [each.receipt for each in generations if each.receipt is not None]
    total = Receipt()
    for receipt in receipts:
        total.add(receipt)
    return msgspec.structs.asdict(total) if receipts else None
