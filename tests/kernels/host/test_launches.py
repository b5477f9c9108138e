"""How many kernels a decoder's layer (without matrix products) and the sampler launch on a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Qwen3Config

from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.sampling.kernels import make_sampling_kernels
from engine.sampling.rows import Row
from engine.sampling.sampler import Sampler
from engine.staging import Staging
from kernels import dry_run
from tests.engine.sampling.stages import STAGES
from tests.kernels.host import host_step

NUM_LAYERS = 3
PRODUCTS = {"linear", "mm", "addmm"}
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias"}
"""Operations that only allocate or make a view, and so launch no kernel. `func.is_view` finds
other views."""
IN_A_LAYER = {
    "add_rms_norm_kernel": 2,
    "rotary_write_kv_kernel": 1,
    "gated_activation_kernel": 1,
    "paged_decode_kernel": 1,
    "combine_splits_kernel": 1,
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


class Operations(TorchDispatchMode):
    """Counts torch's operations that would launch a kernel, and separately matrix products."""

    def __init__(self):
        super().__init__()
        self.launched, self.products = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            self.products += 1
        elif not func.is_view and name not in NO_LAUNCH:
            self.launched[name] += 1
        return func(*args, **(kwargs or {}))


def launches(num_layers, num_prompt_tokens, is_captured):
    """Count Triton kernels, torch kernels and products of a step of 8 decodes and a prompt chunk.

    is_captured: the host does not know the lengths, as in a CUDA graph, so prompts are split.
    """
    model = host_step._Model(num_layers, 8, num_prompt_tokens)
    if is_captured:
        batch = replace(model._inputs.batch, spans=None)
        model._inputs = replace(model._inputs, batches=(batch,))
    model.step()
    with dry_run.target(host_step.ARCH) as recorded, Operations() as operations:
        model.step()
    return Counter(launch.name for launch in recorded), operations.launched, operations.products


@pytest.mark.parametrize(
    ("num_prompt_tokens", "is_captured", "config", "expected"),
    [
        (0, False, LlamaConfig, 6),
        (8, False, LlamaConfig, 7),
        (8, True, LlamaConfig, 8),
        (0, False, Qwen3Config, 7),  # with a norm of queries and keys
        (8, False, Qwen3Config, 8),
        (8, True, Qwen3Config, 9),
    ],
)
def test_launches_of_a_layer(num_prompt_tokens, is_captured, config, expected, monkeypatch):
    def of_this_family(num_layers):
        return config(num_hidden_layers=num_layers, **SIZES)

    monkeypatch.setattr(host_step, "_config", of_this_family)
    with dry_run.idle_gpu(host_step.ARCH), torch.inference_mode():
        # What one more layer adds: embedding, angles, head and sampling are left out.
        (triton, torch_own, products), (more, more_own, more_products) = (
            launches(count, num_prompt_tokens, is_captured)
            for count in (NUM_LAYERS, NUM_LAYERS + 1)
        )
    in_a_layer = IN_A_LAYER | ({"paged_prefill_kernel": 1} if num_prompt_tokens else {})
    if is_captured:
        in_a_layer["combine_splits_kernel"] = 2
    in_a_layer |= {"rms_norm_kernel": 1} if config is Qwen3Config else {}
    assert more - triton == in_a_layer
    lists = {"work_list_kernel": 1} | ({"prefill_work_kernel": 1} if num_prompt_tokens else {})
    for launched in (triton, more):
        assert {name: launched[name] for name in lists} == lists, "all layers share the lists"
    assert more_own - torch_own == Counter()
    assert more_products - products == 4
    assert sum(in_a_layer.values()) == expected


META = torch.device("meta")
GREEDY = {"temperature": 0.0}
ONE_FILTER = [{"top_k": 5}, {"top_k": 5000}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.8}]
ALL_FILTERS = {name: value for changes in ONE_FILTER for name, value in changes.items()}
SAMPLING = {
    "best_of_chunk_kernel": 1,
    "best_of_row_kernel": 1,
    "collect_candidates_kernel": 1,
    "filter_limits_kernel": 1,
    "chunk_masses_kernel": 1,
    "draw_tokens_kernel": 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "batch",
    [
        *([changes] for changes in ({}, *ONE_FILTER, ALL_FILTERS)),
        [{}, GREEDY, *ONE_FILTER, ALL_FILTERS],
        [ALL_FILTERS] * 256,
    ],
    ids=lambda batch: f"{len(batch)}-{batch[0]}",
)
def test_launches_of_the_sampler(batch, dtype):
    """The number of launches is the same for any mix of filters and any batch. The copy of the
    parameters counts as a launch, too."""
    launched, torch_own = launches_of_sampling(batch, dtype)
    assert launched == SAMPLING
    assert sum(launched.values()) + sum(torch_own.values()) <= 11, torch_own


def test_greedy_rows_launch_no_draw():
    launched, torch_own = launches_of_sampling([GREEDY] * 3, torch.float32)
    assert launched == {"best_of_chunk_kernel": 1, "best_of_row_kernel": 1}
    assert sum(torch_own.values()) <= 3, torch_own


def launches_of_sampling(batch, dtype):
    """Count Triton and torch kernels of a step that samples a row for each set of parameters."""
    triton = make_sampling_kernels(torch.device("cuda"))
    rows = [
        Row(Sequence(id, [1, 2], SamplingParams(seed=id, **changes)), 2)
        for id, changes in enumerate(batch)
    ]
    logits = torch.empty(len(rows), 32000, dtype=dtype, device=META)
    newest = torch.empty(len(rows), dtype=torch.int64, device=META)
    sampler = Sampler(Staging(META), STAGES, kernels=triton)
    with dry_run.target(host_step.ARCH) as recorded, Operations() as operations:
        sampler.sample(logits, rows, lambda: newest)
    return Counter(launch.name for launch in recorded), operations.launched
