"""OpenAI's client asks for transcripts. A fake engine returns the same one for every sound."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import openai
import pytest
from flask.testing import FlaskClient

from core.protocol.messages import Perform, Performed
from core.protocol.task_bodies import TRANSCRIPTION, PipelineBody, Span, Transcript, Transcription
from tests.container.clients import openai_client
from tests.container.conftest import Serve
from tests.container.fake_engine import FakeEngine, fails, performs

FILE = ("speech.wav", b"RIFF")
PATH = "/v1/audio/transcriptions"
translates = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
"""OpenAI's client warns that its `translations.create` is deprecated."""
SEGMENTS = [Span(" Hi", 0.0, 0.5), Span(" there --> you", 0.5, 3661.25)]
WORDS = [Span(" Hi", 0.1, 0.4), Span(" there", 0.5, 1.0)]


@pytest.fixture
def http(task_app: Serve, engine: FakeEngine) -> FlaskClient:
    def answer(job: Perform) -> Performed:
        wanted = asked(job)
        transcript = Transcript(
            " Hi there",
            1.25,
            "english" if wanted.names_language else None,
            SEGMENTS if wanted.segments else None,
            WORDS if wanted.words else None,
        )
        return Performed(job.id, msgspec.json.encode(transcript), "application/json")

    engine.script = performs(answer)
    return task_app("pipeline", "automatic-speech-recognition")


@pytest.fixture
def audio(http: FlaskClient) -> openai.resources.Audio:
    return openai_client(http).audio


def asked(job: Perform) -> Transcription:
    body = msgspec.msgpack.decode(job.body, type=PipelineBody)
    return msgspec.convert(body.parameters[TRANSCRIPTION], Transcription)


def last_job(engine: FakeEngine) -> Perform:
    job = engine.of_type(Perform)[-1]
    assert isinstance(job, Perform)
    return job


def test_a_transcription(audio: openai.resources.Audio, engine: FakeEngine) -> None:
    answer = audio.transcriptions.create(model="whisper-1", file=FILE)
    assert answer.text == "Hi there"
    assert answer.to_dict()["usage"] == {"type": "duration", "seconds": 2}
    assert asked(last_job(engine)) == Transcription()
    body = msgspec.msgpack.decode(last_job(engine).body, type=PipelineBody)
    assert (body.inputs, body.is_batch) == ([FILE[1]], False)


@translates
def test_every_field_reaches_the_engine(audio: openai.resources.Audio, engine: FakeEngine) -> None:
    audio.transcriptions.create(
        model="m", file=FILE, language="de", prompt="Guten Tag", temperature=0.25,
        response_format="verbose_json", timestamp_granularities=["word"],
    )  # fmt: skip
    assert asked(last_job(engine)) == Transcription(
        language="de", prompt="Guten Tag", temperature=0.25, words=True, names_language=True
    )
    audio.translations.create(model="m", file=FILE, prompt="Hello")
    assert asked(last_job(engine)) == Transcription(translates=True, prompt="Hello")


@translates
def test_verbose_answers(audio: openai.resources.Audio) -> None:
    verbose: Any = {"model": "m", "file": FILE, "response_format": "verbose_json"}
    answer = audio.transcriptions.create(**verbose, timestamp_granularities=["word", "segment"])
    assert (answer.text, answer.duration, answer.language) == ("Hi there", 1.25, "english")
    assert [(part.id, part.start, part.end, part.text) for part in answer.segments] == [
        (0, 0.0, 0.5, " Hi"),
        (1, 0.5, 3661.25, " there --> you"),
    ]
    assert [(word.word, word.start, word.end) for word in answer.words] == [
        ("Hi", 0.1, 0.4),
        ("there", 0.5, 1.0),
    ]
    assert answer.to_dict()["task"] == "transcribe"
    translated = audio.translations.create(**verbose)
    assert len(translated.segments or []) == 2, "segments are the default"
    assert "words" not in translated.to_dict()
    assert translated.to_dict()["task"] == "translate"


@pytest.mark.parametrize(
    ("response_format", "text", "content_type"),
    [
        ("text", "Hi there\n", "text/plain"),
        ("srt",
         "1\n00:00:00,000 --> 00:00:00,500\nHi\n\n2\n00:00:00,500 --> 01:01:01,250\n"
         "there -> you\n", "text/plain"),
        ("vtt",
         "WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nHi\n\n00:00:00.500 --> 01:01:01.250\n"
         "there -> you\n", "text/vtt"),
    ],
)  # fmt: skip
def test_texts(
    audio: openai.resources.Audio, response_format: Any, text: str, content_type: str
) -> None:
    create = audio.transcriptions.with_raw_response.create
    answer = create(model="m", file=FILE, response_format=response_format)
    assert answer.text == text
    assert answer.headers["content-type"] == f"{content_type}; charset=utf-8"
    assert audio.transcriptions.create(model="m", file=FILE, response_format="text") == "Hi there\n"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"timestamp_granularities": ["letter"], "response_format": "verbose_json"},
         "timestamp_granularities"),
        ({"include": ["logprobs"]}, "include"),
        ({"stream": True}, "stream"),
        ({"extra_body": {"langauge": "de"}}, "langauge"),
    ],
)  # fmt: skip
def test_what_is_refused(
    audio: openai.resources.Audio, engine: FakeEngine, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        audio.transcriptions.create(model="m", file=FILE, **fields)
    assert caught.value.param == field
    assert not engine.of_type(Perform)


def upload(data: bytes) -> tuple[io.BytesIO, str]:
    return io.BytesIO(data), "a.wav"


def test_neutral_values_and_the_model_are_accepted(http: FlaskClient) -> None:
    fields = {"model": "x", "stream": "false", "chunking_strategy": "auto"}
    answer = http.post(PATH, data={"file": upload(b"RIFF"), **fields})
    assert answer.status_code == 200
    assert "model has no effect" in answer.headers["X-Longshore-Warning"]


def test_the_engines_errors_name_the_clients_field(
    audio: openai.resources.Audio, engine: FakeEngine
) -> None:
    for engine_field, field in (("inputs", "file"), ("language", "language")):
        engine.script = fails("rejected", "is wrong", engine_field)
        with pytest.raises(openai.BadRequestError, match=f"{field}: is wrong") as caught:
            audio.transcriptions.create(model="m", file=FILE)
        assert caught.value.param == field


def test_forms_that_are_refused(http: FlaskClient) -> None:
    twice = http.post(PATH, data={"file": upload(b"R"), "prompt": ["a", "b"]})
    assert twice.get_json()["error"]["param"] == "prompt"
    text = http.post(PATH, data={"file": "RIFF", "x": upload(b"R")})
    assert text.get_json()["error"]["param"] == "x"
    no_file = http.post(PATH, data={"file": upload(b"")})
    assert no_file.get_json()["error"]["message"] == "file: expected a WAV file"
    many = http.post(PATH, data={"file": upload(b"R")} | {f"f{n}": "" for n in range(64)})
    long = http.post(PATH, data={"file": upload(b"R"), "prompt": "a" * (2**18 + 1)})
    for answer in (many, long):
        assert answer.get_json()["error"]["message"].startswith("body: has more than 64 parts")
    bare = b"--a\r\nContent-Disposition: form-data\r\n\r\nx\r\n--a--\r\n"
    nameless = http.post(PATH, data=bare, content_type="multipart/form-data; boundary=a")
    assert nameless.get_json()["error"]["message"] == "body: has a part without a name"
    cut = http.post(PATH, data=b"--a\r\n", content_type="multipart/form-data; boundary=a")
    assert (cut.status_code, cut.get_json()["error"]["param"]) == (400, "body")
    assert http.post(PATH, json={"file": "a"}).status_code == 415


def test_large_files_arrive_whole(audio: openai.resources.Audio, engine: FakeEngine) -> None:
    data = bytes(range(256)) * 4096
    audio.transcriptions.create(model="m", file=("a.wav", data))
    assert msgspec.msgpack.decode(last_job(engine).body, type=PipelineBody).inputs == [data]


def test_other_tasks_have_no_transcripts(task_app: Serve) -> None:
    answer = task_app("pipeline").post(PATH, data={"file": upload(b"RIFF")})
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "model")
