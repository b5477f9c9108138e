"""The kernels precompiled for an image are those that the engine launches."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from triton import knobs

from core.configuration.kv_layout import KVLayout, LayerShape
from core.plan import BlockMoves, BlockTable, Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.attention.call import AttentionCall, Rotation
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.attention.triton_backend import TritonBackend
from engine.model.elementwise import make_elementwise
from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.experts import TritonExperts
from engine.model.quantization.formats import TritonCodes
from engine.model.quantization.weights import Float4Weight, Float8Weight, IntegerWeight
from engine.sampling.kernels import make_sampling_kernels
from engine.sampling.rows import Row
from engine.sampling.sampler import Sampler
from engine.staging import Staging
from engine.step.block_mover import BlockMover
from engine.step.step_inputs import InputBuilder
from kernels import dry_run, precompile
from kernels.precompiled_layers import BLOCK_SIZE, Shape

ARCH = 86
SHAPE = Shape(8, 2, 64, 512, "qk")
BF16 = torch.bfloat16


def engine_launches(context_len, max_model_len):
    """Return the launches of a layer in a decode step, a prefill step and a mixed step."""
    heads = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
    layers = [LayerShape(SHAPE.num_kv_heads, SHAPE.head_dim, SHAPE.head_dim)]
    cpu = torch.device("cpu")
    layout = KVLayout.uniform(BLOCK_SIZE)
    cache = KVCache(layers, 8, layout, BF16, cpu)
    backend = TritonBackend(num_processors=4, max_model_len=max_model_len)
    elementwise = make_elementwise(torch.device("cuda"))
    builder = InputBuilder(layout.groups, Staging(cpu))
    sequences = [Sequence(id, [1] * context_len, SamplingParams()) for id in range(2)]
    decode = Chunk(sequences[0], 19, 1, (BlockTable((0, 1)),), samples_token=True)
    blocks = tuple(range(-(-context_len // BLOCK_SIZE)))
    prompt = Chunk(sequences[1], context_len - 20, 20, (BlockTable(blocks),), samples_token=True)
    with dry_run.target(ARCH) as launches:
        for chunks in ((decode,), (prompt,), (decode, prompt)):
            inputs = builder.build(StepPlan(chunks))
            num_tokens = inputs.tokens.shape[1]
            hidden = torch.empty(num_tokens, SHAPE.hidden_size, dtype=BF16)
            elementwise.rms_norm(hidden, hidden[0], 1e-5)
            elementwise.add_rms_norm(hidden, hidden, hidden[0], 1e-5)
            merged = torch.empty(num_tokens, sum(heads) * SHAPE.head_dim, dtype=BF16)
            sizes = sum(heads[:2]), heads[2]
            both, value = merged.unflatten(1, (-1, SHAPE.head_dim)).split(sizes, 1)
            weight = both[0].contiguous()
            normed = elementwise.rms_norm(both, weight, 1e-5).split(heads[:2], 1)
            cos, sin = torch.empty(2, num_tokens, SHAPE.head_dim // 2, dtype=BF16)
            rotation = Rotation(cos, sin, SHAPE.head_dim)
            call = AttentionCall(0, normed[0], normed[1], value, 0.125, None, None, None, rotation)
            PagedStep(inputs.batches, cache, backend).attend(call)
            elementwise.gated_activation(torch.empty(num_tokens, 4096, dtype=BF16), "silu")
    return launches


@pytest.mark.timeout(300)
def test_all_kernels_of_the_engine_are_precompiled():
    compiled = precompile.compile_layers(ARCH, SHAPE)
    launched = engine_launches(20, max_model_len=64) + engine_launches(1100, max_model_len=2048)
    ours, engines = ({x.kernel.hash: x.name for x in part} for part in (compiled, launched))
    assert not {ours[hash] for hash in ours.keys() - engines.keys()}, (
        "all precompiled kernels are launched by the engine"
    )
    assert not {engines[hash] for hash in engines.keys() - ours.keys()}, (
        "all kernels of the engine are precompiled"
    )


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
        Sampler(Staging(meta), (), kernels=triton).sample(logits, rows, newest)
    assert len(launched) == 6
    compiled = {launch.kernel.hash for launch in precompile.compile_sampling(ARCH, vocab_size)}
    assert {launch.kernel.hash for launch in launched} <= compiled


@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", QUANTIZERS)
def test_quantized_layers_are_precompiled(precision):
    """The compiled kernels are for weights of any size, with a scale per group or per output, and
    for any number of rows."""
    weight = quantize_weight(torch.randn(512, 1024), precision, torch.device("cpu"))
    assert isinstance(weight, IntegerWeight | Float8Weight)
    format = TritonCodes(weight)
    with dry_run.target(ARCH) as launched:
        for num_rows in (1, 7):
            format.multiply(torch.empty(num_rows, 1024, dtype=BF16), None)
    compiled = {launch.kernel.hash for launch in precompile.compile_quantized(ARCH, (1,))}
    assert {launch.kernel.hash for launch in launched} <= compiled


@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", [*QUANTIZERS, "mxfp4"])
def test_quantized_experts_are_precompiled(precision):
    """The compiled kernels are for up to 128 experts of any size, and for any number of rows."""
    if precision == "mxfp4":
        codes, exponents = (torch.zeros(8 * 64, n, dtype=torch.uint8) for n in (512, 32))
        weight = Float4Weight(codes, exponents)
    else:
        weight = quantize_weight(torch.randn(8 * 64, 1024), precision, torch.device("cpu"))
    ends = torch.zeros(8, dtype=torch.int32)
    with dry_run.target(ARCH) as launched:
        for num_rows in (1, 7, 128):
            rows = torch.empty(num_rows, 1024, dtype=BF16)
            TritonExperts(weight, 8).multiply(rows, ends)
    compiled = {launch.kernel.hash for launch in precompile.compile_quantized(ARCH, (1,))}
    assert {launch.kernel.hash for launch in launched} <= compiled


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
