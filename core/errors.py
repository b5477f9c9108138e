"""The one family of exceptions. `container/` maps it to HTTP in one place."""

from __future__ import annotations


class LongshoreError(Exception):
    """Base of every error this project raises on purpose. The message states the cure."""


class ConfigurationError(LongshoreError):
    """The configuration or the model cannot be served as asked; raised at start-up only."""

    exit_code = 2
    """Of a process that ends for it. No restart helps."""


class InsufficientMemoryError(ConfigurationError):
    """The model could be served as asked if there were more memory."""

    exit_code = 3


class RequestError(LongshoreError):
    """A request is wrong. `field` names the part of it, as the client spelt it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFoundError(LongshoreError):
    """What a request names is not here."""


class ConflictError(LongshoreError):
    """What is to be made under a name is here already."""


class NoRoomError(LongshoreError):
    """There is no memory left for what is to be loaded."""


class OverloadedError(LongshoreError):
    """The queue is full; the same request may succeed later."""


class EngineUnavailableError(LongshoreError):
    """The engine is still starting, or has died."""


class GenerationError(LongshoreError):
    """An accepted request failed while it ran."""
