"""How much KV memory there is and how much fits into it.

The engine and `longshore plan` share this arithmetic. It needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.configuration.strategy_table import KVReservation
from core.errors import ConfigurationError, InsufficientMemoryError

if TYPE_CHECKING:
    from core.configuration.options import MemoryOptions

DEFAULT_MODEL_LEN = 2048
MAX_DEFAULT_SWAP = 4 * 2**30
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""The fields of config.json that may hold the longest sequence the model was trained for."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def reserved_tokens(
    policy: KVReservation, num_prompt_tokens: int, max_tokens: int, max_model_len: int
) -> int:
    """Return the KV slots that a sequence reserves at admission (see strategies/continuous.py)."""
    match policy:
        case "max":
            return max_model_len
        case "pow2":
            power_of_two = 1 << (max_tokens - 1).bit_length()
            return min(num_prompt_tokens + power_of_two, max_model_len)
        case "oracle":
            return num_prompt_tokens + max_tokens


def length_limit(memory: MemoryOptions, trained_len: int | None) -> int:
    """Return the maximum number of tokens of a sequence, before memory may lower it.

    trained_len: the longest sequence the model was trained for, or None if that is not known.

    Raises ConfigurationError if `option.max_model_len` is greater than `trained_len`.
    """
    if memory.max_model_len is None:
        return trained_len or DEFAULT_MODEL_LEN
    if trained_len is not None and memory.max_model_len > trained_len:
        raise ConfigurationError(
            f"option.max_model_len={memory.max_model_len}: the model was trained for {trained_len}"
        )
    return memory.max_model_len


def fit_length(memory: MemoryOptions, max_len: int, num_slots: int) -> tuple[int, tuple[str, ...]]:
    """Return the longest sequence that fits into the KV memory, and a note if it is below max_len.

    Raises ConfigurationError if `option.max_model_len` is set and does not fit, or if fewer than
    two tokens fit. The error is an InsufficientMemoryError unless an option sets the size of the KV
    memory.
    """
    if num_slots >= max_len:
        return max_len, ()
    shortage = f"the KV memory holds {num_slots} tokens"
    cure = "raise option.kv_cache_memory_bytes or option.num_kv_blocks"
    if num_slots < 2 or memory.max_model_len is not None:
        is_set = memory.num_kv_blocks is not None or memory.kv_cache_memory_bytes is not None
        raise (ConfigurationError if is_set else InsufficientMemoryError)(
            f"{shortage}, less than one sequence of max_model_len {max_len}; "
            f"{cure}, or lower option.max_model_len"
        )
    return num_slots, (f"max_model_len lowered from {max_len} to {num_slots}: {shortage}; {cure}",)


def gpu_kv_budget(memory: MemoryOptions, total: int, used: int, activation_bytes: int) -> int:
    """Return the bytes for KV blocks on a GPU of `total` bytes, `used` of them already taken.

    activation_bytes: bytes to keep free for the activations of a step.
    """
    if memory.kv_cache_memory_bytes is not None:
        return memory.kv_cache_memory_bytes
    usable = int(total * memory.gpu_memory_utilization)
    return max(0, usable - used - activation_bytes)


def most_swap_bytes(memory: MemoryOptions) -> int:
    """Return the bytes of a host that an engine's swapped blocks get, if it has so many to spare.

    If `option.preemption_mode` lets none be swapped, it is 0.
    """
    if memory.preemption_mode == "recompute":
        return 0
    given = memory.swap_space_gib
    return MAX_DEFAULT_SWAP if given is None else int(given * 2**30)
