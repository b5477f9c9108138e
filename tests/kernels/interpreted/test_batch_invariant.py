"""option.batch_invariant with the Triton kernels: an answer has the same bits in any batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention.segment_backend import SegmentBackend
from engine.loading.model_source import ModelSource
from engine.model.elementwise import make_elementwise
from engine.model.pinned.loader import PinnedDense, PinnedDequantizing
from engine.sampling.kernels import make_sampling_kernels
from kernels.attention.prefill_splits import segment_work
from kernels.linear.grouped_linear import grouped_linear
from tests.engine.step.graphs import add_graphs
from tests.kernels.interpreted.test_engine import (
    SMALL,
    WINDOW,
    _poison,  # noqa: F401, a fixture
    save_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # overflow of e^-gate, as on a GPU
CUDA = torch.device("cuda")
LONG = {"max_position_embeddings": 96}
SETTINGS = {
    "mixtral": SMALL | LONG | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": SMALL | LONG | WINDOW | {"query_pre_attn_scalar": 64},
}
PROMPTS = [
    [1 + (7 * n + k * k) % 60 for k in range(length)] for n, length in enumerate((75, 21, 1))
]
SEGMENT = 64


@pytest.fixture
def _on_a_gpu(monkeypatch):
    """Let the engine choose what it would on a GPU, with short segments."""

    def backend(device, shapes, block_size, max_model_len, kv_dtype, *, in_segments):
        assert in_segments
        return SegmentBackend(8, max_model_len), ()

    def grouped(device, dtype, *, is_pinned):
        assert is_pinned
        return partial(grouped_linear, is_pinned=True)

    sampling = make_sampling_kernels(CUDA)
    for name, value in {
        "engine.builders.packed.make_backend": backend,
        "engine.loading.gate.make_backend": backend,
        "engine.builders.packed._exceptions_on_cpus": lambda *_: (),
        "engine.model.mixtures.experts.choose_grouped": grouped,
        "engine.model.loader.make_elementwise": lambda _: make_elementwise(CUDA),
        "engine.sampling.sampler.make_sampling_kernels": lambda _: sampling,
        "kernels.cpu.linear.is_faster": lambda: False,
        "kernels.attention.prefill_splits.SEGMENT_KEYS": SEGMENT,
        "engine.attention.segment_backend.segment_work": partial(
            segment_work, segment_keys=SEGMENT
        ),
    }.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr(
        ModelSource, "is_pinned", property(lambda source: source.is_batch_invariant)
    )


@pytest.mark.matrix(cases=0)
@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("architecture", SETTINGS)
def test_answers_alone_and_in_a_batch(architecture, quantize, tmp_path):
    save_model(tmp_path, architecture, SETTINGS[architecture])
    options = {"dtype": "fp32", "quantize": quantize, "batch_invariant": True}
    alone = LLM(tmp_path, **options, num_kv_blocks=8, max_rolling_batch_prefill_tokens=256)
    expected = [scores(alone, [prompt])[0] for prompt in PROMPTS]
    assert alone.facts.decoder == f"own ({architecture}), batch-invariant"
    assert any("do not depend on its batch" in note for note in alone.facts.notes)
    head = alone.llm_engine.executor.passes.model._decoder.head.format
    assert isinstance(head, PinnedDense if quantize is None else PinnedDequantizing)
    together = LLM(tmp_path, **options, num_kv_blocks=14, max_rolling_batch_prefill_tokens=33)
    assert scores(together, PROMPTS) == expected
    assert scores(together, PROMPTS[:1]) == expected[:1], "after a cached prefix"
    add_graphs(together, max_rows=3, prompt_sizes=(64,))
    assert scores(together, PROMPTS[::-1]) == expected[::-1]


def scores(llm, prompts):
    """Return the tokens and logprobs of the answers."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [(token, each[token].logprob) for token, each in zip(o.token_ids, o.logprobs, strict=True)]
        for o in (output.outputs[0] for output in outputs)
    ]
