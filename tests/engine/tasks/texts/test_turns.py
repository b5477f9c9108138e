"""Requests with many inputs do not hold up others: steps take inputs by turns."""

from __future__ import annotations

import msgspec
import pytest

from core.protocol.task_bodies import EmbeddingBody
from engine.tasks import turns
from engine.tasks.performer import Job
from engine.tasks.turns import Prepared, Waiting, take_turns
from tests.engine.tasks.bodies import body
from tests.engine.tasks.conftest import decoded, engine_of


def waiting(*texts):
    """Inputs with a token for each letter, and the parts in which they are prepared."""
    parts = []

    def prepare(positions):
        parts.append([texts[at] for at in positions])
        return [Prepared(len(texts[at]), at, texts[at]) for at in positions if "?" not in texts[at]]

    return Waiting(list(map(len, texts)), prepare), parts


def taken(num_tokens, **running):
    return [(key, item.value) for key, item in take_turns(running, num_tokens)]


def test_a_step_takes_the_longest_text_that_fits_of_the_request_with_the_fewest_tokens():
    many, _ = waiting("aaaa", "bb", "c")
    one, _ = waiting("ddd")
    assert taken(8, many=many, one=one) == [("many", "aaaa"), ("one", "ddd"), ("many", "c")]
    assert not many.has_ended
    assert one.has_ended
    assert taken(1, many=many, one=one) == [("many", "bb")], "the first one may exceed the budget"
    assert many.has_ended


def test_texts_are_prepared_when_they_have_their_turn(monkeypatch):
    monkeypatch.setattr(turns, "READ_AT_ONCE", 6)
    many, parts = waiting(*["aaa"] * 9)
    late, late_parts = waiting("b")
    assert taken(3, many=many, late=late) == [("many", "aaa")]
    assert (parts, late_parts) == ([["aaa"] * 2], [])
    assert taken(4, many=many, late=late) == [("late", "b"), ("many", "aaa")]
    assert (parts, late_parts) == ([["aaa"] * 2], [["b"]])
    assert taken(99, many=many) == [("many", "aaa")] * 2, "it tokenizes no more in this step"
    assert len(parts) == 2


def test_a_step_prepares_a_limited_number_of_texts_that_cannot_be_computed(monkeypatch):
    monkeypatch.setattr(turns, "READ_AT_ONCE", 6)
    wrong, parts = waiting(*["???"] * 9)
    for number in range(1, 6):
        assert taken(9, wrong=wrong) == []
        assert len(parts) == number
    assert wrong.has_ended


def bodies(name, texts):
    """Return the bodies of a request of these texts, and of one of a single text."""
    if name == "encoder":
        return EmbeddingBody(texts, "input"), EmbeddingBody(["who"], "input")
    if name == "reranker":
        pairs = [{"text": "the cat", "text_pair": text} for text in texts]
        return body(pairs, top_k=2), body([{"text": "the cat", "text_pair": "who"}], top_k=2)
    return body(texts), body("who")


@pytest.mark.parametrize("name", ["encoder", "reranker", "classifier", "tagger", "filler"])
def test_a_single_text_waits_one_step_for_a_request_of_a_thousand(task_model, name):
    """With `dynamic`, its batch begins when the one that runs has ended."""
    texts = ["the [MASK] sat"] * 1000
    for batching in ("continuous", "dynamic"):
        engine = engine_of(
            task_model(name), batching=batching, max_rolling_batch_prefill_tokens=512
        )
        sizes = []

        def before(model, args, inputs, sizes=sizes):
            sizes.append(inputs["input_ids"].numel())

        model = getattr(engine.performer.model, "model", engine.performer.model)
        model.register_forward_pre_hook(before, with_kwargs=True)
        requests = bodies(name, texts)
        many = engine.add(Job(msgspec.msgpack.encode(requests[0])), 0.0)
        assert engine.advance(1.0) == []
        if name == "filler":
            requests = requests[0], body("who [MASK]")
        single = engine.add(Job(msgspec.msgpack.encode(requests[1])), 2.0)
        next_step = [output.request_id for output in engine.advance(3.0)]
        assert next_step == ([single] if batching == "continuous" else [])
        ended = []
        while engine.has_work():
            ended += engine.advance(4.0)
        assert [output.request_id for output in ended][:1] == [many]
        assert all(size <= 512 for size in sizes)
        if name != "encoder":
            assert len(decoded(ended[0].outcome)) == 1000


def test_an_aborted_request_is_not_classified_further(task_model):
    engine = engine_of(task_model("reranker"))
    many = engine.add(Job(msgspec.msgpack.encode(bodies("reranker", ["a"] * 999)[0])), 0.0)
    engine.advance(0.0)
    assert len(engine.performer._running) == 1
    engine.abort(many)
    assert not engine.has_work()
    assert not engine.performer._running
