"""The benchmark of the front end: the requests that it sends, and a run of it."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.front_end.__main__ import main
from benchmarks.front_end.cases import cases
from benchmarks.front_end.sampler import shares


def test_cases_take_their_time_at_their_rate():
    of_text = [*cases(["text"], [1, 100], rate=5000, flood=50_000, seconds=4, requests=9)]
    assert [case.name for case in of_text] == [
        "text, streams, 1",
        "text, streams, 100",
        "text, streams, 100, flood",
        "text, whole answers, 1",
        "text, whole answers, 100",
    ]
    assert [case.step_s for case in of_text] == [0.01, 0.02, 0.002, 0.01, 0.02]
    assert [case.tokens for case in of_text] == [400, 200, 2000, 400, 200]


def test_samples_are_shared_out_by_file():
    found = shares(
        {
            "/a/gevent/_socketcommon.py:SocketMixin.send": 5,
            "/a/gevent/hub.py:Hub.run": 1,
            "/a/core/text/detokenizer.py:Detokenizer.push": 2,
            "/a/asyncio/base.py:run": 2,
        }
    )
    assert {part: share for part, share in found.items() if share} == {
        "sending, receiving": 0.5,
        "event loop": 0.1,
        "detokenizing": 0.2,
        "other": 0.2,
    }


def test_a_run_measures_every_api(tmp_path, capsys):
    """With option.stream_delay, a chunk has several tokens."""
    out = tmp_path / "found.json"
    sizes = ["--connections", "3", "--seconds", "0.2", "--requests", "3", "--flood", "0"]
    assert main([*sizes, "--stream-delay", "70", "--out", str(out)]) == 0
    rows = msgspec.json.decode(out.read_bytes())["rows"]
    assert [row["name"] for row in rows] == [
        f"{api}, {kind}, 3"
        for api in ("text", "completions", "chat")
        for kind in ("streams", "whole answers")
    ]
    assert all(row["tokens_per_s"] > 0 and row["ping_p99_ms"] > 0 for row in rows)
    assert all(row["tokens_per_chunk"] > 2 for row in rows[::2])
    assert rows[0]["name"] in capsys.readouterr().out


def test_an_unknown_api_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--apis", "text,poetry"])
    assert "unknown API poetry" in capsys.readouterr().err
