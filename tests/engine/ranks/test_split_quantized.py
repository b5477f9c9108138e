"""Ranks that split quantized weights compute what one rank does."""

from __future__ import annotations

import pytest
import torch

from core.errors import ConfigurationError
from engine.model.linear import slice_columns, slice_rows
from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.weights import PermutedWeight
from tests.engine.model.conftest import expected_logits
from tests.engine.quantized_checkpoints import FORMATS, MXFP4, write_quantized
from tests.engine.ranks.test_split_models import UNEVEN, split_logits

ACT_ORDER = ("ct int4 act-order", "gptq act-order")
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("exact_rows")


@pytest.mark.matrix(cases=4)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ACT_ORDER])
def test_every_format(tiny_model, tmp_path, name):
    """If inputs are split, a rank may have a part of a group, and needs the scale of the group."""
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    source = tiny_model("llama", changes=changes)
    quantized, dequantized = write_quantized(source, tmp_path, FORMATS[name])
    expected = expected_logits(dequantized)
    for _, split in split_logits(quantized, 4):
        torch.testing.assert_close(split, expected, atol=2e-5, rtol=1e-4)


ODD = {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 5,
       "head_dim": 32, "intermediate_size": 224}  # fmt: skip
"""Seven and five times 32, so that no two of three ranks' shares are whole groups."""


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ACT_ORDER])
def test_every_format_with_groups_that_do_not_divide(tiny_model, tmp_path, name):
    source = tiny_model("llama", changes=ODD)
    quantized, dequantized = write_quantized(source, tmp_path, FORMATS[name])
    for _, split in split_logits(quantized, 3):
        torch.testing.assert_close(split, expected_logits(dequantized), atol=2e-5, rtol=1e-4)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("precision", QUANTIZERS)
@pytest.mark.parametrize("architecture", UNEVEN)
def test_odd_sizes_that_are_quantized_at_load(tiny_model, architecture, precision):
    folder = tiny_model(architecture, changes=UNEVEN[architecture])
    [(_, expected)] = split_logits(folder, 1, precision=precision)
    for _, split in split_logits(folder, 3, precision=precision):
        torch.testing.assert_close(split, expected, atol=2e-5, rtol=1e-4)


def test_fewer_groups_than_ranks_are_refused(tiny_model, tmp_path):
    quantized, _ = write_quantized(tiny_model("gpt_oss"), tmp_path, MXFP4)
    with pytest.raises(ConfigurationError, match=r"too few; set option\.tensor_parallel_degree"):
        split_logits(quantized, 3)


def test_outputs_that_do_not_fill_the_words_of_gptq_are_refused(tiny_model, tmp_path):
    source = tiny_model("llama", changes={"intermediate_size": 50})
    quantized, _ = write_quantized(source, tmp_path, FORMATS["gptq int8 rows"])
    with pytest.raises(ConfigurationError, match="does not fit"):
        split_logits(quantized, 1)


@pytest.mark.parametrize("name", ["awq", "fp8 blocks"])
def test_experts(tiny_model, tmp_path, name):
    quantized, dequantized = write_quantized(tiny_model("mixtral"), tmp_path, FORMATS[name])
    for _, split in split_logits(quantized, 2):
        torch.testing.assert_close(split, expected_logits(dequantized), atol=2e-5, rtol=1e-4)


def test_mxfp4_experts(tiny_model, tmp_path):
    quantized, dequantized = write_quantized(tiny_model("gpt_oss"), tmp_path, MXFP4)
    for _, split in split_logits(quantized, 2):
        torch.testing.assert_close(split, expected_logits(dequantized), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ACT_ORDER)
def test_act_order_is_refused(tiny_model, tmp_path, name):
    quantized, _ = write_quantized(tiny_model("llama"), tmp_path, FORMATS[name])
    with pytest.raises(ConfigurationError, match=r"act-order.*tensor_parallel_degree=1"):
        split_logits(quantized, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", QUANTIZERS)
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt_oss", "gpt2"])
def test_weights_that_are_quantized_at_load(tiny_model, architecture, precision):
    folder = tiny_model(architecture)
    [(_, expected)] = split_logits(folder, 1, precision=precision)
    for _, split in split_logits(folder, 2, precision=precision):
        torch.testing.assert_close(split, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", QUANTIZERS)
@pytest.mark.parametrize("columns", [range(0, 128), range(128, 384), range(96, 224), range(7, 9)])
def test_a_slice_is_that_of_the_dequantized_weight(precision, columns):
    weight = quantize_weight(torch.randn(5, 384), precision, CPU)
    part = slice_columns(weight, columns)
    assert part.shape == (5, len(columns))
    expected = weight.dequantized()[:, columns.start : columns.stop]
    torch.testing.assert_close(part.dequantized(), expected, atol=0, rtol=0)
    rows = slice_rows(part, range(1, 3))
    torch.testing.assert_close(rows.dequantized(), expected[1:3], atol=0, rtol=0)


def test_all_columns_of_any_weight_are_that_weight():
    permuted = PermutedWeight(quantize_weight(torch.ones(2, 4), "int8", CPU), torch.arange(4))
    assert slice_columns(permuted, range(4)) is permuted
    with pytest.raises(ConfigurationError, match="act-order"):
        slice_columns(permuted, range(2))
