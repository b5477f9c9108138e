"""A draft model whose layers keep a state: its drafts follow from the state after known tokens."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.states.room import num_draft_states
from engine import LLM, SamplingParams
from engine.speculation.draft_states import DraftStates, StateDraftModel
from engine.step.packed_executor import PackedExecutor
from kernels.cpu.shared_library import unavailable_reason
from strategies.speculation import speculation
from strategies.speculation.speculation import Speculation
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.speculation.test_draft_model import drafting
from tests.engine.speculation.test_same_answers import SMALL, answers, counts

if unavailable_reason() is not None:
    pytest.skip("torch's products depend on the batch", allow_module_level=True)

FAMILIES = ("qwen3_5_text", "lfm2", "bamba", "mamba2", "mamba")


@pytest.fixture(scope="module")
def model(tiny_model):
    """Return a function (family) → the folder of a model of it."""
    return lambda family: tiny_model(family, is_wide=True)


@pytest.fixture(scope="module")
def expected(model):
    """Return a function (family) → the answers without drafts."""

    @cache
    def of(family: str) -> Any:
        return answers(LLM(model(family), batching="none", num_kv_blocks=60, **SMALL))

    return of


@pytest.fixture(scope="module")
def near(model, tmp_path_factory):
    """Return the folder of a Bamba model that is almost the same."""
    folder = tmp_path_factory.mktemp("near") / "model"
    shutil.copytree(model("bamba"), folder)
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: weight + 0.005 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def speculation_of(llm: LLM) -> Speculation:
    extension = llm.llm_engine.strategy.extension
    assert isinstance(extension, Speculation)
    return extension


def proposer_of(llm: LLM) -> StateDraftModel:
    proposer = speculation_of(llm).proposer
    assert isinstance(proposer, StateDraftModel)
    return proposer


def spoil(llm: LLM) -> None:
    """Fill all rows with NaN, as of an earlier sequence."""
    executor = proposer_of(llm).executor
    assert isinstance(executor, PackedExecutor)
    pool = executor.passes.cache.states
    assert pool is not None
    assert len(pool.rows) == proposer_of(llm).states.count
    pool.rows.fill_(255)
    assert all(tensor.isnan().all() for layer in pool.layers for tensor in layer)


def check_all_right(llm: LLM, least: int = 50) -> None:
    """Check that all drafts were accepted, and nothing is held."""
    assert counts(llm).num_accepted == counts(llm).num_draft_tokens > least
    check_nothing_held(llm)


def check_nothing_held(llm: LLM) -> None:
    proposer = proposer_of(llm)
    proposer.states.check_integrity()
    proposer.memory.check_integrity()
    assert not proposer.states.known
    assert proposer.memory.num_held_blocks == 0


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", STRATEGIES)
def test_a_model_that_drafts_for_itself_is_always_right(
    model, expected, batching, overlaps, family
):
    """A state that a wrong token had been read into, or one too few, would show."""
    llm = drafting(
        model(family),
        model(family),
        batching=batching,
        async_scheduling=overlaps,
        num_kv_blocks=80 if batching == "paged" else 120,
        **STRATEGIES[batching],
    )
    for _ in range(2):
        spoil(llm)
        assert answers(llm) == expected(family)
    check_all_right(llm)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_model_that_is_often_wrong(model, near, expected, mode):
    path = model("bamba")
    llm = drafting(path, near, batching="paged", preemption_mode=mode, num_kv_blocks=40)
    for _ in range(2):
        spoil(llm)
        assert answers(llm) == expected("bamba")
    assert 0.1 < counts(llm).num_accepted / counts(llm).num_draft_tokens < 0.95
    assert llm.llm_engine.strategy.num_preemptions > 0
    check_nothing_held(llm)


def test_after_wrong_drafts_others_are_right(model, expected, monkeypatch):
    """Every second time, wrong tokens are verified in place of those that were read."""
    llm = drafting(model("bamba"), model("bamba"), batching="paged", num_kv_blocks=80)
    proposer, turns = proposer_of(llm), [0, 0]
    completed = proposer.completed

    def wrong_every_second_time(wanted):
        found = completed(wanted)
        turns[1] += len(found)
        if turns[1] % 2:
            return found
        turns[0] += sum(map(len, found))
        return [tuple(3 + token % 5 for token in drafts) for drafts in found]

    monkeypatch.setattr(proposer, "completed", wrong_every_second_time)
    assert answers(llm) == expected("bamba")
    num_wrong = counts(llm).num_draft_tokens - counts(llm).num_accepted
    assert 20 < num_wrong <= turns[0] < counts(llm).num_draft_tokens - 20
    check_nothing_held(llm)


def test_sequences_that_have_no_drafts_for_a_while_catch_up(model, expected, monkeypatch):
    llm = drafting(model("bamba"), model("bamba"), num_kv_blocks=120, max_rolling_batch_size=4)
    extension, steps = speculation_of(llm), iter(range(10**6))
    drafts = extension.drafts
    monkeypatch.setattr(
        extension, "drafts", lambda chunks: {} if next(steps) % 4 else drafts(chunks)
    )
    spoil(llm)
    assert answers(llm) == expected("bamba")
    check_all_right(llm, least=20)


def test_drafts_for_the_same_tokens_again_are_the_same(model, expected, monkeypatch):
    """As after a step that was lost: the state before the newest token is there no longer."""
    llm = drafting(model("bamba"), model("bamba"), num_kv_blocks=120, max_rolling_batch_size=4)
    proposer, pairs = proposer_of(llm), list[Any]()
    completed = proposer.completed

    def twice(wanted):
        first, again = completed(wanted), completed(wanted)
        # A sequence that is read anew may take more than the tokens of a step: then it has none.
        pairs.extend(pair for pair in zip(first, again, strict=True) if all(pair))
        return again

    monkeypatch.setattr(proposer, "completed", twice)
    spoil(llm)
    assert answers(llm) == expected("bamba")
    check_all_right(llm, least=20)
    assert all(first == again for first, again in pairs)
    assert len(pairs) > 4


@pytest.mark.parametrize("count", [4, 5, 9])
def test_more_sequences_than_rows(model, expected, monkeypatch, count):
    monkeypatch.setattr("engine.builders.draft.num_draft_states", lambda *_: count)
    llm = drafting(model("bamba"), model("bamba"), batching="paged", num_kv_blocks=80)
    assert proposer_of(llm).states.count == count
    spoil(llm)
    assert answers(llm) == expected("bamba")
    check_all_right(llm)


def test_sequences_take_turns_with_rows(model, expected, monkeypatch):
    """Who has lost its row, and finds one again, is read anew."""
    monkeypatch.setattr("engine.builders.draft.num_draft_states", lambda *_: 3)
    llm = drafting(model("bamba"), model("bamba"), num_kv_blocks=120, max_rolling_batch_size=8)
    proposer, turns, lost = proposer_of(llm), iter(range(10**6)), list[int]()
    decodes, forget = speculation._decodes, proposer._forget

    def some(chunks):
        turn = next(turns) % 2
        return [(index, one) for index, one in decodes(chunks) if one.sequence.id % 2 == turn]

    def counted(lookup):
        lost.append(lookup.num_read)
        forget(lookup)

    monkeypatch.setattr(speculation, "_decodes", some)
    monkeypatch.setattr(proposer, "_forget", counted)
    spoil(llm)
    assert answers(llm) == expected("bamba")
    check_all_right(llm, least=20)
    assert len(lost) > 5
    assert min(lost) > 0


def test_a_model_with_states_drafts_for_one_without(model):
    target, draft = model("llama"), model("lfm2")
    llm = drafting(target, draft, num_kv_blocks=60)
    assert answers(llm) == answers(LLM(target, num_kv_blocks=60, **SMALL))
    assert counts(llm).num_draft_tokens > counts(llm).num_accepted
    check_nothing_held(llm)


def test_requests_that_are_aborted_leave_no_rows(model):
    llm = drafting(model("bamba"), model("bamba"), num_kv_blocks=60)
    engine, proposer = llm.llm_engine, proposer_of(llm)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ids = [engine.add([5, 6, 7], params, 0.0) for _ in range(3)]
    for now in range(3):
        engine.step(now)
    assert len(proposer.states.known) == 3
    for id in ids:
        engine.abort(id)
    assert not engine.has_work()
    check_nothing_held(llm)


def test_its_states_share_the_memory(model):
    """They take a part of it, and the blocks the rest; the passes are timed before."""
    options = {"kv_cache_memory_bytes": 2**20, "max_model_len": 32, "max_rolling_batch_size": 64}
    path = model("lfm2")
    facts = [
        LLM(model("llama"), **options, **SMALL, **draft).facts
        for draft in (
            {"speculative_method": "ngram"},
            {"speculative_draft_model": str(path), "speculation": "measure"},
        )
    ]
    assert facts[1].num_kv_blocks < facts[0].num_kv_blocks
    [note] = [note for note in facts[1].notes if note.startswith("speculation: draft_model")]
    assert " MiB for 32 states)" in note
    assert "a draft " in note


def test_how_many_rows_there_are():
    assert num_draft_states(1, 10) == num_draft_states(2, 10) == 4, "as many as are timed"
    assert num_draft_states(8, 10) == 16
    assert num_draft_states(256, 10) == 32
    assert num_draft_states(256, 10, 800) == 20
    assert num_draft_states(256, 10, 8) == 4


def test_rows_of_sequences():
    states = DraftStates(5)
    assert states.take(7)
    assert states.take(8)
    assert not states.take(9), "one is free, and it needs two"
    assert states.of(7, -3).reads == states.of(7, -3).writes == states.of(7, 0).reads
    assert states.of(7, 0).writes == states.of(7, 1).reads == states.of(7, 1).writes
    assert states.of(7, 0).writes != states.of(7, 0).reads
    states.end_drafts()
    assert states.take(7), "it has one already"
    assert [*states.known] == [8, 7], "the longest unused first"
    states.release(7)
    states.release(7)
    assert states.take(9)
    states.check_integrity()
