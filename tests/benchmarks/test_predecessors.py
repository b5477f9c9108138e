"""Cases that time an improvement against its predecessor launch both of them."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks import elementwise, ids_ahead, swap_out
from benchmarks.inputs import SHAPES
from engine.step.block_mover import MAX_SWAP_ROWS, CopyStream
from kernels import dry_run
from kernels.attention import paged_decode, paged_prefill
from tests.benchmarks.test_grid import PretendBench, numbers_of_meta_tensors
from tests.kernels.static_check import pipeline

ATTENTION = {"decode": "paged_decode_kernel", "prefill": "paged_prefill_kernel"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_that_load_ids_late_load_fewer_tiles_ahead(arch):
    """The section launches, and so compiles, each kernel once to check it and once to time it."""
    events = []
    with dry_run.target(arch) as launches, numbers_of_meta_tensors():
        ids_ahead.run(PretendBench(events))
    assert [event["row"]["kernel"] for event in events] == list(ATTENTION), events
    for name in ATTENTION.values():
        ahead, again, late, late_again = (
            pipeline(launch.kernel) for launch in launches if launch.name == name
        )
        assert ahead == again
        assert late == late_again
        assert (ahead.wait_depth, late.wait_depth) == (2, 0)
        assert max(ahead.buffers) > min(late.buffers)


def test_late_kernels_are_used_only_within_their_context():
    def kernels():
        return paged_decode.paged_decode_kernel, paged_prefill.paged_prefill_kernel

    before = kernels()
    with ids_ahead.ids_loaded_late():
        late = kernels()
    assert kernels() == before
    with ids_ahead.ids_loaded_late():
        assert kernels() == late, "the late kernels are compiled only once"
    assert not set(before) & set(late)


class CountingBench(PretendBench):
    """Reports the number of our kernels that a call launches, in place of its time."""

    def __init__(self, events, launches):
        super().__init__(events)
        self.launches = launches

    def time_us(self, calls):
        before = len(self.launches)
        calls[0]()
        return float(len(self.launches) - before)


def test_norms_of_queries_and_keys_take_one_launch_or_two():
    events, num_tokens = [], 50
    with (
        patch.object(JITFunction, "run", lambda *_, **__: None),
        dry_run.target(90) as launches,
        numbers_of_meta_tensors(),
    ):
        bench = CountingBench(events, launches)
        elementwise._head_norms(bench, SHAPES[1], num_tokens, "norms")
    (row,) = (event["row"] for event in events)
    assert row["us"] == {"ours": 1.0, "torch": 0.0, "F.rms_norm": 0.0, "two launches": 2.0}
    *_, both, queries, keys = (launch.grid[0] for launch in launches)
    assert queries + keys == both, "two launches have as many rows together as one launch"
    assert queries == SHAPES[1].heads // SHAPES[1].kv_heads * keys


class Stream:
    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


@contextmanager
def recorded_streams(events):
    """Note the order of copies, products and waits, and the stream of each."""
    current = [Stream("kernels", events)]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def note(name):
        return lambda *_, **__: events.append(f"{name} on {current[-1].name}")

    with (
        patch.object(torch.cuda, "Stream", lambda device: Stream("copies", events)),
        patch.object(torch.cuda, "current_stream", lambda: current[-1]),
        patch.object(torch.cuda, "stream", on),
        patch.object(torch.Tensor, "copy_", note("copy")),
        patch.object(torch, "mm", note("product")),
        patch.object(swap_out, "gather_blocks", note("gather")),
    ):
        yield


class RecordingBench(PretendBench):
    """Keeps the order of events of each timed call."""

    def __init__(self, launched):
        super().__init__([])
        self.launched, self.timed_calls = launched, []

    def time_us(self, calls):
        self.launched.clear()
        calls[0]()
        self.timed_calls.append(list(self.launched))
        return 1.0


def test_blocks_are_copied_beside_the_products_or_before_them(monkeypatch):
    """Copies run beside products only on a device with streams. Here, `meta` counts as one."""

    def copy_stream(device):
        return CopyStream(torch.device("cuda" if device.type == "meta" else device))

    monkeypatch.setattr(swap_out, "CopyStream", copy_stream)
    launched = []
    bench = RecordingBench(launched)
    with numbers_of_meta_tensors(), recorded_streams(launched):
        swap_out._measure(bench)
    copies, product, beside, before, products = bench.timed_calls
    assert copies == ["copy on kernels"] * MAX_SWAP_ROWS
    assert product == ["product on kernels"]
    assert products == ["product on kernels"] * 2, "the products take twice as long as the copies"
    assert beside == [
        "gather on kernels",
        "copies waits for kernels",
        *["copy on copies"] * MAX_SWAP_ROWS,
        *products,
        "kernels waits for copies",
    ]
    assert before == ["gather on kernels", *copies, *products]
