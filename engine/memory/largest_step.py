"""Measures the memory that the largest step takes besides weights and KV cache, by running it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.attention.call import AttentionCall, Expands
from engine.loading.packed_model import PackedModel
from engine.sampling.rows import Row
from engine.sampling.sampler import Sampler
from engine.staging import Slot, Staging
from engine.step.step_inputs import StepInputs
from kernels.attention.batch import PagedBatch


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Run `work` and return the peak of the bytes that it allocates on a CUDA device."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


ScratchBytes = Callable[[AttentionCall, int], int]
"""(call, number of sequences) -> bytes that attention takes besides its output."""


@torch.inference_mode()
def run_forward(
    model: PackedModel, num_tokens: int, num_sequences: int, scratch_bytes: ScratchBytes
) -> Tensor:
    """Run a forward pass without a KV cache. Return logits [S, vocabulary].

    Attention is not computed: it returns zeros and allocates the memory that it would take.
    """
    device = model.device
    tokens = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
    rows = torch.arange(num_sequences, device=device) % num_tokens
    empty = torch.empty(0, dtype=torch.int32, device=device)
    batch = PagedBatch(empty, empty, empty, tokens[2], spans=())
    columns = [column.of(Slot(tokens[0])) for column in model.columns]
    inputs = StepInputs(tokens, rows, (batch,), columns=columns)
    attention = NoAttention(lambda call: scratch_bytes(call, num_sequences), NoStates(tokens[0]))
    return model.forward(inputs, attention)


@torch.inference_mode()
def run_step(
    model: PackedModel, num_tokens: int, num_sequences: int, scratch_bytes: ScratchBytes
) -> Tensor:
    """Call `run_forward` and sample for each sequence. Return token ids [S] int64."""
    logits = run_forward(model, num_tokens, num_sequences, scratch_bytes)
    newest = torch.zeros(num_sequences, dtype=torch.int64, device=model.device)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    sampled = [Row(Sequence(id, [0], params), 1) for id in range(num_sequences)]
    return Sampler(Staging(model.device), ()).sample(logits, sampled, lambda: newest).token_ids


class NoAttention:
    """Stands in for the paged attention of a step: returns zeros."""

    def __init__(self, scratch_bytes: Callable[[AttentionCall], int], states: NoStates) -> None:
        self._scratch_bytes = scratch_bytes
        self.states = states

    def expansion(self, layer: int, dims: tuple[int, int], expands: Expands) -> None:
        """Return None: a sequence whose latents are expanded takes no more memory than others."""

    def attend(self, call: AttentionCall) -> Tensor:
        output = call.query.new_zeros(*call.query.shape[:2], call.value_dim)
        # Freed at once, as the scratch of real kernels is after their launch.
        output.new_empty(self._scratch_bytes(call), dtype=torch.uint8)
        return output


class NoStates:
    """Stands in for the states of a step: each operation returns zeros."""

    def __init__(self, token_ids: Tensor) -> None:
        """token_ids: [T]."""
        self.in_prompt = torch.ones_like(token_ids, dtype=torch.bool)

    def convolve(
        self, layer: int, rows: Tensor, weight: Tensor, bias: Tensor | None, **options: object
    ) -> Tensor:
        return rows.new_zeros(rows.shape)

    def gates(self, time: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return zeros in fp32, as the decay and the rate are."""
        decay, rate = time.new_zeros(2, *time.shape, dtype=torch.float32)
        return decay, rate

    def advance(self, layer: int, *tokens: Tensor, **options: object) -> Tensor:
        _, _, value, *_ = tokens
        return value.new_zeros(value.shape)

    scan = advance
