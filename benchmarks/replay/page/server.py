"""Serves the page of a recording, with the files and the rules of the live page."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
from flask import Flask, Response, abort, request
from werkzeug.serving import make_server

from benchmarks.replay.page.causes import causes_of
from benchmarks.replay.page.forks import Forks
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.settings import OPTIONS
from container.ui.routes import Page
from core.configuration.options import ServerOptions, option_table
from core.configuration.strategy_table import BATCHING_NAMES, STRATEGIES
from core.errors import ConfigurationError
from engine.observers.frames import Arrived, Scheduled
from strategies.factory import StrategySettings

MOST_POINTS = 800
"""Of the time line."""


def serve_page(tape: Tape, title: str, port: int) -> None:
    """Serve the page on this machine until the process is stopped. port: 0 for any."""
    server = make_server("127.0.0.1", port, create_app(tape, title), threaded=True)
    print(f"http://127.0.0.1:{server.server_port}/ shows the recording; Ctrl-C ends", flush=True)
    server.serve_forever()


def create_app(tape: Tape, title: str) -> Flask:
    """Return the app with the page and its data. One request at a time uses the tape."""
    app = Flask(__name__, static_folder=None)
    page = Page(ServerOptions(ui="auto"), "replay.html")
    app.before_request(page.check_client)
    page.add_to(app)
    lock = threading.Lock()

    def recording() -> Response:
        with lock:
            return _json(_recording(tape, title))

    def moment() -> Response:
        with lock:
            return _json(tape.snapshot(request.args.get("at", tape.end, type=float)))

    def one_request() -> Response:
        id = request.args.get("id", -1, type=int)
        if id not in tape.rows:
            abort(404)
        with lock:
            return _json(_request(tape, id))

    forks = Forks(tape)

    def fork() -> Response:
        given = request.args
        try:
            changes = {
                name: option_table()[name].parse(given[name]) for name in OPTIONS if name in given
            }
            without = [int(id) for id in given.get("without", "").split(",") if id]
            with lock:
                futures = forks.fork(given.get("at", tape.begin, type=float), changes, without)
        except (ValueError, ConfigurationError) as error:
            return _json({"error": str(error)}, status=400)
        executor = tape.recording.header.executor
        return _json(
            {
                "quality": forks.cost.quality,
                "futures": [
                    {
                        "settings": _settings(future.settings, executor),
                        "figures": future.figures,
                        "rows": future.rows,
                        "num_refused": future.num_refused,
                    }
                    for future in futures
                ],
            }
        )

    for function in (recording, moment, one_request, fork):
        name = function.__name__.removeprefix("one_")
        app.add_url_rule(f"/ui/replay/{name}", name, function)
    return app


def _json(value: object, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _recording(tape: Tape, title: str) -> Mapping[str, object]:
    header = tape.recording.header
    return {
        "title": title,
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
