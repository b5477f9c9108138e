"""The process that owns the device: tokens in, tokens out. `LLM` runs it without a server."""

from core.sampling import SamplingParams
from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]
