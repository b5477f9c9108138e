"""The requests that the engine has accepted and not finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.serve.meter import RequestProgress


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a client."""

    client: bytes
    id: str
    """The id that the client chose."""
    open_answers: set[int]
    """Indices of the answers that have not ended."""
    progress: RequestProgress


class OpenRequests:
    """Finds requests by the engine's ids, and these by the clients' ids."""

    def __init__(self) -> None:
        self._requests: dict[int, ClientRequest] = {}
        self._ids: dict[tuple[bytes, str], int] = {}

    def __contains__(self, key: tuple[bytes, str]) -> bool:
        """Whether a client's request with that id is open."""
        return key in self._ids

    def __iter__(self) -> Iterator[tuple[bytes, str]]:
        """Yield the client, and its id, of each request."""
        return iter(self._ids)

    def add(self, request_id: int, client: bytes, id: str, progress: RequestProgress) -> None:
        """Add a request with all its answers. request_id: the engine's."""
        answers = set(range(progress.num_answers))
        self._requests[request_id] = ClientRequest(client, id, answers, progress)
        self._ids[client, id] = request_id

    def get(self, request_id: int) -> ClientRequest | None:
        return self._requests.get(request_id)

    def id_of(self, client: bytes, id: str) -> int | None:
        """Return the engine's id of a client's request."""
        return self._ids.get((client, id))

    def close(self, request_id: int, index: int | None = None) -> None:
        """Close an answer, or all if `index` is None. Forget the request with its last answer."""
        request = self._requests[request_id]
        request.open_answers.difference_update(request.open_answers if index is None else {index})
        if not request.open_answers:
            del self._requests[request_id]
            del self._ids[request.client, request.id]

    def first_token(self, request_id: int) -> float | None:
        """Return when a request got its first token."""
        request = self._requests.get(request_id)
        return request.progress.first_token if request is not None else None
