"""Chooses which of several servers gets a request.

The servers may be copies of an engine behind one front end, or containers on several machines: a
router knows only their names and how many requests each has not finished.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil

CHUNK_CHARACTERS = 512
CHUNK_TOKENS = 128
"""Prompts that share less than a chunk are not worth sending to the same server."""
MAX_PREFIXES_PER_PROMPT = 64
"""Longer prompts are compared by their first 32,768 characters or 8,192 tokens."""
MAX_REMEMBERED = 32_768
"""How many prefixes, and how many sessions, a router remembers. It forgets the least recent."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The facts about a request that decide its routing."""

    session: str | None
    """Requests of one session belong to one server."""
    prefixes: tuple[Hashable, ...]
    """Keys of the leading parts of the prompt, the shortest part first."""


def prefix_keys(prompt: str | Sequence[int], scope: str = "") -> tuple[bytes, ...]:
    """Return a key for each prefix of the prompt that consists of whole chunks, shortest first.

    Prompts have a key in common if they begin with the same chunks. The keys are the same in every
    process. A text and its tokens have different keys.

    prompt: text, or token ids. scope: prompts of different scopes, such as those for different
    variants of the model, have no key in common.
    """
    chunk_length = CHUNK_CHARACTERS if isinstance(prompt, str) else CHUNK_TOKENS
    num_chunks = min(len(prompt) // chunk_length, MAX_PREFIXES_PER_PROMPT)
    digest = hashlib.blake2b(scope.encode(), digest_size=8)
    keys: list[bytes] = []
    for start in range(0, num_chunks * chunk_length, chunk_length):
        digest.update(_as_bytes(prompt[start : start + chunk_length]))
        keys.append(digest.digest())
    return tuple(keys)


def _as_bytes(chunk: str | Sequence[int]) -> bytes:
    if isinstance(chunk, str):
        return chunk.encode(errors="surrogatepass")
    return "".join(f" {token}" for token in chunk).encode()


class Router(ABC):
    """Chooses a server for each request."""

    @abstractmethod
    def choose(self, request: RoutedRequest, loads: Mapping[str, int]) -> str:
        """Return the name of the chosen server.

        loads: how many unfinished requests each server has, by the server's name. These are the
        servers that may be chosen, at least one; they may differ from call to call. If several
        servers are equally good, the first one is chosen.
        """


class RoundRobin(Router):
    """Chooses the servers in turn."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, request: RoutedRequest, loads: Mapping[str, int]) -> str:
        return list(loads)[next(self._turns) % len(loads)]


class LeastLoaded(Router):
    """Chooses the server with the fewest unfinished requests."""

    def choose(self, request: RoutedRequest, loads: Mapping[str, int]) -> str:
        return _least_loaded(loads)


class PrefixAware(Router):
    """Chooses the server that probably has the K/V of most of the prompt.

    A session stays at its server while this server may be chosen. Any other request goes to a
    server that has seen the longest known prefix of its prompt; if there are several, to the least
    loaded. Overloaded servers are skipped: those that the new request would put above the limit of
    1.25 times the mean load, rounded up. The mean counts the new request, too. This is consistent
    hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018). If no server remains for any
    prefix, the request goes to the least loaded of all servers.
    """

    MAX_OVER_MEAN = 1.25

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        """max_remembered: how many prefixes, and how many sessions, to remember."""
        self._max_remembered = max_remembered
        self._sessions = OrderedDict[str, str]()
        """The server of a session."""
        self._seen = OrderedDict[Hashable, set[str]]()
        """The servers that have seen a prefix."""

    def choose(self, request: RoutedRequest, loads: Mapping[str, int]) -> str:
        chosen = self._of_session(request, loads) or self._of_prefix(request, loads)
        chosen = chosen or _least_loaded(loads)
        self._remember(request, chosen, loads)
        return chosen

    def _of_session(self, request: RoutedRequest, loads: Mapping[str, int]) -> str | None:
        name = None if request.session is None else self._sessions.get(request.session)
        return name if name in loads else None

    def _of_prefix(self, request: RoutedRequest, loads: Mapping[str, int]) -> str | None:
        max_load = ceil(self.MAX_OVER_MEAN * (sum(loads.values()) + 1) / len(loads))
        for prefix in reversed(request.prefixes):
            seen_by = self._seen.get(prefix, ())
            fitting = {
                name: load
                for name, load in loads.items()
                if name in seen_by and load + 1 <= max_load
            }
            if fitting:
                return _least_loaded(fitting)
        return None

    def _remember(self, request: RoutedRequest, chosen: str, loads: Mapping[str, int]) -> None:
        if request.session is not None:
            self._sessions[request.session] = chosen
            self._sessions.move_to_end(request.session)
        for prefix in reversed(request.prefixes):  # the shortest is forgotten last
            seen_by = self._seen.setdefault(prefix, set())
            seen_by.add(chosen)
            if len(seen_by) > len(loads):
                seen_by.intersection_update(loads)
            self._seen.move_to_end(prefix)
        for table in (self._sessions, self._seen):
            while len(table) > self._max_remembered:
                table.popitem(last=False)


def _least_loaded(loads: Mapping[str, int]) -> str:
    return min(loads, key=loads.__getitem__)


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
