"""Which model a request names: the served one, or a variant of it with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

from container.http.request_context import RequestContext
from container.schema.fields import Field, Fields, Values
from container.schema.kinds import ANYTHING, STRING_OR_STRINGS
from core.adapter import lora_disabled
from core.errors import RequestError

ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"

MODEL_FIELDS: Fields = {
    "model": Field(
        ANYTHING,
        "With option.enable_lora: the name of the model or of an adapter. Without that option, "
        "this field is ignored, since only one model is served.",
    ),
    "adapters": Field(
        STRING_OR_STRINGS, "LMI's field: the name of the LoRA adapter to use. '': no adapter."
    ),
}


class NamedModel(NamedTuple):
    """What a body says of the model to use."""

    adapter: str | None
    """It takes precedence over `model`."""
    model: object


def read_model(values: Values) -> NamedModel:
    """Read MODEL_FIELDS.

    Raises RequestError for a list of adapters that does not have exactly one entry, since all
    prompts of a request use the same one.
    """
    adapters = cast(str | list[str] | None, values.given.get("adapters"))
    if isinstance(adapters, list):
        if len(adapters) != 1:
            raise RequestError("adapters", f"expected one adapter, not {len(adapters)}")
        adapters = adapters[0]
    return NamedModel(adapters, values.get("model", None))


def model_choice(
    model_name: str, *, is_enabled: bool
) -> Callable[[RequestContext, str | None, object], str]:
    """Return a function that returns the name of the adapter for a request; '' for none.

    It takes the request, the adapter that the body names, and OpenAI's `model`. The first of these
    wins: the body's adapter; SageMaker's header; `model`, unless it is the model's own name. It
    raises RequestError if a name is given while LoRA is disabled. Whether the adapter is loaded is
    checked by the engine.
    """

    def choose(context: RequestContext, from_body: str | None, model: object) -> str:
        if from_body is not None:
            return from_body
        from_header = context.headers.get(ADAPTER_HEADER)
        if from_header or model is None or model == model_name:
            return from_header or ""
        if not isinstance(model, str):
            raise RequestError("model", "expected a string")
        return model

    return choose if is_enabled else _choose_none


def _choose_none(context: RequestContext, from_body: str | None, model: object) -> str:
    """Return '', whatever `model` is."""
    for field, name in (
        ("adapters", from_body),
        (ADAPTER_HEADER, context.headers.get(ADAPTER_HEADER)),
    ):
        if name:
            raise lora_disabled(field)
    return ""
