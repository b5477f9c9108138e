"""The state of one of several models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gevent.event import Event

from container.apis.model_routes import ModelStatus, Status
from container.multi_model.model_container import ModelContainer
from core.errors import LongshoreError

STATUS_WORDS: Mapping[Status, str] = {
    "LOADING": "being loaded",
    "READY": "already loaded",
    "UNLOADING": "being unloaded",
}
"""Completes the message "the model is ..."."""


class RefusedError(LongshoreError):
    """A request to or about a model cannot be carried out; `code` is the HTTP status."""

    def __init__(self, code: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


@dataclass(slots=True)
class Model:
    """A model that is loaded, or being loaded or unloaded."""

    name: str
    url: str
    stage: Literal["LOADING", "READY", "UNLOADING"] = "LOADING"
    gpu: str | None = None
    """The GPU as in CUDA_VISIBLE_DEVICES; None on a CPU."""
    gpu_share: float = 0.0
    """Fraction of the GPU's memory that this model may use."""
    container: ModelContainer | None = None
    removed: Event = field(default_factory=Event)
    """Set when the model has been unloaded or could not be loaded."""

    @property
    def status(self) -> Status:
        """The stage, or FAILED if the container has ended by itself after it was ready."""
        has_ended = self.container is not None and self.container.exit_code is not None
        return "FAILED" if self.stage == "READY" and has_ended else self.stage

    @property
    def as_status(self) -> ModelStatus:
        return ModelStatus(self.name, self.url, self.status)
