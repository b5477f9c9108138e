"""Tasks whose input is an object: tables, pages of documents, conversations with images."""

from __future__ import annotations

from copy import deepcopy

import pandas as pd
import pytest
from transformers import pipeline
from transformers.pipelines import any_to_any, document_question_answering

from core.errors import ConfigurationError, RequestError
from engine.tasks import loading
from engine.tasks.pipelines import inputs
from tests.engine.tasks.bodies import as_transformers_wants_it, body, close, image
from tests.engine.tasks.conftest import decoded, engine_of, perform

TABLE = {"name": ["cat", "dog"], "age": ["1", "2"]}
WORDS = [["the", [0, 0, 10, 10]], ["cat", [10, 0, 20, 10]], ["sat", [20, 0, 1000, 10]]]
PARTS = [{"type": "image", "image": image("red")}, {"type": "text", "text": "the cat"}]
CONVERSATIONS = [
    body({"text": "<image> the cat", "image": image("blue")}, max_new_tokens=4),
    body({"text": "<image> <image> who", "images": [image("red")] * 2}, max_new_tokens=4),
    body({"text": "the cat"}, max_new_tokens=4, return_full_text=True),
    body({"messages": [{"role": "user", "content": PARTS}]}, max_new_tokens=4),
    body({"text": "who"}, generate_kwargs={"max_new_tokens": 2, "num_beams": 2}),
]


class TestTables:
    def asked(self, query="who", **parameters):
        return body({"table": TABLE, "query": query}, **parameters)

    def test_they_are_read_as_transformers_does(self, task_model):
        path = task_model("table_reader")
        engine = engine_of(path)
        assert engine.facts.task == "table-question-answering"
        reference = pipeline("table-question-answering", model=str(path), device="cpu")
        table = pd.DataFrame(TABLE, dtype=object)
        queries = ["who", "dog age", "cat"]
        expected = [reference(table=table, query=each) for each in queries]
        assert any(each["cells"] for each in expected)
        got = [decoded(each) for each in perform(engine, *map(self.asked, queries))]
        assert close(got, [each | {"coordinates": list(map(list, each["coordinates"]))}
                           for each in expected])  # fmt: skip

    def test_one_too_large_leaves_its_neighbours_alone(self, task_model):
        engine = engine_of(task_model("table_reader"))
        wide = {str(each): ["1"] for each in range(256)}
        high = {"age": ["1"] * 256}
        given = [{"table": each, "query": "who"} for each in (TABLE, wide, high)]
        (outcome,) = perform(engine, body(given))
        good, *bad = decoded(outcome)
        assert "answer" in good
        assert [each["field"] for each in bad] == ["inputs.table"] * 2

    def test_without_pandas_the_start_says_so(self, task_model, monkeypatch):
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
        with pytest.raises(ConfigurationError, match=r"pandas: pip install 'longshore\[tables\]'"):
            engine_of(task_model("table_reader"))


class TestDocuments:
    def asked(self, question="who is", **parameters):
        given = {"image": image("red"), "question": question, "word_boxes": WORDS}
        return body(given, **parameters)

    @pytest.mark.parametrize("name", ["page_reader", "page_and_picture_reader"])
    def test_they_are_read_as_transformers_does(self, task_model, monkeypatch, name):
        monkeypatch.setattr(inputs.shutil, "which", lambda _: None)
        path = task_model(name)
        engine = engine_of(path)
        assert engine.facts.task == "document-question-answering"
        reference = pipeline("document-question-answering", model=str(path), device="cpu")
        if reference.image_processor:
            reference.image_processor.apply_ocr = False
        requests = [self.asked(), self.asked("where", top_k=60), self.asked(max_answer_len=1)]
        answers = []
        for request, outcome in zip(requests, perform(engine, *requests), strict=True):
            expected = reference(as_transformers_wants_it(request.inputs[0]), **request.parameters)
            assert close(decoded(outcome), expected)
            answers += [each["answer"] for each in expected]
        assert len(set(answers)) > 1

    def test_a_long_page_is_read_in_parts(self, task_model):
        """Though its tokenizer may know no limit, and beyond the model's is another table."""
        engine = engine_of(task_model("page_reader"))
        given = {"image": image("red"), "question": "who", "word_boxes": WORDS * 40}
        engine._performer._model._pipeline.tokenizer.model_max_length = 10**30
        long, asked_longer = perform(engine, body(given), body(given, max_seq_len=999))
        assert decoded(long)[0]["answer"]
        assert decoded(asked_longer) == decoded(long)

    def test_donut_needs_no_words(self, task_model, monkeypatch):
        monkeypatch.setattr(inputs.shutil, "which", lambda _: None)
        path, task = task_model("picture_reader"), "document-question-answering"
        engine = engine_of(path, task=task)
        given = {"image": image("red", (40, 30)), "question": "who is it"}
        answer, too_long = perform(engine, body(given), body(given | {"question": "who " * 40}))
        reference = pipeline(task, model=str(path), device="cpu")
        assert decoded(answer) == reference(as_transformers_wants_it(given))
        assert (too_long.field, "the model takes 32" in str(too_long)) == ("inputs.question", True)

    def test_tesseract_finds_them_where_it_is_installed(self, task_model, monkeypatch):
        words, boxes = zip(*WORDS, strict=True)
        monkeypatch.setattr(document_question_answering, "TESSERACT_LOADED", True)
        monkeypatch.setattr(
            document_question_answering, "apply_tesseract", lambda *_, **__: (words, boxes)
        )
        monkeypatch.setattr(inputs, "has_tesseract", lambda: True)
        engine = engine_of(task_model("page_reader"))
        given = {"image": image("red"), "question": "who is"}
        found, sent = perform(engine, body(given), self.asked())
        assert decoded(found) == decoded(sent)

    def test_without_tesseract_the_words_are_needed(self, task_model, monkeypatch):
        engine = engine_of(task_model("page_reader"))
        given = {"image": image("red"), "question": "who"}
        monkeypatch.setattr(inputs.shutil, "which", lambda _: None)
        alone, neighbours = perform(engine, body(given), body([given, self.asked().inputs[0]]))
        assert (alone.field, "Tesseract" in str(alone)) == ("inputs.word_boxes", True)
        bad, good = decoded(neighbours)
        assert (bad["code"], bool(good[0]["answer"])) == (400, True)


class TestConversations:
    @pytest.mark.parametrize("task", ["image-text-to-text", "any-to-any"])
    def test_they_are_answered_as_transformers_does(self, task_model, monkeypatch, task):
        """Of any-to-any it wants torchvision, though not for this."""
        monkeypatch.setattr(any_to_any, "requires_backends", lambda *_: None)
        monkeypatch.setattr(loading, "find_spec", lambda _: True)
        path = task_model("chatter")
        engine = engine_of(path, task=task)
        reference = pipeline(task, model=str(path), device="cpu")
        texts = []
        for request, outcome in zip(CONVERSATIONS, perform(engine, *CONVERSATIONS), strict=True):
            given = as_transformers_wants_it(request.inputs[0])
            parameters = {"return_full_text": False} | deepcopy(request.parameters)
            if "messages" in given:
                said = reference(text=given["messages"], **parameters)
            else:
                images = given.get("images", [given["image"]] if "image" in given else None)
                said = reference(text=given["text"], images=images, **parameters)
            assert decoded(outcome) == [{"generated_text": said[0]["generated_text"]}]
            texts.append(said[0]["generated_text"])
        assert len(set(texts)) > 2

    def test_wrong_ones_leave_their_neighbours_alone(self, task_model):
        engine = engine_of(task_model("chatter"), task="image-text-to-text")
        good = CONVERSATIONS[0]
        too_few = {"text": "<image> <image> who", "image": image("red")}
        alone, batch = perform(
            engine, good, body([too_few, *good.inputs, {"text": "a", "image": b"GIF"}],
                               max_new_tokens=4)
        )  # fmt: skip
        first, second, third = decoded(batch)
        assert second == decoded(alone)
        assert "error" in first
        assert (third["code"], third["field"]) == (400, "inputs.image")

    def test_parameters_are_those_of_the_request_for_each_of_a_list(self, task_model):
        """transformers writes into what it is given."""
        engine = engine_of(task_model("chatter"), task="image-text-to-text")
        parameters = {"max_new_tokens": 4, "generate_kwargs": {"num_beams": 2}}
        one, two = perform(
            engine, body({"text": "who"}, **parameters), body([{"text": "who"}] * 2, **parameters)
        )
        assert decoded(two) == [decoded(one)] * 2

    def test_too_long_ones_are_refused(self, task_model):
        engine = engine_of(task_model("chatter"), task="image-text-to-text")
        text = "cat " * 40
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        outcomes = perform(engine, body({"text": text}), body({"messages": messages}))
        assert [each.field for each in outcomes] == ["inputs.text", "inputs.messages"]

    def test_any_to_any_says_that_it_needs_torchvision(self, task_model, monkeypatch):
        monkeypatch.setattr(loading, "find_spec", lambda name: name != "torchvision" or None)
        with pytest.raises(ConfigurationError, match="torchvision"):
            engine_of(task_model("chatter"), task="any-to-any")

    def test_a_model_without_images_is_refused(self, task_model):
        with pytest.raises(ConfigurationError, match="no processor for images and texts"):
            engine_of(task_model("llama"), task="image-text-to-text")


def test_a_request_error_names_the_field(task_model):
    engine = engine_of(task_model("page_reader"))
    (outcome,) = perform(engine, body({"image": b"GIF", "question": "who", "word_boxes": []}))
    assert (type(outcome), outcome.field) == (RequestError, "inputs.image")
