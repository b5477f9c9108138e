"""Overlapping steps: the next step is submitted before this step's tokens are known."""

from __future__ import annotations

import pytest

from core.errors import GenerationError
from core.part import Part
from core.plan import StepPlan
from core.sampling import Finish, SamplingParams
from engine import LLM
from engine.engine import MAX_FAILED_STEPS, Engine
from tests.engine.greedy_answers import STRATEGIES, prompts, tokens
from tests.engine.serve.serving import FACTS
from tests.escaping import ESCAPING
from tests.strategies.fakes import FakeExecutor, next_token, strategy_of

SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}


class Recorder:
    """An executor that records when steps are submitted and waited for."""

    def __init__(self):
        self.executor = FakeExecutor(4)
        self.events: list[str] = []
        self.plans: list[StepPlan] = []
        self.fails_at: dict[str, BaseException] = {}

    def submit(self, plan, between_tokens):
        self.plans.append(plan)
        number = len(self.plans)
        self._note(f"submit {number}")
        step, note = self.executor.submit(plan, between_tokens), self._note

        class Noted:
            def wait(self):
                note(f"wait {number}")
                return step.wait()

        return Noted()

    def _note(self, event):
        self.events.append(event)
        if event in self.fails_at:
            raise self.fails_at[event]


def engine_of(overlaps, batching="paged", **settings):
    return Engine(strategy_of(batching, **settings), Recorder(), FACTS, overlaps=overlaps)


def params(max_tokens=8, **changes):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


def run(engine):
    """Run the engine until it has no work and return all outputs by sequence."""
    answers: dict[int, list[int]] = {}
    finish: dict[int, Finish] = {}
    while engine.has_work():
        for output in engine.step(0.0):
            assert output.request_id not in finish
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                finish[output.request_id] = output.finish
    return answers, finish


def test_the_next_step_is_submitted_before_waiting_for_this_one():
    for overlaps, order in ((False, "s1 w1 s2 w2 s3 w3"), (True, "s1 s2 w1 s3 w2 w3")):
        engine = engine_of(overlaps)
        engine.add([1, 2], params(3), now=0.0)
        run(engine)
        events = [event[0] + event.split()[1] for event in engine.executor.events]
        assert events == order.split(), "no step is submitted after the last token"


def test_outputs_come_one_call_later_and_are_complete():
    engine = engine_of(True)
    id = engine.add([1, 2], params(3), now=0.0)
    assert engine.step(0.0) == []
    [first] = engine.step(0.0)
    assert first.token_ids == (next_token(id, [1, 2]),)
    answers, finish = run(engine)
    assert (len(answers[id]), finish[id]) == (2, Finish.LENGTH)


class NeedsNewest(Part):
    needs_newest = True


def test_a_step_that_waits_for_tokens_is_submitted_before_these_are_handled():
    engine = engine_of(True)
    engine.add([1, 2], params(3), now=0.0, parts=(NeedsNewest(),))
    events = engine.executor.events
    while engine.has_work():
        if outputs := engine.advance(0.0):
            events.append(f"handled {sum(len(each.token_ids) for each in outputs)}")
    order = "submit 1|wait 1|submit 2|handled 1|wait 2|submit 3|handled 1|wait 3|handled 1"
    assert events == order.split("|")


def test_what_overlaps_is_submitted_once_a_call():
    engine = engine_of(True)
    engine.add([1, 2], params(8), now=0.0)
    for number in range(1, 4):
        engine.advance(0.0)
        assert engine.num_steps == number


def test_an_unexpected_end_leaves_nothing_behind():
    engine = engine_of(True)
    stop = next_token(0, [1, 2])
    id = engine.add([1, 2], params(8, stop_token_ids=(stop,)), now=0.0)
    answers, finish = run(engine)
    assert (answers[id], finish[id]) == ([stop], Finish.STOP)
    assert len(engine.executor.plans) == 2, "the second step was already in flight"
    assert engine.strategy.memory.num_held_blocks == 0


def test_an_abort_discards_the_step_in_flight():
    engine = engine_of(True)
    kept, gone = (engine.add([1, id], params(4), now=0.0) for id in (2, 3))
    engine.step(0.0)
    engine.step(0.0)
    engine.abort(gone)
    answers, finish = run(engine)
    assert finish == {kept: Finish.LENGTH}
    assert gone not in answers
    assert engine.strategy.memory.num_held_blocks == 0


@pytest.mark.parametrize("event", ["submit 3", "wait 3"])
def test_a_failed_step_ends_only_its_sequences(event):
    engine = engine_of(True, max_sequences=2)
    first = engine.add([1, 2], params(6), now=0.0)
    engine.executor.fails_at = {event: RuntimeError("out of memory")}
    outputs = [*engine.step(0.0), *engine.step(0.0)]
    late = engine.add([1, 3], params(2), now=0.0) if event == "wait 3" else None
    answers, finish, failures = {}, {}, set()
    while engine.has_work():
        for output in engine.step(0.0):
            finish[output.request_id] = output.finish
            failures |= {output.failure} if output.failure else set()
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert len(outputs) == 1
    assert finish.pop(first) == Finish.ERROR
    assert len(answers[first]) == (1 if event == "wait 3" else 0)
    assert failures == {"RuntimeError: out of memory"}
    assert finish == ({} if late is None else {late: Finish.ERROR})
    later = engine.add([4], params(2), now=0.0)
    assert run(engine)[1] == {later: Finish.LENGTH}


@pytest.mark.parametrize("kind", ESCAPING)
@pytest.mark.parametrize("event", ["submit 3", "wait 3"])
def test_a_panic_of_a_library_ends_only_the_sequences_of_its_step(event, kind):
    engine = engine_of(True)
    failed = engine.add([1, 2], params(6), now=0.0)
    engine.executor.fails_at = {event: kind("why")}
    assert run(engine)[1] == {failed: Finish.ERROR}
    later = engine.add([4], params(2), now=0.0)
    assert run(engine)[1] == {later: Finish.LENGTH}


def test_a_device_that_keeps_failing_ends_the_engine():
    engine = engine_of(True)
    engine.executor.fails_at = {f"wait {n}": RuntimeError("lost") for n in range(1, 9)}
    with pytest.raises(RuntimeError, match="lost"):  # noqa: PT012
        for _ in range(2 * MAX_FAILED_STEPS):
            engine.add([1], params(2), now=0.0)
            engine.step(0.0)


@pytest.mark.parametrize("batching", STRATEGIES)
def test_tokens_equal_generate(tiny_model, expected, batching):
    """`paged` preempts sequences while their tokens are in flight."""
    llm = LLM(
        tiny_model("llama"),
        batching=batching,
        async_scheduling=True,
        num_kv_blocks=14 if batching == "paged" else 40,
        **SMALL,
        **STRATEGIES[batching],
    )
    assert tokens(llm) == expected("llama")
    if batching == "paged":
        assert llm.llm_engine.strategy.num_preemptions > 0
    assert llm.llm_engine.strategy.memory.num_held_blocks == 0


@pytest.mark.parametrize(("num_blocks", "num_prompt_tokens"), [(11, 13), (13, 17)])
def test_clients_that_send_the_same_prompt_at_once_get_their_samples(
    tiny_model, num_blocks, num_prompt_tokens
):
    """The prompt's blocks are computed twice and kept once, also for samples forked meanwhile."""
    llm = LLM(
        tiny_model("llama"),
        async_scheduling=True,
        num_kv_blocks=num_blocks,
        swap_space=0.001,
        dtype="fp32",
        block_size=4,
    )
    prompt = list(range(1, 1 + num_prompt_tokens))
    results = llm.generate([prompt] * 2, params(12, n=2, seed=1), use_tqdm=False)
    assert llm.llm_engine.strategy.num_swaps > 0
    answers = [[output.token_ids for output in result.outputs] for result in results]
    assert answers[0] == answers[1]
    assert {len(ids) for ids in answers[0]} == {12}


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"temperature": 0, "repetition_penalty": 1.7},
        {"temperature": 1.3, "top_k": 9, "repetition_penalty": 0.8, "seed": 1},
    ],
    ids=str,
)
def test_sampling_equals_that_without_overlap(tiny_model, changes):
    """Penalties and draws depend on tokens that are still in flight."""
    answers = []
    for overlaps in (False, True):
        llm = LLM(tiny_model("llama"), async_scheduling=overlaps, num_kv_blocks=14, **SMALL)
        outputs = llm.generate(prompts(), params(14, **changes), use_tqdm=False)
        answers.append(
            [
                (output.outputs[0].token_ids, output.outputs[0].cumulative_logprob)
                for output in outputs
            ]
        )
    plain, overlapped = answers
    assert [ids for ids, _ in plain] == [ids for ids, _ in overlapped]
    for (_, left), (_, right) in zip(plain, overlapped, strict=True):
        assert left == pytest.approx(right, abs=1e-3)


def test_llm_remains_usable_after_a_failure(tiny_model, monkeypatch):
    llm = LLM(tiny_model("llama"), async_scheduling=True, **SMALL)

    def fail(plan, between_tokens):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.executor, "submit", fail)
        with pytest.raises(GenerationError, match="out of memory"):
            llm.generate(prompts(), params(4), use_tqdm=False)
    [answer] = llm.generate([[1, 2]], params(4), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 4
