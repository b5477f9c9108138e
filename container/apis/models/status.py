"""How models are listed and described over HTTP, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from container.apis.models.schema import PageRequest

Status = Literal["LOADING", "READY", "UNLOADING", "FAILED"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What clients are told of one model."""

    name: str
    url: str
    status: Status

    def in_list(self) -> dict[str, object]:
        """As one of `list_models`."""
        return {"modelName": self.name, "modelUrl": self.url, "status": self.status}

    def whole(self) -> list[dict[str, object]]:
        """SageMaker's description, inside DJL Serving's, which is a list of one workflow."""
        worker = {"id": 1, "status": self.status}
        model = {**self.in_list(), "workerGroups": [{"workers": [worker]}]}
        return [{"workflowName": self.name, **self.in_list(), "models": [model]}]


def list_models(models: Sequence[ModelStatus], asked: PageRequest) -> dict[str, object]:
    """A page of the models, which are sorted by name.

    The token is the last name of a page, so that models may come and go between two pages.
    """
    left = [each for each in models if each.name > asked.after]
    page: dict[str, object] = {"models": [each.in_list() for each in left[: asked.limit]]}
    if len(left) > asked.limit:
        page["nextPageToken"] = left[asked.limit - 1].name
    return page
