"""One model of several: where it stands, and what may be said to who asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gevent.event import Event

from container.apis.models.status import ModelStatus, Status
from container.multi_model.model_container import ModelContainer
from core.errors import LongshoreError

WORDS: Mapping[Status, str] = {
    "LOADING": "being loaded",
    "READY": "already loaded",
    "UNLOADING": "being unloaded",
}
"""After «the model is»."""


class RefusedError(LongshoreError):
    """What is asked of a model cannot be done; `code` is the HTTP status."""

    def __init__(self, code: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


@dataclass(slots=True)
class Model:
    """One that is loaded, or on its way."""

    name: str
    url: str
    stage: Literal["LOADING", "READY", "UNLOADING"] = "LOADING"
    gpu: str | None = None
    gpu_share: float = 0.0
    container: ModelContainer | None = None
    gone: Event = field(default_factory=Event)

    @property
    def status(self) -> Status:
        """FAILED: it has ended by itself, after it was ready."""
        has_ended = self.container is not None and self.container.exit_code is not None
        return "FAILED" if self.stage == "READY" and has_ended else self.stage

    @property
    def described(self) -> ModelStatus:
        return ModelStatus(self.name, self.url, self.status)
