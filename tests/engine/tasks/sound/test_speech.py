"""Transcripts of tiny random models, compared with those of transformers' pipeline."""

from __future__ import annotations

import msgspec
import pytest
import torch
from transformers import pipeline

from core.errors import RequestError
from core.protocol.task_bodies import TRANSCRIPTION, Span, Transcript, Transcription
from tests.engine.tasks.bodies import as_transformers_wants_it, body, wav
from tests.engine.tasks.conftest import decoded, engine_of, perform

SOUND = wav(1, 12_000, 16_000)
LONG = wav(2, 40_000, 16_000)
"""Lasts 2.5 s. The model hears 1 s at once."""


def ask(engine, sound=SOUND, **fields):
    wanted = msgspec.to_builtins(Transcription(**fields))
    (outcome,) = perform(engine, body(sound, **{TRANSCRIPTION: wanted}))
    if isinstance(outcome, Exception):
        raise outcome
    return msgspec.convert(decoded(outcome), Transcript)


@pytest.fixture(scope="module")
def interpreter(task_model):
    return engine_of(task_model("interpreter"))


@pytest.fixture(scope="module")
def reference(task_model):
    """Return a function that calls transformers' pipeline of the same model with a WAV file."""
    made = pipeline(
        "automatic-speech-recognition",
        model=str(task_model("interpreter")), dtype=torch.float32, device="cpu",
    )  # fmt: skip
    return lambda sound, **parameters: made(as_transformers_wants_it(sound), **parameters)


@pytest.mark.parametrize(
    ("fields", "generate"),
    [
        ({"language": "de"}, {"task": "transcribe", "language": "de"}),
        ({"language": "English"}, {"task": "transcribe", "language": "en"}),
        ({"language": "de", "translates": True}, {"task": "translate", "language": "de"}),
    ],
)
def test_language_and_task_reach_whisper(interpreter, reference, fields, generate):
    expected = reference(SOUND, generate_kwargs=generate)["text"]
    assert ask(interpreter, **fields).text == expected


def test_languages_and_tasks_differ(interpreter):
    texts = {
        ask(interpreter, sound, language=language, translates=translates).text
        for sound in (SOUND, LONG)
        for language in ("en", "de")
        for translates in (False, True)
    }
    assert len(texts) > 2


def test_segments_and_words(interpreter, reference):
    generate = {"task": "transcribe", "language": "en"}
    answer = ask(interpreter, language="en", segments=True, words=True, names_language=True)
    assert (answer.duration, answer.language) == (0.75, "english")
    for spans, kind in ((answer.segments, True), (answer.words, "word")):
        chunks = reference(SOUND, return_timestamps=kind, generate_kwargs=generate)["chunks"]
        assert [span.text for span in spans] == [chunk["text"] for chunk in chunks]
        assert spans
        assert all(0 <= span.start <= span.end for span in spans)
    alone = ask(interpreter, language="en", words=True)
    assert (alone.words, alone.segments) == (answer.words, None)


def test_the_language_is_found(interpreter):
    found = ask(interpreter, words=True, names_language=True)
    codes = {"english": "en", "german": "de"}
    assert found.text == ask(interpreter, language=codes[found.language], words=True).text
    assert ask(interpreter, language="de", names_language=True).language == "german"
    assert ask(interpreter, segments=True).language is None


def test_long_sounds(interpreter, reference):
    generate = {"task": "transcribe", "language": "en"}
    expected = reference(LONG, return_timestamps=True, generate_kwargs=generate)["text"]
    answer = ask(interpreter, LONG, language="en")
    assert (answer.text, answer.duration) == (expected, 2.5)
    assert answer.segments is None


def test_prompts(interpreter):
    plain = ask(interpreter, language="en").text
    prompted = {
        prompt: ask(interpreter, language="en", prompt=prompt).text for prompt in "abcdefgh"
    }
    assert any(text != plain for text in prompted.values())
    for prompt, text in prompted.items():
        assert not text.strip().startswith(f"{prompt} {plain}"), "the prompt is not repeated"
    ask(interpreter, language="en", prompt="abc " * 1000)  # only the prompt's end fits
    with pytest.raises(RequestError, match="prompt: not accepted"):
        ask(interpreter, prompt="<|translate|>")


def test_a_temperature_samples(interpreter):
    torch.manual_seed(1)
    sampled = {ask(interpreter, language="en", temperature=1.0).text for _ in range(5)}
    greedy = {ask(interpreter, language="en").text for _ in range(2)}
    assert len(sampled) > 1
    assert len(greedy) == 1


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("interpreter", {"language": "fr"}, "language: expected one of de, en"),
        ("whisper", {"translates": True}, "model: is for English only"),
        ("whisper", {"language": "de"}, "language: the model is for English only"),
        (
            "whisper",
            {"words": True},
            "timestamp_granularities: the model returns no times of words",
        ),
        ("whisper", {"segments": True}, "response_format: the model returns no times"),
        ("listener", {"translates": True}, "model: wav2vec2 does not translate"),
        ("listener", {"language": "de"}, "language: cannot be set for wav2vec2"),
        ("listener", {"prompt": "a"}, "prompt: cannot be set"),
        ("listener", {"temperature": 0.5}, "temperature: cannot be set"),
    ],
)
def test_what_a_model_cannot_do(task_model, name, fields, message):
    with pytest.raises(RequestError, match=message):
        ask(engine_of(task_model(name)), **fields)


def test_a_model_without_times_takes_only_short_sounds(task_model):
    with pytest.raises(RequestError, match="file: the model takes at most 1 s"):
        ask(engine_of(task_model("whisper")), LONG)


def test_english_models(task_model):
    engine = engine_of(task_model("whisper"))
    reference = pipeline(
        "automatic-speech-recognition", model=str(task_model("whisper")), dtype=torch.float32
    )
    expected = reference(as_transformers_wants_it(SOUND))["text"]
    for fields in ({}, {"language": "en"}):
        assert ask(engine, **fields).text == expected
    assert ask(engine, names_language=True).language == "english"


def test_models_without_generation_give_words(task_model):
    engine = engine_of(task_model("listener"))
    answer = ask(engine, wav(1), segments=True, names_language=True)
    assert answer.text
    assert answer.language is None
    assert answer.segments == ask(engine, wav(1), words=True).words
    assert isinstance(answer.segments[0], Span)
