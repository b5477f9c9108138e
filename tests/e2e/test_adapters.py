"""LoRA adapters end to end: found in the model's folder or loaded over HTTP, selected, unloaded."""

from __future__ import annotations

import http.client
import json
import shutil

import pytest

from engine import LLM, LoRARequest, SamplingParams
from tests.e2e.serving import DEMO, IMAGE, MODEL_NAME, serve
from tests.engine.lora.adapter_files import write_adapter

PROMPT = "ROMEO:"
NUM_NEW = 16
OPTIONS = """option.dtype=fp32
option.enable_lora=true
option.max_loras=2
option.http_workers=2
"""


@pytest.fixture
def model(tmp_path):
    """The demo model with adapter `a`, which is loaded at start, and two more elsewhere."""
    folder = shutil.copytree(DEMO, tmp_path / "adapted" / "demo")
    write_adapter(DEMO, folder / "adapters" / "a", rank=4, seed=1)
    write_adapter(DEMO, folder / "more" / "b", rank=8, seed=2)
    write_adapter(DEMO, folder / "more" / "large", rank=32, seed=3)
    return folder


@pytest.fixture
def expected(model):
    """The offline engine's answers. Other tests compare these with answers of merged weights."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    wanted = [None, model / "adapters" / "a", model / "more" / "b"]
    requests = [folder and LoRARequest(folder.name, 1, str(folder)) for folder in wanted]
    with LLM(DEMO, dtype="fp32", enable_lora=True) as llm:
        outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False, lora_request=requests)
    texts = dict(zip(("", "a", "b"), (output.outputs[0].text for output in outputs), strict=True))
    assert len(set(texts.values())) == 3
    return texts


def test_adapters_end_to_end(tmp_path, model, expected):
    where = "/opt/ml/model" if IMAGE else str(model)
    with serve(tmp_path, OPTIONS, model=model) as container:

        def ask(method, path, body=None, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", container.port, timeout=60)
            connection.request(method, path, body and json.dumps(body), headers)
            response = connection.getresponse()
            status, answer = response.status, json.loads(response.read())
            connection.close()
            return status, answer

        def load(name, src):
            return ask("POST", "/adapters", {"name": name, "src": f"{where}/{src}"})

        assert load("b", "more/large")[0] == 400
        assert "option.max_lora_rank is 16" in load("b", "more/large")[1]["error"]
        assert load("b", "more/b") == (200, {"status": "Adapter b registered"})
        assert load("b", "more/b")[0] == 409
        assert load("c", "more/b")[0] == 507
        check_choosing(ask, expected)
        check_unloading(container, ask, load, expected)
        container.wait_for_log("loaded: a\n")
        assert container.stop() == 0


def check_choosing(ask, expected):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": NUM_NEW}}
    for _ in range(3):  # either worker may answer
        for name, text in expected.items():
            payload = {**body, **({"adapters": name} if name else {})}
            assert ask("POST", "/invocations", payload)[1] == {"generated_text": text}
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "a"}
    assert ask("POST", "/invocations", body, **header)[1] == {"generated_text": expected["a"]}
    names = ["b", "", "a"]
    together = ask("POST", "/invocations", {**body, "inputs": [PROMPT] * 3, "adapters": names})[1]
    assert [answer["generated_text"] for answer in together] == [expected[name] for name in names]
    for name in ("a", MODEL_NAME):
        payload = {"prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0, "model": name}
        answer = ask("POST", "/v1/completions", payload)[1]
        assert answer["choices"][0]["text"] == expected[name if name == "a" else ""]
        assert answer["model"] == name
    models = ask("GET", "/v1/models")[1]["data"]
    assert [entry["id"] for entry in models] == [MODEL_NAME, "a", "b"]


def check_unloading(container, ask, load, expected):
    """Unload an adapter during a stream. The stream ends normally, then the slot is free."""
    connection = http.client.HTTPConnection("127.0.0.1", container.port, timeout=60)
    payload = {
        "inputs": PROMPT, "adapters": "a", "stream": True,
        "parameters": {"max_new_tokens": 400, "ignore_eos": True},
    }  # fmt: skip
    connection.request("POST", "/invocations", json.dumps(payload))
    lines = connection.getresponse()
    next(lines)
    assert ask("DELETE", "/adapters/a") == (200, {"status": "Adapter a unregistered"})
    assert ask("DELETE", "/adapters/a")[0] == 404
    assert ask("POST", "/invocations", {"inputs": PROMPT, "adapters": "a"})[0] == 404
    last = json.loads(list(lines)[-1])
    connection.close()
    assert last["generated_text"].startswith(expected["a"])
    assert load("c", "more/b")[0] == 200
    body = {"inputs": PROMPT, "adapters": "c", "parameters": {"max_new_tokens": NUM_NEW}}
    assert ask("POST", "/invocations", body)[1] == {"generated_text": expected["b"]}
