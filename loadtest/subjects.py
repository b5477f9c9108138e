"""Servers under test: Longshore containers, one per strategy, or a running server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.endpoint import Endpoint
from loadtest.measure import Subject
from loadtest.server import Server
from loadtest.tuning import Setting


@dataclass(slots=True, kw_only=True)
class Strategies:
    """Longshore containers, each with a strategy of its own. Only one gets requests at a time."""

    names: Sequence[str]
    properties: Mapping[str, str]
    """Properties of every server, apart from `option.batching`."""
    model_dir: Path | None
    logs: Path
    """Folder for the servers' logs."""
    schema: str = "lmi"
    timeout_s: float = 600.0
    keeps_servers: bool = False
    """Whether servers stay up between runs, idle. They need memory for all of them at once."""
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
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{next(self._numbers):02d}-{strategy}.log"
        with Server(settings, log, model_dir=self.model_dir) as server:
            yield Subject(
                name=name,
                endpoint=Endpoint(url=server.url, schema=self.schema, timeout_s=self.timeout_s),
                processes=server.processes(),
                start_s=server.start_s,
                settings=settings,
            )


@dataclass(slots=True, kw_only=True)
class Target:
    """A server that is already running, here or elsewhere."""

    endpoint: Endpoint
    keeps_servers: bool = True

    @property
    def names(self) -> Sequence[str]:
        url = self.endpoint.url
        return [self.endpoint.sagemaker or (urlsplit(url).netloc if url else "target")]

    @contextmanager
    def open(self, name: str, setting: Setting | None = None) -> Iterator[Subject]:
        """Yield the running server as it is."""
        assert setting is None, "only our own servers are tuned"
        yield Subject(name=name, endpoint=self.endpoint, settings={})


Subjects = Strategies | Target
