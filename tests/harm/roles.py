"""The roles of a container's processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

import psutil

from loadtest.servers.server import PACKAGE_PREFIX

Role = Literal["supervisor", "engine", "gunicorn", "worker", "helper"]


def by_role(processes: Sequence[psutil.Process]) -> Mapping[Role, list[psutil.Process]]:
    """Return the processes of each role, without those that have ended.

    `processes` are the supervisor and all its descendants, each parent before its children.
    """
    found: dict[Role, list[psutil.Process]] = {
        "supervisor": list(processes[:1]),
        "engine": [],
        "gunicorn": [],
        "worker": [],
        "helper": [],
    }
    for process in processes[1:]:
        with suppress(psutil.Error):
            role = _role(process, found["gunicorn"])
            if role is not None:
                found[role].append(process)
    return found


def _role(process: psutil.Process, gunicorn: Sequence[psutil.Process]) -> Role | None:
    command = process.cmdline()
    if PACKAGE_PREFIX + "engine" in command:
        return "engine"
    if PACKAGE_PREFIX + "container.isolation.process" in command:
        return "helper"
    if PACKAGE_PREFIX + "container.front_end.start" in command:
        # A worker has its parent's command line.
        return "worker" if process.parent() in gunicorn else "gunicorn"
    return None
