"""Extractive question answering: the most likely span, across windows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
import torch

from core.configuration.limits import WINDOWS
from core.errors import EngineUnavailableError, RequestError
from core.protocol.task_bodies import PipelineBody
from engine.tasks.performer import Answer, Job
from engine.tasks.pipelines.question_answering import WINDOWS_PER_RUN
from tests.engine.tasks.conftest import decoded, engine_of, perform
from tests.engine.tasks.words import WORDS

CONTEXT = "the cat sat on a mat and the dog ran"


def ask(question="where", context=CONTEXT, **parameters):
    return PipelineBody([{"question": question, "context": context}], False, parameters)


class Reader(torch.nn.Module):
    """Starts each answer at one word and ends it at another, with high probability."""

    def __init__(self, start="sat", end="mat", nothing=0.0):
        super().__init__()
        self.start, self.end, self.nothing = WORDS.index(start), WORDS.index(end), nothing
        self.device, self.shapes = torch.device("cpu"), []

    def forward(self, input_ids, **_):
        self.shapes.append(tuple(input_ids.shape))
        starts, ends = (9.0 * (input_ids == token_id) for token_id in (self.start, self.end))
        starts[:, 0] = ends[:, 0] = self.nothing
        return SimpleNamespace(start_logits=starts, end_logits=ends)


@pytest.fixture
def reader(task_model):
    """Return a function that makes an engine with a `Reader` as its model."""

    def make(**options):
        engine = engine_of(task_model("reader"))
        model = Reader(**options)
        engine.performer.model.model = model
        return engine, model

    return make


def test_the_answer_is_the_text_from_start_to_end(reader):
    engine, _ = reader()
    answer = decoded(perform(engine, ask())[0])
    assert answer["answer"] == "sat on a mat"
    assert CONTEXT[answer["start"] : answer["end"]] == "sat on a mat"
    assert 0.9 < answer["score"] < 1


def test_the_question_is_never_the_answer(reader):
    engine, _ = reader()
    answer = decoded(perform(engine, ask("the cat sat on a mat who", "dog ran"))[0])
    assert answer["answer"] in ("dog", "ran", "dog ran")


def test_questions_of_a_batch_are_independent(reader):
    engine, model = reader()
    other = ask(context="a mat on it ran")
    outcomes = perform(engine, ask(), other, ask(top_k=2), PipelineBody(["who"], False, {}))
    assert decoded(outcomes[0])["answer"] == "sat on a mat"
    assert "mat" in decoded(outcomes[1])["answer"]
    first, second = decoded(outcomes[2])
    assert first["answer"] == "sat on a mat"
    assert first["score"] > second["score"]
    assert isinstance(outcomes[3], RequestError)
    assert [shape[0] for shape in model.shapes] == [2, 1], "equal parameters run together"


def test_a_long_context_is_read_in_overlapping_windows(reader):
    engine, model = reader()
    for before in range(60):
        context = " ".join(["dog"] * before + [CONTEXT] + ["it"] * 30)
        answer = decoded(perform(engine, ask(context=context, doc_stride=8))[0])
        assert answer["answer"] == "sat on a mat"
        assert context[answer["start"] : answer["end"]] == "sat on a mat"
    assert max(rows for rows, _ in model.shapes) > 3
    assert max(length for _, length in model.shapes) == 32


def test_a_question_may_fill_most_of_a_window(reader):
    """A window has 32 tokens. Three of them are special, and the context needs eight."""
    engine, _ = reader()
    for words in range(1, 40):
        outcome = perform(engine, ask("who " * words, f"{'it ' * 90}{CONTEXT}"))[0]
        if words <= 21:
            assert decoded(outcome)["answer"] == "sat on a mat"
        else:
            assert isinstance(outcome, RequestError)
            assert outcome.field == "inputs.question"
            assert f"has {words} tokens" in str(outcome)


@pytest.mark.parametrize("stride", [0, 1, 31, 128, 10**6])
def test_windows_of_any_size(task_model, stride):
    engine = engine_of(task_model("reader"))
    for length in range(1, 40):
        parameters = {"max_seq_len": length, "doc_stride": stride}
        outcome = perform(engine, ask("who is it", CONTEXT * 9, **parameters))[0]
        assert isinstance(outcome, Answer) == (length >= 8)
        assert length >= 8 or outcome.field == "inputs.question"


def test_other_requests_are_taken_between_the_windows_of_a_context(reader):
    engine, model = reader()
    engine.add(Job(msgspec.msgpack.encode(ask(context="it " * 1000 + CONTEXT))), 0.0)
    num_runs = []
    [output] = engine.advance(1.0, lambda: num_runs.append(len(model.shapes)))
    assert decoded(output.outcome)["answer"] == "sat on a mat"
    sizes = [rows for rows, _ in model.shapes]
    assert sizes[:-1] == [WINDOWS_PER_RUN] * (len(sizes) - 1)
    assert len(sizes) > 1
    assert set(num_runs) >= set(range(1, len(sizes)))


def test_a_context_has_a_limited_number_of_windows(reader, monkeypatch):
    engine, model = reader()
    limit = dataclasses.replace(WINDOWS, maximum=3)
    monkeypatch.setattr("engine.tasks.pipelines.question_answering.WINDOWS", limit)
    answered, refused = perform(engine, ask(context="it " * 50), ask(context="it " * 90))
    assert isinstance(answered, Answer)
    assert refused.field == "inputs.context"
    assert [rows for rows, _ in model.shapes] == [3]


def test_a_lost_connection_ends_the_engine_between_windows(reader):
    engine, _ = reader()

    def lose():
        raise EngineUnavailableError("the socket failed")

    engine.add(Job(msgspec.msgpack.encode(ask(context="it " * 1000))), 0.0)
    with pytest.raises(EngineUnavailableError):
        engine.advance(1.0, lose)


def test_answers_are_no_longer_than_allowed(reader):
    engine, _ = reader()
    answer = decoded(perform(engine, ask(max_answer_len=3))[0])
    assert len(answer["answer"].split()) <= 3


def test_an_impossible_answer_is_empty_if_allowed(reader):
    engine, _ = reader(nothing=20.0)
    allowed, forced = perform(engine, ask(handle_impossible_answer=True), ask())
    assert decoded(allowed)["answer"] == ""
    assert decoded(forced)["answer"] == "sat on a mat"


def test_a_real_model_answers_from_the_context(task_model):
    engine = engine_of(task_model("reader"))
    assert engine.facts.task == "question-answering"
    answer = decoded(perform(engine, ask())[0])
    assert answer["answer"]
    assert CONTEXT[answer["start"] : answer["end"]] == answer["answer"]


@pytest.mark.parametrize("parameters", [{"top_k": 0}, {"max_answer_len": 0}, {"stride": 3}])
def test_invalid_parameters(task_model, parameters):
    (outcome,) = perform(engine_of(task_model("reader")), ask(**parameters))
    assert outcome.field == "parameters"
