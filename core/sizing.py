"""How much KV memory there is and what it holds: arithmetic of the engine, and of whoever plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ConfigurationError, InsufficientMemoryError
from core.options import Batching, Options

DEFAULT_STEP_TOKENS = {"cuda": 8192, "cpu": 512}
DEFAULT_BATCH_SIZE = 32
DEFAULT_MODEL_LEN = 2048
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""What config.json calls the longest sequence that a model was trained for."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token. K and V may differ in size (multi-head latent attention)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numel(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, itemsize: int) -> int:
    """Of all layers; itemsize: bytes of a number in the KV cache."""
    return sum(shape.numel for shape in shapes) * block_size * itemsize


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens of one sequence."""
    return -(-num_tokens // block_size)


def sequence_limit(options: Options, batching: Batching) -> int:
    """Most sequences that the strategy runs at once, were there memory for them."""
    if batching == "none":
        return 1
    if batching == "dynamic":
        return options.batch_size or DEFAULT_BATCH_SIZE
    return options.max_rolling_batch_size


def step_token_budget(options: Options, device: str) -> int:
    """Most tokens of a step of the packed executor. device: cuda or cpu."""
    return options.max_rolling_batch_prefill_tokens or DEFAULT_STEP_TOKENS[device]


def length_limit(options: Options, own: int | None) -> int:
    """Most tokens of a sequence; own: what the model was trained for, where it says so."""
    if options.max_model_len is None:
        return own or DEFAULT_MODEL_LEN
    if own is not None and options.max_model_len > own:
        raise ConfigurationError(
            f"option.max_model_len={options.max_model_len}: the model was trained for {own}"
        )
    return options.max_model_len


def fit_length(options: Options, max_len: int, num_slots: int) -> tuple[int, tuple[str, ...]]:
    """The longest sequence that fits into all of the KV memory, and a note if that is less.

    Raises ConfigurationError where one of a wanted length does not: InsufficientMemoryError, unless
    the options themselves say how much memory there is.
    """
    if num_slots >= max_len:
        return max_len, ()
    shortage = f"the KV memory holds {num_slots} tokens"
    cure = "raise option.kv_cache_memory_bytes or option.num_kv_blocks"
    if num_slots < 2 or options.max_model_len is not None:
        is_asked = options.num_kv_blocks is not None or options.kv_cache_memory_bytes is not None
        raise (ConfigurationError if is_asked else InsufficientMemoryError)(
            f"{shortage}, less than one sequence of max_model_len {max_len}; "
            f"{cure}, or lower option.max_model_len"
        )
    return num_slots, (f"max_model_len lowered from {max_len} to {num_slots}: {shortage}; {cure}",)


def gpu_kv_budget(options: Options, total: int, used: int, activation_bytes: int) -> int:
    """Bytes for KV blocks on a GPU of `total` bytes of which `used` are taken before.

    activation_bytes: kept free for steps.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    usable = int(total * options.gpu_memory_utilization)
    return max(0, usable - used - activation_bytes)
