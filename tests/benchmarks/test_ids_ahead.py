"""The kernels that the section `ids-ahead` compares, compiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks import predecessors
from benchmarks.ids_ahead import calls_of_both
from benchmarks.inputs import Lengths, Shape, make_inputs
from kernels import dry_run
from tests.benchmarks.pretend import PretendBench
from tests.kernels.static_check import faults, pipeline

META = torch.device("meta")
SHAPE = Shape(32, 8, 128)


@pytest.mark.parametrize(
    ("kernel", "lengths"),
    [
        ("paged_decode_kernel", Lengths((1, 1), (4096, 4096))),
        ("paged_prefill_kernel", Lengths((500,), (500,))),
    ],
)
def test_the_predecessor_loads_fewer_tiles_ahead(kernel, lengths):
    found = {}
    with dry_run.target(90) as launches:
        inputs = make_inputs(SHAPE, lengths, device=META, dtype=torch.bfloat16)
        is_decode = kernel == "paged_decode_kernel"
        both = calls_of_both(PretendBench([]), inputs, SHAPE, is_decode=is_decode)
        for name, calls in both.items():
            launches.clear()
            calls[0]()
            [compiled] = [launch.kernel for launch in launches if launch.name == kernel]
            found[name] = pipeline(compiled)
            assert not faults(compiled, 90)
    ours, predecessor = found.values()
    assert min(ours.buffers) >= 2
    assert ours.wait_depth == 2
    assert min(predecessor.buffers) == 1
    assert predecessor.wait_depth == 0


def test_an_edit_that_no_longer_fits_is_an_error(monkeypatch):
    monkeypatch.setattr(predecessors, "_DECODE_AHEAD", "blocks = ids_of_yesterday()\n")
    with pytest.raises(ValueError, match="ids_of_yesterday"):
        predecessors.decode_without_ids_ahead()
