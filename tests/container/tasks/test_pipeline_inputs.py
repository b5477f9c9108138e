"""Pipeline inputs that are files or objects with files, and outputs that are files."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec
import pytest
from werkzeug.test import TestResponse

from container.apis.tasks.pipeline_parameters import NESTED, PARAMETERS
from container.schema.kinds import OBJECT
from core.configuration.pipeline_tasks import CHAT_TASKS, PIPELINE_TASKS
from core.protocol.messages import Perform, Performed
from core.protocol.task_bodies import PipelineBody
from tests.container.conftest import Serve
from tests.container.fake_engine import FakeEngine, last_performed, performs


class TestFields:
    """Object inputs as the engine receives them."""

    PNG = b"\x89PNG"
    ENCODED = base64.b64encode(PNG).decode()
    CHAT = "image-text-to-text"
    PAGES = "document-question-answering"

    def post(self, task_app: Serve, task: str, inputs: Any) -> TestResponse:
        return task_app("pipeline", task).post("/invocations", json={"inputs": inputs})

    @pytest.fixture(autouse=True)
    def answers(self, engine: FakeEngine) -> None:
        engine.script = performs(lambda request: Performed(request.id, b"[]", "application/json"))

    @pytest.mark.parametrize(
        ("task", "inputs", "read"),
        [
            (PAGES, {"image": ENCODED, "question": "q"}, {"image": PNG, "question": "q"}),
            (PAGES, {"image": ENCODED, "question": "q", "word_boxes": [["a", [0, 1, 2, 1000]]]},
             {"image": PNG, "question": "q", "word_boxes": [["a", [0, 1, 2, 1000]]]}),
            ("table-question-answering", {"table": {"a": [1, "2", 0.5]}, "query": "q"},
             {"table": {"a": ["1", "2", "0.5"]}, "query": "q"}),
            ("keypoint-matching", {"images": [ENCODED] * 2}, {"images": [PNG] * 2}),
            (CHAT, {"text": "a"}, {"text": "a"}),
            (CHAT, {"text": "a", "image": f"data:image/png;base64,{ENCODED}"},
             {"text": "a", "image": PNG}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}]},
             {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
            (CHAT, {"messages": [{"role": "user", "content": [
                {"type": "image", "image": ENCODED},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}"}},
            ]}]},
             {"messages": [{"role": "user", "content": [{"type": "image", "image": PNG}] * 2}]}),
        ],
    )  # fmt: skip
    def test_files_are_decoded_to_bytes(
        self, task_app: Serve, engine: FakeEngine, task: str, inputs: Any, read: Any
    ) -> None:
        assert self.post(task_app, task, inputs).status_code == 200
        body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
        assert body.inputs == [read]
        assert self.post(task_app, task, [inputs, inputs]).status_code == 200
        body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
        assert body.inputs == [read, read]

    @pytest.mark.parametrize(
        ("task", "inputs", "field"),
        [
            (PAGES, "q", "inputs"),
            (PAGES, {"image": ENCODED}, "inputs.question"),
            (PAGES, {"image": "https://a/b.png", "question": "q"}, "inputs.image"),
            (PAGES, {"image": "/etc/passwd", "question": "q"}, "inputs.image"),
            (PAGES, {"image": ENCODED, "question": "q", "images": 1}, "inputs.images"),
            (PAGES, {"image": ENCODED, "question": "q", "word_boxes": [["a", [0, 0, 0, 1001]]]},
             "inputs.word_boxes[0][1][3]"),
            (PAGES, {"image": ENCODED, "question": "q", "word_boxes": [["a", [2, 0, 1, 1]]]},
             "inputs.word_boxes[0][1]"),
            (PAGES, {"image": ENCODED, "question": "q", "word_boxes": [["a", [0, 2, 1, 1]]]},
             "inputs.word_boxes[0][1]"),
            ("table-question-answering", {"table": {}, "query": "q"}, "inputs.table"),
            ("table-question-answering", {"table": {"a": ["1"], "b": ["1", "2"]}, "query": "q"},
             "inputs.table"),
            ("table-question-answering", {"table": {"a": [None]}, "query": "q"},
             "inputs.table.a[0]"),
            ("keypoint-matching", {"images": [ENCODED] * 33}, "inputs.images"),
            ("keypoint-matching", {"images": [ENCODED, "file:///a"]}, "inputs.images[1]"),
            (CHAT, {"image": ENCODED}, "inputs.text"),
            (CHAT, {"text": "a", "image": ENCODED, "images": [ENCODED]}, "inputs.images"),
            (CHAT, {"text": "a", "messages": [{"role": "user", "content": "a"}]}, "inputs"),
            (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "x"}]},
             "inputs.messages[1].role"),
            (CHAT, {"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
            ]}]}, "inputs.messages[0].content[0].image_url.url"),
            (CHAT, {"messages": [{"role": "user", "content": [
                {"type": "image", "path": "/etc/passwd"}
            ]}]}, "inputs.messages[0].content[0]"),
            (CHAT, {"messages": [{"role": "user", "content": [
                {"type": "image", "image": ENCODED}
            ] * 33}]}, "inputs.messages"),
            (CHAT, {"messages": [{"role": "user", "content": [
                {"type": "video", "video": "/a.mp4"}
            ]}]}, "inputs.messages[0].content[0].type"),
        ],
    )  # fmt: skip
    def test_invalid_fields_are_rejected_by_name(
        self, task_app: Serve, engine: FakeEngine, task: str, inputs: Any, field: str
    ) -> None:
        response = self.post(task_app, task, inputs)
        assert (response.status_code, response.get_json()["field"]) == (400, field)
        assert not engine.of_type(Perform)

    def test_a_video_may_be_the_body(self, task_app: Serve, engine: FakeEngine) -> None:
        http = task_app("pipeline", "video-classification")
        for sent in (
            {"data": b"mp4", "content_type": "video/mp4"},
            {"json": {"inputs": f"data:video/mp4;base64,{base64.b64encode(b'mp4').decode()}"}},
        ):
            assert http.post("/invocations", **sent).status_code == 200  # pyright: ignore
            body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
            assert body.inputs == [b"mp4"]
        request = {"inputs": "bXA0", "parameters": {"num_frames": 1000}}
        assert (
            http.post("/invocations", json=request).get_json()["field"] == "parameters.num_frames"
        )


class TestSpokenAnswers:
    @pytest.mark.parametrize(
        ("accept", "wants_sound"),
        [
            ("*/*", False),
            ("application/json", False),
            ("audio/wav", True),
            ("audio/*", True),
            ("audio/wav, application/json;q=0.5", True),
        ],
    )
    def test_the_engine_is_told_whether_a_file_is_accepted(
        self, task_app: Serve, engine: FakeEngine, accept: str, wants_sound: bool
    ) -> None:
        engine.script = performs(lambda request: Performed(request.id, b"RIFF", "audio/wav"))
        http = task_app("pipeline", "text-to-audio")
        response = http.post("/invocations", json={"inputs": "a"}, headers={"Accept": accept})
        assert (response.content_type, response.data) == ("audio/wav", b"RIFF")
        body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
        assert body == PipelineBody(["a"], False, {}, wants_sound)

    def test_a_batch_cannot_be_returned_as_a_file(
        self, task_app: Serve, engine: FakeEngine
    ) -> None:
        http = task_app("pipeline", "text-to-audio")
        response = http.post(
            "/invocations", json={"inputs": ["a"]}, headers={"Accept": "audio/wav"}
        )
        assert (response.status_code, response.get_json()["field"]) == (400, "inputs")

    def test_accept_has_no_effect_on_other_tasks(self, task_app: Serve, engine: FakeEngine) -> None:
        engine.script = performs(lambda request: Performed(request.id, b"[]", "application/json"))
        http = task_app("pipeline")
        http.post("/invocations", json={"inputs": "a"}, headers={"Accept": "audio/wav"})
        body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
        assert not body.wants_sound


class TestParameters:
    """The parameters of pipelines: each has bounds, and none can name a file or code."""

    INPUTS: Mapping[str, Any] = {
        "table-question-answering": {"table": {"a": ["1"]}, "query": "q"},
        "document-question-answering": {"image": "aQ==", "question": "q"},
        "keypoint-matching": {"images": ["aQ==", "aQ=="]},
        **{task: {"text": "a"} for task in CHAT_TASKS},
    }

    @pytest.fixture(autouse=True)
    def answers(self, engine: FakeEngine) -> None:
        engine.script = performs(lambda request: Performed(request.id, b"[]", "application/json"))

    def post(self, task_app: Serve, task: str, inputs: Any = None, **parameters: Any) -> Any:
        reads = PIPELINE_TASKS[task].reads
        default = "a" if reads in ("text", "any text") else "aQ=="
        given = self.INPUTS.get(task, default) if inputs is None else inputs
        http = task_app("pipeline", task)
        return http.post("/invocations", json={"inputs": given, "parameters": parameters})

    def test_every_number_has_bounds(self) -> None:
        tables = [PARAMETERS, *NESTED.values()]
        for name, kind in chain.from_iterable(table.items() for table in tables):
            if kind.schema.get("type") in ("integer", "number"):
                assert {"minimum", "maximum"} <= kind.schema.keys(), name
            assert kind is not OBJECT or name in NESTED
            for hostile in (10**30, -(10**30), 1e300, float("nan")):
                assert not kind.accepts(hostile), name

    @pytest.mark.parametrize("task", PIPELINE_TASKS)
    def test_integers_of_more_than_64_bits_are_refused(
        self, task_app: Serve, engine: FakeEngine, task: str
    ) -> None:
        for name in PIPELINE_TASKS[task].parameters:
            response = self.post(task_app, task, **{name: 10**30})
            assert (response.status_code, response.get_json()["field"]) == (
                400,
                f"parameters.{name}",
            )
        assert not engine.of_type(Perform)
        assert self.post(task_app, task).status_code == 200

    @pytest.mark.parametrize(
        ("task", "parameters", "field"),
        [
            ("fill-mask", {"tokenizer_kwargs": {"padding": "max_length"}},
             "tokenizer_kwargs.padding"),
            ("fill-mask", {"tokenizer_kwargs": {"max_length": 10**8}},
             "tokenizer_kwargs.max_length"),
            ("fill-mask", {"tokenizer_kwargs": {"truncation": "only_second"}},
             "tokenizer_kwargs.truncation"),
            ("fill-mask", {"targets": ["a"] * 1025}, "targets"),
            ("feature-extraction", {"tokenize_kwargs": {"return_tensors": "pt"}},
             "tokenize_kwargs.return_tensors"),
            ("feature-extraction", {"tokenize_kwargs": [1]}, "tokenize_kwargs"),
            ("text-classification", {"top_k": 0}, "top_k"),
            ("text-classification", {"truncation": 1}, "truncation"),
            ("zero-shot-classification", {"candidate_labels": ["a"] * 1025}, "candidate_labels"),
            ("zero-shot-classification", {"candidate_labels": "a," * 1025}, "candidate_labels"),
            ("zero-shot-image-classification", {"candidate_labels": ["a", 1]}, "candidate_labels"),
            ("zero-shot-classification",
             {"candidate_labels": ["a"] * 1024, "hypothesis_template": "{}" + "a" * 2**12},
             "candidate_labels"),
            ("question-answering", {"max_seq_len": 5}, "max_seq_len"),
            ("question-answering", {"doc_stride": -1}, "doc_stride"),
            ("question-answering", {"top_k": 10**6}, "top_k"),
            ("document-question-answering", {"max_seq_len": 2**30}, "max_seq_len"),
            ("document-question-answering", {"max_question_len": 5}, "max_question_len"),
            ("image-text-to-text", {"stop_sequence": "a" * 1001}, "stop_sequence"),
            ("image-text-to-text", {"stop_sequence": ["a"] * 17}, "stop_sequence"),
            ("image-text-to-text", {"generate_kwargs": {"length_penalty": -2000}},
             "generate_kwargs.length_penalty"),
            ("automatic-speech-recognition", {"chunk_length_s": 0.001}, "chunk_length_s"),
            ("automatic-speech-recognition", {"chunk_length_s": 10, "stride_length_s": 4.9},
             "stride_length_s"),
            ("automatic-speech-recognition", {"stride_length_s": [1, 2, 3]}, "stride_length_s"),
            ("automatic-speech-recognition", {"return_timestamps": "words"}, "return_timestamps"),
            ("mask-generation", {"crop_overlap_ratio": 1e9}, "crop_overlap_ratio"),
            ("table-question-answering", {"truncation": False}, "truncation"),
        ],
    )  # fmt: skip
    def test_values_out_of_bounds(
        self,
        task_app: Serve,
        engine: FakeEngine,
        task: str,
        parameters: Any,
        field: str,
    ) -> None:
        response = self.post(task_app, task, **parameters)
        assert (response.status_code, response.get_json()["field"]) == (400, f"parameters.{field}")
        assert not engine.of_type(Perform)

    @pytest.mark.parametrize(
        ("task", "parameters"),
        [
            ("fill-mask", {"tokenizer_kwargs": {"truncation": True, "max_length": 512}}),
            ("text-classification", {"top_k": None, "function_to_apply": "none"}),
            ("zero-shot-classification",
             {"candidate_labels": ["a"] * 1024, "hypothesis_template": "It is {}."}),
            ("zero-shot-classification", {"candidate_labels": "a, b", "multi_label": True}),
            ("token-classification", {"aggregation_strategy": "simple", "stride": 16}),
            ("question-answering", {"max_seq_len": 384, "doc_stride": 128, "top_k": 3}),
            ("automatic-speech-recognition",
             {"chunk_length_s": 10, "stride_length_s": [4, 2], "return_timestamps": "word"}),
            ("automatic-speech-recognition", {"return_timestamps": True}),
            ("image-text-to-text", {"generate_kwargs": {"temperature": 1}, "stop_sequence": ["a"]}),
            ("text-to-audio", {"generate_kwargs": {"early_stopping": "never"}}),
        ],
    )  # fmt: skip
    def test_usual_values(
        self, task_app: Serve, engine: FakeEngine, task: str, parameters: Any
    ) -> None:
        assert self.post(task_app, task, **parameters).status_code == 200
        body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
        assert body.parameters == parameters

    def test_null_sets_no_parameter(self, task_app: Serve, engine: FakeEngine) -> None:
        parameters = {"truncation": None, "max_length": None, "top_k": None}
        assert self.post(task_app, "text-classification", **parameters).status_code == 200
        body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
        assert body.parameters == {"top_k": None}

    @pytest.mark.parametrize(
        ("task", "inputs", "field"),
        [
            ("fill-mask", {"text": "a", "other": 10**30}, "inputs.other"),
            ("fill-mask", "a" * (2**18 + 1), "inputs"),
            ("question-answering", [{"question": "a", "context": "a" * (2**18 + 1)}],
             "inputs[0].context"),
            ("fill-mask", ["a" * 2**18] * 17, "inputs"),
            ("image-text-to-text",
             {"messages": [{"role": "user", "content": "a" * (2**18 + 1)}]}, "inputs.messages"),
            ("table-question-answering", {"table": {"a": ["a" * (2**18 + 1)]}, "query": "q"},
             "inputs.table"),
            ("document-question-answering",
             {"image": "aQ==", "question": "q", "word_boxes": [["a" * 2**15, [0, 0, 1, 1]]] * 3},
             "inputs.word_boxes"),
        ],
    )  # fmt: skip
    def test_texts_have_a_maximum(
        self, task_app: Serve, engine: FakeEngine, task: str, inputs: Any, field: str
    ) -> None:
        response = self.post(task_app, task, inputs)
        assert (response.status_code, response.get_json()["field"]) == (400, field)
        assert not engine.of_type(Perform)

    def test_inputs_and_labels_together_have_a_maximum(
        self, task_app: Serve, engine: FakeEngine
    ) -> None:
        labels = ["a"] * 9
        task = "zero-shot-classification"
        assert self.post(task_app, task, ["a"] * 910, candidate_labels=labels).status_code == 200
        response = self.post(task_app, task, ["a"] * 911, candidate_labels=labels)
        assert response.get_json()["field"] == "parameters.candidate_labels"
