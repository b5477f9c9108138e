"""`longshore batch`: sends each line of a file to a container and writes the outcomes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO

import gevent
import gevent.pool
import msgspec
from tqdm import tqdm

from container.batch.lines import (
    BatchError,
    BatchResponse,
    Line,
    Outcome,
    open_output,
    outcome_id,
    parse_line,
    read_numbered,
    read_outcomes,
)
from container.configuration.properties import Setting
from container.multi_model.model_container import ModelContainer, UnixConnection
from core.errors import ConfigurationError
from core.process.names import python_command

COMMAND = python_command("container.batch.serve_batch")
STOP_S = 30.0
_RETRY_S = 1.0
_MAX_FAILURES = 3
_BUSY = 503
_ENGINE_DIED = 424


class BatchStoppedError(Exception):
    """Some lines have no outcome yet; the batch can be resumed."""


def run_batch(
    source: Path,
    output: Path,
    *,
    model_dir: Path | None = None,
    properties: Path | None = None,
    flags: Sequence[Setting] = (),
    num_workers: int = 256,
    command: Sequence[str] = COMMAND,
) -> Counter[str]:
    """Append the outcome of each line of `source` to `output` as soon as the outcome is known.

    Lines whose outcomes `output` already has are skipped. On a terminal, a progress bar is shown.
    Return how many lines were answered, failed, and skipped.

    Raises ConfigurationError if a file or `num_workers` is unusable or the container does not
    start, and BatchStoppedError if the container ends too early or `output` can no longer be
    written.
    """
    if not source.is_file():
        raise ConfigurationError(f"--input {source}: there is no such file")
    if num_workers < 1:
        raise ConfigurationError(f"--concurrency {num_workers}: must be at least 1")
    counts: Counter[str] = Counter()
    with open_output(output) as out:
        todo = _todo(source, output, counts)
        if not todo:
            return counts
        running = started(command, model_dir, properties, num_workers, flags)
        with (
            running as container,
            tqdm(total=len(todo), unit="request", disable=None) as bar,  # no bar without a terminal
        ):
            _Sender(container, out, counts, bar.update).send_all(source, todo, num_workers)
    return counts


@contextmanager
def started(
    command: Sequence[str],
    model_dir: Path | None,
    properties: Path | None,
    num_workers: int,
    flags: Sequence[Setting],
) -> Generator[ModelContainer]:
    """Start a container and stop it at the end. Raises ConfigurationError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="longshore-", ignore_cleanup_errors=True) as run_dir:
        socket = Path(run_dir) / "batch.sock"
        arguments = [str(model_dir or ""), str(properties or ""), str(socket), str(num_workers)]
        arguments.append(msgspec.json.encode(flags).decode())
        child = [*command, str(os.getpid()), *arguments]
        container = ModelContainer("server", socket, child, os.environ)
        try:
            if not container.wait_until_ready():
                raise ConfigurationError(f"the server did not start: {container.exit_reason()}")
            yield container
        finally:
            container.stop(STOP_S)


def _todo(source: Path, output: Path, counts: Counter[str]) -> set[int]:
    """Return the numbers of the lines that have no outcome yet, and count the others."""
    todo: set[int] = set()
    done = read_outcomes(output)
    for number, text in read_numbered(source):
        id = outcome_id(number)
        if id not in done:
            todo.add(number)
        elif parse_line(text).custom_id != done[id]:
            raise ConfigurationError(
                f"{output} has the outcome of a different request for line {number} of {source}; "
                "choose another --output"
            )
        else:
            counts["skipped"] += 1
    return todo


class _Sender:
    """Sends requests from many greenlets and writes their outcomes."""

    def __init__(
        self,
        container: ModelContainer,
        out: BinaryIO,
        counts: Counter[str],
        advance: Callable[[], object],
    ) -> None:
        self._container = container
        self._out = out
        self._counts = counts
        self._advance = advance
        self._failure: str | None = None
        """Why outcomes can no longer be written. The last one in the file may be cut off."""

    def send_all(self, source: Path, numbers: set[int], num_workers: int) -> None:
        """Send these lines. Raises BatchStoppedError unless each of them gets its outcome."""
        pool = gevent.pool.Pool(num_workers)
        try:
            for number, text in read_numbered(source):
                if number in numbers:
                    # Waits for a free worker, so that the file is read as it is needed.
                    pool.spawn(self._finish, number, text)
                    self._check()
            while not pool.join(_RETRY_S):
                self._check()
        finally:
            pool.kill()
        num_left = len(numbers) - self._counts["answered"] - self._counts["failed"]
        if num_left:
            self._check()
            raise BatchStoppedError(f"{num_left} lines have no outcome")

    def _finish(self, number: int, text: bytes) -> None:
        line = parse_line(text)
        outcome = self._outcome(line) if isinstance(line, Line) else line
        if outcome is None or self._failure is not None:
            return
        try:
            self._write(msgspec.structs.replace(outcome, id=outcome_id(number)))
        except OSError as error:
            self._failure = f"{self._out.name}: {error.strerror}"
            return
        is_answer = outcome.response is not None and outcome.response.status_code < 300
        self._counts["answered" if is_answer else "failed"] += 1
        self._advance()

    def _write(self, outcome: Outcome) -> None:
        """Append an outcome, in one call, so that a kill cuts off at most the last line."""
        data = msgspec.json.encode(outcome) + b"\n"
        while data:  # a full disk takes a part of the data, and raises at the second call
            data = data[self._out.write(data) :]

    def _outcome(self, line: Line) -> Outcome | None:
        """Return a request's outcome; None if the container has ended."""
        request_id = f"batch_req_{uuid.uuid4().hex}"
        num_failed = 0
        while self._container.exit_code is None:
            try:
                response = self._exchange(line, request_id)
                if response.status_code not in (_BUSY, _ENGINE_DIED):
                    return Outcome("", line.custom_id, response)
                message = f"status {response.status_code}: {bytes(response.body).decode()}"
                num_failed += response.status_code == _ENGINE_DIED
            except (OSError, HTTPException) as error:
                message = f"{type(error).__name__}: {error}"
                num_failed += 1
            if num_failed == _MAX_FAILURES:
                return Outcome("", line.custom_id, error=BatchError("no_answer", message))
            gevent.sleep(_RETRY_S)
        return None

    def _exchange(self, line: Line, request_id: str) -> BatchResponse:
        response, body = post(self._container, line.url, line.body, {"X-Request-Id": request_id})
        try:
            body = msgspec.json.format(body.decode(), indent=-1).encode()  # on one line
        except (UnicodeDecodeError, msgspec.DecodeError):  # not JSON, as a handler may answer
            body = msgspec.json.encode(body.decode("utf-8", "replace"))
        return BatchResponse(response.status, request_id, msgspec.Raw(body))

    def _check(self) -> None:
        """Raise BatchStoppedError if there can be no more outcomes."""
        if self._failure is not None:
            raise BatchStoppedError(self._failure)
        if self._container.exit_code is not None:
            raise BatchStoppedError(self._container.exit_reason())


def post(
    container: ModelContainer, url: str, body: object, headers: Mapping[str, str]
) -> tuple[HTTPResponse, bytes]:
    """Return the container's response to a JSON body. Raises OSError or HTTPException."""
    connection = UnixConnection(container.socket)
    try:
        sent = {"Content-Type": "application/json", **headers}
        with suppress(BrokenPipeError):  # the answer may come before the body is sent
            connection.request("POST", url, msgspec.json.encode(body), sent)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def report(counts: Counter[str], seconds: float, output: Path) -> str:
    """Return the last line that a batch prints."""
    num_sent = counts["answered"] + counts["failed"]
    skipped = f", {counts['skipped']} were there already" if counts["skipped"] else ""
    return (
        f"{counts['answered']} answered, {counts['failed']} failed{skipped}: {output} "
        f"({seconds:.1f} s, {num_sent / max(seconds, 0.001):.1f} requests/s)"
    )


def batch(
    source: Path,
    output: Path,
    model_dir: Path | None,
    properties: Path | None,
    flags: Sequence[Setting],
    num_workers: int,
) -> int:
    """Run a batch and return the exit code."""
    began = time.monotonic()
    try:
        counts = run_batch(
            source,
            output,
            model_dir=model_dir,
            properties=properties,
            flags=flags,
            num_workers=num_workers,
        )
    except (BatchStoppedError, KeyboardInterrupt) as error:
        reason = "stopped" if isinstance(error, KeyboardInterrupt) else str(error)
        print(f"error: {reason}\nRun the same command again to go on.", file=sys.stderr)
        return 1
    print(report(counts, time.monotonic() - began, output))
    return 0
