"""The nodes and GPUs of a replica."""

from __future__ import annotations

import re

import pytest

from core.configuration.options import make_options
from core.errors import ConfigurationError
from deploy.fleet.span import NodeSpan, span_of


@pytest.mark.parametrize(
    ("degree", "copies", "num_gpus", "required"),
    [("2", 1, 8, 2), ("2", 3, 8, 6), ("max", 1, 4, 4), ("max", 2, 4, 4), ("2", 2, 0, 0)],
)
def test_a_container_needs_a_gpu_for_each_rank_of_each_copy(
    degree: str, copies: int, num_gpus: int, required: int
) -> None:
    options = make_options({"tensor_parallel_degree": degree, "copies": copies})
    assert span_of(options, [num_gpus]) == NodeSpan(1, required, is_strict=False)
    assert span_of(options.changed(device="cpu"), [num_gpus]).gpus == 0


@pytest.mark.parametrize(
    ("degree", "gpus", "bundles", "each"),
    [("8", [8, 4], 1, 8), ("8", [4, 4], 2, 4), ("6", [4, 4], 2, 3), ("9", [4] * 3, 3, 3),
     ("10", [4, 4, 4], 5, 2), ("7", [4, 3], 7, 1), ("8", [4, 3, 1], 8, 1), ("6", [4, 1, 1], 6, 1),
     ("8", [5, 2, 2], 4, 2)],
)  # fmt: skip
def test_ranks_spread_over_nodes_if_none_has_enough_gpus(
    degree: str, gpus: list[int], bundles: int, each: int
) -> None:
    span = span_of(make_options({"tensor_parallel_degree": degree}), gpus)
    assert span == NodeSpan(bundles, each, is_strict=False)
    assert span.placement(2.0) == ([{"CPU": 2.0, "GPU": each}] * bundles, "PACK")


def test_option_nodes_asks_for_different_nodes() -> None:
    options = make_options({"tensor_parallel_degree": "4", "nodes": 2})
    assert span_of(options, [8, 8]) == NodeSpan(2, 2, is_strict=True)
    assert span_of(options, [1, 1, 1, 1]) == NodeSpan(4, 1, is_strict=True)
    assert span_of(options, [8, 1, 1, 1]) == NodeSpan(4, 1, is_strict=True)
    max_degree = options.changed(tensor_parallel_degree="max")
    assert span_of(max_degree, [2, 8, 4]) == NodeSpan(2, 4, is_strict=True), "two nodes have 4 each"
    on_cpus = span_of(options, [0, 0])
    assert on_cpus.placement(0.5) == ([{"CPU": 0.5}] * 2, "STRICT_SPREAD")


def test_a_line_says_what_a_replica_takes() -> None:
    assert str(NodeSpan(2, 4, is_strict=True)) == "2 nodes with 4 GPUs each"
    assert str(NodeSpan(2, 0, is_strict=True)) == "2 nodes"
    assert str(NodeSpan(3, 1, is_strict=False)) == (
        "3 parts with 1 GPU each, on as few nodes as have room"
    )


@pytest.mark.parametrize(
    ("options", "gpus", "message"),
    [
        ({"tensor_parallel_degree": "2", "copies": 2}, [3], "but the largest node has 3 GPUs"),
        ({"tensor_parallel_degree": "8"}, [2, 4], "=8, but the cluster has 6 GPUs; add nodes"),
        ({"tensor_parallel_degree": "2", "nodes": 2}, [0], "but the cluster has 1 node; add nodes"),
        ({"tensor_parallel_degree": "4", "nodes": 2}, [8, 0], "8 GPUs, on too few nodes for equal"),
        ({"tensor_parallel_degree": "max", "nodes": 2}, [8, 0], "=max with option.nodes=2, but"),
        ({"tensor_parallel_degree": "3", "nodes": 2}, [4, 4], "divided by option.nodes=2"),
        ({"tensor_parallel_degree": "0"}, [4, 4], "expected a positive integer or max"),
        ({"tensor_parallel_degree": "3", "nodes": 2}, [0, 0], "divided by option.nodes=2"),
        ({"copies": 2, "nodes": 2}, [0, 0], "leave out one of the two options"),
    ],
)  # fmt: skip
def test_a_cluster_without_room_is_an_error(
    options: dict[str, object], gpus: list[int], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        span_of(make_options(options), gpus)
