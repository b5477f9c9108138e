"""The requests that the engine has accepted and not finished."""

from __future__ import annotations

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


class OpenRequests(dict[int, ClientRequest]):
    """The requests by the engine's ids."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[tuple[bytes, str], int] = {}
        """The engine's ids by client and the client's id."""

    def add(self, request_id: int, client: bytes, id: str, progress: RequestProgress) -> None:
        """Add a request with all its answers."""
        answers = set(range(progress.num_answers))
        self[request_id] = ClientRequest(client, id, answers, progress)
        self.ids[client, id] = request_id

    def close(self, request_id: int, index: int | None = None) -> None:
        """Close an answer, or all if `index` is None. Forget the request with its last answer."""
        request = self[request_id]
        request.open_answers.difference_update(request.open_answers if index is None else {index})
        if not request.open_answers:
            del self[request_id]
            del self.ids[request.client, request.id]

    def first_token(self, request_id: int) -> float | None:
        """Return when a request got its first token."""
        request = self.get(request_id)
        return request.progress.first_token if request is not None else None
