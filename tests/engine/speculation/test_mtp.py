"""Layers of multi-token prediction: they draft what transformers' own layers would draft."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from core.errors import ConfigurationError
from engine import LLM, SamplingParams
from kernels.cpu.shared_library import unavailable_reason
from tests.engine.speculation.heads import (
    PAGED,
    RESERVING,
    check,
    check_strategy,
    proposer_of,
    recorded,
)
from tests.engine.speculation.mtp_models import PUBLISHED, with_mtp
from tests.engine.speculation.test_same_answers import ALWAYS, SMALL, answers, prompts

if unavailable_reason() is not None:
    pytest.skip("torch's products depend on the batch", allow_module_level=True)


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Return a function (architecture) → path, reference, and the answers without drafts."""
    known: dict[str, Any] = {}

    def of(architecture: str) -> Any:
        if architecture not in known:
            folder = tmp_path_factory.mktemp("mtp") / architecture
            path, reference = with_mtp(tiny_model(architecture, is_wide=True), folder)
            plain = answers(LLM(path, batching="none", num_kv_blocks=60, **SMALL))
            known[architecture] = path, reference, plain
        return known[architecture]

    return of


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize(
    ("architecture", "batching", "overlaps"),
    [
        *((architecture, *how) for architecture in PUBLISHED for how in PAGED),
        *(("glm4_moe", *how) for how in RESERVING),
    ],
)
def test_drafts_are_those_of_the_reference(models, architecture, batching, overlaps):
    path, reference, plain = models(architecture)
    check_strategy(path, reference, plain, batching, overlaps=overlaps, speculative_method="mtp")


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next"])
def test_states_are_swapped_with_their_blocks(models, architecture):
    path, reference, plain = models(architecture)
    llm = LLM(
        path,
        batching="paged",
        preemption_mode="swap",
        speculative_config='{"method": "mtp", "num_speculative_tokens": 2}',
        num_kv_blocks=30,
        **ALWAYS,
        **SMALL,
    )
    found = recorded(proposer_of(llm))
    assert answers(llm) == plain
    assert llm.llm_engine.strategy.num_swaps > 0
    check(reference, found)


def test_samples_read_the_states_of_a_prompt_that_they_share(models):
    """Where blocks are copied in the step that writes into them, there are no drafts yet."""
    path, reference, _ = models("glm4_moe")
    llm = LLM(path, speculative_method="mtp", num_kv_blocks=90, **ALWAYS, **SMALL)
    found = recorded(proposer_of(llm))
    params = SamplingParams(temperature=0, n=3, max_tokens=12, ignore_eos=True)
    for prompt in (prompts()[2], prompts()[5]):  # alone, so that the step has room for drafts
        llm.generate([prompt], params, use_tqdm=False)
    check(reference, found)


def test_states_take_memory_beside_k_and_v(models):
    path, _, _ = models("glm4_moe")
    options = {"kv_cache_memory_bytes": 2**18, "max_model_len": 32, **SMALL}
    alone = LLM(path, **options).facts
    llm = LLM(path, speculative_method="mtp", **options)
    # K and V of 3 layers of 2 heads of 32; of one layer more, and a state of 128
    assert llm.facts.num_kv_blocks == alone.num_kv_blocks * 3 * 128 // (4 * 128 + 128)
    [note] = [note for note in llm.facts.notes if note.startswith("speculation: mtp (")]
    assert "MiB of weights, " in note
    assert "ms; it pays from" in note


def test_models_without_the_layer_are_errors(models, tiny_model, tmp_path):
    path, _, _ = models("deepseek_v3")
    other = tmp_path / "other"
    shutil.copytree(path, other)
    weights = load_file(other / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers.3." not in name}
    save_file(kept, other / "model.safetensors", metadata={"format": "pt"})
    cases = {
        other: "have no layer of multi-token prediction; choose",
        tiny_model("llama", is_wide=True): "no multi-token prediction is known of models of type",
    }
    for folder, problem in cases.items():
        with pytest.raises(ConfigurationError, match="speculative_method=mtp") as raised:
            LLM(folder, speculative_method="mtp", **SMALL)
        assert problem in str(raised.value)
    with pytest.raises(ConfigurationError, match="makes no weights of such a layer"):
        LLM(path, speculative_method="mtp", load_format="dummy", **SMALL)


def test_a_tensor_that_does_not_fit_is_an_error(models, tmp_path):
    path, _, _ = models("glm4_moe")
    other = tmp_path / "other"
    shutil.copytree(path, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.3.eh_proj.weight"] = weights["model.layers.3.eh_proj.weight"][:, :128]
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert json.loads((other / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(ConfigurationError, match=r"eh_proj.weight' has shape \[128, 128\]"):
        LLM(other, speculative_method="mtp", **SMALL)
