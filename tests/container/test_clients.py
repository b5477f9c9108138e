"""What other people's clients send, and what they read from the answers."""

from __future__ import annotations

import json

import pytest
from flask.testing import FlaskClient
from huggingface_hub.errors import HfHubHTTPError

from tests.container.clients import hugging_face
from tests.container.fake_engine import FakeEngine
from tests.container.test_chat import USER
from tests.container.test_structured import SCHEMA, grammar


@pytest.mark.parametrize("kind", ["json", "json_object"])
def test_the_schema_of_hugging_faces_chat(http: FlaskClient, engine: FakeEngine, kind: str) -> None:
    with hugging_face(http) as client:
        client.chat_completion([USER], response_format={"type": kind, "value": SCHEMA})
        (constraint,) = json.loads(grammar(engine))["grammars"]
        assert constraint["json_schema"]["properties"] == SCHEMA["properties"]
        with pytest.raises(HfHubHTTPError, match="type text takes no other field"):
            client.chat_completion([USER], response_format={"type": "text", "value": SCHEMA})
