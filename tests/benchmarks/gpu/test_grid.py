"""The cases of a real run, with meta tensors and without compiling kernels."""

from __future__ import annotations

import importlib
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import peers
from benchmarks.gpu.paged_inputs import Lengths, Shape, make_inputs, ragged
from benchmarks.gpu.sections import SECTIONS
from kernels import dry_run
from kernels.cache import torch_cache
from kernels.state import reference

H200_BYTES = 130 * 2**30


class PretendBench(Bench):
    """Pretends to run on a GPU with 130 GiB where everything takes a microsecond."""

    num_processors = 132

    def __init__(self, events):
        super().__init__(is_dry=False, use_flashinfer=False, seconds=1e6, emit=events.append)
        self.device = torch.device("meta")

    def num_sets(self, num_bytes, max_sets=64):
        return min(max_sets, max(1, 2**28 // num_bytes))

    def fits(self, num_bytes, what):
        assert num_bytes < H200_BYTES, what
        return True

    def time_us(self, calls):
        calls[0]()
        return 1.0


@pytest.mark.parametrize(
    ("section", "num_rows"),
    [
        ("decode", 98),
        ("latents", 24),
        ("expanded", 8),
        ("prefill", 30),
        ("sweep", 6),
    ],
)
def test_every_case_launches_its_kernel(section, num_rows, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.occupancy.programs_per_processor", lambda kernel: 5)
    events = []
    with patch.object(JITFunction, "run", lambda *_, **__: None), dry_run.target(90) as launches:
        importlib.import_module(f"benchmarks.gpu.{SECTIONS[section].module}").run(
            PretendBench(events)
        )
    rows = [event["row"] for event in events if event["event"] == "row"]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert len(rows) == num_rows
    assert len(launches) >= num_rows
    assert all("new tokens" in note for note in notes), notes
    for row in rows:
        assert set(row["us"].values()) == {1.0}
        assert section != "sweep" or "programs_per_processor=5" in row["best"]


def _zeros_like(index, *arguments, **_):
    return torch.zeros_like(arguments[index])


@contextmanager
def numbers_of_meta_tensors():
    """Let the host read zeros from tensors without memory, and find all tensors equal."""
    with ExitStack() as patches:
        for name, value in {"item": 0.0, "__float__": 0.0, "__bool__": True}.items():
            patches.enter_context(patch.object(torch.Tensor, name, lambda _, value=value: value))
        patches.enter_context(patch.object(torch.Tensor, "copy_", lambda to, *_, **__: to))
        for name in ("equal", "allclose"):
            patches.enter_context(patch.object(torch, name, lambda *_, **__: True))
        for name in ("copy_blocks", "gather_blocks", "scatter_blocks"):
            patches.enter_context(patch.object(torch_cache, name, lambda *_: None))
        for name, index in {"conv_rows": 0, "scan": 2, "state_step": 2}.items():
            like = partial(_zeros_like, index)
            patches.enter_context(patch.object(reference, name, like))
        yield


@pytest.mark.parametrize(
    ("section", "num_rows"),
    [
        ("ceilings", 4),
        ("correctness", 86),
        ("elementwise", 24),
        ("sampling", 14),
        ("quantized", 24),
        ("invariant", 12),
    ],
)
def test_every_check_runs_at_its_real_size(section, num_rows):
    """No kernel is launched here. The dry run checks at small sizes what the kernels compute."""
    events = []
    with (
        patch.object(JITFunction, "run", lambda *_, **__: None),
        dry_run.target(90),
        numbers_of_meta_tensors(),
    ):
        importlib.import_module(f"benchmarks.gpu.{SECTIONS[section].module}").run(
            PretendBench(events)
        )
    assert [event["text"] for event in events if event["event"] == "note"] == []
    rows = [event["row"] for event in events if event["event"] == "row"]
    assert len(rows) == num_rows
    assert all(row.get("verdict", "ok") == "ok" for row in rows)


def test_bytes_and_operations_are_counted():
    """The 4 queries see 3, 4, 5 and 6 keys.

    For each key, each of 2 heads computes two products of 64 numbers, 2 operations per number.
    """
    lengths, shape = Lengths((4,), (6,)), Shape(2, 1, 64)
    assert lengths.flop(shape) == (3 + 4 + 5 + 6) * 2 * 2 * 64 * 2
    assert lengths.kv_bytes(shape, 2) == 6 * 2 * 64 * 2
    assert lengths.query_bytes(shape, 2) == 4 * 2 * 2 * 64 * 2


def test_a_latent_is_counted_once():
    """DeepSeek V3's 128 heads compute 278,528 operations with each row of 1,152 bytes."""
    lengths, shape = Lengths((1,), (10,)), Shape(128, 1, 576, 512)
    assert lengths.flop(shape) == 10 * 278_528
    assert lengths.kv_bytes(shape, 2) == 10 * 1152
    assert lengths.query_bytes(shape, 2) == 128 * (576 + 512) * 2


def test_ragged_lengths_are_distinct_and_include_the_longest():
    lengths = ragged(16, 4096)
    assert len(set(lengths)) == 16
    assert (min(lengths), max(lengths)) == (256, 4096)


def test_block_tables_share_no_block():
    lengths = Lengths((1, 1), (33, 5))
    cpu = torch.device("cpu")
    inputs = make_inputs(Shape(1, 1, 64), lengths, device=cpu, dtype=torch.float16, num_sets=3)
    used = [block for table in inputs.tables for block in [*table[0, :3], table[1, 0]]]
    assert sorted(int(block) for block in used) == list(range(12))


def test_flashinfer_gets_the_same_blocks():
    lengths = Lengths((1, 1), (33, 16))
    cpu = torch.device("cpu")
    inputs = make_inputs(Shape(1, 1, 64), lengths, device=cpu, dtype=torch.float16)
    starts, blocks, last = peers.page_lists(inputs, inputs.tables[0], 16)
    assert starts.tolist() == [0, 3, 4]
    assert blocks.tolist() == [*inputs.tables[0][0].tolist(), int(inputs.tables[0][1, 0])]
    assert last.tolist() == [1, 16]


def test_flashinfer_gets_latents_and_rotated_keys_apart(monkeypatch):
    plans = []

    class Wrapper:
        def __init__(self, workspace):
            pass

        def plan(self, *arguments):
            plans.append(arguments)

        def run(self, *rows, out):
            return rows, out

    mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
    monkeypatch.setattr(peers.importlib, "import_module", {"flashinfer.mla": mla}.get)
    cpu, shape = torch.device("cpu"), Shape(8, 1, 320, 256)
    inputs = make_inputs(shape, Lengths((1, 1), (33, 16)), device=cpu, dtype=torch.float16)
    [call] = peers.flashinfer_latents(inputs, shape)
    rows, out = call()
    assert all(part.is_contiguous() for part in rows)
    [[starts, page_starts, pages, lengths, *sizes]] = plans
    assert torch.equal(torch.cat(rows[:2], -1), inputs.query)
    assert torch.equal(torch.cat(rows[2:], -1), inputs.key_cache[:, :, 0])
    assert (starts.tolist(), page_starts.tolist()) == ([0, 1, 2], [0, 3, 4])
    assert (len(pages), lengths.tolist(), out.shape) == (4, [33, 16], (2, 8, 256))
    half = torch.float16
    assert sizes == [8, 256, 64, 16, False, inputs.scale, half, half]
    assert {part.dtype for part in (starts, page_starts, pages, lengths)} == {torch.int32}


def test_flashinfer_plans_with_the_types_and_the_scale_of_the_inputs(monkeypatch):
    plans = []

    class Wrapper:
        def __init__(self, workspace, layout, **options):
            pass

        def plan(self, *sizes, **options):
            plans.append((sizes, options))

    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    flashinfer = SimpleNamespace(**dict.fromkeys(names, Wrapper))
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: flashinfer)
    cpu, shape = torch.device("cpu"), Shape(8, 2, 64)
    inputs = make_inputs(shape, Lengths((1, 1), (33, 16)), device=cpu, dtype=torch.float16)
    peers.flashinfer_decode(inputs, shape, "NHD")
    peers.flashinfer_prefill(inputs, shape, "NHD")
    (decode, given), (prefill, also_given) = plans
    assert given == {
        "q_data_type": torch.float16,
        "kv_data_type": torch.float16,
        "sm_scale": 64**-0.5,
    }
    assert also_given == given | {"causal": True}
    assert prefill[0] is inputs.query_starts
    assert decode[3:] == prefill[4:] == (8, 2, 64, 16)
