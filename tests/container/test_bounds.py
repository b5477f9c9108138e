"""Every number that a request may have has bounds, and the code keeps them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

import container.apis
from container.apis.anthropic.schema import MESSAGES_FIELDS
from container.apis.chat.schema import CHAT_FIELDS
from container.apis.completions.schema import COMPLETION_FIELDS
from container.apis.embeddings import EMBEDDING_FIELDS
from container.apis.responses.schema import RESPONSES_FIELDS
from container.apis.tasks.rerank import RERANK_FIELDS
from container.apis.text.schema import PARAMETERS, TEXT_FIELDS
from container.apis.tokenize import DETOKENIZE_FIELDS
from container.schema.fields import Field
from container.schema.kinds import INTEGER
from core.errors import RequestError
from core.sampling import BOUNDS, MAX_INT64, SamplingParams
from tests.container.conftest import Serve

USER = {"role": "user", "content": "Q"}


def tables() -> Iterator[tuple[str, Mapping[str, Field]]]:
    """Yield all tables of fields, as they are found in the modules of the APIs."""
    for module in pkgutil.walk_packages(container.apis.__path__, "container.apis."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, dict) and any(isinstance(v, Field) for v in value.values()):
                yield f"{module.name}.{name}", value


def numbers(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a JSON Schema that are numbers."""
    if isinstance(schema, Mapping):
        if schema.get("type") in ("integer", "number"):
            yield schema
        for part in schema.values():
            yield from numbers(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from numbers(part)


def test_every_number_of_every_table_has_bounds() -> None:
    found = [
        (table, name, schema)
        for table, fields in tables()
        for name, field in fields.items()
        if field.effect == "supported"
        for schema in numbers(field.kind.schema)
    ]
    assert len({table for table, _, _ in found}) >= 10
    whole = INTEGER.schema["maximum"]
    without = [
        f"{table}: {name}"
        for table, name, schema in found
        if not {"minimum", "maximum"} <= schema.keys()
        or (schema["maximum"] == whole and name not in ("seed", "priority"))
    ]
    assert without == []


def test_every_number_of_the_sampling_parameters_has_bounds() -> None:
    hints = get_type_hints(SamplingParams)
    of_number = {
        name
        for name in SamplingParams.__struct_fields__
        if {int, float} & set(get_args(hints[name] | None))
    }
    assert set(BOUNDS) == of_number
    for name, (least, greatest) in BOUNDS.items():
        for value in (least - 1, greatest * 2 + 1, float("nan"), float("inf"), -float("inf")):
            with pytest.raises(RequestError) as caught:
                SamplingParams(**{name: value})
            assert caught.value.field == name
    for value in (float("nan"), float("inf"), 1e7):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams(logit_bias={1: value})


ROUTES: list[tuple[str, str, dict[str, Any], Mapping[str, Field]]] = [
    ("generation", "/v1/completions", {"prompt": "Q"}, COMPLETION_FIELDS),
    ("generation", "/v1/chat/completions", {"messages": [USER]}, CHAT_FIELDS),
    ("generation", "/v1/responses", {"input": "Q"}, RESPONSES_FIELDS),
    ("generation", "/v1/messages", {"messages": [USER]}, MESSAGES_FIELDS),
    ("generation", "/invocations", {"inputs": "Q"}, TEXT_FIELDS),
    ("generation", "/invocations parameters", {"inputs": "Q"}, PARAMETERS),
    ("generation", "/detokenize", {}, DETOKENIZE_FIELDS),
    ("embedding", "/v1/embeddings", {"input": "Q"}, EMBEDDING_FIELDS),
    ("pipeline", "/v1/rerank", {"query": "Q", "documents": ["a"]}, RERANK_FIELDS),
]


def beyond(field: Field) -> Iterator[str]:
    """Yield JSON with numbers that the field must not have."""
    (schema, *_) = numbers(field.kind.schema)
    values = [
        str(schema["minimum"] - 1),
        str(schema["maximum"] + 1),
        str(10**30),
        "1e308",
        "-1e308",
    ]
    values += ["NaN", "Infinity", "1e999"]
    if schema["maximum"] in (MAX_INT64, 1e30):
        values[1:3] = ["1e31"]
    for value in values:
        match field.kind.schema.get("type"):
            case "array":
                yield f"[1,{value}]"
            case "object":
                yield f'{{"1":{value}}}'
            case _:
                yield value


@pytest.mark.usefixtures("helper")  # so that `leak_detector` starts after it
@pytest.mark.parametrize(("kind", "path", "body", "fields"), ROUTES)
def test_numbers_beyond_the_bounds_are_the_client_s_error(
    request: pytest.FixtureRequest,
    kind: str,
    path: str,
    body: dict[str, Any],
    fields: Mapping[str, Field],
) -> None:
    serve: Serve = request.getfixturevalue("serve" if kind == "generation" else "task_app")
    http = serve() if kind == "generation" else serve(kind)
    path, _, within = path.partition(" ")
    start = msgspec.json.encode(body).decode().removesuffix("}") + ("," if body else "")
    num_sent = 0
    for name, field in fields.items():
        if field.effect != "supported" or not [*numbers(field.kind.schema)]:
            continue
        if name in ("prompt", "input", "inputs"):
            continue
        for value in beyond(field):
            given = f'"{name}":{value}'
            data = start + (f'"{within}":{{{given}}}}}' if within else given + "}")
            answer = http.post(path, data=data, content_type="application/json")
            assert answer.status_code == 400, (data, answer.text)
            named = (name, field.canonical_name or name, "not JSON")
            assert any(text in answer.text for text in named), (data, answer.text)
            num_sent += 1
    assert num_sent
