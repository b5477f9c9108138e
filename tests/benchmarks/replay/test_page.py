"""The page of a recording: any moment, rows and receipts, and who may see them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient

from benchmarks.replay.page.causes import causes_of
from benchmarks.replay.page.server import create_app
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.reproduce import Replay
from tests.benchmarks.replay.recordings import Ask, random_asks, record


def test_any_moment_is_the_same_as_in_one_run() -> None:
    tape = Tape(record("paged", random_asks(seed=2, count=60, seconds=3), num_blocks=12))
    replay = Replay(tape.recording, tape.script)
    held: list[int] = []
    for end in [*tape.steps[1:], tape.num_frames]:
        assert replay.run_to(end) is None
        held.append(replay.engine.strategy.memory.num_held_blocks)
    assert len(set(held)) > 3
    for step in random.Random(0).sample(range(len(held)), 30):
        time = tape.times[tape.steps[step]]
        assert tape.snapshot(time).num_held_blocks == held[step]


def test_rows_and_receipts_agree() -> None:
    asks = [Ask(0, 4, 8), Ask(0, 4, 12), Ask(0.001, 4, 4)]
    tape = Tape(record("continuous", asks, max_sequences=2))
    row, receipt = tape.rows[2], tape.receipts[2]
    assert row.admitted is not None
    assert row.end is not None
    assert row.ended_by == "length"
    assert row.generated == 4
    queued = sum(receipt.queued_ns.values()) / 1e9
    assert queued <= row.admitted - row.arrived
    assert receipt.queued_ns["slots"] == pytest.approx(
        1e9 * sum(c.until - c.since for c in causes_of(tape, 2) if c.reason == "slots")
    )
    total = sum(each.compute_ns for each in tape.receipts.values()) / 1e9
    assert total == pytest.approx(tape.end - tape.begin)


@pytest.fixture(scope="module")
def http() -> FlaskClient:
    asks = [Ask(0, 4, 8), Ask(0, 4, 28), Ask(0.001, 4, 4)]
    recording = record("continuous", asks, max_sequences=2)
    return create_app(lambda: recording).test_client()


def data(http: FlaskClient, path: str) -> Any:
    return msgspec.json.decode(http.get(f"/ui/replay/{path}").data)


def test_the_page_has_the_live_pages_files_and_policy(http: FlaskClient) -> None:
    page = http.get("/")
    assert "ui/replay.js" in page.text
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert http.get("/ui/batch.js").status_code == 200


def test_the_data_of_the_page(http: FlaskClient) -> None:
    found = data(http, "recording")
    assert found["settings"]["batching"] == "continuous"
    assert [row["id"] for row in found["rows"]] == [0, 1, 2]
    assert max(running for _, running, *_ in found["points"]) == 2
    moment = data(http, f"moment?at={found['rows'][2]['admitted'] - 0.03}")
    assert (moment["num_running"], moment["num_waiting"]) == (2, 1)
    request = data(http, "request?id=2")
    assert [cause["reason"] for cause in request["causes"]] == ["step", "slots"]
    assert request["receipt"]["queued_ns"]["slots"] > 0


def test_what_was_recorded_since_is_read_again() -> None:
    whole = record("paged", random_asks(seed=2, count=8, seconds=1))
    half = dataclasses.replace(whole, frames=whole.frames[: len(whole.frames) // 2])
    recordings = [whole, half]
    http = create_app(recordings.pop).test_client()
    before = data(http, "recording")
    assert data(http, "recording") == before
    after = data(http, "recording?again=1")
    assert after["end"] > before["end"]
    assert before["difference"] is None
    assert data(http, f"moment?at={after['end']}")["num_running"] == 0


def test_a_fork_of_the_page(http: FlaskClient) -> None:
    found = data(http, "fork?at=0.05&batching=none&without=1")
    before, after = found["futures"]
    assert (before["settings"]["batching"], after["settings"]["batching"]) == ("continuous", "none")
    assert {row["id"] for row in before["rows"]} - {row["id"] for row in after["rows"]} == {1}
    assert "median error" in found["quality"]
    wrong = http.get("/ui/replay/fork?num_kv_blocks=none")
    assert wrong.status_code == 400
    assert "num_kv_blocks" in wrong.text


def test_an_unknown_request_is_not_found(http: FlaskClient) -> None:
    assert http.get("/ui/replay/request?id=7").status_code == 404


@pytest.mark.parametrize("path", ["/", "/ui/replay/recording", "/ui/replay/moment"])
def test_only_this_machine_sees_it(http: FlaskClient, path: str) -> None:
    assert http.get(path, environ_base={"REMOTE_ADDR": "203.0.113.9"}).status_code == 404
    assert http.get(path, headers={"Host": "rebound.example"}).status_code == 404
