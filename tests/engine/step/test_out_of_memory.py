"""Memory that runs out in a step: only the largest request of the step ends."""

from __future__ import annotations

import msgspec
import pytest
import torch

from core.configuration.options import make_options
from core.sampling import Finish, SamplingParams
from core.text.tokenizer import Tokenizer
from engine.build import build_engine
from engine.engine import MAX_FAILED_STEPS, Engine
from tests.e2e.serving import DEMO
from tests.engine.serve.serving import FACTS
from tests.strategies.fakes import FakeExecutor, next_token, strategy_of

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
SHORT, LONG = [3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5]


class Limited:
    """An executor that runs out of memory in steps of more than `limit` tokens."""

    def __init__(self, executor, limit, error=torch.OutOfMemoryError):
        self._executor = executor
        self._error = error
        self.limit = limit
        self.num_failures = 0

    def submit(self, plan, between_tokens):
        if plan.num_tokens > self.limit:
            self.num_failures += 1
            raise self._error("no memory left")
        return self._executor.submit(plan, between_tokens)


def engine_of(batching, limit, *, overlaps=False, error=torch.OutOfMemoryError, **settings):
    executor = Limited(FakeExecutor(4), limit, error)
    return Engine(strategy_of(batching, **settings), executor, FACTS, overlaps=overlaps)


def run(engine):
    """Run the engine until it has no work; return tokens and finish reasons by request."""
    tokens, finish, now = {}, {}, 0.0
    while engine.has_work():
        now += 100.0
        for output in engine.step(now):
            tokens[output.request_id] = [*tokens.get(output.request_id, []), *output.token_ids]
            if output.finish is not None:
                finish[output.request_id] = output.finish, output.failure
    return tokens, finish


def expected(id, prompt, count=6):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(id, tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", ["dynamic", "continuous", "paged"])
def test_only_the_largest_request_of_the_step_ends(batching, overlaps):
    """A step takes 8 tokens. The first would have 8 + 3 + 3; without the 8, the others fit."""
    engine = engine_of(batching, 8, overlaps=overlaps)
    short, long, other = (engine.add(prompt, PARAMS, 0.0) for prompt in (SHORT, LONG, SHORT))
    tokens, finish = run(engine)
    reason = "out of memory in a step of 3 sequences; this one was the largest"
    assert finish[long] == (Finish.ERROR, reason)
    assert (finish[short][0], finish[other][0]) == (Finish.LENGTH, Finish.LENGTH)
    assert (tokens[short], tokens[other]) == (expected(short, SHORT), expected(other, SHORT))
    assert tokens[long] == []
    assert engine.executor.num_failures == 1
    assert engine.strategy.memory.num_held_blocks == 0


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", ["continuous", "paged"])
def test_a_new_prompt_that_does_not_fit_ends_and_running_answers_go_on(batching, overlaps):
    engine = engine_of(batching, 7, overlaps=overlaps)
    running = engine.add(SHORT, PARAMS, 0.0)
    collected = []
    for _ in range(3):
        collected += [id for output in engine.step(0.0) for id in output.token_ids]
    late = engine.add(LONG, PARAMS, 0.0)
    tokens, finish = run(engine)
    assert finish[late][0] == Finish.ERROR
    assert finish[running][0] == Finish.LENGTH
    assert collected + tokens[running] == expected(running, SHORT)


def test_as_many_requests_end_as_needed():
    engine = engine_of("paged", 3, enable_prefix_caching=False)
    ids = [engine.add([at + 1] * 3, PARAMS, 0.0) for at in range(4)]
    tokens, finish = run(engine)
    survivors = [id for id in ids if finish[id][0] == Finish.LENGTH]
    assert len(survivors) == 1, "each attempt ends one request"
    assert tokens[survivors[0]] == expected(survivors[0], [survivors[0] + 1] * 3)


def test_a_single_request_ends_and_the_engine_gives_up_after_several():
    engine = engine_of("paged", 5)
    for _ in range(MAX_FAILED_STEPS - 1):
        engine.add(LONG, PARAMS, 0.0)
        _, finish = run(engine)
        assert [reason for reason, _ in finish.values()] == [Finish.ERROR]
    engine.add(LONG, PARAMS, 0.0)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine)


def test_any_other_error_ends_all_requests_of_the_step():
    """It is unknown which request caused the error, and what the device's memory holds now."""
    engine = engine_of("paged", 8, error=ValueError)
    ids = [engine.add(prompt, PARAMS, 0.0) for prompt in (SHORT, LONG, SHORT)]
    _, finish = run(engine)
    assert [finish[id] for id in ids] == [(Finish.ERROR, "ValueError: no memory left")] * 3
    later = engine.add(SHORT, PARAMS, 0.0)
    assert run(engine)[0][later] == expected(later, SHORT)


class NoMoves(Limited):
    """An executor that runs out of memory in the first step that moves blocks."""

    def submit(self, plan, between_tokens):
        if plan.moves and not self.num_failures:
            self.num_failures += 1
            raise torch.OutOfMemoryError("no memory left")
        return super().submit(plan, between_tokens)


def test_all_requests_end_if_memory_runs_out_in_a_step_that_moves_blocks():
    """It is unknown which moves have happened. Here, the moves are copies for second samples."""
    executor = NoMoves(FakeExecutor(4), limit=99)
    engine = Engine(strategy_of("paged"), executor, FACTS)
    params = msgspec.structs.replace(PARAMS, n=2)
    ids = [engine.add([at + 1] * 6, params, 0.0) for at in range(2)]
    _, finish = run(engine)
    assert executor.num_failures == 1
    assert [finish[id][0] for id in ids] == [Finish.ERROR] * 2
    assert all(finish[id][1].startswith("out of memory in a step of") for id in ids)
    assert engine.strategy.memory.num_held_blocks == 0
    later = engine.add(SHORT, PARAMS, 0.0)
    assert run(engine)[0][later] == expected(later, SHORT)


@pytest.mark.parametrize(
    ("batching", "executor"),
    [("dynamic", "library"), ("dynamic", "packed"), ("continuous", "packed"), ("paged", "packed")],
)
def test_a_real_model_answers_the_others_as_if_nothing_had_happened(batching, executor):
    """The requests have penalties and seeds, since sampling keeps state between steps."""
    params = SamplingParams(
        max_tokens=12, temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.5
    )
    tokenizer = Tokenizer(DEMO)
    large = "First Citizen:\nBefore we proceed any further, hear me speak."
    small, small_too, large = map(tokenizer.encode, ("ROMEO:", "JULIET:\nO", large))
    options = make_options(
        {"batching": batching, "executor": executor, "dtype": "fp32", "num_kv_blocks": 300}
    )
    engine = build_engine(DEMO, options)
    ids = [engine.add(prompt, params, 0.0) for prompt in (small, small_too)]
    tokens, _ = run(engine)
    wanted = [tokens[id] for id in ids]
    engine = build_engine(DEMO, options)
    engine.executor = Limited(engine.executor, len(large))
    first, lost, last = (engine.add(prompt, params, 0.0) for prompt in (small, large, small_too))
    tokens, finish = run(engine)
    assert finish[lost][0] == Finish.ERROR
    assert [tokens[first], tokens[last]] == wanted
    assert engine.executor.num_failures == 1
