"""Layers of multi-token prediction: they draft what transformers' own layers would draft."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from container.capacity.decoder import decoder_from_directory
from container.capacity.draft import with_draft
from core.configuration.options import make_options
from core.errors import ConfigurationError
from core.plan import Chunk
from engine import LLM, SamplingParams
from engine.speculation.draft_model import DraftLookup
from kernels.cpu.shared_library import unavailable_reason
from strategies.memory.blocks import PagedMemory
from tests.engine.speculation.heads import (
    PAGED,
    RESERVING,
    check,
    check_each,
    check_strategy,
    proposer_of,
    recorded,
)
from tests.engine.speculation.mtp_models import PUBLISHED, with_mtp, wrap
from tests.engine.speculation.test_same_answers import ALWAYS, SMALL, answers, prompts

if unavailable_reason() is not None:
    pytest.skip("torch's products depend on the batch", allow_module_level=True)


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Return a function (architecture) → path, reference, and the answers without drafts."""

    @cache
    def of(architecture: str) -> Any:
        folder = tmp_path_factory.mktemp("mtp") / architecture
        path, reference = with_mtp(tiny_model(architecture, is_wide=True), folder)
        plain = answers(LLM(path, batching="none", num_kv_blocks=60, **SMALL))
        return path, reference, plain

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


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_the_layer_is_read_beside_a_wrapped_language_model(models, tmp_path, architecture):
    """As published: `mtp` is beside the language model in the files of a model of images."""
    path, reference, plain = models(architecture)
    wrapped = wrap(path, tmp_path / "wrapped")
    check_strategy(wrapped, reference, plain, "paged", overlaps=True, speculative_method="mtp")


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(
    ("architecture", "overlaps"), [("deepseek_v3", False), ("qwen3_next", True)]
)
def test_states_are_read_once_a_swap_has_brought_them(models, architecture, overlaps):
    """Until the step runs that swaps a sequence in, its blocks hold the states of others."""
    path, reference, _ = models(architecture)
    llm = LLM(
        path,
        batching="paged",
        preemption_mode="swap",
        async_scheduling=overlaps,
        speculative_config='{"method": "mtp", "num_speculative_tokens": 2}',
        num_kv_blocks=25,
        **ALWAYS,
        **SMALL,
    )
    found = recorded(proposer_of(llm))
    swaps = Swaps(llm)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm.generate(prompts() * 2, params, use_tqdm=False)
    after_swaps = [one for one in found if one[0] in swaps.restored]
    assert len(after_swaps) > 3
    check_each(reference, after_swaps)
    assert swaps.num_waits > 0, "drafts were wanted in a step that swaps their sequence in"


class Swaps:
    """Overwrites the states in blocks that are about to be swapped in, and sees who reads them."""

    def __init__(self, llm: LLM) -> None:
        self.num_waits = 0
        """How often a sequence had no drafts because of a move."""
        self.restored: list[list[int]] = []
        """The known tokens of sequences whose states are first read after a swap."""
        proposer, memory = proposer_of(llm), llm.llm_engine.strategy.memory
        assert isinstance(memory, PagedMemory)
        states = proposer._head.states
        assert states is not None
        size = states.group.block_size
        swap_in, can_read, chunk = memory.swap_in, proposer._can_read, proposer._chunk
        swapped: set[int] = set()

        def overwriting(sequence_ids: Iterable[int]) -> None:
            sequence_ids = tuple(sequence_ids)
            swapped.update(sequence_ids)
            num_known = len(memory.swap_ins)
            swap_in(sequence_ids)
            for _, block in memory.swap_ins[num_known:]:
                states.rows[block * size : (block + 1) * size].normal_(0, 3)

        def waiting(lookup: DraftLookup) -> bool:
            can = can_read(lookup)
            self.num_waits += not can
            return can

        def reading(lookup: DraftLookup, length: int) -> Chunk:
            if lookup.sequence.id in swapped:
                swapped.discard(lookup.sequence.id)
                self.restored.append([*lookup._known])
            return chunk(lookup, length)

        memory.swap_in, proposer._can_read, proposer._chunk = overwriting, waiting, reading


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


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next", "ernie4_5_moe"])
def test_plan_counts_the_layer(models, tiny_model, tmp_path, architecture):
    """By the files, or without them by the config; and not among the model's weights."""
    path, reference, _ = models(architecture)
    options = make_options({"speculative_method": "mtp", "dtype": "fp32"})
    num_bytes = 4 * sum(weight.numel() for weight in reference.published().values())
    decoder = decoder_from_directory(path, options)
    found = with_draft(decoder, path, options).draft
    assert found is not None
    assert (found.weights_bytes, found.state_bytes) == (num_bytes, 4 * 128)
    alone = decoder_from_directory(tiny_model(architecture, is_wide=True), options)
    assert decoder.weights_bytes == alone.weights_bytes
    shutil.copy(path / "config.json", tmp_path)
    computed = with_draft(decoder_from_directory(tmp_path, options), tmp_path, options).draft
    assert computed is not None
    assert computed.weights_bytes == pytest.approx(num_bytes, rel=0.01)


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
