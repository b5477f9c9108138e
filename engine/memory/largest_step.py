"""What a step takes of the device's memory besides weights and K/V, by running the largest one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.attention.call import AttentionCall
from engine.inputs import StepInputs
from engine.loading.packed_model import PackedModel
from engine.sampling.sampler import Row, Sampler
from engine.staging import Staging
from kernels.batch import PagedBatch


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes that `work` holds at once on a CUDA device, beyond what is there before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def run_step(model: PackedModel, num_tokens: int, num_sequences: int) -> Tensor:
    """A forward over that many tokens without K/V, and a draw for each sequence, [S] int64.

    Attention takes no memory but its output, as the real one does.
    """
    device = model.device
    tokens = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
    rows = torch.arange(num_sequences, device=device)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    batch = PagedBatch(nothing, nothing, nothing, tokens[2], spans=())
    slots = None if model.adapter_memory is None else tokens[0]
    inputs = StepInputs(tokens, rows, batch, (), adapter_slots=slots)
    logits = model.forward(inputs, _NoMemory())
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    drawn = [Row(Sequence(id, [0], params), 1) for id in range(num_sequences)]
    return Sampler(Staging(device)).sample(logits, drawn, inputs.newest()).token_ids


class _NoMemory:
    def attend(self, call: AttentionCall) -> Tensor:
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[-1])
