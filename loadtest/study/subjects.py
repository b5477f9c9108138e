"""Servers under test: Longshore containers, one per strategy, and servers that already run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.servers.endpoint import Endpoint
from loadtest.servers.local_processes import server_processes
from loadtest.servers.server import Server
from loadtest.study.measure import Subject
from loadtest.study.tuning import Setting, given_setting


@dataclass(slots=True, kw_only=True)
class Strategies:
    """Longshore containers, each with a strategy of its own. Only one gets requests at a time."""

    names: Sequence[str]
    properties: Mapping[str, str]
    """Properties of each container; the strategy replaces `option.batching`."""
    model_dir: Path | None
    logs: Path
    """Folder for the servers' logs."""
    schema: str = "lmi"
    path: str | None = None
    """Overrides the schema's path."""
    timeout_s: float = 600.0
    record: Path | None = None
    """Folder for recordings of what each container schedules. Each strategy has a folder in it,
    and each of its containers is a run there (`longshore replay --run`)."""
    keeps_servers: bool = False
    """Whether servers stay up, idle, between runs. All of them then need memory at once."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextmanager
    def open(self, name: str, setting: Setting | None = None) -> Iterator[Subject]:
        """Run a server with the strategy `name` in a new process until the block ends.

        With a `setting`, the strategy is dynamic, whatever the name.
        """
        strategy = name if setting is None else "dynamic"
        settings = {**self.properties, "option.batching": strategy}
        if setting is not None:
            settings |= setting.properties()
        if self.record is not None:
            settings["option.record"] = str(self.record.resolve() / name)
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{next(self._numbers):02d}-{strategy}.log"
        with Server(settings, log, model_dir=self.model_dir) as server:
            yield Subject(
                name=name,
                endpoint=Endpoint(
                    url=server.url, schema=self.schema, path=self.path, timeout_s=self.timeout_s
                ),
                processes=server.processes(),
                start_s=server.start_s,
                settings=settings,
            )


class SubjectError(Exception):
    """A running server does not answer."""


@dataclass(slots=True, kw_only=True)
class Subjects:
    """Everything under test: our strategies, and servers that already run, here or elsewhere."""

    strategies: Strategies | None
    running: Mapping[str, Endpoint]
    """Endpoints of the servers that already run, by name."""

    @property
    def names(self) -> Sequence[str]:
        return [*(self.strategies.names if self.strategies else ()), *self.running]

    @property
    def has_dynamic(self) -> bool:
        """Whether dynamic batching is one of the strategies."""
        return self.strategies is not None and "dynamic" in self.strategies.names

    @property
    def given_setting(self) -> Setting:
        """The setting of dynamic batching in the given properties."""
        return given_setting(self.strategies.properties if self.strategies else {})

    @property
    def keeps_servers(self) -> bool:
        return self.strategies is None or self.strategies.keeps_servers

    def open(self, name: str, setting: Setting | None = None) -> AbstractContextManager[Subject]:
        """Start a server until the block ends, as `Strategies.open` does, or take a running one."""
        if name in self.running:
            endpoint = self.running[name]
            url = None if endpoint.sagemaker else endpoint.url
            processes = server_processes(url) if url else ()
            return nullcontext(
                Subject(name=name, endpoint=endpoint, processes=processes, settings={})
            )
        assert self.strategies is not None, f"no subject is called {name}"
        return self.strategies.open(name, setting)

    def require_up(self) -> None:
        """Send each running server a request. Raises SubjectError if one does not answer it."""
        for name, endpoint in self.running.items():
            error = endpoint.failure()
            if error is not None:
                raise SubjectError(
                    f"{name} at {endpoint.address} does not answer: {error}; "
                    "start it, or correct its address or schema"
                )
