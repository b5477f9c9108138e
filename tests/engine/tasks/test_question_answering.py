"""Extractive question answering: the most likely span, across windows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core.errors import RequestError
from core.protocol.task_bodies import PipelineBody
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
