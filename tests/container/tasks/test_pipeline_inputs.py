"""Pipeline inputs that are files or objects with files, and outputs that are files."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from werkzeug.test import TestResponse

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
