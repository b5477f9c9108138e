"""Which model a request gets: the served one, or a variant of it with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable

from container.http.request_context import RequestContext
from core.adapter import lora_disabled
from core.configuration.options import Options
from core.errors import RequestError

ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def model_choice(
    model_name: str, options: Options
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

    return choose if options.lora.enable_lora else _choose_none


def _choose_none(context: RequestContext, from_body: str | None, model: object) -> str:
    """Return '', whatever `model` is."""
    for field, name in (
        ("adapters", from_body),
        (ADAPTER_HEADER, context.headers.get(ADAPTER_HEADER)),
    ):
        if name:
            raise lora_disabled(field)
    return ""
