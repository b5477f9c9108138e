"""The walk of an option: the functions that hold it, from serving.properties until both the engine
and the front end are built.

A function holds an option if its value, or a record, list or dict that has this value, is among the
function's arguments, variables, attributes or results. So the value should be one that nothing else
has. Processes are not started: their functions are called one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from tests.measures import tree
from tests.measures.requests import MODEL

USUAL = "option.max_rolling_batch_size", "187"
"""An option and a value that nothing else has."""
MAX_DEPTH = 6
MAX_ENTRIES = 200
MAX_TEXT = 200
"""Longer texts are files that have nothing to do with the option."""


@dataclasses.dataclass(frozen=True)
class Stay:
    """A function that held the option."""

    place: str
    """file:line"""
    name: str
    depth: int
    is_in_engine: bool
    """Whether the engine was being built when it was first called."""

    @property
    def file(self) -> str:
        return self.place.partition(":")[0]


def walk(key: str, text: str) -> list[Stay]:
    """Serve the demo model with an option, and return its stays in the order of their calls."""
    import container.__main__
    from container.launch.supervisor import Supervisor

    watch = _Watch(text)

    def run(supervisor: Supervisor) -> int:
        launch = msgspec.json.decode(
            Path(supervisor._launch_path).read_bytes(), type=type(supervisor._launch)
        )
        watch.is_in_engine = True
        _build_engine(launch)
        watch.is_in_engine = False
        _load_front_end(launch)
        return 0

    its_own, Supervisor.run = Supervisor.run, run
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            path = Path(folder) / "serving.properties"
            path.write_text(f"option.model_id={MODEL}\noption.device=cpu\n{key}={text}\n")
            arguments = ["serve", "--properties", str(path), "--port", str(_free_port())]
            sys.settrace(watch.enter)
            code = container.__main__.main(arguments)
            assert code == 0, "the option is refused"
    finally:
        sys.settrace(None)
        Supervisor.run = its_own
    return watch.stays()


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _build_engine(launch: Any) -> None:
    from unittest.mock import MagicMock

    from engine.__main__ import _build
    from engine.phases import Phases

    _build(launch, Phases(), MagicMock(), 0)


def _load_front_end(launch: Any) -> None:
    from container.front_end.start import FrontEnd

    front_end = FrontEnd(launch)
    front_end.load()
    front_end._client.close()


class _Watch:
    def __init__(self, text: str) -> None:
        self.is_in_engine = False
        self._in_text = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
        self._values = {text, *_numbers(text)}
        self._files = {str(path) for path in tree.files().values()}
        self._stays: dict[tuple[str, int], tuple[int, Stay]] = {}
        self._calls: dict[int, int] = {}
        self._num_calls = 0

    def enter(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name.startswith("<"):
            return None
        frame.f_trace_lines = False
        self._num_calls += 1
        self._calls[id(frame)] = self._num_calls
        return self._leave

    def stays(self) -> list[Stay]:
        return [stay for _, stay in sorted(self._stays.values(), key=lambda pair: pair[0])]

    def _leave(self, frame: FrameType, event: str, result: object) -> Any:
        code = frame.f_code
        key = code.co_filename, code.co_firstlineno
        if (
            event == "return"
            and key not in self._stays
            and self._holds([*frame.f_locals.values(), result])
        ):
            place = f"{tree.name(Path(code.co_filename))}:{code.co_firstlineno}"
            name = code.co_qualname.replace("<locals>.", "")
            stay = Stay(place, name, self._depth(frame), self.is_in_engine)
            self._stays[key] = self._calls[id(frame)], stay
        return self._leave

    def _holds(self, value: object, depth: int = 0) -> bool:
        if isinstance(value, str):
            return self._in_text.search(value[:MAX_TEXT]) is not None
        if isinstance(value, int | float):
            return value in self._values
        inner = _inner(value) if depth < MAX_DEPTH else []
        return len(inner) < MAX_ENTRIES and any(self._holds(each, depth + 1) for each in inner)

    def _depth(self, frame: FrameType) -> int:
        depth, caller = 0, frame.f_back
        while caller is not None:
            depth += caller.f_code.co_filename in self._files
            caller = caller.f_back
        return depth


def _inner(value: object) -> list[object]:
    """Return what a record or a container has in it."""
    if isinstance(value, argparse.Namespace):
        return list(vars(value).values())
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    is_ours = type(value).__module__.partition(".")[0] in tree.PACKAGES
    if is_ours and isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    if is_ours and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return []


def _numbers(text: str) -> list[float]:
    kinds: tuple[Callable[[str], float], ...] = (int, float)
    found: list[float] = []
    for kind in kinds:
        with contextlib.suppress(ValueError):
            found.append(kind(text))
    return found
