"""The settings that the supervisor passes to its child processes."""

from __future__ import annotations

from pathlib import PurePath

import msgspec

from core.configuration.options import Options
from core.configuration.task import Task


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the supervisor passes to its child processes, as a JSON file."""

    model_dir: str
    """Local directory with the model's files."""
    endpoint: str
    """ZeroMQ address of the first engine's socket. Further engines append `.` and their number."""
    port: int
    host: str = ""
    """The IP address to listen on. Empty for all addresses."""
    socket: str = ""
    """Path of a Unix socket to serve on instead of the port."""
    name: str = ""
    """The model's name, if the operator has set one."""
    options: Options
    task: Task = Task()
    library_dir: str = ""
    """Directory of the packages installed from the requirements.txt of the user's code."""
    formatters: str = ""
    """The file with the user's input and output formatters, for the front end."""
    hooks: dict[str, str] = {}
    """The user's hooks by the names of their options, each as FILE:FUNCTION, for the front end."""
    rank_address: str = ""
    """HOST:PORT at which the ranks on other nodes find rank 0, if option.nodes is above 1."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses of all engines."""
        others = range(1, self.options.layout.copies)
        return (self.endpoint, *(f"{self.endpoint}.{copy}" for copy in others))

    @property
    def model_name(self) -> str:
        """The model's name for clients and in metrics."""
        path = PurePath(self.options.source.model_id or self.model_dir)
        return self.name or self.options.source.served_model_name or path.name
