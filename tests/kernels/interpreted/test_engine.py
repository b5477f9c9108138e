"""The engine gives the same tokens with the Triton kernels as with torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.attention import expansion
from engine.attention.triton_backend import TritonBackend
from engine.model.elementwise import make_elementwise
from engine.sampling.kernels import make_sampling_kernels
from kernels.attention.prefill_splits import prefill_work
from kernels.attention.work_list import UNIT, make_work_list
from tests.engine.step.graphs import add_graphs

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
    "youtu": SMALL
    | {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
       "v_head_dim": 128, "head_dim": 64, "num_key_value_heads": 2},
    "gemma4_text": SMALL
    | WINDOW
    | {"global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
       "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
       "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
"""Together, these models cover norms with an offset, norms of whole rows, experts, latents, K
folded into V, and the decoder of transformers."""
LONG = {"max_position_embeddings": 300, "sliding_window": 270, "num_attention_heads": 1}
LENGTHS = (290, 20)
CUDA = torch.device("cuda")
PROMPTS = [[1 + (7 * n + k) % 60 for k in range(length)] for n, length in enumerate((3, 21, 9))]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fill all memory that torch does not initialize with NaN: no token may depend on it.

    Without this, such memory may by chance hold infinities, of which NumPy warns in rows of
    padding.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "architecture",
    [
        name if name == "llama" else pytest.param(name, marks=pytest.mark.matrix(cases=0))
        for name in SETTINGS
    ],
)
def test_same_tokens_as_with_torch(architecture, tmp_path, monkeypatch):
    decoder = "transformers" if architecture == "mistral" else "own"
    save_model(tmp_path, architecture, SETTINGS[architecture])
    expected = answers(tmp_path)
    backends, expanded = use_triton(monkeypatch), note_expansions(monkeypatch)
    assert answers(tmp_path, decoder) == expected
    assert len(backends) == 2, "one for the gate's probe, one for the engine"
    assert bool(expanded) == (architecture == "youtu"), "latents of prompts"
    if architecture == "gemma2":  # some of its layers have a window, the others none
        assert answers(tmp_path, decoder, graph_tokens=16) == expected


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("graph_tokens", [0, 32])
def test_same_tokens_as_with_torch_if_contexts_are_split(graph_tokens, tmp_path, monkeypatch):
    """A prompt of 290 tokens is computed in chunks of up to 95, the last chunk beside a second
    prompt. Then both decode more tokens.

    Splits may be shorter than on a GPU: the interpreter would take minutes for longer prompts.
    """
    save_model(tmp_path, "gemma2", SETTINGS["gemma2"] | LONG)
    prompts = [
        [1 + (7 * n + k * k) % 60 for k in range(length)] for n, length in enumerate(LENGTHS)
    ]
    limits = {"num_kv_blocks": 30, "max_rolling_batch_prefill_tokens": 95}
    expected = answers(tmp_path, prompts=prompts, **limits)
    backends = use_triton(monkeypatch)
    monkeypatch.setattr("kernels.attention.work_list.MIN_SPLIT_KEYS", UNIT)
    for module in ("prefill_splits", "prefill_work"):
        monkeypatch.setattr(f"kernels.attention.{module}.MIN_SPLIT_KEYS", 32)
    monkeypatch.setattr(
        "engine.attention.triton_backend.make_work_list",
        partial(make_work_list, min_split_keys=UNIT),
    )
    monkeypatch.setattr(
        "kernels.attention.prefill_splits.prefill_work", partial(prefill_work, min_split_keys=32)
    )
    windows = {None, LONG["sliding_window"]}
    answered = answers(tmp_path, "own", prompts=prompts, graph_tokens=graph_tokens, **limits)
    assert answered == expected
    assert backends[-1].split_decodes == backends[-1].split_prefills == windows


class Watched(TritonBackend):
    """Notes the windows of decodes and prefills that are split."""

    def __init__(self, num_processors, max_model_len):
        super().__init__(num_processors, max_model_len)
        self.split_decodes, self.split_prefills = set(), set()
        decode, prefill = self._decode, self._prefill

        def watched_decode(*arguments, work, window, **options):
            if (work.rows[:, 2] > 1).any():
                self.split_decodes.add(window)
            return decode(*arguments, work=work, window=window, **options)

        def watched_prefill(*arguments, work, window, **options):
            if (work.rows[:, 2] > 1).any():
                self.split_prefills.add(window)
            return prefill(*arguments, work=work, window=window, **options)

        self._decode, self._prefill = watched_decode, watched_prefill


def save_model(path, architecture, settings):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[architecture](**settings), dtype=torch.float32
    )
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.4 / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)


def use_triton(monkeypatch):
    """Let engines run on the Triton kernels. Return the list that their backends are added to."""
    backends = []

    def triton(device, shapes, block_size, max_model_len, kv_dtype, *, in_segments):
        assert not in_segments
        backends.append(Watched(4, max_model_len))
        return backends[-1], ()

    monkeypatch.setattr("engine.builders.packed.make_backend", triton)
    monkeypatch.setattr("engine.loading.gate.make_backend", triton)
    monkeypatch.setattr("engine.model.loader.make_elementwise", lambda _: make_elementwise(CUDA))
    sampling = make_sampling_kernels(CUDA)
    monkeypatch.setattr("engine.sampling.sampler.make_sampling_kernels", lambda _: sampling)
    monkeypatch.setattr("engine.model.latent_attention.uses_panels", lambda *_: False)
    return backends


def note_expansions(monkeypatch):
    """Return the list that the expansions of steps are added to."""
    noted, make = [], expansion.StepExpansion

    def note(*arguments):
        noted.append(make(*arguments))
        return noted[-1]

    monkeypatch.setattr(expansion, "StepExpansion", note)
    return noted


def answers(
    path,
    decoder="transformers",
    *,
    graph_tokens=0,
    prompts=PROMPTS,
    num_kv_blocks=8,
    max_rolling_batch_prefill_tokens=16,
):
    """Return an engine's answers. The first steps mix chunks of prompts with decodes.

    graph_tokens: steps with up to this many tokens of prompts are padded, as for CUDA graphs. If 0,
    no step is padded.
    """
    limits = {
        "num_kv_blocks": num_kv_blocks,
        "max_rolling_batch_prefill_tokens": max_rolling_batch_prefill_tokens,
    }
    llm = LLM(path, dtype="fp32", decoder=decoder, **limits)
    assert llm.facts.executor == "packed"
    if graph_tokens:
        add_graphs(llm, max_rows=3, prompt_sizes=(graph_tokens,))
    assert llm.facts.decoder.startswith(decoder)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    drawn = SamplingParams(top_p=0.8, seed=3, max_tokens=5, ignore_eos=True)
    params = [greedy, drawn, greedy][: len(prompts)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
