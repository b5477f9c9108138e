"""Recordings on disk: what is kept, and what can be read again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.configuration.kv_layout import KVLayout
from core.errors import ConfigurationError
from engine.observers.frames import VERSION, Aborted, Header
from engine.observers.store import PARTS, RecordingWriter, read_recording
from strategies.base import Limits
from strategies.factory import StrategySettings

HEADER = Header(
    VERSION,
    StrategySettings(
        batching="paged",
        num_blocks=8,
        layout=KVLayout.uniform(4),
        max_model_len=16,
        limits=Limits(max_sequences=2, max_step_tokens=8),
        max_delay_s=0.0,
        kv_reservation="max",
        enable_prefix_caching=True,
        preemption_mode="auto",
        num_swap_blocks=0,
    ),
    "packed",
    overlaps=False,
    drafts=False,
    link_tokens=4,
    weights_bytes=0,
    number=0,
    is_idle=True,
)
HOUR_S = 3600
FRAMES = [Aborted(at_ns, 1, None, "disconnect") for at_ns in range(10)]


@contextmanager
def writing(folder: Path, max_bytes: int = 2**20) -> Iterator[RecordingWriter]:
    writer = RecordingWriter(folder, HEADER, max_bytes, HOUR_S)
    yield writer
    writer.close()


def write(folder: Path, frames: list[Aborted]) -> None:
    with writing(folder) as writer:
        writer.write(frames, is_idle=True)


def test_what_was_written_is_read_without_closing(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.write(FRAMES, is_idle=True)
        recording = read_recording(tmp_path)
        assert recording.header == HEADER
        assert recording.frames == FRAMES
        assert recording.is_whole


def test_an_incomplete_last_frame_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, FRAMES)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert read_recording(tmp_path).frames == FRAMES[:-1]


def test_a_busy_engine_writes_now_and_then_and_an_idle_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.observers.store.FLUSH_S", 3600)
    with writing(tmp_path) as writer:
        writer.write(FRAMES[:1], is_idle=True)
        writer.write(FRAMES[1:2], is_idle=False)
        assert read_recording(tmp_path).frames == FRAMES[:1]
        monkeypatch.setattr("engine.observers.store.FLUSH_S", 0)
        writer.write(FRAMES[2:3], is_idle=False)
        assert read_recording(tmp_path).frames == FRAMES[:3]
        monkeypatch.setattr("engine.observers.store.FLUSH_S", 3600)
        writer.write(FRAMES[3:], is_idle=False)
        assert read_recording(tmp_path).frames == FRAMES[:3]
    assert read_recording(tmp_path).frames == FRAMES


def test_each_start_is_a_run(tmp_path: Path) -> None:
    for count in (1, 2):
        write(tmp_path, FRAMES[:count])
    assert read_recording(tmp_path).frames == FRAMES[:2]
    assert read_recording(tmp_path, run=1).frames == FRAMES[:1]


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    """A recording then begins with a file that began without requests."""
    max_bytes = 16_000
    with writing(tmp_path, max_bytes) as writer:
        for at_ns in range(5_000):
            is_idle = at_ns % 40 == 0
            writer.write([Aborted(at_ns, 1, None, "disconnect")], is_idle=is_idle)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= max_bytes
    assert max(sizes) <= 2 * max_bytes // PARTS + 400
    recording = read_recording(tmp_path)
    assert not recording.is_whole
    first = recording.frames[0]
    assert isinstance(first, Aborted)
    assert (first.at_ns - 1) % 40 == 0
    assert recording.frames[-1] == Aborted(4_999, 1, None, "disconnect")


def test_old_files_are_deleted(tmp_path: Path) -> None:
    write(tmp_path, FRAMES)
    [path] = tmp_path.iterdir()
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - HOUR_S - 60))
    write(tmp_path, [])
    assert read_recording(tmp_path).frames == []


def test_a_full_disk_ends_the_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writing(tmp_path) as writer, open("/dev/full", "wb", buffering=0) as full:
        writer.write(FRAMES[:1], is_idle=True)
        writer.close()
        writer._file = full
        for _ in range(2):
            writer.write(FRAMES, is_idle=True)
    assert "recording ends" in caplog.text
    assert read_recording(tmp_path).frames == FRAMES[:1]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"option.record=.*file"):
        write(tmp_path / "file", [])


def test_a_folder_without_a_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="longshore serve --record"):
        read_recording(tmp_path)
    (tmp_path / "0001-000000.rec").write_bytes(b"\0\0\0\1x")
    with pytest.raises(ConfigurationError, match="no recording of version"):
        read_recording(tmp_path)
