"""The example recording of docs/recordings.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.replay.reproduce import reproduce
from engine.observers.store import read_recording

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "recording"


def test_the_example_is_reproduced() -> None:
    """If a strategy was changed on purpose, make it again: benchmarks/example_recording.py."""
    recording = read_recording(FOLDER)
    found = reproduce(recording)
    assert found.difference is None, str(found.difference)
    assert (found.num_requests, found.num_steps) == (131, 798)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 200_000
