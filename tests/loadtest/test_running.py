"""How `--subject` names a running server."""

from __future__ import annotations

import pytest

from loadtest.servers.running import Running, parse_running


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("old=http://host:8080", Running("old", None, "http://host:8080", None)),
        ("vLLM 1=openai+https://h/a?b=c", Running("vLLM 1", "openai", "https://h/a?b=c", None)),
        ("tgi=lmi+http://h", Running("tgi", "lmi", "http://h", None)),
        ("demo=sagemaker:my-end-1", Running("demo", None, None, "my-end-1")),
        ("demo=openai+sagemaker:end", Running("demo", "openai", None, "end")),
    ],
)
def test_a_subject_has_a_name_an_address_and_perhaps_a_schema(text: str, found: Running) -> None:
    assert parse_running(text) == found


@pytest.mark.parametrize(
    "text", ["http://host", "=http://host", "a=host:80", "a=tgi+http://h", "a,b=http://h", "a=",
     "a=http://h:port"],
)  # fmt: skip
def test_an_invalid_subject_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=URL"):
        parse_running(text)
