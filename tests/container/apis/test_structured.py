"""Structured outputs in each API: the grammar sent to the engine, and rejected requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from container.front_end.app import create_app
from container.isolation.helper import Helper
from container.wire.engine_client import EngineClient
from core.configuration.options import make_options
from core.protocol.messages import Submit
from core.structured_outputs import StructuredOutputsParams
from core.text.chat_template import ChatTemplate
from core.text.grammar import grammar_text
from core.text.tokenizer import Tokenizer
from tests.container.apis.test_chat import USER, ask, events, submitted
from tests.container.conftest import EOS, Serve
from tests.container.fake_engine import FakeEngine, fails, says

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "it", "strict": True, "schema": SCHEMA}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
CALL_F = {"type": "function", "function": {"name": "f"}}


def complete(http: FlaskClient, **fields: Any) -> TestResponse:
    return http.post("/v1/completions", json={"prompt": "Q", **fields})


def invoke(http: FlaskClient, **parameters: Any) -> TestResponse:
    return http.post("/invocations", json={"inputs": "Q", "parameters": parameters})


def grammar(engine: FakeEngine) -> str:
    """Return the grammar that the engine got last. Converting it again must not change it."""
    form = submitted(engine).params.structured_outputs
    assert form is not None
    assert form.grammar == grammar_text(form)
    return form.grammar


CONSTRAINTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ({"guided_regex": r"\d+"}, {"regex": r"\d+"}),
    ({"guided_choice": ["a", "b"], "guided_decoding_backend": "x"}, {"choice": ("a", "b")}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json_object": True, "regex": None}}, {"json_object": True}),
    ({"structured_outputs": {"choice": ["a"], "json_object": False}}, {"choice": ("a",)}),
]
RESPONSE_FORMATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json", "value": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_schema", "value": NAMED}}, {"json": SCHEMA}),
    ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
]
TGI_GRAMMARS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"grammar": {"type": "json", "value": SCHEMA}}, {"json": SCHEMA}),
    ({"grammar": {"type": "json", "value": json.dumps(SCHEMA)}}, {"json": SCHEMA}),
    ({"grammar": {"type": "json_object", "value": SCHEMA}}, {"json": SCHEMA}),
    ({"grammar": {"type": "json_schema", "value": NAMED}}, {"json": SCHEMA}),
    ({"grammar": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
]


def is_grammar_of(grammar: str, form: dict[str, Any]) -> bool:
    """Return whether `grammar` is the grammar of the constraint `form`.

    The keys of a schema may be in any order, because flask's test client sorts them.
    """
    expected = grammar_text(StructuredOutputsParams(**form))
    if "json" in form:
        return bool(json.loads(grammar) == json.loads(expected))
    return grammar == expected


@pytest.mark.parametrize(("fields", "form"), [*CONSTRAINTS, *RESPONSE_FORMATS])
def test_openai_apis(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], form: dict[str, Any]
) -> None:
    for answer in (complete(http, **fields), ask(http, **fields)):
        assert answer.status_code == 200
        assert is_grammar_of(grammar(engine), form)


@pytest.mark.parametrize(("fields", "form"), [*CONSTRAINTS, *TGI_GRAMMARS])
def test_invocations_api(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], form: dict[str, Any]
) -> None:
    assert invoke(http, **fields).status_code == 200
    assert is_grammar_of(grammar(engine), form)


def test_schema_properties_keep_their_order(http: FlaskClient, engine: FakeEngine) -> None:
    """The engine gets the properties of a schema in the order of the request."""
    schema = '{"type":"object","properties":{"b":{},"a":{}}}'
    body = f'{{"prompt":"Q","guided_json":{schema}}}'
    http.post("/v1/completions", data=body, content_type="application/json")
    assert list(json.loads(grammar(engine))["grammars"][0]["json_schema"]["properties"]) == [
        "b",
        "a",
    ]


NOTHING: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"structured_outputs": {}},
    {"guided_json": None},
    {"structured_outputs": {"whitespace_pattern": None}},
]


def test_fields_without_a_constraint(http: FlaskClient, engine: FakeEngine) -> None:
    for fields in NOTHING:
        assert ask(http, **fields).status_code == 200
        assert submitted(engine).params.structured_outputs is None


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": 3}, "guided_json", "JSON Schema"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": {"type": "nonsense"}}, "guided_json", "nonsense"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_regex": "("}, "guided_regex", "unclosed"),
    ({"guided_regex": ["a"]}, "guided_regex", "a string"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": [1]}, "guided_choice", "list of strings"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "Expected"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "mean 'regex'"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "JSON Schema"),
    (
        {"structured_outputs": {"structural_tag": {}}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
    ({"structured_outputs": "json"}, "structured_outputs", "an object"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "combined with guided_regex"),
    (
        {"guided_regex": "a", "structured_outputs": {"json": {}}},
        "structured_outputs.json",
        "combined with",
    ),
    ({"guided_regex": "a", "num_beams": 2}, "guided_regex", "beam search"),
]
WRONG_OPENAI: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json"}}, "response_format.value", "JSON Schema"),
    ({"response_format": {"type": "regex", "schema": SCHEMA}}, "response_format.schema", "value"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "no other"),
    ({"response_format": {"type": "json_object", "json_schema": NAMED}},
     "response_format.json_schema", "schema or value"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}},
     "response_format.value", "schema or value"),
    ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema", "object"),
    ({"response_format": {}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
     "response_format.json_schema", "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
     "response_format.json_schema.schema", '"not"'),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"},
     "response_format", "guided_regex"),
    ({"response_format": {"type": "json_object"}, "num_beams": 2, "temperature": 0},
     "response_format", "beam search"),
]  # fmt: skip
WRONG_TGI: list[tuple[dict[str, Any], str, str]] = [
    ({"grammar": {"type": "xml", "value": "a"}}, "grammar.type", "regex"),
    ({"grammar": {"value": "a"}}, "grammar.type", "regex"),
    ({"grammar": {"type": "regex", "value": {}}}, "grammar.value", "regular expression"),
    ({"grammar": {"type": "regex", "value": "("}}, "grammar.value", "unclosed"),
    ({"grammar": {"type": "json_schema", "value": {}}}, "grammar.value", "JSON Schema"),
    ({"grammar": {"type": "json_schema", "value": {"schema": {"type": "x"}}}},
     "grammar.value.schema", "Invalid type"),
    ({"grammar": {"type": "regex", "value": "a"}, "guided_json": {}},
     "grammar.value", "guided_json"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), [*WRONG, *WRONG_OPENAI])
def test_errors_of_the_openai_apis(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    for response in (ask(http, **fields), complete(http, **fields)):
        assert response.status_code == 400
        error = response.get_json()["error"]
        assert error["param"] == param
        assert message in error["message"]
    assert not engine.of_type(Submit)


@pytest.mark.parametrize(("fields", "param", "message"), [*WRONG, *WRONG_TGI])
def test_errors_of_invocations(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    response = invoke(http, **fields)
    assert (response.status_code, response.get_json()["field"]) == (400, f"parameters.{param}")
    assert message in response.get_json()["error"]
    assert not engine.of_type(Submit)


def test_a_schema_that_is_nested_too_deeply(http: FlaskClient) -> None:
    for depth in (200, 400, 800, 900, 950):
        schema = '{"items":' * depth + "{}" + "}" * depth
        body = f'{{"prompt":"Q","guided_json":{schema}}}'
        response = http.post("/v1/completions", data=body, content_type="application/json")
        assert response.status_code == 400
        assert response.get_json()["error"]["param"] in ("guided_json", "body")


def test_errors_found_by_the_engine(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = fails("rejected", "too complex", field="structured_outputs")
    response = ask(http, response_format={"type": "json_object"})
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "response_format")


def test_a_grammar_that_fails_after_the_first_tokens_is_the_client_s_error(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.script = fails("rejected", "too complex", "structured_outputs", after=[5])
    response = ask(http, guided_regex="a+")
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "guided_regex")
    *_, last, done = ask(http, guided_regex="a+", stream=True).text.split("\n\n")[:-1]
    assert '"code":400' in last
    assert done == "data: [DONE]"


WRITTEN = {
    None: '{"name": "f", "parameters": {"a": 1}}',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"a": 1}}]',
    "qwen3_coder": '{"name": "f", "parameters": {"a": 1}}',
    "pythonic": '{"name": "f", "parameters": {"a": 1}}',
    "ernie45": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n',
    "hunyuan_a13b": '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>',
    "glm45": '{"name": "f", "parameters": {"a": 1}}',
}


@pytest.mark.parametrize("parser", WRITTEN)
@pytest.mark.parametrize("choice", ["required", CALL_F])
def test_forced_tool_calls(
    serve: Serve, engine: FakeEngine, tokenizer: Tokenizer, parser: str | None, choice: Any
) -> None:
    """The model writes calls in its own notation.

    If this notation is unknown or does not use JSON, it writes plain JSON.
    """
    http = serve(tool_call_parser=parser)
    engine.script = says([*tokenizer.encode(WRITTEN[parser]), EOS])
    fields = {"tools": TOOLS, "tool_choice": choice}
    choice_ = ask(http, **fields).get_json()["choices"][0]
    (call,) = choice_["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a":1}'}
    reason = "tool_calls" if choice == "required" else "stop"
    assert (choice_["message"]["content"], choice_["finish_reason"]) == (None, reason)
    rules = grammar(engine)
    assert '\\"f\\"' in rules
    assert ('\\"g\\"' in rules) == (choice == "required")
    assert ("*" in rules.split("\n")[0]) == (choice == "required")
    deltas = [event["choices"][0]["delta"] for event in events(ask(http, **fields, stream=True))]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == call["function"]


def test_a_marker_that_is_a_token(
    client: EngineClient,
    engine: FakeEngine,
    tokenizer_dir: Path,
    tmp_path: Path,
    template: ChatTemplate,
) -> None:
    """The token is in the grammar, and is kept in the text that is parsed for calls."""
    own = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    own.add_special_tokens(["[TOOL_CALLS]"])
    own.save(str(tmp_path / "tokenizer.json"))
    tokenizer, options = Tokenizer(tmp_path), make_options({"tool_call_parser": "mistral"})
    helper = Helper(tmp_path, template.source)
    http = create_app(client, tokenizer, options, "demo", template, helper=helper).test_client()
    mark, *_ = answer = tokenizer.encode(WRITTEN["mistral"])
    assert mark > EOS
    engine.script = says([*answer, EOS])
    choice = ask(http, tools=TOOLS, tool_choice="required").get_json()["choices"][0]
    assert [tool_call["function"]["name"] for tool_call in choice["message"]["tool_calls"]] == ["f"]
    assert grammar(engine).startswith(f'start: <[{mark}]> "[" call')
    helper.close()


def test_parallel_tool_calls_can_be_disabled(http: FlaskClient, engine: FakeEngine) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert "X-Longshore-Warning" not in ask(http, **fields).headers
    assert "*" not in grammar(engine).split("\n")[0]


def test_tool_calls_that_are_not_forced(serve: Serve, engine: FakeEngine) -> None:
    http = serve(tool_call_parser="hermes")
    response = ask(http, tools=TOOLS, parallel_tool_calls=False)
    assert "parallel_tool_calls" in response.headers["X-Longshore-Warning"]
    assert submitted(engine).params.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "required"),
        ({"tool_choice": 3, "tools": TOOLS}, "tool_choice", "a function"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": TOOLS},
         "tool_choice.function.name", "no function 'h'"),
        ({"tool_choice": CALL_F}, "tool_choice.function.name", "no function 'f'"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]},
         "tools[0].function", "a name"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": []}},
                                               {"function": {"name": "f", "parameters": [1]}}]},
         "tools[1].function.parameters", "JSON Schema"),
        ({"tool_choice": "required",
          "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters", "an object"),
        ({"tool_choice": "required",
          "tools": [{"function": {"name": "f", "parameters": {"enum": [], "type": "object"}}}]},
         "tools", "Unsatisfiable"),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"},
         "tool_choice", "structured outputs"),
        ({"tool_choice": "required", "tools": TOOLS, "num_beams": 2}, "tools", "beam search"),
    ],
)  # fmt: skip
def test_tool_calls_that_cannot_be_forced(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    response = ask(http, USER, **fields)
    assert response.status_code == 400
    error = response.get_json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert not engine.of_type(Submit)
