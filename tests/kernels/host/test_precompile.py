"""The kernels precompiled for an image are those that the engine launches."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from triton import knobs

from core.configuration.kv_layout import KVLayout, LayerShape
from core.plan import BlockMoves
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.attention.kv_cache import KVCache
from engine.attention.triton_backend import TritonBackend
from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.experts import TritonExperts
from engine.model.quantization.formats import TritonCodes
from engine.model.quantization.weights import Float4Weight, Float8Weight, IntegerWeight
from engine.sampling.kernels import make_sampling_kernels
from engine.sampling.rows import Row
from engine.sampling.sampler import Sampler
from engine.staging import Staging
from engine.step.block_mover import BlockMover
from kernels import dry_run, precompile
from kernels.linear.row_codes import row_codes
from tests.kernels.host.launched import ARCH, kernels

BF16 = torch.bfloat16


def test_all_block_moves_of_the_engine_are_precompiled():
    cache = KVCache(
        [LayerShape(2, 64, 64)] * 2, 8, KVLayout.uniform(16), BF16, torch.device("cpu"), 4
    )
    moves = BlockMoves(swap_outs=((1, 0), (2, 1)), swap_ins=((2, 3),), copies=((4, 5),))
    with dry_run.target(ARCH) as launched:
        BlockMover(cache, TritonBackend(4, 64)).launch(moves)
    compiled = {launch.kernel.hash for launch in precompile.compile_block_moves(ARCH)}
    assert {launch.kernel.hash for launch in launched} == compiled
    assert len(compiled) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_all_sampling_kernels_of_the_engine_are_precompiled(num_rows, dtype):
    triton = make_sampling_kernels(torch.device("cuda"))
    meta, vocab_size = torch.device("meta"), precompile.VOCAB_SIZES[1]
    params = SamplingParams(top_p=0.9, seed=1)
    rows = [Row(Sequence(id, [1], params), 1) for id in range(num_rows)]
    logits = torch.empty(num_rows, vocab_size, dtype=dtype, device=meta)
    newest = torch.empty(num_rows, dtype=torch.int64, device=meta)
    with dry_run.target(ARCH) as launched:
        Sampler(Staging(meta), (), kernels=triton).sample(logits, rows, lambda: newest)
    assert len(launched) == 6
    compiled = {launch.kernel.hash for launch in precompile.compile_sampling(ARCH, vocab_size)}
    assert {launch.kernel.hash for launch in launched} <= compiled


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_quantized_layers_are_precompiled(precision):
    """The compiled kernels are for weights of any size, with a scale per group or per output, and
    for any number of rows."""
    weight = quantize_weight(torch.randn(512, 1024), precision, torch.device("cpu"))
    assert isinstance(weight, IntegerWeight | Float8Weight)
    format = TritonCodes(weight)

    def serve():
        for num_rows in (1, 7, 100):
            format.multiply(torch.empty(num_rows, 1024, dtype=BF16), None)

    launched = kernels(serve)
    assert launched
    assert launched <= kernels(lambda: precompile.compile_quantized(ARCH))


@pytest.mark.parametrize("width", [896, 1536, 3584, 14336])
def test_fp8_codes_of_rows_are_precompiled(width):
    launched = kernels(lambda: row_codes(torch.empty(7, width, dtype=BF16)), 89)
    assert launched
    assert launched <= kernels(lambda: precompile.compile_quantized(89), 89)


@pytest.mark.parametrize("precision", [*QUANTIZERS, "mxfp4"])
def test_quantized_experts_are_precompiled(precision):
    """The compiled kernels are for up to 128 experts of any size, and for any number of rows."""
    if precision == "mxfp4":
        codes, exponents = (torch.zeros(8 * 64, n, dtype=torch.uint8) for n in (512, 32))
        weight = Float4Weight(codes, exponents)
    else:
        weight = quantize_weight(torch.randn(8 * 64, 1024), precision, torch.device("cpu"))
    ends = torch.zeros(8, dtype=torch.int32)

    def serve():
        for num_rows in (1, 7, 128, 1000):
            rows = torch.empty(num_rows, 1024, dtype=BF16)
            TritonExperts(weight, 8).multiply(rows, ends)

    launched = kernels(serve)
    assert launched
    assert launched <= kernels(lambda: precompile.compile_quantized(ARCH))


@pytest.mark.skipif(
    shutil.which("gcc") is None, reason="needs gcc, which compiles the driver module"
)
def test_the_driver_module_is_compiled_without_a_driver(tmp_path):
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        path = precompile.compile_driver_module()
    assert path.is_relative_to(tmp_path)
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True)
    assert "[libcuda.so.1]" in needed.stdout
