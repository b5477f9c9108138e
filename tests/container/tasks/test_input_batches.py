"""Batches in `inputs`: each input gets a result or an error."""

from __future__ import annotations

from typing import Any

from flask.testing import FlaskClient

from core.protocol.messages import Abort, Submit
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS, eventually
from tests.container.fake_engine import FakeEngine, fails, says, stalls
from tests.container.invocations import records


def test_a_batch_has_a_result_per_input(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """Each input has its own result, and invalid inputs do not affect the others."""

    def script(submit: Submit) -> Any:
        text = tokenizer.decode(submit.prompt_token_ids)
        return fails("failed", "no luck", after=[65])(submit) if text == "bad" else (
            says([*submit.prompt_token_ids, EOS])(submit)
        )  # fmt: skip

    engine.script = script
    inputs = ["one", "bad", "", "two", 5, "x" * 99]
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 5, "return_full_text": True}}
    whole = http.post("/invocations", json=body)
    assert whole.status_code == 200
    results = whole.get_json()
    assert [result.get("generated_text") for result in results] == [
        "oneone", None, None, "twotwo", None, None,
    ]  # fmt: skip
    assert results[1] == {"error": "no luck", "code": 424}
    assert [result.get("field") for result in results[2:]] == [
        "inputs[2]", None, "inputs[4]", "parameters.max_new_tokens",
    ]  # fmt: skip

    seen = records(http.post("/invocations", json={**body, "stream": True}))
    texts = {
        result["index"]: result["generated_text"]
        for result in seen
        if result.get("generated_text") is not None
    }
    assert texts == {0: "oneone", 1: "", 3: "twotwo"}
    assert {result["index"] for result in seen if "error" in result} == {2, 4, 5}


def test_a_failed_batch_has_the_status_of_its_first_error(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.script = fails("overloaded", "full")
    response = http.post("/invocations", json={"inputs": ["a", "b"]})
    assert (response.status_code, response.get_json()["error"]) == (503, "full")


def test_an_unread_batch_is_aborted(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = stalls(after=[65])
    response = http.post("/invocations", json={"inputs": ["a", "b", "c"], "stream": True})
    response.close()
    eventually(lambda: len(engine.of_type(Abort)) == 3)


def test_csv_is_a_batch(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    data = 'inputs\nfirst\n"a ""b"", c"\n'
    response = http.post("/invocations", data=data, content_type="text/csv")
    assert response.get_json() == [{"generated_text": "Hi there"}] * 2
    prompts = [
        message.prompt_token_ids
        for message in engine.of_type(Submit)
        if isinstance(message, Submit)
    ]
    assert list(map(tokenizer.decode, prompts)) == ["first", 'a "b", c']
