"""A draft model: its tokens are verified like any others, and its K and V follow its sequences."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ConfigurationError
from core.structured_outputs import StructuredOutputsParams
from engine import LLM, SamplingParams
from engine.speculation.draft_model import DraftModel
from kernels.cpu.shared_library import unavailable_reason
from strategies.memory.base import Span
from strategies.speculation.speculation import Speculation
from tests.e2e.serving import DEMO
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.speculation.test_same_answers import ALWAYS, SMALL, answers, counts

if unavailable_reason() is not None:
    pytest.skip("torch's products depend on the batch", allow_module_level=True)


@pytest.fixture(scope="module")
def llama(tiny_model):
    return tiny_model("llama", is_wide=True)


@pytest.fixture(scope="module")
def near(llama, tmp_path_factory):
    """Return the folder of a model that is almost the same."""
    folder = tmp_path_factory.mktemp("near") / "model"
    shutil.copytree(llama, folder)
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: weight + 0.005 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expected(llama):
    return answers(LLM(llama, batching="none", num_kv_blocks=60, **SMALL))


def draft_model(llm: LLM) -> DraftModel:
    extension = llm.llm_engine.strategy.extension
    assert isinstance(extension, Speculation)
    assert isinstance(extension.proposer, DraftModel)
    return extension.proposer


def drafting(model: Any, draft: Any, **options: Any) -> LLM:
    return LLM(
        model,
        speculative_draft_model=str(draft),
        num_speculative_tokens=4,
        **ALWAYS,
        **SMALL,
        **options,
    )


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", STRATEGIES)
def test_a_model_that_drafts_for_itself_is_always_right(llama, expected, batching, overlaps):
    """Also where tokens are drawn: with the same random number it draws the same."""
    llm = drafting(
        llama,
        llama,
        batching=batching,
        async_scheduling=overlaps,
        num_kv_blocks=80 if batching == "paged" else 120,
        **STRATEGIES[batching],
    )
    assert answers(llm) == expected
    assert counts(llm).num_accepted == counts(llm).num_draft_tokens > 50
    assert draft_model(llm).memory.num_held_blocks == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_model_that_is_often_wrong(llama, near, expected, mode):
    llm = drafting(llama, near, batching="paged", preemption_mode=mode, num_kv_blocks=40)
    for _ in range(2):
        assert answers(llm) == expected, "with cached prefixes the second time"
    assert 0.1 < counts(llm).num_accepted / counts(llm).num_draft_tokens < 0.95
    assert llm.llm_engine.strategy.num_preemptions > 0
    draft_model(llm).memory.check_integrity()
    assert draft_model(llm).memory.num_held_blocks == 0


def test_a_model_without_room_gives_none(llama, expected):
    llm = drafting(llama, llama, batching="paged", num_kv_blocks=60)
    proposer = draft_model(llm)
    assert proposer.memory.reserve([Span(10**6, 0, 50 * 4)]), "other sequences hold its blocks"
    assert answers(llm) == expected
    assert counts(llm).num_accepted == counts(llm).num_draft_tokens > 0
    proposer.memory.release(10**6)
    assert proposer.memory.num_held_blocks == 0


def test_requests_that_are_aborted_leave_no_blocks(llama):
    engine = drafting(llama, llama, num_kv_blocks=60).llm_engine
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ids = [engine.add([5, 6, 7], params, 0.0) for _ in range(3)]
    for now in range(3):
        engine.step(now)
    extension = engine.strategy.extension
    assert isinstance(extension, Speculation)
    assert isinstance(extension.proposer, DraftModel)
    assert extension.proposer.memory.num_held_blocks > 0
    for id in ids:
        engine.abort(id)
    assert not engine.has_work()
    assert extension.proposer.memory.num_held_blocks == 0


def test_grammars_and_beams_have_no_drafts(grammar_model):
    """The requests beside them have some."""
    kinds = [
        {"structured_outputs": StructuredOutputsParams(regex="[ab]{3,9}c")},
        {"num_beams": 2, "temperature": 0},
        {"temperature": 0, "ignore_eos": True},
    ]
    params = [SamplingParams(**{"max_tokens": 12, "seed": 1, **kind}) for kind in kinds]
    prompts = [[5, 6, 7], [8, 9], [7, 6, 5]]
    found: list[list[Any]] = []
    for draft in (None, str(grammar_model)):
        llm = LLM(grammar_model, dtype="fp32", speculative_draft_model=draft, **ALWAYS)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([[one.token_ids for one in output.outputs] for output in outputs])
    assert found[0] == found[1]
    assert counts(llm).num_drafts == 2, "11 tokens after the first, of one request"


def test_the_demo_model_has_a_draft_model():
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain, llm = (LLM(DEMO, dtype="fp32", speculative_draft_model=draft, num_speculative_tokens=3,
                      **ALWAYS) for draft in (None, "draft"))  # fmt: skip
    prompts = ["ROMEO:", "JULIET:"]
    found = [each.generate(prompts, params, use_tqdm=False) for each in (plain, llm)]
    first, second = ([output.outputs[0].token_ids for output in outputs] for outputs in found)
    assert first == second
    assert counts(llm).num_accepted > 0.3 * counts(llm).num_draft_tokens


def test_it_drafts_for_models_with_states(tiny_model, llama):
    path = tiny_model("qwen3_5_text", is_wide=True)
    assert answers(drafting(path, llama)) == answers(LLM(path, **SMALL))


def test_both_models_share_the_memory(llama):
    options = {"kv_cache_memory_bytes": 2**17, "max_model_len": 32, **SMALL}
    alone = LLM(llama, **options).facts
    llm = LLM(llama, speculative_config=f'{{"model": "{llama}"}}', **options)
    assert llm.facts.num_kv_blocks == alone.num_kv_blocks // 2
    assert draft_model(llm).memory.num_blocks == llm.facts.num_kv_blocks
    [note] = [note for note in llm.facts.notes if note.startswith("speculation: draft_model")]
    assert "a draft " in note
    assert "ms; it pays from" in note


def test_a_model_with_another_vocabulary_is_an_error(tiny_model, llama):
    path = tiny_model("llama", changes={"vocab_size": 99})
    with pytest.raises(ConfigurationError, match="speculative_draft_model") as raised:
        drafting(llama, path)
    assert "its vocabulary has 99 tokens, that of the model has" in str(raised.value)


def test_a_token_with_another_meaning_is_an_error(grammar_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(grammar_model, other)
    text = (other / "tokenizer.json").read_text()
    assert '"a":' in text
    (other / "tokenizer.json").write_text(text.replace('"a":', '"\\u0416":', 1))
    with pytest.raises(ConfigurationError, match="is another one than that of the model"):
        LLM(grammar_model, speculative_draft_model=str(other), dtype="fp32")


def test_a_directory_that_is_missing_is_an_error(llama):
    with pytest.raises(ConfigurationError, match=r"speculative_draft_model=./no: there is no dir"):
        drafting(llama, "./no")
