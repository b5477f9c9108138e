"""All layers in one call: supported families, equal logits, and fallbacks."""

from __future__ import annotations

import pytest
import torch

from core.configuration.kv_layout import KVLayout
from engine.attention.backends import CpuBackend
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.attention.states import StatePool
from engine.loading.gate import relative_error
from engine.step.column import Applied
from kernels.attention.batch import PagedBatch
from kernels.cpu.integers import rounds_rows
from kernels.cpu.shared_library import unavailable_reason
from kernels.cpu.step_calls import StepCalls
from tests.engine.model.conftest import expected_logits, logits
from tests.engine.model.test_documented_families import documented
from tests.engine.tiny_models import OWN
from tests.kernels.state_inputs import Chunk, make_batch

ONE_CALL = {name for name, one_call in documented().items() if one_call == "yes"}
"""Families whose layers run in one call.

The others have parallel parts, experts, q/k norms after rotation, or no gate.
"""
GRANITE_4 = {
    "changes": {"num_local_experts": 0, "time_step_limit": (0.0, float("inf"))},
    "name": "granitemoehybrid-dense-wide",
}
"""Of its dense models."""


@pytest.fixture(autouse=True)
def weights_in_panels(monkeypatch):
    """Store weights in panels whatever is faster here. Skip without the C++ library."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr("kernels.cpu.linear.is_faster", lambda: True)


@pytest.fixture
def steps(monkeypatch):
    """Return a list to which each step in one call adds its numbers of tokens and of rows that the
    last layer computes; None for all."""
    found, call = [], StepCalls.__call__

    def watch(self, hidden, angles, batch, rows=None):
        found.append((len(hidden), None if rows is None else len(rows)))
        return call(self, hidden, angles, batch, rows)

    monkeypatch.setattr(StepCalls, "__call__", watch)
    return found


@pytest.mark.matrix(cases=16)
@pytest.mark.parametrize("architecture", OWN)
def test_logits_are_equal_and_the_families_are_known(tiny_model, load, steps, architecture):
    folder = tiny_model(architecture, is_wide=True)
    decoder = load(folder)
    steps.clear()
    together = logits(decoder)
    assert bool(steps) == (architecture in ONE_CALL), "the column «one call» of docs/models.md"
    assert (decoder.one_call.no_kernel is None) == bool(steps)
    decoder.one_call = None
    steps.clear()
    torch.testing.assert_close(logits(decoder), together, atol=1e-4, rtol=1e-4)
    assert not steps
    torch.testing.assert_close(together, expected_logits(folder), atol=1e-3, rtol=1e-3)


def test_bf16(tiny_model, load, steps):
    decoder = load(tiny_model("qwen3", is_wide=True), dtype=torch.bfloat16)
    steps.clear()
    together = logits(decoder, torch.bfloat16)
    assert steps
    decoder.one_call = None
    error = (logits(decoder, torch.bfloat16) - together).abs().max() / together.abs().max()
    assert error < 0.05


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_weights(tiny_model, load, steps, dtype, precision):
    """One call for all layers gives the same logits as a call for each operation."""
    folder = tiny_model("llama", is_wide=True)
    decoder = load(folder, precision=precision, dtype=dtype, is_exact=True)
    steps.clear()
    together = logits(decoder, dtype)
    assert steps
    decoder.one_call = None
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert relative_error(logits(decoder, dtype), together) < tolerance


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_rows(tiny_model, load, steps, dtype, precision):
    """One call for all layers rounds rows in the same way as a call for each operation."""
    folder = tiny_model("llama", is_wide=True)
    decoder = load(folder, precision=precision, dtype=dtype)
    steps.clear()
    together = logits(decoder, dtype)
    assert steps
    decoder.one_call = None
    assert relative_error(logits(decoder, dtype), together) == 0.0
    exact = logits(load(folder, precision=precision, dtype=dtype, is_exact=True), dtype)
    if rounds_rows():
        assert 0.0 < relative_error(together, exact) < 0.2
    else:
        assert torch.equal(together, exact)


def test_the_last_layer_only_computes_rows_with_logits(tiny_model, load, steps):
    decoder = load(tiny_model("llama", is_wide=True))
    steps.clear()
    logits(decoder)  # a prompt in chunks of 19, 20 and 1; only the last has logits
    assert steps == [(19, 0), (20, 0), (1, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "gemma2", "olmo2", "granite"),
        *("lfm2", "qwen3_5_text", "bamba", "mamba2", "granitemoehybrid"),
    ],
)
def test_any_rows(tiny_model, load, steps, architecture, dtype):
    """One call gives what calls of each layer give, whichever rows the last layer computes.

    Norms stand before attention and MLP, around them, or after them. Layers with states are the
    last ones, too; what slots held before is poisoned.
    """
    changes = GRANITE_4 if architecture == "granitemoehybrid" else {}
    folder = tiny_model(architecture, is_wide=True, **changes)
    decoder = load(folder, dtype=dtype)
    num_tokens, device = 5, torch.device("cpu")
    batch = PagedBatch(
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.arange(8, 8 + num_tokens),
        spans=((0, num_tokens, num_tokens),),
        states=make_batch([Chunk(num_tokens, -1, {2: 0, num_tokens: 2})]),
        in_prompt=torch.ones(num_tokens, dtype=torch.bool),
    )
    ids, one_call = torch.tensor([3, 5, 7, 11, 13]), decoder.one_call
    for wanted in ([], [4], [3, 0, 3], [4, 3, 2, 1, 0], [4]):
        results, caches = [], []
        for decoder.one_call in (None, one_call):
            pool = StatePool(decoder.states, 4, dtype, device) if decoder.states else None
            if pool is not None:
                pool.rows.fill_(0xFF)
            layout = KVLayout.uniform(8)
            caches.append(KVCache(decoder.shapes, 2, layout, dtype, device, states=pool))
            step = PagedStep((batch,), caches[-1], CpuBackend())
            steps.clear()
            rows = torch.tensor(wanted, dtype=torch.int64)
            with torch.inference_mode():
                results.append(decoder(ids, torch.arange(num_tokens), rows, step))
            assert bool(steps) == (decoder.one_call is not None)
        if architecture in ("gemma2", "olmo2"):
            # The norm is added to the residual with one rounding.
            torch.testing.assert_close(*results)
        else:
            assert torch.equal(*results)
        if decoder.states:
            slots, others = (cache.states.rows for cache in caches)
            assert torch.equal(slots, others)
            assert not slots[[0, 2]].eq(0xFF).all(1).any()
            assert slots[[1, 3]].eq(0xFF).all()
        for layer_by_layer, together in zip(*(cache.keys for cache in caches), strict=True):
            torch.testing.assert_close(layer_by_layer, together)


def test_steps_with_adapters_run_layer_by_layer(tiny_model, load, steps):
    decoder = load(tiny_model("llama", is_wide=True))
    ids = torch.tensor([3, 5, 7])

    class Nothing:
        def attend(self, call):
            return call.query

    class AddsToLinears(Applied):
        adds_to_linears = True

    steps.clear()
    decoder(ids, torch.arange(3), torch.tensor([2]), Nothing(), [AddsToLinears()])
    assert not steps


def test_steps_of_growing_size_and_other_caches(tiny_model, load, steps):
    """The buffers grow, and a new KV cache replaces the last one."""
    decoder = load(tiny_model("llama", is_wide=True))
    first = logits(decoder)
    steps.clear()
    assert torch.equal(logits(decoder), first)
    assert len(steps) == 3


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gpt2", "gelu_new has no kernel"),
        ("mixtral", "it has experts"),
        ("cohere", "are parallel"),
        ("granitemoehybrid", "it has experts"),
        ("nemotron_h", "it clamps the time steps"),
        ("mamba", "it keeps a state"),
        ("olmoe", "it has experts"),
        ("hunyuan_v1_dense", "normalized after rotation"),
        ("arcee", "the MLP has no gate"),
    ],
)
def test_why_layers_do_not_run_in_one_call(tiny_model, load, architecture, reason):
    decoder = load(tiny_model(architecture, is_wide=True))
    logits(decoder)
    assert reason in str(decoder.one_call.no_kernel)
    assert decoder.one_call.no_kernel.__traceback__ is None, "it keeps nothing of the step alive"
