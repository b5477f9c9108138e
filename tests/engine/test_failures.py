"""Exceptions of a strategy end the requests they belong to, and never the engine."""

from __future__ import annotations

import pytest

from core.beams import BeamSearch
from core.configuration.strategy_table import BATCHING_NAMES
from core.errors import GenerationError
from core.sampling import Finish, SamplingParams
from engine.engine import Engine
from strategies.beam_group import BeamSearches
from strategies.group import SequenceGroup
from tests.engine.serve.serving import FACTS, expected
from tests.strategies.fakes import FakeExecutor, strategy_of

TOGETHER = [name for name in BATCHING_NAMES if name != "none"]


def engine_of(batching="paged", *, overlaps=False, **settings):
    return Engine(
        strategy_of(batching, **settings),
        FakeExecutor(4),
        FACTS,
        overlaps=overlaps,
        features=(BeamSearches(),),
    )


def add(engine, prompt=(1, 2), max_tokens=6, **changes):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)
    return engine.add(prompt, params, now=0.0)


def run(engine, tokens=None, ends=None):
    """Run the engine until it has no work; return tokens and ends by request."""
    tokens, ends = tokens or {}, ends or {}
    while engine.has_work():
        for output in engine.step(9.0):
            assert output.request_id not in ends, "an output after the end"
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                ends[output.request_id] = output.failure or output.finish
        engine.strategy.memory.check_integrity()
    assert engine.strategy.memory.num_held_blocks == 0
    assert not engine.strategy._group_of
    return tokens, ends


def raise_for(monkeypatch, owner, method, request_id):
    """Make a method of groups raise for one request."""
    original = getattr(owner, method)

    def raises(self, *arguments):
        if self.request.id == request_id:
            raise ZeroDivisionError("a bug")
        return original(self, *arguments)

    monkeypatch.setattr(owner, method, raises)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("method", ["turns", "commit"])
@pytest.mark.parametrize("batching", TOGETHER)
def test_only_the_request_at_fault_ends(monkeypatch, batching, method, overlaps):
    engine = engine_of(batching, overlaps=overlaps)
    first, bad, last = (add(engine) for _ in range(3))
    raise_for(monkeypatch, SequenceGroup, method, bad)
    tokens, ends = run(engine)
    assert ends == {
        first: Finish.LENGTH, bad: "ZeroDivisionError: a bug", last: Finish.LENGTH
    }  # fmt: skip
    assert tokens[first] == expected(first, [1, 2], 6)
    assert tokens[last] == expected(last, [1, 2], 6)
    later = add(engine)
    assert run(engine)[1] == {later: Finish.LENGTH}


def test_other_answers_of_the_step_are_not_lost(monkeypatch):
    """The last step of one request is the step in which another one fails."""
    engine = engine_of()
    first, bad, last = (add(engine, max_tokens=1) for _ in range(3))
    raise_for(monkeypatch, SequenceGroup, "commit", bad)
    outputs = engine.step(0.0)
    assert [(output.request_id, output.finish) for output in outputs] == [
        (first, Finish.LENGTH), (last, Finish.LENGTH), (bad, Finish.ERROR)
    ]  # fmt: skip


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_a_beam_search_that_fails_ends_alone(monkeypatch, batching):
    engine = engine_of(batching)
    first, search = add(engine), add(engine, num_beams=2)

    def advance(self, candidates):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(BeamSearch, "advance", advance)
    _, ends = run(engine)
    assert ends == {first: Finish.LENGTH, search: "ZeroDivisionError: a bug"}


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_exception_of_unknown_origin_ends_what_holds_blocks(monkeypatch, overlaps):
    engine = engine_of("continuous", overlaps=overlaps, max_sequences=2)
    running = [add(engine), add(engine)]
    waiting = add(engine)
    engine.step(0.0)

    def next_chunks(now):
        monkeypatch.undo()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(engine.strategy, "_next_chunks", next_chunks)
    tokens, ends = run(engine)
    assert ends == {
        **dict.fromkeys(running, "ZeroDivisionError: a bug"), waiting: Finish.LENGTH
    }  # fmt: skip
    assert tokens[waiting] == expected(waiting, [1, 2], 6)


def test_a_waiting_request_is_at_fault_only_if_nothing_else_is(monkeypatch):
    engine = engine_of("dynamic")
    ids = [add(engine), add(engine)]
    monkeypatch.setattr(engine.strategy, "_is_overdue", lambda now: 1 / 0)
    _, ends = run(engine)
    assert ends == dict.fromkeys(ids, "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("method", ["split", "add"])
def test_a_request_that_cannot_be_added_is_refused(monkeypatch, method):
    engine = engine_of()
    first = add(engine)
    monkeypatch.setattr(engine.strategy, method, lambda request: 1 / 0)
    with pytest.raises(GenerationError, match="failed to add"):
        add(engine)
    monkeypatch.undo()
    assert run(engine)[1] == {first: Finish.LENGTH}


@pytest.mark.parametrize("index", [None, 0])
def test_a_failed_abort_drops_the_whole_request(monkeypatch, index):
    engine = engine_of()
    first, aborted = add(engine), add(engine, n=2)
    engine.step(0.0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.strategy.memory, "release", lambda sequence_id: 1 / 0)
        engine.abort(aborted, index)
    ends = run(engine)[1]
    other = {} if index is None else {aborted: "ZeroDivisionError: division by zero"}
    assert ends == {first: Finish.LENGTH, **other}


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_failed_step_ends_its_requests_even_if_aborting_them_fails(monkeypatch, overlaps):
    engine = engine_of(overlaps=overlaps)
    ids = [add(engine), add(engine)]

    def submit(plan, between_tokens):
        monkeypatch.undo()
        monkeypatch.setattr(engine.strategy.memory, "release", lambda sequence_id: 1 / 0)
        raise RuntimeError("lost")

    monkeypatch.setattr(engine.executor, "submit", submit)
    assert {output.request_id for output in engine.step(0.0)} == {*ids}
    monkeypatch.undo()
    assert not run(engine)[1]


def test_if_a_request_cannot_be_dropped_all_end(monkeypatch):
    engine = engine_of()
    ids = [add(engine), add(engine)]
    raise_for(monkeypatch, SequenceGroup, "commit", ids[0])
    rebuild = engine.strategy.memory.rebuild

    def fails_once(sequence_ids):
        monkeypatch.setattr(engine.strategy.memory, "rebuild", rebuild)
        raise ZeroDivisionError("another bug")

    monkeypatch.setattr(engine.strategy.memory, "rebuild", fails_once)
    assert run(engine)[1] == dict.fromkeys(ids, "ZeroDivisionError: a bug")
    later = add(engine)
    assert run(engine)[1] == {later: Finish.LENGTH}


def until_swapped_out(engine):
    """Run three requests until one is swapped out. Return their ids."""
    ids = [add(engine, [1] * 7, 24) for _ in range(3)]
    while not any(map(engine.strategy.memory.is_swapped, ids)):
        engine.step(0.0)
    return ids


@pytest.mark.parametrize("fails", [False, True])
def test_moves_made_before_an_exception_still_happen(monkeypatch, fails):
    """A plan swaps a group in, and an exception ends it. The next plan swaps it out again."""
    engine = engine_of(num_blocks=12, max_step_tokens=64, preemption_mode="swap",
                       num_swap_blocks=8, enable_prefix_caching=False)  # fmt: skip
    ids = until_swapped_out(engine)
    bad = add(engine)
    original, submit, plans = engine.strategy._begin, engine.executor.submit, []

    def begin(group, budget):
        if group.request.id == bad:
            raise ZeroDivisionError("a bug")
        return original(group, budget)

    def submit_or_fail(plan, between_tokens):
        plans.append(plan)
        if fails and not plan.chunks:
            raise RuntimeError("lost")
        return submit(plan, between_tokens)

    monkeypatch.setattr(engine.strategy, "_begin", begin)
    monkeypatch.setattr(engine.executor, "submit", submit_or_fail)
    ends = {}
    while bad not in ends:
        ends |= {output.request_id: output.failure or output.finish for output in engine.step(0.0)}
    assert plans[-1].moves.swap_ins
    assert not plans[-1].chunks
    if not fails:
        engine.strategy._preempt(engine.strategy.running[-1])
    ends |= run(engine)[1]
    assert ends.pop(bad) == "ZeroDivisionError: a bug"
    assert [ends[id] == "RuntimeError: lost" for id in ids] == [False, False, fails]
