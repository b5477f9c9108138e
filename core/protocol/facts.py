"""What an engine is and can do, which checks of requests, logs and routes need to know."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.configuration.strategy_table import Batching


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the engine determines at start-up. Sent with Ready, and printed once.

    For tasks other than text generation, fields about tokens are 0 or empty.
    """

    model: str
    task: str = "text-generation"
    architecture: str
    batching: Batching
    batching_reason: str
    executor: Literal["packed", "library", "task"]
    executor_reason: str
    decoder: str = ""
    """For the packed executor: whose code computes the layers; if not Longshore's, also why."""
    encoder: str = ""
    """The same for tasks other than text generation, except for the user's handlers."""
    device: str
    num_ranks: int = 1
    """Devices that share the model."""
    dtype: str
    kv_dtype: str = ""
    max_model_len: int = 0
    max_sequences: int
    """Maximum sequences that run at once; for tasks other than text generation, requests."""
    max_step_tokens: int = 0
    block_size: int = 0
    num_kv_blocks: int = 0
    num_swap_blocks: int = 0
    weights_bytes: int
    num_weights: int = 0
    """Elements of the weights; 0 if transformers' code computes the layers."""
    digest: str = ""
    """What may change the bits of an answer, in parts between dots: the weights, how they are
    quantized, dtype, kv_dtype, the instruction set, a digest of the code, and num_ranks."""
    quantization: str = ""
    """How the weights are quantized: option.quantize, or the checkpoint's quant_method."""
    kv_bytes: int = 0
    activation_bytes: int = 0
    """Bytes of device memory kept free for the largest step, its block tables and the CUDA graphs.
    0 if they were not measured."""
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    load_seconds: float
    phases: dict[str, float] = {}
    """Seconds of each phase of start-up, in order."""
    gives_receipts: bool = False
    """Whether requests get receipts (option.receipts)."""
    takes_images: bool = False
    """Whether conversations may have images."""
    unavailable: dict[str, str] = {}
    """Why requests must leave out fields of SamplingParams, by the field's name."""
    notes: tuple[str, ...] = ()
    """Lines to print at start-up, such as a lowered limit."""
