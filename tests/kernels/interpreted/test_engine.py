"""The engine gives the same tokens with the Triton kernels as with torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.attention.triton_backend import TritonBackend
from engine.model.elementwise import make_elementwise
from engine.sampling.kernels import make_sampling_kernels
from tests.engine.graphs import add_graphs

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # overflow of e^-gate, as on a GPU
SMALL = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
         "max_position_embeddings": 64, "eos_token_id": 0, "bos_token_id": 1}  # fmt: skip
WINDOW = {"sliding_window": 18}
SETTINGS = {
    "llama": SMALL,
    "mistral": SMALL | WINDOW,
    "gemma2": SMALL | WINDOW | {"query_pre_attn_scalar": 64},
    "olmo2": SMALL | {"pad_token_id": 0},
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Norms with an offset, norms of whole rows, experts, transformers' code."""
CUDA = torch.device("cuda")
PROMPTS = [[1 + (7 * n + k) % 60 for k in range(length)] for n, length in enumerate((3, 21, 9))]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fill all memory that torch does not initialize with NaN: no token may depend on it.

    By chance it may hold infinities, of which NumPy warns in rows of padding.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("architecture", "decoder"),
    [(name, "transformers" if name == "mistral" else "own") for name in SETTINGS],
)
def test_same_tokens_as_with_torch(architecture, decoder, tmp_path, monkeypatch):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[architecture](**SETTINGS[architecture]), dtype=torch.float32
    )
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.4 / weight.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    expected = answers(tmp_path)
    backends = []

    def triton(device, shapes, block_size, max_model_len, kv_dtype):
        backends.append(TritonBackend(4, max_model_len))
        return backends[-1], ()

    monkeypatch.setattr("engine.parts.make_backend", triton)
    monkeypatch.setattr("engine.loading.gate.make_backend", triton)
    monkeypatch.setattr("engine.model.loader.make_elementwise", lambda _: make_elementwise(CUDA))
    sampling = make_sampling_kernels(CUDA)
    monkeypatch.setattr("engine.sampling.sampler.make_sampling_kernels", lambda _: sampling)
    assert answers(tmp_path, decoder) == expected
    assert len(backends) == 2, "one for the gate's probe, one for the engine"
    if architecture == "gemma2":  # its layers have windows or none
        assert answers(tmp_path, decoder, with_graphs=True) == expected


def answers(path, decoder="transformers", *, with_graphs=False):
    """Chunked prompts of two sequences mixed with decodes, then only decodes.

    with_graphs: pad all steps, as for CUDA graphs.
    """
    limits = {"num_kv_blocks": 8, "max_rolling_batch_prefill_tokens": 16}
    llm = LLM(path, dtype="fp32", decoder=decoder, **limits)
    assert llm.facts.executor == "packed"
    if with_graphs:
        add_graphs(llm, max_rows=3, prompt_sizes=(16,))
    assert llm.facts.decoder.startswith(decoder)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    drawn = SamplingParams(top_p=0.8, seed=3, max_tokens=5, ignore_eos=True)
    outputs = llm.generate(PROMPTS, [greedy, drawn, greedy], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
