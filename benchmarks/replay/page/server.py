"""Serves the page of a recording, with the files and the rules of the live page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec
from flask import Flask, Response, abort, request
from werkzeug.serving import make_server

from benchmarks.replay.page.causes import causes_of
from benchmarks.replay.page.forks import Forks, Future
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.recorded import title
from benchmarks.replay.settings import OPTIONS
from container.ui.routes import Page
from core.configuration.options import ServerOptions, option_table
from core.configuration.strategy_table import BATCHING_NAMES, STRATEGIES
from core.errors import ConfigurationError
from engine.observers.frames import Arrived, Scheduled
from engine.observers.store import Recording
from strategies.factory import StrategySettings

MOST_POINTS = 800
"""Of the time line."""


def serve_page(read: Callable[[], Recording], port: int) -> None:
    """Serve the page on this machine until the process is stopped. port: 0 for any.

    Raises ValueError if the recording cannot be replayed.
    """
    server = make_server("127.0.0.1", port, create_app(read), threaded=True)
    print(f"http://127.0.0.1:{server.server_port}/ shows the recording; Ctrl-C ends", flush=True)
    server.serve_forever()


def create_app(read: Callable[[], Recording]) -> Flask:
    """Return the app with the page and its data. read: of a recording that may still grow."""
    app = Flask(__name__, static_folder=None)
    page = Page(ServerOptions(ui="auto"), "replay.html")
    app.before_request(page.check_client)
    page.add_to(app)
    _Data(read).add_to(app)
    return app


class _Data:
    """The routes of the page's data. One request at a time uses the tape."""

    def __init__(self, read: Callable[[], Recording]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._tape = Tape(read())
        self._forks = Forks(self._tape)

    def add_to(self, app: Flask) -> None:
        for function in (self.recording, self.moment, self.request, self.fork):
            name = function.__name__
            app.add_url_rule(f"/ui/replay/{name}", name, function)

    def recording(self) -> Response:
        """Return everything but the moments; with `?again=1`, what was recorded since, too."""
        with self._lock:
            if "again" in request.args:
                self._tape = Tape(self._read())
                self._forks = Forks(self._tape)
            return _json(_recording(self._tape))

    def moment(self) -> Response:
        with self._lock:
            at = request.args.get("at", self._tape.end, type=float)
            return _json(self._tape.snapshot(at))

    def request(self) -> Response:
        with self._lock:
            id = request.args.get("id", -1, type=int)
            if id not in self._tape.rows:
                abort(404)
            return _json(_request(self._tape, id))

    def fork(self) -> Response:
        given = request.args
        try:
            changes = {
                name: option_table()[name].parse(given[name]) for name in OPTIONS if name in given
            }
            without = [int(id) for id in given.get("without", "").split(",") if id]
            with self._lock:
                at = given.get("at", self._tape.begin, type=float)
                futures = self._forks.fork(at, changes, without)
        except (ValueError, ConfigurationError) as error:
            return _json({"error": str(error)}, status=400)
        executor = self._tape.recording.header.executor
        return _json(
            {
                "quality": self._forks.cost.quality,
                "futures": [_future(future, executor) for future in futures],
            }
        )


def _json(value: object, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _future(future: Future, executor: str) -> Mapping[str, object]:
    return msgspec.structs.asdict(future) | {"settings": _settings(future.settings, executor)}


def _recording(tape: Tape) -> Mapping[str, object]:
    header = tape.recording.header
    return {
        "title": title(tape.recording),
        "begin": tape.begin,
        "end": tape.end,
        "difference": None if tape.difference is None else str(tape.difference),
        "settings": _settings(header.settings, header.executor),
        "strategies": BATCHING_NAMES,
        "options": [name for name in OPTIONS if name != "batching"],
        "points": points(tape),
        "steps": tape.step_times,
        "rows": list(tape.rows.values()),
    }


def _settings(settings: StrategySettings, executor: str) -> Mapping[str, object]:
    """Return what the live page's pictures and sentences need (container/ui/events.py)."""
    return {
        "batching": settings.batching,
        "is_paged": STRATEGIES[settings.batching].is_paged,
        "executor": executor,
        "block_size": settings.layout.block_size,
        "num_blocks": settings.num_blocks,
        "max_sequences": settings.limits.max_sequences,
        "max_model_len": settings.max_model_len,
        "max_step_tokens": settings.limits.max_step_tokens,
        "max_batch_delay_ms": settings.max_delay_s * 1e3,
        "kv_reservation": settings.kv_reservation,
    }


def points(tape: Tape) -> list[tuple[float, int, int, int, int]]:
    """Return the time line: times, and the most running, waiting and held blocks until the next.

    The last is how many tokens were computed.
    """
    num_blocks = tape.recording.header.settings.num_blocks
    width = max(tape.end - tape.begin, 1e-9) / MOST_POINTS
    found: dict[int, tuple[int, int, int, int]] = {}
    num_tokens = 0
    for index in tape.steps:
        frame = tape.recording.frames[index]
        if not isinstance(frame, Scheduled):
            continue
        num_tokens = num_tokens if frame.lengths is None else sum(frame.lengths)
        bin = min(MOST_POINTS - 1, int((frame.at - tape.begin) / width))
        running, waiting, held, computed = found.get(bin, (0, 0, 0, 0))
        found[bin] = (
            max(running, frame.num_running),
            max(waiting, frame.num_waiting),
            max(held, num_blocks - frame.num_free_blocks),
            computed + num_tokens,
        )
    return [(tape.begin + bin * width, *values) for bin, values in sorted(found.items())]


def _request(tape: Tape, id: int) -> Mapping[str, object]:
    row = tape.rows[id]
    arrived = next(
        frame
        for frame in tape.recording.frames
        if isinstance(frame, Arrived) and frame.id == row.request
    )
    return {
        "row": row,
        "max_tokens": arrived.max_tokens,
        "num_samples": arrived.num_samples,
        "causes": causes_of(tape, row.request),
        "receipt": msgspec.structs.asdict(tape.receipts[row.request]),
    }
