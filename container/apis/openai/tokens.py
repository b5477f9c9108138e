"""vLLM's requests to /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from container.apis.generation.conversation import (
    TEMPLATE_FIELDS,
    Conversation,
    read_conversation,
)
from container.schema.fields import Field, Fields, ignored, read_fields
from container.schema.kinds import BOOLEAN, INTEGERS, TEXT
from core.errors import RequestError

_MODEL: Fields = {"model": ignored("One model is served, whatever its name here.")}

TOKENIZE_FIELDS: Fields = {
    **_MODEL,
    **TEMPLATE_FIELDS,
    "prompt": Field(TEXT, "A text; or send messages."),
    "add_special_tokens": Field(
        BOOLEAN, "Begin a prompt as the model expects (default true); messages never do."
    ),
    "return_token_strs": Field(BOOLEAN, "Give the tokens as the vocabulary spells them, too."),
}
DETOKENIZE_FIELDS: Fields = {**_MODEL, "tokens": Field(INTEGERS, "Token ids.")}


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A checked request."""

    prompt: str | Conversation
    add_special_tokens: bool
    return_token_strs: bool


def read_tokenize_request(body: Mapping[str, object]) -> TokenizeRequest:
    """Raises RequestError that names the first mistake."""
    values = read_fields(body, TOKENIZE_FIELDS)
    text: str | None = values.get("prompt", None)
    if text is not None and "messages" in values:
        raise RequestError("messages", "does not go with prompt; send one of them")
    if text is None and "messages" not in values:
        raise RequestError("prompt", "expected a text; or send messages")
    if text is None and values.get("add_special_tokens", False):
        raise RequestError(
            "add_special_tokens", "does not go with messages: the template writes all of them"
        )
    return TokenizeRequest(
        prompt=read_conversation(values) if text is None else text,
        add_special_tokens=values.get("add_special_tokens", True),
        return_token_strs=values.get("return_token_strs", False),
    )


def read_detokenize_request(body: Mapping[str, object]) -> list[int]:
    """The token ids. Raises RequestError that names the first mistake."""
    values = read_fields(body, DETOKENIZE_FIELDS)
    if "tokens" not in values:
        raise RequestError("tokens", "expected a list of integers")
    return values.get("tokens", [])
