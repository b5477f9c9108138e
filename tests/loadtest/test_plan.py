"""Plans: reproducible by seed, with the workload's lengths and arrival times."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from loadtest.load.arrivals import BURST, bursts, poisson
from loadtest.load.plan import MARGIN, Load, Plan, make_plan, warm_up_requests
from loadtest.load.request import Words
from loadtest.load.traces import CONVERSATION
from loadtest.load.workloads import AWS_OUTPUTS, AWS_PROMPTS, WORKLOADS

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,100,10
2023-11-16 18:00:01.5000000,9000,10
2023-11-16 18:00:03.0000000,200,20
2023-11-16 18:00:04,300,30
"""


def plan(name: str = "aws", fixed_output: int | None = None, **changes: object) -> Plan:
    load = Load(**{"num_requests": 36, "users": 4, **changes})
    return make_plan(WORKLOADS[name], load, Words(), fixed_output=fixed_output)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_plan_depends_only_on_its_seed(name: str) -> None:
    assert plan(name) == plan(name)
    assert plan(name).requests != plan(name, seed=1).requests
    assert len(plan(name).requests) == 36


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_have_the_stated_number_of_words(name: str) -> None:
    for request in plan(name, length_scale=0.25).requests:
        assert len(request.prompt.split()) == request.shape.prompt_tokens


def test_a_prompt_has_fewer_words_if_a_word_is_several_tokens() -> None:
    load = Load(num_requests=9, users=1)
    requests = make_plan(WORKLOADS["aws"], load, Words(tokens_per_word=2.0)).requests
    assert all(
        len(request.prompt.split()) == request.shape.prompt_tokens / 2 for request in requests
    )


def test_aws_has_every_pair_of_lengths_equally_often() -> None:
    pairs = Counter(
        (request.shape.prompt_tokens, request.shape.output_tokens) for request in plan().requests
    )
    assert pairs == {(p, a): 4 for p in AWS_PROMPTS for a in AWS_OUTPUTS}
    scaled = {request.shape.prompt_tokens for request in plan(length_scale=0.25).requests}
    assert scaled == {16, 32, 64}
    assert {
        request.shape.output_tokens for request in plan(fixed_output=128, length_scale=0.5).requests
    } == {64}


def test_requests_that_are_too_long_are_left_out_and_counted() -> None:
    found = plan(max_length=512 + MARGIN - 1)
    assert all(
        request.shape.prompt_tokens + request.shape.output_tokens < 512
        for request in found.requests
    )
    assert (len(found.requests), found.num_left_out) == (36, 5)
    assert plan(max_length=512 + MARGIN).num_left_out == 0
    with pytest.raises(ValueError, match="--length-scale"):
        plan(max_length=100)


def test_only_the_shared_prefix_is_shared() -> None:
    requests = plan("shared-prefix").requests
    beginnings = {tuple(request.prompt.split()[:256]) for request in requests}
    assert len(beginnings) == 4
    assert len({request.prompt for request in requests}) == len(requests)


def test_parallel_and_beam_workloads_request_several_sequences() -> None:
    assert {request.shape.samples for request in plan("parallel").requests} == {4}
    assert {request.shape.beams for request in plan("beam").requests} == {4}


def test_long_prompts_among_streams() -> None:
    kinds = Counter(
        request.shape.kind
        for request in plan("long-prompt-among-streams", num_requests=32).requests
    )
    assert kinds == {"stream": 28, "long": 4}


def test_closed_and_open_loops() -> None:
    assert not plan().is_open
    assert plan().loop.startswith("closed loop: 4 users")
    assert (plan().num_users(4), plan(num_requests=9).num_users(50)) == (4, 9)
    poisson_plan = plan(rate=2.0)
    assert poisson_plan.is_open
    assert "Poisson arrivals, 2 requests/s" in poisson_plan.loop
    assert poisson_plan.num_users(4) == 36, "no request waits for another's answer"


def test_an_open_loop_has_the_requests_that_fall_due_in_its_seconds() -> None:
    whole, cut = plan(rate=2.0), plan(rate=2.0, seconds=5.0)
    assert 1 < len(cut.requests) < 36
    due = [request for request in whole.requests if (request.due_s or 0.0) <= 5]
    assert cut.requests == tuple(due)
    assert cut.stop_s is None
    assert cut.loop.endswith("2 requests/s, for 5 s")
    assert len(plan(rate=2.0, seconds=1e-9).requests) == 1, "no run is empty"


def test_users_of_a_closed_loop_stop_after_its_seconds() -> None:
    found = plan(seconds=5.0)
    assert (found.requests, found.stop_s) == (plan().requests, 5.0)
    assert found.loop.endswith("after a response, for 5 s")
    assert plan().stop_s is None


def test_a_trace_gives_lengths_and_arrivals(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    found = plan("chat", trace=tmp_path / "trace.csv", max_length=1000, time_scale=2.0)
    assert [(a.shape.prompt_tokens, a.shape.output_tokens) for a in found.requests] == [
        (100, 10),
        (200, 20),
        (300, 30),
    ]
    assert [request.due_s for request in found.requests] == [0.0, 1.5, 2.0]
    assert (found.num_left_out, found.is_open) == (1, True)
    at_rate = plan("chat", trace=tmp_path / "trace.csv", max_length=1000, rate=3.0)
    assert at_rate.requests[-1].due_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text", ["TIMESTAMP,ContextTokens\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"]
)
def test_invalid_traces(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=r"trace\.csv has no"):
        plan("chat", trace=tmp_path / "trace.csv")


def test_sampled_lengths_match_the_published_trace() -> None:
    """Azure's prompts have a mean of 1155 tokens and a median of 1020, the answers 211 and 129."""
    shapes = list(islice(CONVERSATION.shapes(Random(0)), 20_000))
    prompts, answers = (
        [getattr(shape, name) for shape in shapes] for name in ("prompt_tokens", "output_tokens")
    )
    assert sum(prompts) / len(prompts) == pytest.approx(1155, rel=0.15)
    assert sum(answers) / len(answers) == pytest.approx(211, rel=0.1)


@pytest.mark.parametrize("process", [poisson, bursts])
def test_arrivals_have_the_requested_rate(process) -> None:
    times = list(islice(process(4.0, Random(0)), 8000))
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05)


def test_bursts_arrive_at_once() -> None:
    times = list(islice(bursts(4.0, Random(0)), 200))
    together = Counter(times)
    assert BURST in together.values()
    assert 1 in together.values()
    gaps = [after - before for before, after in pairwise(t for t, n in together.items() if n > 1)]
    assert gaps == pytest.approx([BURST / 2.0] * len(gaps))


def test_the_warm_up_has_other_prompts_of_the_same_length() -> None:
    measured = plan()
    warm_up = warm_up_requests(measured, Words(), 5)
    assert [request.shape.prompt_tokens for request in warm_up] == [
        request.shape.prompt_tokens for request in measured.requests[:5]
    ]
    assert not {request.prompt for request in warm_up} & {
        request.prompt for request in measured.requests
    }
    assert {request.shape.output_tokens for request in warm_up} == {4}
