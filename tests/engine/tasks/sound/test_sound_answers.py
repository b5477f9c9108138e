"""Text to speech, and sound classification with labels of the request."""

from __future__ import annotations

import base64
import io
import wave

import numpy as np
import pytest
import torch
from transformers import pipeline

from core.errors import ConfigurationError, RequestError
from core.protocol.task_bodies import PipelineBody
from engine.tasks.performer import Answer
from engine.tasks.pipelines.inputs import MAX_SPOKEN
from engine.tasks.pipelines.sound import write_wav
from tests.engine.tasks.bodies import as_transformers_wants_it, body, close, wav, with_files_read
from tests.engine.tasks.conftest import decoded, engine_of, perform
from tests.engine.tasks.models import LETTERS


class TestSpeech:
    def test_speech_equals_that_of_transformers(self, task_model):
        path = task_model("speaker")
        engine = engine_of(path)
        assert engine.facts.task == "text-to-audio"
        reference = pipeline("text-to-audio", model=str(path), device="cpu")
        requests = [body("ab c"), body(["ca", "bbb a"])]
        for request, outcome in zip(requests, perform(engine, *requests), strict=True):
            expected = [
                {"audio": (spoken["audio"] * 32767).round().tolist(), "sampling_rate": 8000}
                for spoken in map(reference, request.inputs)
            ]
            got = with_files_read(decoded(outcome))
            for sound, its_own in zip(got if request.is_batch else [got], expected, strict=True):
                assert sound["sampling_rate"] == its_own["sampling_rate"]
                np.testing.assert_allclose(sound["audio"], its_own["audio"], atol=1)
                assert np.std(sound["audio"]) > 1000

    def test_speech_as_a_wav_file(self, task_model):
        engine = engine_of(task_model("speaker"), task="text-to-speech")
        as_json, as_file = perform(
            engine, body("ab c"), PipelineBody(["ab c"], False, {}, wants_sound=True)
        )
        assert isinstance(as_file, Answer)
        assert as_file.content_type == "audio/wav"
        assert as_file.body == base64.b64decode(decoded(as_json)["audio"])
        with wave.open(io.BytesIO(as_file.body)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (8000, 1, 2)

    def test_invalid_requests(self, task_model):
        engine = engine_of(task_model("speaker"))
        outcomes = perform(
            engine,
            body("a" * (MAX_SPOKEN + 1)),
            body("a", generate_kwargs={"do_sample": True}),
            body(["a", "b" * (MAX_SPOKEN + 1)]),
        )
        assert all(isinstance(outcome, RequestError) for outcome in outcomes[:2])
        good, bad = decoded(outcomes[2])
        assert (good["sampling_rate"], bad["code"]) == (8000, 400)

    def test_spectrogram_models_are_rejected(self, task_model, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "speecht5"}')
        with pytest.raises(ConfigurationError, match="spectrograms"):
            engine_of(tmp_path, task="text-to-audio", load_format="dummy")


def test_written_sounds_can_be_read_back():
    left, right = np.linspace(-1, 1, 50), np.linspace(0.5, -3, 50)
    with wave.open(io.BytesIO(write_wav(np.stack([left, right]), 16_000))) as file:
        assert (file.getnchannels(), file.getframerate()) == (2, 16_000)
        frames = np.frombuffer(file.readframes(50), "<i2").reshape(50, 2) / 32767
    np.testing.assert_allclose(frames, np.stack([left, right.clip(-1)], 1), atol=1e-4)


LABELS = {"candidate_labels": ["cat", "dog ran"], "hypothesis_template": "the {}"}


class TestLabels:
    def test_scores_equal_those_of_transformers(self, task_model):
        path, task = task_model("sound_labeller"), "zero-shot-audio-classification"
        reference = pipeline(task, model=str(path), dtype=torch.float32, device="cpu")
        requests = [body(wav(1), **LABELS), body([wav(2), wav(3, 900)], **LABELS)]
        engine = engine_of(path, task=task)
        for request, outcome in zip(requests, perform(engine, *requests), strict=True):
            expected = [
                reference(as_transformers_wants_it(sound), **request.parameters)
                for sound in request.inputs
            ]
            assert abs(expected[0][0]["score"] - 0.5) > 1e-3
            assert close(decoded(outcome), expected if request.is_batch else expected[0])

    @pytest.mark.parametrize("labels", [None, [], "cat", [1], ["cat", " ".join(LETTERS * 10)]])
    def test_invalid_labels(self, task_model, labels):
        """Each letter of a string would become a label; a long label exceeds the position table."""
        engine = engine_of(task_model("sound_labeller"), task="zero-shot-audio-classification")
        (outcome,) = perform(engine, body(wav(1), candidate_labels=labels))
        assert outcome.field == "parameters.candidate_labels"

    @pytest.mark.parametrize("template", ["a", "{} {}", "{:>999999999}", "{0.__class__}", 3])
    def test_invalid_templates(self, task_model, template):
        """A format spec could ask for a text of any length."""
        engine = engine_of(task_model("sound_labeller"), task="zero-shot-audio-classification")
        labelled = LABELS | {"hypothesis_template": template}
        (outcome,) = perform(engine, body(wav(1), **labelled))
        assert outcome.field == "parameters.hypothesis_template"
