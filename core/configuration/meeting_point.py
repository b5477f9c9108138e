"""Where the ranks of several machines meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.configuration.options import Options
from core.errors import ConfigurationError

KEY_VARIABLE = "LONGSHORE_RANK_KEY"
"""The environment variable with the secret of ranks on several machines."""
MIN_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where rank 0 waits for the ranks of other machines."""

    host: str
    port: int
    key: bytes = field(repr=False)
    """The secret that both sides must know."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def meeting_point(options: Options, variables: Mapping[str, str] = os.environ) -> MeetingPoint:
    """Return where the ranks of several machines meet.

    Raises ConfigurationError if the address or the key is missing or wrong.
    """
    host, _, port = (options.rank_address or "").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # as IPv6 addresses are written
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigurationError(
            f"option.nodes={options.nodes} needs option.rank_address=HOST:PORT, the address at "
            "which the other machines reach the machine of rank 0; it is "
            f"{options.rank_address or 'not set'}"
        )
    key = variables.get(KEY_VARIABLE, "")
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigurationError(
            f"option.nodes={options.nodes} needs the environment variable {KEY_VARIABLE}: the same "
            f"secret of at least {MIN_KEY_LENGTH} characters on every machine, such as the output "
            "of `openssl rand -hex 32`"
        )
    return MeetingPoint(host, int(port), key.encode())
