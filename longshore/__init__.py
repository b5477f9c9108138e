"""Longshore: a serving container for language models in which batching is a choice.

`longshore serve` starts it, and `LLM` runs a model without a server (docs/without-a-client.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import (
        LLM,
        CompletionOutput,
        GenerationError,
        GuidedDecodingParams,
        LoRARequest,
        OutputDelta,
        RequestError,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "GenerationError",
    "GuidedDecodingParams",
    "LoRARequest",
    "OutputDelta",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import engine as public  # lazy: most commands do not need it

    return getattr(public, name)
