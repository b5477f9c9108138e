"""The process that owns the device: tokens in, tokens out. `LLM` runs it without a server."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.sampling import SamplingParams
    from core.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
    from engine.llm import LLM
    from engine.lora.requests import LoRARequest
    from engine.outputs import CompletionOutput, OutputDelta, RequestOutput

_MODULES = {
    "LLM": "engine.llm",
    "CompletionOutput": "engine.outputs",
    "GuidedDecodingParams": "core.structured_outputs",
    "LoRARequest": "engine.lora.requests",
    "OutputDelta": "engine.outputs",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "core.sampling",
    "StructuredOutputsParams": "core.structured_outputs",
}
"""Imported when they are first asked for: a server's engine starts without the offline class."""
__all__ = [
    "LLM",
    "CompletionOutput",
    "GuidedDecodingParams",
    "LoRARequest",
    "OutputDelta",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
