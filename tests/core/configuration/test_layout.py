"""The devices of copies and ranks."""

from __future__ import annotations

import re

import pytest

from core.configuration.layout import lay_out, layout_here
from core.configuration.options import make_options
from core.errors import ConfigurationError

FOUR = ("0", "1", "2", "3")


def options(copies, degree=None, **others):
    return make_options({"copies": copies, "tensor_parallel_degree": degree, **others})


@pytest.mark.parametrize(
    ("copies", "degree", "expected"),
    [
        (2, None, ["0", "1"]),
        (4, None, ["0", "1", "2", "3"]),
        (2, "2", ["0,1", "2,3"]),
        (2, "max", ["0,1", "2,3"]),
        (3, "max", ["0", "1", "2"]),
    ],
)
def test_copies_take_the_gpus_in_turn(copies, degree, expected):
    layout = lay_out(options(copies, degree), FOUR, 16)
    found = [layout.variables(copy, {"A": "b"}) for copy in range(copies)]
    assert found == [{"A": "b", "CUDA_VISIBLE_DEVICES": gpus} for gpus in expected]


@pytest.mark.parametrize(
    ("copies", "degree", "given", "expected"),
    [(2, None, {}, "8"), (2, "2", {}, "4"), (3, None, {}, "5"),
     (2, None, {"OMP_NUM_THREADS": "1"}, "1"), (2, None, {"OMP_NUM_THREADS": "16"}, "8")],
)  # fmt: skip
def test_copies_on_a_cpu_divide_the_cores(copies, degree, given, expected):
    layout = lay_out(options(copies, degree), (), 16)
    assert layout.variables(1, given) == {"OMP_NUM_THREADS": expected}


@pytest.mark.parametrize("gpus", [FOUR, ()])
def test_a_single_copy_keeps_its_environment(gpus):
    assert lay_out(options(1, "2"), gpus, 2).variables(0, {"A": "b"}) == {"A": "b"}


@pytest.mark.parametrize(
    ("copies", "degree", "gpus", "message"),
    [
        (3, "2", FOUR, "option.copies=3 with 2 ranks each needs 6 GPUs, but the instance has 4 "
                       "GPUs; set option.copies to at most 2"),
        (5, "max", FOUR, "option.copies=5 with 1 rank each needs 5 GPUs, but the instance has 4"),
        (2, None, ("0",), "needs 2 GPUs, but the instance has 1 GPU; set option.copies to at most"),
        (9, None, (), "needs 9 cores, but the instance has 8 cores"),
        (1, "5", FOUR, "option.tensor_parallel_degree=5, but the instance has 4 GPUs"),
    ],
)  # fmt: skip
def test_too_few_devices_are_refused(copies, degree, gpus, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        lay_out(options(copies, degree), gpus, 8, "the instance")


@pytest.mark.parametrize(
    ("degree", "copies", "message"),
    [
        ("10", 1, "option.tensor_parallel_degree=10 with option.nodes=2, but the instance has 4 "
                  "GPUs; set it to at most 8, or set option.nodes to the number"),
        ("5", 1, "option.tensor_parallel_degree=5 cannot be divided by option.nodes=2"),
        (None, 1, "option.tensor_parallel_degree=1 cannot be divided by option.nodes=2"),
        ("2", 2, "option.copies=2 with option.nodes=2: a copy on several machines takes all"),
    ],
)  # fmt: skip
def test_ranks_that_the_machines_cannot_share_are_refused(degree, copies, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        lay_out(options(copies, degree, nodes=2), FOUR, 8, "the instance")


def test_the_lines_name_the_device_of_each_rank():
    assert list(lay_out(options(2, "2"), FOUR, 16).lines()) == [
        "  layout: 2 copies x 2 ranks",
        "    copy 0: rank 0 on GPU 0; rank 1 on GPU 1",
        "    copy 1: rank 0 on GPU 2; rank 1 on GPU 3",
    ]
    assert list(lay_out(options(2), (), 2).lines()) == [
        "  layout: 2 copies x 1 rank",
        "    copy 0: rank 0 on the CPU, 1 thread",
        "    copy 1: rank 0 on the CPU, 1 thread",
    ]


def test_machines_share_the_ranks_equally():
    layout = lay_out(options(1, "8", nodes=2), FOUR, 16)
    assert (layout.num_ranks, layout.num_local_ranks) == (8, 4)
    assert layout.gpus_of(0) == FOUR
    assert lay_out(options(1, "max", nodes=3), FOUR, 16).num_ranks == 12
    assert list(lay_out(options(1, "4", nodes=2), FOUR, 16).lines()) == [
        "  layout: 1 copy x 4 ranks on 2 machines",
        "    copy 0: rank 0 on GPU 0; rank 1 on GPU 1; the others on other machines",
    ]
    on_cpu = lay_out(options(1, "4", nodes=2), (), 16)
    assert "    copy 0: rank 0 on the CPU, 8 threads; rank 1" in [*on_cpu.lines()][1]


def test_a_rank_on_another_node_has_a_device_of_its_own():
    layout = lay_out(options(1, "4", nodes=2), FOUR, 16)
    assert layout.rank_variables(1, {"A": "b"}) == {"A": "b", "CUDA_VISIBLE_DEVICES": "1"}
    layout = lay_out(options(1, "4", nodes=2), (), 16)
    assert layout.rank_variables(1, {}) == {"OMP_NUM_THREADS": "8"}
    given = {"OMP_NUM_THREADS": "3"}
    assert layout.rank_variables(1, given) == given


def test_the_visible_gpus_of_this_machine_count_unless_the_cpu_is_chosen():
    visible = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert layout_here(options(2), visible).gpus_of(1) == ("GPU-b",)
    assert layout_here(options(1, device="cpu"), visible).gpus == ()
