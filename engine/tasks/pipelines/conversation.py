"""The pipelines that answer a text with images, with answers that end at the model's limit.

transformers generates beyond the model's last position, which ends the process on a GPU if the
positions are a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.pipelines.any_to_any import AnyToAnyPipeline
from transformers.pipelines.image_text_to_text import ImageTextToTextPipeline

from core.errors import RequestError
from engine.tasks.lengths import num_positions


class _LastPosition(MaxLengthCriteria):
    """Ends an answer at the model's limit.

    A class of its own, because transformers would replace its own MaxLengthCriteria, which has the
    request's max_new_tokens, by another object of the same class.
    """


class _Limited:
    """A mixin that checks the prompt once its images have become tokens, and limits the answer."""

    model: Any

    def _forward(self, model_inputs: Any, generate_kwargs: Any = None) -> Any:
        generate: Any = super()
        arguments = dict(generate_kwargs or {})
        if limit := num_positions(self.model):
            num_tokens = model_inputs["input_ids"].shape[-1] if "input_ids" in model_inputs else 0
            if num_tokens > limit:
                raise RequestError(
                    "inputs",
                    f"has {num_tokens} tokens with its images; the model takes {limit}; shorten "
                    "the text, or send fewer or smaller images",
                )
            arguments["stopping_criteria"] = [_LastPosition(limit)]
        return generate._forward(model_inputs, arguments)


class _ImageTextToText(_Limited, ImageTextToTextPipeline):
    pass


class _AnyToAny(_Limited, AnyToAnyPipeline):
    pass


CONVERSATION_PIPELINES: Mapping[str, type] = {
    "image-text-to-text": _ImageTextToText,
    "any-to-any": _AnyToAny,
}
