"""Lists and descriptions of models in the formats of OpenAI, DJL Serving and SageMaker.

The routes here serve one model and its variants. A multi-model container has its own routes
(`container.multi_model.app`), which use the request and status classes of this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from flask import Response, abort, request
from werkzeug.exceptions import MethodNotAllowed

from container.http.route import ALL_KINDS, Api, delete, get, post
from container.http.service import Service, json_response
from container.schema.fields import Field, Fields, read_fields
from container.schema.kinds import STRING, with_schema
from core.errors import RequestError

_NAME = "[A-Za-z0-9][!-.0-~]{0,255}"
"""A letter or digit, then printable characters other than the slash, since a name is one segment
of a path."""
_DEFAULT_PAGE = 100
"""The default number of models on a page, as in DJL Serving. A request may ask for more here."""

LOAD_FIELDS: Fields = {
    "model_name": Field(
        with_schema(STRING, {"pattern": f"^{_NAME}$"}), "The model's name in the other routes."
    ),
    "url": Field(STRING, "The absolute path of the model's directory or archive in the container."),
}

Status = Literal["LOADING", "READY", "UNLOADING", "FAILED"]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A checked request to load a model."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class PageRequest:
    limit: int
    after: str
    """The token of the previous page; '' for the first page."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model's name, location and status."""

    name: str
    url: str
    status: Status

    def list_entry(self) -> dict[str, object]:
        """Return the model's entry in a list."""
        return {"modelName": self.name, "modelUrl": self.url, "status": self.status}

    def description(self) -> list[dict[str, object]]:
        """Return SageMaker's full description, wrapped in DJL Serving's list of one workflow."""
        worker = {"id": 1, "status": self.status}
        model = {**self.list_entry(), "workerGroups": [{"workers": [worker]}]}
        return [{"workflowName": self.name, **self.list_entry(), "models": [model]}]


def read_load_request(body: Mapping[str, object]) -> LoadRequest:
    """Check SageMaker's request to load a model. Raises RequestError, naming the bad field.

    Unknown fields are ignored, since SageMaker may add some.
    """
    values = read_fields({name: body.get(name) for name in LOAD_FIELDS}, LOAD_FIELDS)
    for name in LOAD_FIELDS:
        if not values.get(name, ""):
            raise RequestError(name, 'is missing; send {"model_name": "...", "url": "..."}')
    load = LoadRequest(values.get("model_name", ""), values.get("url", ""))
    if not re.fullmatch(_NAME, load.name):
        raise RequestError(
            "model_name",
            "expected a letter or digit, then at most 255 printable characters other than /",
        )
    return load


def read_page_request(query: Mapping[str, str]) -> PageRequest:
    """Read DJL Serving's query parameters. Raises RequestError for an invalid limit."""
    limit = query.get("limit", str(_DEFAULT_PAGE))
    if not re.fullmatch("[1-9][0-9]{0,5}", limit):
        raise RequestError("limit", "expected a number of at least 1")
    return PageRequest(int(limit), query.get("next_page_token", ""))


def list_models(models: Sequence[ModelStatus], page: PageRequest) -> dict[str, object]:
    """Return one page of the models, which must be sorted by name.

    The next page's token is the last name of this page, so models may be loaded and unloaded
    between two requests.
    """
    remaining = [model for model in models if model.name > page.after]
    listed: dict[str, object] = {
        "models": [model.list_entry() for model in remaining[: page.limit]]
    }
    if len(remaining) > page.limit:
        listed["nextPageToken"] = remaining[page.limit - 1].name
    return listed


def models(service: Service) -> Response:
    """List the models in OpenAI's format."""
    return json_response({"object": "list", "data": list(_models(service).values())})


def model(service: Service, name: str) -> Response:
    """Describe the model or a variant in OpenAI's format."""
    found = _models(service)
    if name not in found:
        abort(404, f"no model '{name}'; this server has {', '.join(map(repr, found))}")
    return json_response(found[name])


def listing(service: Service) -> Response:
    """List the model in DJL Serving's format."""
    page = read_page_request(request.args)
    return json_response(list_models([_status(service)], page))


def describe(service: Service, name: str) -> Response:
    """Describe the model in DJL Serving's format."""
    service.require_model(name)
    return json_response(_status(service).description())


def refuse(service: Service, name: str = "") -> NoReturn:
    """Refuse to load or unload models, which only a multi-model container does."""
    raise MethodNotAllowed(
        ["GET"],
        f"this container serves only '{service.model_name}'; start it with "
        "SAGEMAKER_MULTI_MODEL=true to load and unload models",
    )


def _status(service: Service) -> ModelStatus:
    return ModelStatus(service.model_name, service.client.facts.model, "READY")


def _models(service: Service) -> dict[str, dict[str, object]]:
    """Return the model and its variants by name, with vLLM's fields added to OpenAI's."""
    name, max_model_len = service.model_name, service.client.facts.max_model_len
    model: dict[str, object] = {
        "object": "model",
        "created": service.started,
        "owned_by": "longshore",
        **({"max_model_len": max_model_len} if max_model_len else {}),
    }
    variants = {
        variant.name: {"id": variant.name, **model, "root": variant.src, "parent": name}
        for variant in service.client.variants
    }
    return {name: {"id": name, **model}, **variants}


OPENAI_MODELS = Api(
    "OpenAI",
    (
        get("/v1/models", "List the models that requests may name, in OpenAI's format.", models),
        get("/v1/models/<path:name>", "Describe one of these models, in OpenAI's format.",
            model),
    ),
    kinds=ALL_KINDS,
)  # fmt: skip
DJL_MODELS = Api(
    "DJL Serving",
    (
        get("/models", "List the model, in DJL Serving's format.", listing),
        post("/models", "", refuse),
        get("/models/<name>", "Describe the model, in DJL Serving's format.", describe),
        delete("/models/<name>", "", refuse),
    ),
    kinds=ALL_KINDS,
)  # fmt: skip
