"""The formats of option.batch_invariant on GPUs, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.configuration.kv_layout import LayerShape
from core.errors import ConfigurationError
from engine import LLM
from engine.attention.backends import make_backend
from engine.attention.call import UnsupportedModelError
from engine.attention.segment_backend import SegmentBackend
from engine.attention.triton_backend import TritonBackend
from engine.loading.packed_model import load_packed_model
from engine.model.checkpoint import open_checkpoint
from engine.model.linear import Dense
from engine.model.pinned.loader import PinnedDense, PinnedDequantizing, PinnedLoader, pinned
from engine.model.published.settings import read_spec
from engine.model.quantization.at_load import quantize_weight
from engine.model.quantization.experts import quantized_experts
from engine.model.quantization.formats import (
    PermutedInputs,
    SideBySide,
    TritonCodes,
    quantized_format,
)
from engine.model.quantization.weights import PermutedWeight
from engine.phases import Phases
from kernels import dry_run
from tests.engine.ranks.threads import thread_groups

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 64, 64)]


@pytest.fixture(autouse=True)
def _sm_90(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))


def format_of(precision, shape=(32, 128), dtype=BF16, **options):
    weight = quantize_weight(torch.randn(shape), precision, CPU)
    return quantized_format(weight, CUDA, dtype, **options)


def test_each_format_has_a_pinned_one():
    assert isinstance(pinned(Dense(torch.zeros(2, 3))), PinnedDense)
    assert isinstance(pinned(format_of("int8", dtype=torch.float32)), PinnedDequantizing)
    codes = pinned(format_of("fp8", is_exact=True))
    assert isinstance(codes, TritonCodes)
    assert codes.product.keywords == {"is_pinned": True}
    both = pinned(SideBySide([format_of("int4"), Dense(torch.zeros(2, 128))], [32, 2]))
    assert [type(part) for part in both.formats] == [TritonCodes, PinnedDense]
    permuted = quantized_format(
        PermutedWeight(quantize_weight(torch.ones(6, 128), "int4", CPU), torch.arange(128)),
        CUDA, BF16,
    )  # fmt: skip
    assert pinned(permuted).format.product.keywords == {"is_pinned": True}
    assert isinstance(permuted, PermutedInputs)


def test_quantized_experts_are_pinned():
    weights = [quantize_weight(torch.randn(48, 128), "int8", CPU)]
    experts = quantized_experts(weights, 3, CUDA, BF16, is_pinned=True)
    assert experts._multiply.keywords == {"is_pinned": True}
    assert quantized_experts(weights, 3, CUDA, BF16)._multiply.keywords == {"is_pinned": False}


def test_the_attention_is_in_segments():
    with dry_run.target(90):
        backend, _ = make_backend(CUDA, SHAPES, 16, 4096, BF16, in_segments=True)
        assert type(backend) is SegmentBackend
        backend, _ = make_backend(CUDA, SHAPES, 16, 4096, BF16)
        assert type(backend) is TritonBackend
        with pytest.raises(ConfigurationError, match=r"needs the Triton kernels: .*block_size=8"):
            make_backend(CUDA, SHAPES, 8, 4096, BF16, in_segments=True)


def test_transformers_code_cannot_promise_it(tiny_model, source):
    given = replace(source(tiny_model("llama")), is_batch_invariant=True)
    with pytest.raises(ConfigurationError, match=r"batch_invariant=true needs .*decoder=transf"):
        load_packed_model(given, 64, "transformers", Phases())
    assert not given.is_pinned, "on CPUs, the fastest kernels do it"
    assert replace(given, device=CUDA).is_pinned


def test_on_a_cpu_it_is_always_so_or_an_error(tiny_model):
    folder, options = tiny_model("llama", is_wide=True), {"batch_invariant": True}
    with LLM(folder, dtype="fp32", **options) as llm:
        assert "the bits of an answer do not depend on its batch, as always on CPUs" in (
            llm.facts.notes
        )
    with pytest.raises(ConfigurationError, match=r"torch multiplies float16 .* leave the option"):
        LLM(folder, dtype="fp16", **options)
    with pytest.raises(ConfigurationError, match=r"batch_invariant=true needs .*executor=library"):
        LLM(folder, dtype="fp32", executor="library", **options)


def test_norms_of_rows_that_are_split_over_ranks_are_refused(tiny_model, source):
    given = source(tiny_model("olmo2"))
    spec = read_spec(given.config, 64)
    checkpoint = open_checkpoint(given.model_dir, spec.family)
    loader = PinnedLoader(checkpoint, CPU, torch.float32, group=thread_groups(2)[0])
    with pytest.raises(UnsupportedModelError, match=r"whole rows, runs on one rank, but option"):
        loader.split_norm("q_norm", 64, range(32), 1, spec.family.norm, 1e-6)
