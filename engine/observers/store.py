"""The files of recordings in a folder: one after the other, up to a size and an age.

```
0001-000000.rec   0001-000001.rec    the first run of an engine
0002-000000.rec   ...                the second one
```

A file begins with its `Header`. Frames are written once in FLUSH_S while the engine is busy, and at
once when it is not, so nothing older is lost if the process is killed. An incomplete frame at the
end of a file is ignored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from core.errors import ConfigurationError
from core.process.frames import read_frame, write_frame
from engine.observers.frames import VERSION, AnyFrame, Header

logger = logging.getLogger(__name__)

FLUSH_S = 0.05
"""Steps may be as short as a millisecond, of which encoding and writing one took 2 %."""
PARTS = 16
"""A file is closed at this part of the size that all together may have."""


class RecordingWriter:
    """Writes one run. If a write fails, logs a warning and writes nothing more."""

    def __init__(self, folder: Path, header: Header, max_bytes: int, max_age_s: float) -> None:
        """max_bytes, max_age_s: of all runs in the folder together.

        Raises ConfigurationError if the folder cannot be written.
        """
        self._folder, self._header = folder, header
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._number = header.number
        self._pending: list[AnyFrame] = []
        self._flushed = 0.0
        """When `_pending` was written, by the monotonic clock."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._run = 1 + max((_run_of(path) for path in _files(folder)), default=0)
            self._file: BinaryIO | None = self._open(is_idle=True)
        except OSError as error:
            raise ConfigurationError(
                f"option.record={folder} cannot be written: {error}; name another folder"
            ) from error

    def write(self, frames: Sequence[AnyFrame], *, is_idle: bool) -> None:
        """Append frames. is_idle: whether the engine has no request after them."""
        self._pending += frames
        if is_idle or time.monotonic() >= self._flushed + FLUSH_S:
            self._flush(is_idle=is_idle)

    def close(self) -> None:
        """Write nothing more."""
        self._flush(is_idle=False)
        self._end()

    def _flush(self, *, is_idle: bool) -> None:
        frames, self._pending = self._pending, []
        self._flushed = time.monotonic()
        if self._file is None:
            return
        data = BytesIO()
        for frame in frames:
            write_frame(data.write, frame)
        try:
            self._file.write(data.getbuffer())
            self._size += data.tell()
            limit = self._max_bytes // PARTS
            if self._size >= (limit if is_idle else 2 * limit):
                self._file.close()
                self._number += 1
                self._file = self._open(is_idle=is_idle)
        except OSError as error:
            self._end()
            logger.warning("recording ends folder=%s reason=%s", self._folder, error)

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, *, is_idle: bool) -> BinaryIO:
        """Open the next file, and delete the oldest ones as far as the limits need."""
        self._prune()
        file = None
        while file is None:
            path = self._folder / f"{self._run:04}-{self._number:06}.rec"
            try:
                file = path.open("xb", buffering=0)
            except FileExistsError:
                self._run += 1  # another engine has begun the same run
        header = msgspec.structs.replace(self._header, number=self._number, is_idle=is_idle)
        write_frame(file.write, header)
        self._size = 0
        return file

    def _prune(self) -> None:
        # Room is left for the file that is opened now.
        room = self._max_bytes - 2 * self._max_bytes // PARTS
        oldest = time.time() - self._max_age_s
        for path in reversed(_files(self._folder)):
            found = path.stat()
            room -= found.st_size
            if room < 0 or found.st_mtime < oldest:
                path.unlink()


@dataclass(frozen=True, slots=True)
class Recording:
    """One run of an engine, as far as it was kept."""

    header: Header
    frames: list[AnyFrame]
    """Without headers."""

    @property
    def is_whole(self) -> bool:
        """Whether it has the engine's first request. If not, it begins when there was none."""
        return self.header.number == 0


def read_recording(folder: Path, run: int | None = None) -> Recording:
    """Read a run; by default the newest.

    Raises ConfigurationError if there is none, if it is of another version, or if its beginning was
    deleted and there was no later moment without requests.
    """
    files = _files(folder)
    run = max(map(_run_of, files), default=0) if run is None else run
    kept: list[tuple[Header, list[AnyFrame]]] = []
    for path in files:
        if _run_of(path) == run and (read := _read(path)):
            kept.append(read)
    first = next((i for i, (header, _) in enumerate(kept) if header.is_idle), None)
    if first is None:
        raise ConfigurationError(
            f"{folder} has no recording that begins when there was no request; make one with "
            "longshore serve --record DIR"
        )
    return Recording(kept[first][0], [frame for _, frames in kept[first:] for frame in frames])


def _read(path: Path) -> tuple[Header, list[AnyFrame]] | None:
    """Read a file; None if it is empty. An incomplete frame at its end is ignored."""
    decoder = msgspec.msgpack.Decoder(AnyFrame)
    frames: list[AnyFrame] = []
    with path.open("rb") as file:
        try:
            while True:
                frames.append(decoder.decode(read_frame(file)))
        except EOFError:
            pass
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"{path} is no recording of version {VERSION}: {error}"
            ) from error
    if not frames:
        return None
    header, *others = frames
    if not isinstance(header, Header) or header.version != VERSION:
        raise ConfigurationError(f"{path} is no recording of version {VERSION}")
    return header, others


def _files(folder: Path) -> list[Path]:
    """Return the files of all runs, oldest first."""
    return sorted(folder.glob("[0-9][0-9][0-9][0-9]-[0-9]*.rec"))


def _run_of(path: Path) -> int:
    return int(path.name.partition("-")[0])
