"""The model that a request names: the served one, or a variant of it with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from container.schema.fields import Field, Fields, Values, unsupported
from container.schema.kinds import ANYTHING, STRING_OR_STRINGS
from core.errors import RequestError

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
INPUT_FIELDS: Fields = {
    "adapters": Field(
        STRING_OR_STRINGS,
        "The LoRA adapter to use, or a list with one adapter for each input of a batch. An "
        "empty string means no adapter.",
    ),
}
"""The field beside the inputs of LMI's text schema, which names an adapter for each of them."""
NOT_PARAMETERS: Fields = {
    name: unsupported(ANYTHING, instead="put adapters beside inputs")
    for name in ("adapter_id", "adapters")
}
"""The same field, in the wrong place."""


class NamedModel(NamedTuple):
    """What a body says of the model to use."""

    adapter: str | None
    """It takes precedence over `model`."""
    model: object


NO_MODEL = NamedModel(None, None)


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


def read_models(values: Values, num_inputs: int | None) -> Sequence[NamedModel]:
    """Read INPUT_FIELDS: the model for each input of a batch, or for the only input (None).

    Raises RequestError for a list of adapters that is not one for each input of a batch.
    """
    adapters = cast(str | list[str] | None, values.given.get("adapters"))
    count = num_inputs or 1
    if not isinstance(adapters, list):
        return [NamedModel(adapters, None)] * count
    if len(adapters) != num_inputs:
        raise RequestError(
            "adapters", f"a list must have one adapter for each of a batch's inputs ({count})"
        )
    return [NamedModel(adapter, None) for adapter in adapters]
