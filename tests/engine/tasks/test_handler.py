"""Custom handlers: their arguments, return values and errors."""

from __future__ import annotations

import sys

import pytest
import torch

from core.errors import ConfigurationError, EngineUnavailableError, RequestError, StoppedError
from engine.tasks.performer import Answer
from tests.engine.tasks.conftest import decoded, job, perform

ECHO = """
from djl_python import Input, Output

calls = []

def handle(inputs: Input) -> Output:
    calls.append(inputs)
    if inputs.is_empty():
        return None
    data = inputs.get_as_json()
    if data == "raise":
        raise ValueError("no such thing")
    if data == "exit":
        raise SystemExit(3)
    return Output().add_as_json({"said": data})
"""
BATCHES = """
from djl_python import Input, Output

sizes = []

def handle(inputs):
    if inputs.is_empty():
        return
    sizes.append(inputs.get_batch_size())
    outputs = Output()
    for index, item in enumerate(inputs.get_batches()):
        outputs.add_as_json(1 / item.get_as_json()["x"], batch_index=index)
    return outputs
"""


def test_a_handler_is_called_once_at_start_and_once_per_request(handler, tmp_path):
    engine = handler(ECHO, {"temperature": "0.5", "batch_size": "1"})
    assert engine.facts.architecture == "handle(inputs)"
    outcome = perform(engine, job({"a": 1}, Accept="x/y"))[0]
    assert decoded(outcome) == {"said": {"a": 1}}
    assert outcome.content_type == "application/json"
    empty, request = sys.modules["model"].calls
    assert empty.is_empty()
    assert empty.get_properties() == {
        "temperature": "0.5",
        "batch_size": "1",
        "model_dir": str(tmp_path),
        "device_id": "-1",
    }
    assert request.get_property("content-type") == "application/json"
    assert request.get_property("ACCEPT") == "x/y"
    assert request.get_property("temperature") == "0.5"
    assert request.contains_key("data")


def test_an_error_fails_only_its_request(handler):
    engine = handler(ECHO, batch_size=8)
    outcomes = perform(engine, *map(job, ("a", "raise", "b", "exit", "c")))
    assert [decoded(outcomes[at]) for at in (0, 2, 4)] == [{"said": letter} for letter in "abc"]
    assert isinstance(outcomes[1], ValueError)
    assert "SystemExit: 3" in str(outcomes[3])


ESCAPES = """
import asyncio
import sys
from djl_python import Input, Output

class PanicException(BaseException): ...

ERRORS = {"panic": PanicException, "cancel": asyncio.CancelledError, "exit": SystemExit,
          "close": GeneratorExit}

def answer(inputs):
    said = None if inputs.is_empty() else inputs.get_as_json()
    if said in ERRORS:
        raise ERRORS[said]("why")
    return said
"""
HANDLERS = {
    "function": "def handle(inputs): return answer(inputs)",
    "coroutine": "async def handle(inputs): return answer(inputs)",
    "awaitable": "async def later(inputs): return answer(inputs)\n"
                 "def handle(inputs): return later(inputs)",
    "batches": "def handle(inputs):\n"
               "    outputs = Output()\n"
               "    for index, item in enumerate(inputs.get_batches()):\n"
               "        outputs.add_as_json(answer(item), batch_index=index)\n"
               "    return outputs",
    "generator": "def handle(inputs): yield answer(inputs) or ''",
    "async generator": "async def handle(inputs): yield answer(inputs) or ''",
    "sagemaker": "def model_fn(model_dir): return Input()\n"
                 "def input_fn(body, content_type):\n"
                 "    inputs = Input()\n"
                 "    inputs.content.add('data', body.encode())\n"
                 "    return inputs\n"
                 "def predict_fn(inputs, model): return answer(inputs)",
}  # fmt: skip


@pytest.mark.parametrize("name", HANDLERS)
def test_no_exception_ends_more_than_its_request(handler, name):
    engine = handler(ESCAPES + HANDLERS[name], batch_size=8)
    outcomes = perform(engine, *map(job, ("a", "panic", "b", "cancel", "exit", "close", "c")))
    for at in (0, 2, 6):
        assert isinstance(outcomes[at], Answer)
    errors = [str(outcomes[at]) for at in (1, 3, 4, 5)]
    names = ("PanicException", "CancelledError", "SystemExit", "GeneratorExit")
    assert errors == [f"{name}: why" for name in names]


def test_a_signal_that_arrives_in_a_handler_ends_the_engine(handler):
    code = "from core.errors import StoppedError\nasync def handle(inputs):\n"
    code += "    if not inputs.is_empty(): raise StoppedError"
    for start in (code, code.replace("async ", "")):
        with pytest.raises(StoppedError):
            perform(handler(start), job(1))


def test_a_batch_handler_gets_batches(handler):
    engine = handler(BATCHES, batch_size=4)
    outcomes = perform(engine, *(job({"x": number}) for number in (1, 2, 4, 8, 16)))
    assert [decoded(outcome) for outcome in outcomes] == [1, 0.5, 0.25, 0.125, 0.0625]
    assert sys.modules["model"].sizes == [4, 1]


def test_a_failing_request_of_a_batch_fails_alone(handler):
    engine = handler(BATCHES, batch_size=4)
    outcomes = perform(engine, *(job({"x": number}) for number in (1, 0, 4)))
    assert [decoded(outcomes[0]), decoded(outcomes[2])] == [1, 0.25]
    assert isinstance(outcomes[1], ZeroDivisionError)
    perform(engine, job({"x": 1}), job({"x": 2}))
    assert sys.modules["model"].sizes == [3, 1, 1, 1, 2], "the next requests are batched again"


def test_a_handler_without_batch_support_gets_no_further_batches(handler):
    engine = handler(ECHO, batch_size=4)
    for _ in range(2):
        outcomes = perform(engine, job("a"), job("b"))
        assert [decoded(outcome) for outcome in outcomes] == [{"said": "a"}, {"said": "b"}]
    calls = sys.modules["model"].calls
    assert [call.get_batch_size() for call in calls] == [1, 2, 1, 1, 1, 1]


def test_coroutines_run_concurrently_in_one_loop(handler):
    engine = handler(
        """
import asyncio

waiting, loops = [], set()

async def handle(inputs):
    loops.add(asyncio.get_running_loop())
    if inputs.is_empty():
        return None
    waiting.append(inputs)
    while len(waiting) < 3:
        await asyncio.sleep(0)
    if inputs.get_as_json() == 0:
        raise ValueError("zero")
    return {"got": inputs.get_as_json()}
""",
        batch_size=3,
    )
    outcomes = perform(engine, job(1), job(0), job(2))
    assert [decoded(outcomes[0]), decoded(outcomes[2])] == [{"got": 1}, {"got": 2}]
    assert isinstance(outcomes[1], ValueError)
    perform(engine, job(3))
    assert len(sys.modules["model"].loops) == 1


@pytest.mark.parametrize(
    ("returned", "answer"),
    [
        ("None", Answer(b"", "", 204)),
        ("'text'", Answer(b"text", "text/plain; charset=utf-8")),
        ("b'data'", Answer(b"data", "application/octet-stream")),
        ("[1, {'a': None}]", Answer(b'[1, {"a": null}]')),
        ("Output(201, 'made')", Answer(b'{"code": 201, "message": "made"}', code=201)),
        (
            "Output().add('a', key='x').add('b', key='data').add_property('X-Y', 'z')",
            Answer(b"b", "text/plain; charset=utf-8", headers={"X-Y": "z"}),
        ),
        (
            "Output().add(b'P6', key='data').add_property('content-type', 'image/x')",
            Answer(b"P6", "image/x"),
        ),
        (
            "Output().error('bad', code=400)",
            Answer(b'{"code": 400, "message": "prediction failure", "error": "bad"}', code=400),
        ),
        ("{'a': numpy.float32(0.5), 'b': numpy.arange(2)}", Answer(b'{"a": 0.5, "b": [0, 1]}')),
        ("Output().set_code(202).set_message('m').add({'a': 1})", Answer(b'{"a": 1}', code=202)),
    ],
)
def test_valid_return_values(handler, returned, answer):
    engine = handler(
        "import numpy\nfrom djl_python import Output\ndef handle(inputs):\n"
        f"    return None if inputs.is_empty() else {returned}\n"
    )
    assert perform(engine, job({})) == [answer]


@pytest.mark.parametrize("returned", ["object()", "float('nan')", "Output().add_stream_content(1)"])
def test_invalid_return_values_fail_the_request(handler, returned):
    engine = handler(
        "from djl_python import Output\ndef handle(inputs):\n"
        f"    return None if inputs.is_empty() else {returned}\n"
    )
    assert isinstance(perform(engine, job({}))[0], TypeError | ValueError)


def test_inputs_of_other_content_types(handler):
    engine = handler(
        "def handle(inputs):\n"
        "    if inputs.is_empty():\n        return\n"
        "    data = inputs.get_data()\n"
        "    return {'type': type(data).__name__, 'string': inputs.get_as_string(),\n"
        "            'keys': inputs.get_content().get_keys()}\n"
    )
    outcomes = perform(
        engine,
        job(b"[1]"),
        job(b"a,b\n1,2", **{"Content-Type": "text/csv"}),
        job(b"raw", **{"Content-Type": "application/x-thing"}),
        job(b"", **{"Content-Type": "text/plain"}),
    )
    assert [decoded(outcome)["type"] for outcome in outcomes] == ["list", "str", "bytes", "str"]
    assert decoded(outcomes[3]) == {"type": "str", "string": "", "keys": ["data"]}


SAGEMAKER = """
import json, pathlib

def model_fn(model_dir):
    return json.loads(pathlib.Path(model_dir, "weights.json").read_text())

def predict_fn(data, model):
    return [model["scale"] * number for number in data]
"""


def test_sagemakers_handler_functions(handler, tmp_path):
    (tmp_path / "weights.json").write_text('{"scale": 2}')
    engine = handler(SAGEMAKER, batch_size=4)
    doubled, wrong, csv, failed = perform(
        engine, job([1, 2]), job(b"{"), job(b"1,2", **{"Content-Type": "text/csv"}), job([{}])
    )
    assert decoded(doubled) == [2, 4]
    assert isinstance(wrong, RequestError)
    assert isinstance(csv, RequestError)
    assert csv.field == "Content-Type"
    assert isinstance(failed, TypeError)


def test_sagemakers_input_and_output_functions(handler, tmp_path):
    (tmp_path / "weights.json").write_text('{"scale": 3}')
    engine = handler(
        SAGEMAKER
        + """
def input_fn(body, content_type):
    assert isinstance(body, str if content_type == "text/csv" else bytes), type(body)
    return [int(number) for number in (body if isinstance(body, str) else body.decode()).split(",")]

def output_fn(prediction, accept):
    text = ",".join(map(str, prediction))
    return (text, "text/csv") if accept == "application/json" else text
"""
    )
    text = {"Content-Type": "text/csv; charset=utf-8"}
    outcomes = perform(
        engine,
        job(b"1,2", **text),
        job(b"3", **{"content-type": "x/y", "Content-Type": "x/y"}, Accept="x/z"),
    )
    assert outcomes == [Answer(b"3,6", "text/csv"), Answer(b"9", "x/z")]


def test_without_predict_fn_the_model_is_called(handler):
    engine = handler("def model_fn(model_dir):\n    return lambda data: data + 1\n")
    assert decoded(perform(engine, job(1))[0]) == 2


@pytest.mark.parametrize(
    ("code", "line", "message"),
    [
        ("def handle(inputs):\n    return (\n", 2, "SyntaxError: '(' was never closed"),
        ("import json\nimport no_such_package\n", 2, "requirements.txt"),
        ("def handle(inputs):\n    x = 1\n    return x / 0\n", 3, "ZeroDivisionError"),
        ("raise SystemExit(4)\n", 1, "SystemExit: 4"),
        ("import asyncio\nraise asyncio.CancelledError\n", 2, "CancelledError"),
        ("def handle(inputs):\n    return inputs.get_as_json()\n", 2, "is_empty"),
        ("def model_fn(model_dir):\n    raise OSError('no weights')\n", 2, "OSError: no weights"),
        ("import helper\ndef handle(inputs): ...\n", None, "helper.py:1: NameError"),
        ("def handler(inputs): ...\n", None, "defines neither"),
    ],
)
def test_errors_at_start_name_the_line(handler, tmp_path, code, line, message):
    (tmp_path / "helper.py").write_text("undefined\n")
    with pytest.raises(ConfigurationError) as caught:
        handler(code)
    assert message in str(caught.value)
    if line is not None:
        assert f"{tmp_path / 'model.py'}:{line}:" in str(caught.value)


def test_a_handler_can_use_files_next_to_it(handler, tmp_path):
    (tmp_path / "helper.py").write_text("ANSWER = 42\n")
    (tmp_path / "table.txt").write_text("seven")
    engine = handler(
        "import helper, pathlib\nTABLE = pathlib.Path('table.txt').read_text()\n"
        "def handle(inputs):\n    return [helper.ANSWER, TABLE]\n"
    )
    assert decoded(perform(engine, job({}))[0]) == [42, "seven"]


@pytest.mark.parametrize("start", ["def", "async def"])
def test_a_lost_connection_ends_the_engine(handler, start):
    """The server raises this error while a part is sent."""

    def lose(part):
        raise EngineUnavailableError("the socket failed")

    engine = handler(f"{start} handle(inputs):\n    yield 'a'\n")
    with pytest.raises(EngineUnavailableError):
        perform(engine, job(1, send=lose))


def test_a_lost_device_ends_the_engine(handler):
    for code in (
        "def handle(inputs):\n    if not inputs.is_empty():\n"
        "        raise torch.AcceleratorError()",
        "async def handle(inputs):\n    if not inputs.is_empty():\n"
        "        raise torch.AcceleratorError()",
        "def model_fn(model_dir): ...\ndef predict_fn(data, model): raise torch.AcceleratorError()",
    ):
        engine = handler(f"import torch\n{code}\n", batch_size=2)
        with pytest.raises(torch.AcceleratorError):
            perform(engine, job(1), job(2))


@pytest.mark.parametrize("batching", ["continuous", "paged"])
def test_token_level_strategies_are_rejected(handler, batching):
    with pytest.raises(ConfigurationError, match="none or dynamic"):
        handler(ECHO, batching=batching)
