"""A batch of `inputs`: a result or an error for each."""

from __future__ import annotations

from typing import Any

from flask.testing import FlaskClient

from core.messages import Abort, Submit
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS, eventually
from tests.container.fake_engine import FakeEngine, fails, says, stalls
from tests.container.invocations import records


def test_a_batch(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """Each input has a result of its own, and mistakes disturb no neighbour."""

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
    assert [each.get("generated_text") for each in results] == [
        "oneone", None, None, "twotwo", None, None,
    ]  # fmt: skip
    assert results[1] == {"error": "no luck", "code": 424}
    assert [each.get("field") for each in results[2:]] == [
        "inputs[2]", None, "inputs[4]", "parameters.max_new_tokens",
    ]  # fmt: skip

    seen = records(http.post("/invocations", json={**body, "stream": True}))
    texts = {each["index"]: each["generated_text"] for each in seen if "generated_text" in each}
    assert texts == {0: "oneone", 1: "", 3: "twotwo"}
    assert {each["index"] for each in seen if "error" in each} == {2, 4, 5}


def test_a_batch_without_any_answer_has_the_status_of_its_first(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.script = fails("overloaded", "full")
    response = http.post("/invocations", json={"inputs": ["a", "b"]})
    assert (response.status_code, response.get_json()["error"]) == (503, "full")


def test_a_batch_that_is_not_read_is_aborted(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = stalls(after=[65])
    response = http.post("/invocations", json={"inputs": ["a", "b", "c"], "stream": True})
    response.close()
    eventually(lambda: len(engine.of_type(Abort)) == 3)


def test_csv_is_a_batch(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    data = 'inputs\nfirst\n"a ""b"", c"\n'
    response = http.post("/invocations", data=data, content_type="text/csv")
    assert response.get_json() == [{"generated_text": "Hi there"}] * 2
    prompts = [each.prompt_token_ids for each in engine.of_type(Submit) if isinstance(each, Submit)]
    assert list(map(tokenizer.decode, prompts)) == ["first", 'a "b", c']
