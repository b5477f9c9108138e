"""`longshore plan` for models on several GPUs and instances."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from container.__main__ import main
from core.errors import ConfigurationError
from tests.container.capacity.planned import LLAMA_8B, planned


def test_with_several_ranks_the_figures_are_those_of_each_gpu(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = model / "serving.properties"
    properties.write_text("option.tensor_parallel_degree=2\n")
    command = ["plan", "--model-dir", str(model), "--properties", str(properties)]
    assert main([*command, "--instance-type", "ml.p5.48xlarge"]) == 0
    text = capsys.readouterr().out
    assert "8 x H100 (the model uses 2 of them)" in text
    assert "on each GPU, like all figures below: weights 7,658.3 MiB" in text


def test_the_plan_of_several_copies_shows_their_gpus(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    degree = ["--copies", "2", "--tensor-parallel-degree", "max"]
    command = ["plan", str(model), "--instance-type", "ml.g5.12xlarge", *degree]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "4 x A10G (the model uses 4 of them)" in text
    assert "    copy 1: rank 0 on GPU 2; rank 1 on GPU 3\n" in text
    assert "concurrent requests of each copy" in text
    of_two_ranks = planned(model, "paged", "ml.g5.12xlarge", tensor_parallel_degree="2")
    assert f"{of_two_ranks.num_blocks} blocks" in text


def test_weights_and_kv_heads_are_divided_among_the_ranks(model: Path) -> None:
    one = planned(model, "paged", "ml.g5.12xlarge")
    four = planned(model, "paged", "ml.g5.12xlarge", tensor_parallel_degree="max")
    assert four.block_bytes == one.block_bytes / 4
    assert four.num_blocks > 4 * one.num_blocks, "each rank has only a fourth of the weights"
    eight = planned(model, "paged", "ml.p5.48xlarge", tensor_parallel_degree="8")
    assert eight.block_bytes == one.block_bytes / 8


def test_ranks_may_be_on_several_instances(model: Path) -> None:
    eight = planned(model, "paged", "ml.p5.48xlarge", tensor_parallel_degree="8")
    on_two = planned(model, "paged", "ml.g5.12xlarge", tensor_parallel_degree="8", nodes=2)
    assert on_two.block_bytes == eight.block_bytes
    with pytest.raises(ConfigurationError, match="has 4 GPUs; set it to at most 8"):
        planned(model, "paged", "ml.g5.12xlarge", tensor_parallel_degree="16", nodes=2)


def test_a_degree_that_the_instance_cannot_have_is_refused(model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ml\.g5\.12xlarge has 4 GPUs"):
        planned(model, "paged", "ml.g5.12xlarge", tensor_parallel_degree="8")
    (model / "config.json").write_text(json.dumps(LLAMA_8B | {"num_attention_heads": 2}))
    with pytest.raises(ConfigurationError, match="2 attention heads"):
        planned(model, "paged", "ml.g5.12xlarge", tensor_parallel_degree="4")


def test_the_error_says_when_all_gpus_together_would_fit_the_model(model: Path) -> None:
    config = LLAMA_8B | {"hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_degree=4 splits the model"):
        planned(model, "paged", "ml.g5.12xlarge")
    assert planned(model, "paged", "ml.g5.12xlarge", tensor_parallel_degree="4").num_blocks
