"""The process that owns the device: tokens in, tokens out. `LLM` runs it without a server."""

from core.sampling import SamplingParams
from core.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from engine.llm import LLM
from engine.lora.requests import LoRARequest
from engine.outputs import CompletionOutput, OutputDelta, RequestOutput

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
