"""Tasks with object inputs: tables, document pages, conversations with images."""

from __future__ import annotations

from copy import deepcopy

import pandas as pd
import pytest
from transformers import pipeline
from transformers.pipelines import any_to_any, document_question_answering

from core.errors import ConfigurationError, RequestError
from engine.tasks import loading
from engine.tasks.pipelines import input_reader as inputs
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
    def body_of(self, query="who", **parameters):
        return body({"table": TABLE, "query": query}, **parameters)

    def test_answers_equal_those_of_transformers(self, task_model):
        path = task_model("table_reader")
        engine = engine_of(path)
        assert engine.facts.task == "table-question-answering"
        reference = pipeline("table-question-answering", model=str(path), device="cpu")
        table = pd.DataFrame(TABLE, dtype=object)
        queries = ["who", "dog age", "cat"]
        expected = [reference(table=table, query=query) for query in queries]
        assert any(answer["cells"] for answer in expected)
        got = [decoded(outcome) for outcome in perform(engine, *map(self.body_of, queries))]
        assert close(got, [answer | {"coordinates": list(map(list, answer["coordinates"]))}
                           for answer in expected])  # fmt: skip

    def test_a_table_that_is_too_large_fails_alone(self, task_model):
        engine = engine_of(task_model("table_reader"))
        wide = {str(byte): ["1"] for byte in range(256)}
        high = {"age": ["1"] * 256}
        given = [{"table": table, "query": "who"} for table in (TABLE, wide, high)]
        (outcome,) = perform(engine, body(given))
        good, *bad = decoded(outcome)
        assert "answer" in good
        assert [result["field"] for result in bad] == ["inputs.table"] * 2

    def test_missing_pandas_is_reported_at_start(self, task_model, monkeypatch):
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
        with pytest.raises(ConfigurationError, match=r"pandas: pip install 'longshore\[tables\]'"):
            engine_of(task_model("table_reader"))


class TestDocuments:
    def body_of(self, question="who is", **parameters):
        given = {"image": image("red"), "question": question, "word_boxes": WORDS}
        return body(given, **parameters)

    @pytest.mark.parametrize("name", ["page_reader", "page_and_picture_reader"])
    def test_answers_equal_those_of_transformers(self, task_model, monkeypatch, name):
        monkeypatch.setattr(inputs.shutil, "which", lambda _: None)
        path = task_model(name)
        engine = engine_of(path)
        assert engine.facts.task == "document-question-answering"
        reference = pipeline("document-question-answering", model=str(path), device="cpu")
        if reference.image_processor:
            reference.image_processor.apply_ocr = False
        requests = [self.body_of(), self.body_of("where", top_k=60), self.body_of(max_answer_len=1)]
        answers = []
        for request, outcome in zip(requests, perform(engine, *requests), strict=True):
            expected = reference(as_transformers_wants_it(request.inputs[0]), **request.parameters)
            assert close(decoded(outcome), expected)
            answers += [answer["answer"] for answer in expected]
        assert len(set(answers)) > 1

    def test_a_long_page_is_read_in_windows(self, task_model):
        """Even if the tokenizer has no limit, the model's position table is not exceeded."""
        engine = engine_of(task_model("page_reader"))
        given = {"image": image("red"), "question": "who", "word_boxes": WORDS * 40}
        engine.performer.model.pipeline.tokenizer.model_max_length = 10**30
        long, asked_longer = perform(engine, body(given), body(given, max_seq_len=999))
        assert decoded(long)[0]["answer"]
        assert decoded(asked_longer) == decoded(long)

    @pytest.mark.parametrize("stride", [0, 31, 256, 10**6])
    def test_a_question_leaves_room_for_the_words(self, task_model, stride):
        engine = engine_of(task_model("page_reader"))
        for words in (1, 9, 20, 40, 90):
            given = {"image": image("red"), "question": "who " * words, "word_boxes": WORDS * 40}
            outcome = perform(engine, body(given, doc_stride=stride))[0]
            if isinstance(outcome, RequestError):
                assert outcome.field == "inputs.question"
            else:
                assert decoded(outcome)[0]["answer"]
            assert isinstance(outcome, RequestError) == (words > 20)

    def test_donut_needs_no_words(self, task_model, monkeypatch):
        monkeypatch.setattr(inputs.shutil, "which", lambda _: None)
        path, task = task_model("picture_reader"), "document-question-answering"
        engine = engine_of(path, task=task)
        given = {"image": image("red", (40, 30)), "question": "who is it"}
        answer, too_long = perform(engine, body(given), body(given | {"question": "who " * 40}))
        reference = pipeline(task, model=str(path), device="cpu")
        assert decoded(answer) == reference(as_transformers_wants_it(given))
        assert (too_long.field, "the model takes 32" in str(too_long)) == ("inputs.question", True)

    def test_tesseract_finds_the_words_if_installed(self, task_model, monkeypatch):
        words, boxes = zip(*WORDS, strict=True)
        monkeypatch.setattr(document_question_answering, "TESSERACT_LOADED", True)
        monkeypatch.setattr(
            document_question_answering, "apply_tesseract", lambda *_, **__: (words, boxes)
        )
        monkeypatch.setattr(inputs, "has_tesseract", lambda: True)
        engine = engine_of(task_model("page_reader"))
        given = {"image": image("red"), "question": "who is"}
        found, sent = perform(engine, body(given), self.body_of())
        assert decoded(found) == decoded(sent)

    def test_without_tesseract_words_are_required(self, task_model, monkeypatch):
        engine = engine_of(task_model("page_reader"))
        given = {"image": image("red"), "question": "who"}
        monkeypatch.setattr(inputs.shutil, "which", lambda _: None)
        alone, neighbours = perform(engine, body(given), body([given, self.body_of().inputs[0]]))
        assert (alone.field, "Tesseract" in str(alone)) == ("inputs.word_boxes", True)
        bad, good = decoded(neighbours)
        assert (bad["code"], bool(good[0]["answer"])) == (400, True)


class TestConversations:
    @pytest.mark.parametrize("task", ["image-text-to-text", "any-to-any"])
    def test_answers_equal_those_of_transformers(self, task_model, monkeypatch, task):
        """transformers requires torchvision for any-to-any, although this test does not need it."""
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
                generated = reference(text=given["messages"], **parameters)
            else:
                images = given.get("images", [given["image"]] if "image" in given else None)
                generated = reference(text=given["text"], images=images, **parameters)
            assert decoded(outcome) == [{"generated_text": generated[0]["generated_text"]}]
            texts.append(generated[0]["generated_text"])
        assert len(set(texts)) > 2

    def test_invalid_inputs_fail_alone(self, task_model):
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

    def test_all_inputs_of_a_list_have_the_requests_parameters(self, task_model):
        """transformers modifies the parameters that it gets, so each input must get a copy."""
        engine = engine_of(task_model("chatter"), task="image-text-to-text")
        parameters = {"max_new_tokens": 4, "generate_kwargs": {"num_beams": 2}}
        one, two = perform(
            engine, body({"text": "who"}, **parameters), body([{"text": "who"}] * 2, **parameters)
        )
        assert decoded(two) == [decoded(one)] * 2

    @pytest.mark.parametrize("kwargs", [{"max_new_tokens": 8}, {"temperature": 0}], ids=str)
    def test_parameters_that_transformers_refuses_are_named(self, task_model, kwargs):
        engine = engine_of(task_model("chatter"), task="image-text-to-text")
        kwargs |= {"do_sample": True}
        (outcome,) = perform(
            engine, body({"text": "who"}, max_new_tokens=4, generate_kwargs=kwargs)
        )
        assert outcome.field == "parameters"

    def test_inputs_that_are_too_long_are_rejected(self, task_model):
        engine = engine_of(task_model("chatter"), task="image-text-to-text")
        text = "cat " * 40
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        outcomes = perform(engine, body({"text": text}), body({"messages": messages}))
        assert [outcome.field for outcome in outcomes] == ["inputs.text", "inputs.messages"]

    @pytest.mark.parametrize("beams", [1, 2])
    def test_answers_end_at_the_model_s_limit(self, task_model, beams):
        """transformers would look up positions beyond the table's last."""
        engine = engine_of(task_model("chatter_with_table"), task="image-text-to-text")
        kwargs = {"min_new_tokens": 8192, "num_beams": beams}
        limited, short = perform(
            engine,
            body({"text": "who is"}, max_new_tokens=8192, generate_kwargs=kwargs),
            body({"text": "who is"}, max_new_tokens=4, generate_kwargs={"min_new_tokens": 4}),
        )
        assert len(decoded(limited)[0]["generated_text"].split()) > 20
        assert len(decoded(short)[0]["generated_text"].split()) <= 4

    def test_images_count_as_tokens_of_the_prompt(self, task_model):
        engine = engine_of(task_model("chatter_with_table"), task="image-text-to-text")
        many = {"text": "<image> " * 20, "images": [image("red")] * 20}
        (outcome,) = perform(engine, body(many, max_new_tokens=2))
        assert (outcome.field, "tokens with its images" in outcome.message) == ("inputs", True)

    def test_any_to_any_reports_missing_torchvision(self, task_model, monkeypatch):
        monkeypatch.setattr(loading, "find_spec", lambda name: name != "torchvision" or None)
        with pytest.raises(ConfigurationError, match="torchvision"):
            engine_of(task_model("chatter"), task="any-to-any")

    def test_a_text_only_model_is_rejected(self, task_model):
        with pytest.raises(ConfigurationError, match="no processor for images and texts"):
            engine_of(task_model("llama"), task="image-text-to-text")


def test_a_request_error_names_the_field(task_model):
    engine = engine_of(task_model("page_reader"))
    (outcome,) = perform(engine, body({"image": b"GIF", "question": "who", "word_boxes": []}))
    assert (type(outcome), outcome.field) == (RequestError, "inputs.image")
