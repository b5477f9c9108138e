"""Tasks other than generation end to end: real processes, tiny models, HTTP."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import wave

import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import pipeline

from tests.container.launch.test_preparation import wheel
from tests.container.processes import free_port
from tests.e2e.serving import DEMO, IMAGE, MODEL_NAME, ROOT, serve
from tests.engine.tasks.bodies import wav
from tests.engine.tasks.models import save_task_model

TEXTS = ["the cat sat", "a dog ran on it", "who is it"]
HANDLER = """
import tiny_package
from djl_python import Input, Output

def handle(inputs: Input) -> Output:
    if inputs.is_empty():
        return None
    outputs = Output()
    for index, item in enumerate(inputs.get_batches()):
        data = item.get_as_json()
        outputs.add_as_json({"twice": tiny_package.FACTOR * data["number"]}, batch_index=index)
    return outputs
"""


def at_once(function, arguments):
    """Call the function with all arguments concurrently and return the results in order."""
    results = {}
    jobs = [
        threading.Thread(
            target=lambda at=at, argument=argument: results.update({at: function(argument)})
        )
        for at, argument in enumerate(arguments)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    return [results[at] for at in range(len(arguments))]


def test_classification(tmp_path):
    """The requests of one batch have different parameters, and two are invalid."""
    path = save_task_model("classifier", tmp_path)
    reference = pipeline("text-classification", model=str(path), dtype=torch.float32, device="cpu")
    options = "batch_size=8\nmax_batch_delay=200\noption.dtype=fp32\n"
    with serve(tmp_path, options, model=path) as container:
        container.wait_for_log(
            "task: text-classification (the model is a BertForSequenceClassification)"
        )
        bodies = [
            {"inputs": TEXTS[0]},
            {"inputs": TEXTS[1], "parameters": {"top_k": 3}},
            {"inputs": "cat " * 50},
            {"inputs": TEXTS},
            {"inputs": TEXTS[2], "parameters": {"topk": 3}},
        ]
        answers = at_once(lambda body: container.request("POST", "/invocations", body), bodies)
        assert [status for status, _ in answers] == [200, 200, 400, 200, 400]
        read = [json.loads(data) for _, data in answers]
        expected = [reference(TEXTS[0]), reference(TEXTS[1], top_k=3), None, reference(TEXTS)]
        for at in (0, 1, 3):
            assert [answer["label"] for answer in read[at]] == [
                answer["label"] for answer in expected[at]
            ]
            scores = [answer["score"] for answer in read[at]]
            assert scores == pytest.approx([answer["score"] for answer in expected[at]], abs=1e-5)
        assert (read[2]["field"], read[4]["field"]) == ("inputs", "parameters.topk")
        assert "did you mean 'top_k'" in read[4]["error"]
        assert container.stop() == 0


def test_embeddings_with_the_openai_client(tmp_path):
    path = save_task_model("encoder", tmp_path)
    with (
        serve(tmp_path, "max_batch_delay=5\noption.dtype=fp32\n", model=path) as container,
        OpenAI(base_url=f"http://127.0.0.1:{container.port}/v1", api_key="none") as client,
    ):
        container.wait_for_log("pooling: mean; vectors are normalized")
        answer = client.embeddings.create(model="any", input=TEXTS)
        vectors = np.array([item.embedding for item in answer.data])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(len(text.split()) + 2 for text in TEXTS)
        floats = client.embeddings.create(model="any", input=TEXTS[0], encoding_format="float")
        np.testing.assert_allclose(floats.data[0].embedding, vectors[0], atol=1e-5)
        status, data = container.request("POST", "/invocations", {"inputs": TEXTS[0]})
        assert status == 200
        np.testing.assert_allclose(json.loads(data), vectors[:1], atol=1e-5)
        with pytest.raises(BadRequestError, match="was not trained for fewer"):
            client.embeddings.create(model="any", input=TEXTS, dimensions=4)
        with pytest.raises(BadRequestError, match="has 52 tokens") as caught:
            client.embeddings.create(model="any", input=["a", "cat " * 50])
        assert caught.value.param == "input[1]"
        assert client.models.list().data[0].id == (MODEL_NAME if IMAGE else path.name)
        assert container.stop() == 0


@pytest.mark.matrix(cases=0)
def test_images(tmp_path):
    path = save_task_model("viewer", tmp_path)
    pixel = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
        "rkJggg=="
    )
    with serve(tmp_path, "max_batch_delay=5\n", model=path) as container:
        body = {"inputs": base64.b64encode(pixel).decode(), "parameters": {"top_k": 1}}
        status, data = container.request("POST", "/invocations", body)
        assert status == 200, data
        assert len(json.loads(data)) == 1


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("batching", ["none", "dynamic"])
def test_custom_handler(tmp_path, short_dir, batching):
    """The handler needs a package of its requirements.txt. Its directory is read-only."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.py").write_text(HANDLER)
    wheel(directory, "tiny_package", "FACTOR = 2\n")
    (directory / "requirements.txt").write_text("--no-index\n--find-links .\ntiny_package\n")
    directory.chmod(0o555)
    options = f"option.batching={batching}\nbatch_size=4\nmax_batch_delay=200\n"
    with serve(tmp_path, options, model=directory, TMPDIR=str(short_dir)) as container:
        bodies = [{"number": 4}, {"numbr": 5}, {"number": 6}]
        answers = at_once(lambda body: container.request("POST", "/invocations", body), bodies)
        assert [status for status, _ in answers] == [200, 424, 200]
        assert json.loads(answers[0][1]) == {"twice": 8}
        assert json.loads(answers[2][1]) == {"twice": 12}
        assert json.loads(answers[1][1]) == {"error": "KeyError: 'number'", "code": 424}
        assert container.request("GET", "/ping")[0] == 200, (
            "a failed request does not stop the server"
        )
        assert container.request("POST", "/invocations", bodies[0])[0] == 200
        assert container.stop() == 0
    assert "Traceback" in container.log, "the traceback is in the log"


@pytest.mark.matrix(cases=0)
def test_speech_recognition(tmp_path):
    """The body is a WAV file whose sampling rate is not the model's. Then two files come in base64.

    The second of the two is cut off: it lasts 0.00 s and is refused.
    """
    path = save_task_model("listener", tmp_path)
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(44_100)
        file.writeframes(np.random.default_rng(1).bytes(40_000))
    sound = data.getvalue()
    with serve(tmp_path, "max_batch_delay=5\n", model=path) as container:
        container.wait_for_log("task: automatic-speech-recognition (the model is a Wav2Vec2ForCTC)")
        connection = http.client.HTTPConnection("127.0.0.1", container.port, timeout=60)
        connection.request("POST", "/invocations", sound, {"Content-Type": "audio/wav"})
        answer = connection.getresponse()
        texts = json.loads(answer.read())
        connection.close()
        assert (answer.status, list(texts)) == (200, ["text"])
        encoded = base64.b64encode(sound).decode()
        body = {"inputs": [encoded, encoded[:80]]}
        status, listed = container.request("POST", "/invocations", body)
        first, second = json.loads(listed)
        assert (status, first) == (200, texts)
        assert (second["code"], second["field"]) == (400, "inputs")
        assert "lasts 0.00 s" in second["error"]
        assert container.stop() == 0


HOOK = """
async def with_length(request, call_next):
    length = len(await request.body())
    response = await call_next(request)
    response.headers["X-Body-Bytes"] = str(length)
    return response
"""


@pytest.mark.matrix(cases=0)
def test_transcripts_and_a_hook_around_them(tmp_path):
    """OpenAI's client works, and so does a middleware that a variable of AWS's containers names."""
    path = save_task_model("interpreter", tmp_path)
    (path / "hooks.py").write_text(HOOK)
    hook = {"CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS": "hooks.py:with_length"}
    file = ("speech.wav", wav(1, 12_000, 16_000))
    with serve(tmp_path, "max_batch_delay=5\n", model=path, **hook) as container:
        container.wait_for_log("pre_post_process_hook: ")
        url = f"http://127.0.0.1:{container.port}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            create = client.audio.transcriptions.create
            verbose = create(
                model="m", file=file, language="de", response_format="verbose_json",
                timestamp_granularities=["segment", "word"],
            )  # fmt: skip
            assert (verbose.language, verbose.duration) == ("german", 0.75)
            assert verbose.segments
            assert verbose.words
            raw = client.audio.transcriptions.with_raw_response.create(
                model="m", file=file, language="de"
            )
            assert raw.parse().text
            assert int(raw.headers["X-Body-Bytes"]) > len(file[1])
            with pytest.raises(BadRequestError, match="file: is not a WAV file"):
                create(model="m", file=("speech.mp3", b"ID3" * 99))
        assert container.request("GET", "/ping")[0] == 200
        assert container.stop() == 0


@pytest.mark.matrix(cases=0)
def test_speech_synthesis(tmp_path):
    """The Accept header asks for a WAV file. By default, the sound comes in base64."""
    path = save_task_model("speaker", tmp_path)
    with serve(tmp_path, "option.task=text-to-speech\n", model=path) as container:
        body = {"inputs": "ab c"}
        status, answer = container.request("POST", "/invocations", body)
        assert status == 200
        assert json.loads(answer)["sampling_rate"] == 8000
        status, sound = container.request("POST", "/invocations", body, Accept="audio/wav")
        assert (status, sound) == (200, base64.b64decode(json.loads(answer)["audio"]))
        with wave.open(io.BytesIO(sound)) as file:
            assert (file.getframerate(), file.getnframes() > 100) == (8000, True)
        assert container.stop() == 0


STREAMING = """
import pathlib, time

def handle(inputs):
    if inputs.is_empty():
        return
    seen = pathlib.Path(inputs.get_as_json()["seen"])
    try:
        yield {"part": 1}
        while not (seen.exists() and seen.read_text()):
            yield b""
            time.sleep(0.01)
        yield {"part": 2}
        if seen.read_text() == "fail":
            raise ValueError("half way")
    finally:
        seen.with_suffix(".closed").touch()
"""


@pytest.mark.matrix(cases=0)
@pytest.mark.skipif(bool(IMAGE), reason="test and handler share a directory of this machine")
@pytest.mark.parametrize("batching", ["none", "dynamic"])
def test_streaming_handler(tmp_path, batching):
    """The handler yields its second part only after the client has read the first."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.py").write_text(STREAMING)
    options = f"option.batching={batching}\nbatch_size=4\nmax_batch_delay=5\n"
    with serve(tmp_path, options, model=directory) as container:
        for end, lines in (("end", []), ("fail", [{"error": "ValueError: half way", "code": 424}])):
            seen = tmp_path / end
            with container.post_lines({"seen": str(seen)}) as answer:
                assert next(answer) == {"part": 1}
                seen.write_text(end)
                assert list(answer) == [{"part": 2}, *lines]
            assert seen.with_suffix(".closed").exists()
        with container.post_lines({"seen": str(tmp_path / "never")}) as answer:
            assert next(answer) == {"part": 1}
        status, _ = container.request("POST", "/invocations", {"seen": str(tmp_path / "end")})
        assert status == 200, "the lost client does not block others"
        assert (tmp_path / "never.closed").exists()
        assert container.stop() == 0


FORMATTERS = """
import pathlib
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

@input_formatter
def ask(decoded_payload, **kwargs):
    inputs = pathlib.Path("before.txt").read_text() + decoded_payload.pop("who")
    return {"inputs": inputs, "parameters": {"max_new_tokens": 5}, **decoded_payload}

@output_formatter
def say(response_data):
    return {"mine": response_data}
"""


@pytest.mark.matrix(cases=0)
def test_custom_formatters(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory)
    (directory / "before.txt").write_text("ROM")
    (directory / "model.py").write_text(FORMATTERS)
    with serve(tmp_path, "option.dtype=fp32\n", model=directory) as container:
        if not IMAGE:
            container.wait_for_log(f"formatters: {directory / 'model.py'}")
        status, data = container.request(
            "POST", "/v1/completions", {"prompt": "ROMEO:", "max_tokens": 5, "temperature": 0}
        )
        assert status == 200, data
        text = json.loads(data)["choices"][0]["text"]
        status, data = container.request("POST", "/invocations", {"who": "EO:"})
        assert (status, json.loads(data)) == (200, {"mine": {"generated_text": text}})
        with container.post_lines({"who": "EO:", "stream": True}) as lines:
            assert "".join(line["mine"]["token"]["text"] for line in lines) == text
        assert container.request("POST", "/invocations", {"inputs": "a"})[0] == 424
        assert container.stop() == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def handle(inputs):\n    return (\n", "model.py:2: SyntaxError"),
        pytest.param(
            "import nothing_like_this\ndef handle(inputs): ...\n",
            "model.py:1: ModuleNotFoundError",
            marks=pytest.mark.matrix(cases=0),
        ),
        ("def handel(inputs): ...\n", "defines neither handle(inputs) nor model_fn(model_dir)"),
        (
            "def handle(inputs):\n    raise OSError('no weights')\n",
            "model.py:2: OSError: no weights",
        ),
    ],
)
def test_a_handler_that_cannot_start(tmp_path, code, message):
    (tmp_path / "model.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "container", "serve", "--port", str(free_port()),
         "--model-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert f"longshore: {tmp_path}" in done.stderr
    assert message in done.stderr
