"""The engine runs the model: token ids in, token ids out. `LLM` runs it without a server."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from core.process.names import full_name

if TYPE_CHECKING:
    from core.errors import GenerationError, RequestError
    from core.sampling import SamplingParams
    from core.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
    from engine.offline.adapters import LoRARequest
    from engine.offline.llm import LLM
    from engine.offline.outputs import CompletionOutput, OutputDelta, RequestOutput

_MODULES = {
    "LLM": "engine.offline.llm",
    "CompletionOutput": "engine.offline.outputs",
    "GenerationError": "core.errors",
    "GuidedDecodingParams": "core.structured_outputs",
    "LoRARequest": "engine.offline.adapters",
    "OutputDelta": "engine.offline.outputs",
    "RequestError": "core.errors",
    "RequestOutput": "engine.offline.outputs",
    "SamplingParams": "core.sampling",
    "StructuredOutputsParams": "core.structured_outputs",
}
"""The module of each public name. A name is imported on first use, so a server never imports `LLM`.
"""
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute '{name}'")
    return getattr(importlib.import_module(full_name(_MODULES[name])), name)
