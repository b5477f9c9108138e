"""grouped_quantized_linear in Triton's interpreter, against the dequantized experts in fp64."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from engine.loading.model_source import ModelSource
from engine.loading.own_decoder import load_own_decoder
from engine.model.linear import slice_columns
from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.experts import DequantizingExperts, TritonExperts
from engine.model.quantization.weights import Float4Weight, joined
from engine.phases import Phases
from kernels.linear.grouped_quantized_linear import grouped_quantized_linear
from kernels.linear.quantized_linear import PER_BYTE
from tests.engine.model.conftest import logits
from tests.engine.quantized_checkpoints import MXFP4, write_quantized
from tests.engine.tiny_models import save_tiny_model
from tests.kernels.elementwise_inputs import strided
from tests.kernels.quantized_inputs import make_codes

TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _poison():
    """Fill all memory that torch does not initialize with NaN: every output must be written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(kind, counts, num_outputs, num_inputs, group_size):
    """Return codes, scales, zeros, ends, and the dequantized experts in fp64.

    Experts without rows have scales that would ruin any result.
    """
    size = len(counts), num_outputs, num_inputs
    codes, scales, zeros, weights = make_codes(kind, size, group_size)
    scales[torch.tensor(counts) == 0] = 255 if kind == "fp4" else float("nan")
    return codes, scales, zeros, torch.tensor(counts).cumsum(0).int(), weights


def check(kind, counts, num_outputs, num_inputs, group_size, dtype=BF16):
    codes, scales, zeros, ends, weights = make(kind, counts, num_outputs, num_inputs, group_size)
    rows = strided(sum(counts), num_inputs, dtype=dtype, seed=1)
    got = grouped_quantized_linear(rows, codes, scales, zeros, ends, kind, group_size)
    assert got.dtype == dtype
    assert got.is_contiguous()
    each = torch.repeat_interleave(weights, torch.tensor(counts), 0)
    exact = torch.einsum("mk,mnk->mn", rows.double(), each)
    magnitude = torch.einsum("mk,mnk->mn", rows.double().abs(), each.abs())
    assert got.isfinite().all()
    limit = TOLERANCE[dtype] * exact.abs() + 2**-20 * magnitude + 1e-7
    assert ((got.double() - exact).abs() <= limit).all()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", PER_BYTE)
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "group_size"),
    [(64, 40, 32), (192, 1, 32), (256, 130, 64), (256, 64, 128), (256, 33, 256)],
)
def test_widths_and_groups(kind, dtype, num_inputs, num_outputs, group_size):
    """Inputs are in blocks of 32 or 64. A group has one block, several, or all blocks of a row."""
    check(kind, [3, 0, 17, 1], num_outputs, num_inputs, group_size, dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", PER_BYTE)
@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [0, 0, 1],
        [1, 0, 0],
        [0, 40, 0],  # all rows with the same expert
        [17, 0, 15, 16],
        [90, 1, 1],
        [1] * 5,
        [130, 57, 70],
    ],
)
def test_numbers_of_rows_per_expert(kind, counts):
    check(kind, counts, 48, 128, 64)


@pytest.mark.parametrize("num_experts", [60, 128, 160])
def test_many_experts(num_experts):
    """A program reads at least MIN_EXPERTS (128) ends. The experts are fewer, as many, or more."""
    counts = [0] * num_experts
    for expert in (0, 7, 7, 7, num_experts - 1):
        counts[expert] += 5
    check("int4", counts, 20, 64, 32)


def test_several_groups_of_tiles():
    """The grid has room for 15 row tiles, which is not a multiple of GROUP (8)."""
    check("fp4", [20] * 8 + [0, 180], 100, 64, 32, torch.float16)


def test_empty_results():
    codes, scales, zeros, ends, _ = make("int8", [0, 0], 8, 64, 64)
    rows = torch.zeros(0, 64, dtype=BF16)
    got = grouped_quantized_linear(rows, codes, scales, zeros, ends, "int8", 64)
    assert got.shape == (0, 8)


ROWS, ENDS = torch.zeros(4, 64).half(), torch.full((3,), 4).int()
CODES, GROUPS = torch.zeros(3, 8, 64, dtype=torch.uint8), torch.ones(3, 1, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ROWS[0]}, "they must be"),
        ({"codes": CODES[0]}, "they must be"),
        ({"ends": ENDS[:2]}, "they must be"),
        ({"codes": CODES[:0], "ends": ENDS[:0]}, "E at least 1"),
        ({"ends": ENDS.long()}, "must be int32"),
        ({"ends": torch.zeros(6).int()[::2]}, "int32 and contiguous"),
        ({"rows": ROWS.float()}, "rows are torch.float32"),
        ({"rows": torch.zeros(4, 128).half()}, "do not fit"),
        ({"scales": GROUPS[:, :, :4]}, "do not fit"),
        ({"scales": GROUPS[:1].expand(3, 1, 8)}, "contiguous"),
        ({"kind": "int8"}, "zeros must have the shape"),
        ({"kind": "fp4"}, "no kernel for fp4 with 64 inputs in groups of 16"),
    ],
)
def test_invalid_inputs(change, message):
    given = {"rows": ROWS, "codes": CODES, "scales": GROUPS, "zeros": None, "ends": ENDS,
             "kind": "fp8", "group_size": 64} | change  # fmt: skip
    if change == {"kind": "fp4"}:
        given["group_size"] = 16
    with pytest.raises(ValueError, match=message):
        grouped_quantized_linear(**given)


COUNTS = (3, 0, 9, 1)


def random_weight(precision, num_outputs, num_inputs):
    """Return a weight of all experts, [experts * out, in]."""
    if precision in QUANTIZERS:
        return quantize_weight(torch.randn(len(COUNTS) * num_outputs, num_inputs), precision, CPU)
    codes = torch.randint(256, (len(COUNTS) * num_outputs, num_inputs // 2)).to(torch.uint8)
    exponents = torch.randint(118, 128, (len(codes), num_inputs // 32)).to(torch.uint8)
    return Float4Weight(codes, exponents)


@pytest.mark.parametrize("precision", [*QUANTIZERS, "mxfp4"])
def test_experts_equal_the_dequantized_ones(precision, monkeypatch):
    """If two ranks split the inputs, their products add up to the same result. Codes are packed in
    several steps."""
    monkeypatch.setattr("engine.model.quantization.kernel_codes.ROWS_AT_ONCE", 50)
    weight = random_weight(precision, 40, 384)
    rows = torch.randn(sum(COUNTS), 384).half()
    ends = torch.tensor(COUNTS).cumsum(0).int()
    dense = DequantizingExperts([weight], len(COUNTS), torch.float32).dense()
    each = torch.repeat_interleave(dense, torch.tensor(COUNTS), 0)
    expected = torch.einsum("mk,mnk->mn", rows.float(), each)
    got = TritonExperts(weight, len(COUNTS)).multiply(rows, ends)
    torch.testing.assert_close(got.float(), expected, atol=3e-2, rtol=2e-3)
    parts = torch.zeros_like(expected)
    for share in (range(192), range(192, 384)):
        [part] = joined([slice_columns(weight, share)], CPU)
        experts = TritonExperts(part, len(COUNTS))
        parts += experts.multiply(rows[:, share.start : share.stop], ends)
    torch.testing.assert_close(parts, expected, atol=3e-2, rtol=2e-3)


SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}


def load(folder, dtype=torch.float16, **changes):
    config = AutoConfig.from_pretrained(folder)
    source = ModelSource(model_dir=folder, config=config, dtype=dtype, device=CPU, **changes)
    return load_own_decoder(source, 128, Phases())


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("precision", QUANTIZERS)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_models_that_are_quantized_at_load(architecture, precision, tmp_path, monkeypatch):
    folder = save_tiny_model(architecture, folder=tmp_path, changes=SIZES)
    check_model(folder, monkeypatch, precision=precision)


def test_mxfp4_experts_of_gpt_oss(tmp_path, monkeypatch):
    """Biases are added outside of the kernel."""
    source = save_tiny_model("gpt_oss", folder=tmp_path, changes=SIZES)
    quantized, _ = write_quantized(source, tmp_path / "mxfp4", MXFP4)
    check_model(quantized, monkeypatch)


def check_model(folder, monkeypatch, **options):
    expected = logits(load(folder, **options), torch.float16)
    monkeypatch.setattr(
        "engine.model.quantization.experts.uses_kernel", lambda device, dtype: dtype != FP32
    )
    decoder = load(folder, **options)
    for layer in decoder.layers:
        assert isinstance(layer.mlp.gate_up, TritonExperts)
        assert isinstance(layer.mlp.down, TritonExperts)
    torch.testing.assert_close(logits(decoder, torch.float16), expected, atol=1e-2, rtol=1e-2)
