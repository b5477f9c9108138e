"""The container's parsers raise only their own errors, for arbitrary and nearly valid inputs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.eventstream import EventStreamBuffer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from container.apis.adapter_routes import ADAPTER_FIELDS, read_adapter_request
from container.apis.chat.schema import CHAT_FIELDS, read_chat_request
from container.apis.completions.schema import COMPLETION_FIELDS, read_completion_request
from container.apis.embeddings import (
    EMBEDDING_FIELDS,
    INPUTS_FIELDS,
    read_embedding_request,
    read_inputs_request,
)
from container.apis.invocations.event_stream import payload_part
from container.apis.text.schema import PARAMETERS, read_text_request
from container.apis.tokenize import (
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    read_detokenize_request,
    read_tokenize_request,
)
from container.configuration.properties import read_properties
from container.schema.body import read_csv, read_json
from container.schema.fields import Fields
from core.errors import ConfigurationError, RequestError

fuzz = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TEXTS = st.text("ab{}:=\\\"'\n\r\t\x00\u00e9\u2028\U0001f600", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": TEXTS | VALUES},
        optional={
            "content": TEXTS | VALUES | st.lists(st.fixed_dictionaries({"type": st.just("text")})),
            "tool_calls": VALUES,
        },
    ),
    max_size=3,
)


def bodies(fields: Fields, **usual: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return bodies with a few of the fields, mostly with invalid values.

    usual: how to make the values of some fields. The values of other fields are arbitrary.
    """
    entry = st.sampled_from(sorted(fields)).flatmap(
        lambda name: st.tuples(st.just(name), usual.get(name, VALUES))
    )
    return st.lists(entry, max_size=4).map(dict)


Reader = Callable[[Mapping[str, object]], object]


@pytest.mark.parametrize(
    ("read", "given_bodies"),
    [
        (read_chat_request, bodies(CHAT_FIELDS, messages=MESSAGES)),
        (read_completion_request, bodies(COMPLETION_FIELDS)),
        (read_tokenize_request, bodies(TOKENIZE_FIELDS, messages=MESSAGES)),
        (read_detokenize_request, bodies(DETOKENIZE_FIELDS)),
        (read_embedding_request, bodies(EMBEDDING_FIELDS)),
        (read_inputs_request, bodies(INPUTS_FIELDS)),
        (read_adapter_request, bodies(ADAPTER_FIELDS)),
        (
            read_text_request,
            st.fixed_dictionaries({"inputs": TEXTS | VALUES, "parameters": bodies(PARAMETERS)}),
        ),
    ],
)
def test_request_schemas(read: Reader, given_bodies: st.SearchStrategy[dict[str, Any]]) -> None:
    @fuzz
    @given(body=given_bodies)
    def check(body: dict[str, Any]) -> None:
        with suppress(RequestError):
            read(body)

    check()


@fuzz
@given(body=st.binary(max_size=60) | TEXTS.map(str.encode))
def test_properties_files(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "serving.properties"
    path.write_bytes(body)
    try:
        found = read_properties(path)
    except ConfigurationError:
        return
    for setting in found:
        assert setting.source.startswith(f"{path}:")


@fuzz
@given(body=st.binary(max_size=60) | TEXTS.map(lambda text: b"inputs\n" + text.encode()))
def test_csv_bodies(body: bytes) -> None:
    try:
        inputs = read_csv(body)["inputs"]
    except RequestError:
        return
    assert isinstance(inputs, list)
    assert all(isinstance(text, str) for text in inputs)


@fuzz
@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=9), max_size=3
    )
)
def test_csv_bodies_that_a_writer_made(texts: list[str]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([["inputs"], *([text] for text in texts)])
    assert read_csv(out.getvalue().encode()) == {"inputs": texts}


@fuzz
@given(body=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_json_bodies(body: bytes) -> None:
    with suppress(RequestError):
        assert isinstance(read_json(body), dict)


@fuzz
@given(payloads=st.lists(st.binary(max_size=300), max_size=4), cut=st.integers(1, 40))
def test_event_streams_are_read_by_boto(payloads: list[bytes], cut: int) -> None:
    """The events are read correctly wherever the network cuts the stream."""
    buffer = EventStreamBuffer()
    data = b"".join(map(payload_part, payloads))
    read: list[bytes] = []
    for at in range(0, len(data), cut):
        buffer.add_data(data[at : at + cut])
        read += [event.payload for event in buffer]
    assert read == payloads
