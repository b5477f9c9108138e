"""How much memory a model's steps and KV cache get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.configuration.options import Options, make_options
from core.configuration.sizing import fit_length
from core.configuration.step_size import StepSize
from core.errors import ConfigurationError, InsufficientMemoryError
from core.process.host_memory import available_host_memory
from engine import LLM
from engine.group import Group
from engine.memory.capacity import (
    Beside,
    activation_bytes,
    kv_budget,
    measure,
    swap_budget,
    useful_kv_bytes,
)
from engine.memory.largest_step import run_forward, run_step
from engine.shard import Shard
from engine.step.block_tables import table_bytes
from tests.engine.resolved import resolved

DEMO = str(Path(__file__).parents[3] / "models" / "demo")
MIB = 2**20


@pytest.fixture
def llama(tiny_model):
    return tiny_model("llama")


def test_blocks_follow_the_memory_budget(llama):
    llm = LLM(llama, dtype="fp32", kv_cache_memory_bytes=64 * 2**10)
    # 3 layers x (K and V) x 2 heads x 8 dims x 16 tokens x 4 bytes
    per_block = 3 * 2 * 2 * 8 * 16 * 4
    assert llm.facts.num_kv_blocks == 64 * 2**10 // per_block
    assert llm.facts.kv_bytes == llm.facts.num_kv_blocks * per_block


def test_no_more_blocks_than_requests_can_use(llama):
    assert LLM(llama, batching="none").facts.num_kv_blocks == 128 // 16
    assert LLM(llama, batch_size=3).facts.num_kv_blocks == 3 * 128 // 16
    assert LLM(llama, max_model_len=20, batching="none").facts.num_kv_blocks == 2


def test_the_default_budget_is_a_quarter_of_what_is_available(monkeypatch):
    monkeypatch.setattr("engine.memory.capacity.available_host_memory", lambda: 4000)
    for copies, share in ((1, 1000), (4, 250)):
        found = resolved(copies=copies)
        assert kv_budget(found.memory, found.share, torch.device("cpu")) == share
        assert swap_budget(found.memory, found.share) == share


def test_ranks_share_the_memory_of_their_own_machine_only(llama, monkeypatch):
    """There are four ranks, all on one machine or two on each of two machines."""
    monkeypatch.setattr("engine.memory.capacity.available_host_memory", lambda: 2**20)
    model = LLM(llama, dtype="fp32").llm_engine.executor.passes.model
    group = Group(model.device)
    group.shard = Shard(0, 4)

    def blocks(**options):
        found = resolved(num_ranks=4, preemption_mode="swap", **options)
        capacity = measure(found, model, group, Beside())
        return capacity.num_blocks, capacity.num_swap_blocks

    per_block = 3 * 2 * 2 * 8 * 16 * 4
    assert blocks() == (2**18 // 4 // per_block,) * 2
    assert blocks(nodes=2) == (2**18 // 2 // per_block,) * 2
    assert blocks(kv_cache_memory_bytes=2**19)[0] == 2**19 // 4 // per_block
    assert blocks(kv_cache_memory_bytes=2**19, nodes=2)[0] == 2**19 // 2 // per_block


def test_on_cuda_the_budget_subtracts_used_memory_and_activations(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    found = resolved("cuda", gpu_memory_utilization=0.8)

    def budget(activation_bytes):
        return kv_budget(found.memory, found.share, found.source.device, activation_bytes)

    assert budget(150) == 800 - 300 - 150
    assert budget(600) == 0


def test_the_largest_step_samples_a_token_per_sequence(llama):
    model = LLM(llama, dtype="fp32").llm_engine.executor.passes.model
    tokens = run_step(model, 20, 7, lambda call, num_sequences: 0)
    assert tokens.shape == (7,)
    assert 0 <= tokens.min() <= tokens.max() < model.config.vocab_size
    logits = run_forward(model, 5, 9, lambda call, num_sequences: 0)
    assert logits.shape == (9, model.config.vocab_size), "graphs may have more rows than tokens"


@pytest.mark.parametrize(
    ("options", "graph"),
    [
        ({"enforce_eager": True}, None),
        ({"cuda_graph_sizes": "0"}, StepSize(7)),
        ({"cuda_graph_sizes": "4,8"}, StepSize(6, 4, 8)),
        ({}, StepSize(6, 7, 20)),
    ],
)
def test_steps_and_graphs_are_budgeted_and_sampling_is_counted_once(
    llama, options, graph, monkeypatch
):
    """graph: the size of the largest graph, for 7 sequences and steps of 20 tokens."""
    model = LLM(llama, dtype="fp32").llm_engine.executor.passes.model
    measured, attended = [], set()

    def scratch_bytes(call, num_sequences):
        attended.add((len(call.query), num_sequences))
        return 1

    def measured_bytes(work, device):
        measured.append(work)
        return 1000 * len(measured)

    sizes = resolved("cuda", **options).graph_prompt_sizes
    total = activation_bytes(model, 20, 7, scratch_bytes, sizes, measured_bytes)
    assert measured[0]().shape == (7,), "a step with its sampled tokens"
    assert attended == {(20, 7)}
    if graph is None:
        assert (len(measured), total) == (1, 1000)
    else:
        vocab_size, num_rows = model.config.vocab_size, graph.num_sequences
        attended.clear()
        assert measured[1]().shape == (num_rows, vocab_size), "logits, but no sampled tokens"
        assert attended == {(graph.num_tokens, num_rows)}
        assert total == 1000 + 2000 + num_rows * vocab_size * 4


def test_block_tables_are_budgeted():
    """The table has two rows for each sequence. A step and the CUDA graphs have a copy each.

    Each copy has one row for each sequence, and that of the graphs 16 more for prompts. Entries
    take 4 bytes. The table's rows and columns are rounded up to powers of two.
    """
    assert table_bytes(max_sequences=256, max_blocks=8192) == (512 + 2 * 256 + 16) * 8192 * 4
    assert table_bytes(max_sequences=3, max_blocks=5) == (8 * 8 + (2 * 3 + 16) * 5) * 4


def test_available_memory_respects_the_container_limit(tmp_path):
    """Reclaimable file cache counts as available."""
    for name, text in (("max", "1000"), ("current", "900"), ("stat", "anon 1\ninactive_file 400")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_host_memory(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max")
    assert available_host_memory(tmp_path) > 2**20


def test_the_kind_of_error_depends_on_whether_an_option_limits_the_memory():
    for options, kind in (
        (Options(), InsufficientMemoryError),
        (make_options({"max_model_len": 50}), InsufficientMemoryError),
        (make_options({"num_kv_blocks": 1}), ConfigurationError),
        (make_options({"kv_cache_memory_bytes": 1}), ConfigurationError),
    ):
        with pytest.raises(ConfigurationError) as caught:
            fit_length(options.memory, max_len=50, num_slots=1)
        assert type(caught.value) is kind


def test_max_model_len_is_lowered_to_fit_memory_with_a_note(llama):
    facts = LLM(llama, num_kv_blocks=4).facts
    assert facts.max_model_len == 64
    assert "lowered from 128 to 64" in facts.notes[0]


@pytest.mark.parametrize(
    ("weights", "sequence", "most"),
    [(8 * MIB, MIB, 128 * MIB), (100 * MIB, MIB, 1600 * MIB), (MIB, 512 * MIB, 512 * MIB)],
)
def test_the_default_on_a_cpu_fits_the_model(weights: int, sequence: int, most: int):
    assert useful_kv_bytes(weights, sequence) == most


def test_a_small_model_gets_little_kv_memory():
    """The demo model would fill 512 MiB with 256 sequences of its greatest length."""
    facts = LLM(DEMO, dtype="bf16").facts
    assert (facts.kv_bytes, facts.max_model_len) == (128 * MIB, 1024)
    assert LLM(DEMO, dtype="bf16", kv_cache_memory_bytes=2**30).facts.kv_bytes == 512 * MIB
