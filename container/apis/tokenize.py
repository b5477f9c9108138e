"""vLLM's routes /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flask import Response

from container.apis.generation.conversation import (
    TEMPLATE_FIELDS,
    Conversation,
    read_conversation,
)
from container.apis.generation.service import GenerationService
from container.apis.openai import openai_error
from container.http.off_loop import in_thread_if_long
from container.http.request_context import request_context
from container.http.route import Api, Body, Errors, post
from container.http.service import json_response
from container.schema.fields import MODEL_IGNORED, Field, Fields, read_fields
from container.schema.kinds import BOOLEAN, STRING, TOKEN_IDS
from core.configuration import limits
from core.errors import RequestError

_MODEL: Fields = {"model": MODEL_IGNORED}

TOKENIZE_FIELDS: Fields = {
    **_MODEL,
    **TEMPLATE_FIELDS,
    "prompt": Field(STRING, "The text to tokenize. Send either this field or messages."),
    "add_special_tokens": Field(
        BOOLEAN,
        "Add the tokens that the model expects at the start of a prompt (default: true for a "
        "prompt, false for messages).",
    ),
    "return_token_strs": Field(
        BOOLEAN, "Also return the tokens as strings, as the vocabulary has them."
    ),
}
DETOKENIZE_FIELDS: Fields = {
    **_MODEL,
    "tokens": Field(TOKEN_IDS, "The token ids.", limit=limits.TOKEN_IDS),
}


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    prompt: str | Conversation
    add_special_tokens: bool
    return_token_strs: bool


def read_tokenize_request(body: Mapping[str, object]) -> TokenizeRequest:
    """Check a request to /tokenize. Raises RequestError, naming the first bad field."""
    values = read_fields(body, TOKENIZE_FIELDS)
    text: str | None = values.get("prompt", None)
    if text is not None and "messages" in values:
        raise RequestError("messages", "cannot be combined with prompt; send one of them")
    if text is None and "messages" not in values:
        raise RequestError("prompt", "expected a string; or send messages")
    return TokenizeRequest(
        prompt=read_conversation(values) if text is None else text,
        add_special_tokens=values.get("add_special_tokens", True),
        return_token_strs=values.get("return_token_strs", False),
    )


def read_detokenize_request(body: Mapping[str, object]) -> list[int]:
    """Return the token ids of a request to /detokenize. Raises RequestError if they are missing."""
    values = read_fields(body, DETOKENIZE_FIELDS)
    if "tokens" not in values:
        raise RequestError("tokens", "expected a list of integers")
    return values.get("tokens", [])


def tokenize(service: GenerationService) -> Response:
    """Return the tokens of a text or a conversation."""
    prompting = service.prompting
    context = request_context()
    body = context.json_fields()
    request = context.checked(lambda: read_tokenize_request(body))
    if isinstance(request.prompt, str):
        prompting.check_length(request.prompt, "prompt")
        add = request.add_special_tokens
        tokens = prompting.encode(request.prompt, add_special_tokens=add)
    else:
        prompt = service.conversations.encode(request.prompt, size=len(context.body))
        tokens = prompt.token_ids
    strings = None
    if request.return_token_strs:
        token = prompting.tokenizer.token
        strings = in_thread_if_long(lambda: list(map(token, tokens)), size=len(tokens))
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": service.client.facts.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


def detokenize(service: GenerationService) -> Response:
    """Return the text of token ids."""
    context = request_context()
    body = context.json_fields()
    token_ids = context.checked(lambda: read_detokenize_request(body))
    vocab_size = service.client.facts.vocab_size
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RequestError("tokens", f"token ids are 0 to {vocab_size - 1}")
    return json_response({"prompt": service.prompting.decode(token_ids)})


TOKENIZE = Api(
    "vLLM",
    (
        post("/tokenize", "Tokenize a text or a conversation.", tokenize,
             Body("Tokenize", TOKENIZE_FIELDS, title="`/tokenize`")),
        post("/detokenize", "Return the text of token ids.", detokenize,
             Body("Detokenize", DETOKENIZE_FIELDS, ("tokens",), title="`/detokenize`")),
    ),
    errors=Errors(openai_error, ("/tokenize", "/detokenize")),
)  # fmt: skip
