"""What is sent: the same for the same seed, in the lengths and at the times of the workload."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from loadtest.arrivals import BURST, bursts, poisson
from loadtest.plan import MARGIN, Load, Plan, make_plan, warm_up_asks
from loadtest.traces import CONVERSATION
from loadtest.words import Words
from loadtest.workloads import AWS_ANSWERS, AWS_PROMPTS, WORKLOADS

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,100,10
2023-11-16 18:00:01.5000000,9000,10
2023-11-16 18:00:03.0000000,200,20
2023-11-16 18:00:04,300,30
"""


def plan(name: str = "aws", fixed_answer: int | None = None, **changes: object) -> Plan:
    load = Load(**{"requests": 36, "users": 4, **changes})
    return make_plan(WORKLOADS[name], load, Words(), fixed_answer=fixed_answer)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_plan_is_a_function_of_its_seed(name: str) -> None:
    assert plan(name) == plan(name)
    assert plan(name).asks != plan(name, seed=1).asks
    assert len(plan(name).asks) == 36


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_have_the_words_that_they_are_said_to_have(name: str) -> None:
    for ask in plan(name, length_scale=0.25).asks:
        assert len(ask.prompt.split()) == ask.shape.prompt


def test_words_of_several_tokens_make_fewer_of_them() -> None:
    load = Load(requests=9, users=1)
    asks = make_plan(WORKLOADS["aws"], load, Words(tokens_per_word=2.0)).asks
    assert all(len(ask.prompt.split()) == ask.shape.prompt / 2 for ask in asks)


def test_aws_has_every_pair_of_lengths_equally_often() -> None:
    pairs = Counter((ask.shape.prompt, ask.shape.answer) for ask in plan().asks)
    assert pairs == {(p, a): 4 for p in AWS_PROMPTS for a in AWS_ANSWERS}
    scaled = {ask.shape.prompt for ask in plan(length_scale=0.25).asks}
    assert scaled == {16, 32, 64}
    assert {ask.shape.answer for ask in plan(fixed_answer=128, length_scale=0.5).asks} == {64}


def test_what_is_too_long_is_left_out_and_counted() -> None:
    found = plan(max_length=512 + MARGIN - 1)
    assert all(ask.shape.prompt + ask.shape.answer < 512 for ask in found.asks)
    assert (len(found.asks), found.num_left_out) == (36, 5)
    assert plan(max_length=512 + MARGIN).num_left_out == 0
    with pytest.raises(ValueError, match="--length-scale"):
        plan(max_length=100)


def test_shared_prefixes_are_shared_and_rests_are_not() -> None:
    asks = plan("shared-prefix").asks
    beginnings = {tuple(ask.prompt.split()[:256]) for ask in asks}
    assert len(beginnings) == 4
    assert len({ask.prompt for ask in asks}) == len(asks)


def test_parallel_and_beam_ask_for_several() -> None:
    assert {ask.shape.samples for ask in plan("parallel").asks} == {4}
    assert {ask.shape.beams for ask in plan("beam").asks} == {4}


def test_long_prompts_among_streams() -> None:
    kinds = Counter(ask.shape.kind for ask in plan("long-prompt-among-streams", requests=32).asks)
    assert kinds == {"stream": 28, "long": 4}


def test_loops() -> None:
    assert not plan().is_open
    assert plan().loop.startswith("closed loop: 4 users")
    assert (plan().num_users(4), plan(requests=9).num_users(50)) == (4, 9)
    poisson_plan = plan(rate=2.0)
    assert poisson_plan.is_open
    assert "Poisson arrivals, 2 requests/s" in poisson_plan.loop
    assert poisson_plan.num_users(4) == 36, "nobody waits for another's answer"


def test_a_trace_gives_lengths_and_arrivals(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    found = plan("chat", trace=tmp_path / "trace.csv", max_length=1000, time_scale=2.0)
    assert [(a.shape.prompt, a.shape.answer) for a in found.asks] == [
        (100, 10),
        (200, 20),
        (300, 30),
    ]
    assert [ask.due_s for ask in found.asks] == [0.0, 1.5, 2.0]
    assert (found.num_left_out, found.is_open) == (1, True)
    at_rate = plan("chat", trace=tmp_path / "trace.csv", max_length=1000, rate=3.0)
    assert at_rate.asks[-1].due_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text", ["TIMESTAMP,ContextTokens\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"]
)
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=r"trace\.csv has no"):
        plan("chat", trace=tmp_path / "trace.csv")


def test_drawn_lengths_have_the_moments_of_the_published_trace() -> None:
    """Azure's conversations have means of 1155 and 211 tokens, and medians of 1020 and 129."""
    shapes = list(islice(CONVERSATION.shapes(Random(0)), 20_000))
    prompts, answers = ([getattr(each, of) for each in shapes] for of in ("prompt", "answer"))
    assert sum(prompts) / len(prompts) == pytest.approx(1155, rel=0.15)
    assert sum(answers) / len(answers) == pytest.approx(211, rel=0.1)


@pytest.mark.parametrize("process", [poisson, bursts])
def test_arrivals_have_their_rate(process) -> None:
    times = list(islice(process(4.0, Random(0)), 8000))
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05)


def test_bursts_come_at_one_moment() -> None:
    times = list(islice(bursts(4.0, Random(0)), 200))
    together = Counter(times)
    assert BURST in together.values()
    assert 1 in together.values()
    gaps = [after - before for before, after in pairwise(t for t, n in together.items() if n > 1)]
    assert gaps == pytest.approx([BURST / 2.0] * len(gaps))


def test_the_warm_up_has_other_prompts_of_the_same_length() -> None:
    measured = plan()
    warm_up = warm_up_asks(measured, Words(), 5)
    assert [ask.shape.prompt for ask in warm_up] == [ask.shape.prompt for ask in measured.asks[:5]]
    assert not {ask.prompt for ask in warm_up} & {ask.prompt for ask in measured.asks}
    assert {ask.shape.answer for ask in warm_up} == {4}
