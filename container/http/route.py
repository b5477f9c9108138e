"""An API as a value: its owner, its routes with their request fields, and the shape of its errors.

The application, the OpenAPI document, the contract page and error responses are made of these
values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from flask import Flask, Response

from container.http.failures import ErrorBody
from container.schema.fields import Fields

if TYPE_CHECKING:
    from core.configuration.options import ServerOptions
    from core.configuration.task import Kind

ALL_KINDS: tuple[Kind, ...] = ("generation", "embedding", "pipeline", "handler")
_ALIAS = "/openai"
"""Precedes the path of each route below /v1/ in another path, where KServe's clients expect it."""


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request: a schema of the OpenAPI document and a table of the contract page."""

    name: str
    """The schema's name."""
    fields: Fields
    required: tuple[str, ...] = ()
    title: str = ""
    """The table's title; '' leaves the table out."""
    parts: Mapping[str, Body] = field(default_factory=dict[str, "Body"])
    """The fields that have a schema and a table of their own."""
    is_form: bool = False
    """Whether it is a form with files, not JSON."""

    @property
    def tables(self) -> tuple[Body, ...]:
        """The body, then its parts."""
        return (self, *self.parts.values())


@dataclass(frozen=True, slots=True)
class Invocation:
    """What a request to /invocations means for one kind of models."""

    kind: Kind
    read: Callable[..., Mapping[str, object]]
    """Called with the service and the request's context. Returns the fields of the body; none if
    the API takes the body unparsed."""
    answer: Callable[..., Response]
    """Called with the service, the request's context and what `read` returned."""
    bodies: tuple[Body, ...] = ()
    """Empty if any body is allowed."""
    file_types: tuple[str, ...] = ()
    """Types of files that may be sent as they are, such as `audio`."""


@dataclass(frozen=True, slots=True)
class Route:
    """A method of a path."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    """As Flask writes it, with parameters such as <name> and <path:name>."""
    summary: str
    """For the documents; '' leaves the route out of them."""
    answer: Callable[..., Response]
    """Called with the service and the parameters of the path."""
    bodies: tuple[Body, ...] = ()
    """The bodies that it takes, one of them for each request."""
    takes_invocation: bool = False
    """Whether it takes the bodies of the `Invocation` instead."""
    responses: Mapping[int, str] = field(default_factory=dict[int, str])
    """Further statuses of its responses, and what they mean."""
    allows_slash: bool = False
    """Whether the path may end with a slash."""
    is_websocket: bool = False
    """Whether it also takes requests of the scheme `ws`."""

    @property
    def parameters(self) -> list[str]:
        """The names of the path's parameters."""
        return re.findall(r"<(?:path:)?(\w+)>", self.path)

    @property
    def documented_path(self) -> str:
        """The path as the documents write it, with parameters such as {name}."""
        return re.sub(r"<(?:path:)?(\w+)>", r"{\1}", self.path)

    def add_to(self, app: Flask, service: object) -> None:
        """Add the route to the app, and its alias if it is below /v1/."""
        view = partial(self.answer, service)
        paths = (self.path, f"{_ALIAS}{self.path}") if _is_aliased(self.path) else (self.path,)
        for path, is_websocket in product(paths, {False, self.is_websocket}):
            app.add_url_rule(
                path,
                f"{self.method} {self.path}",
                view,
                methods=[self.method],
                strict_slashes=not self.allows_slash,
                websocket=is_websocket,
            )


def get(path: str, summary: str, answer: Callable[..., Response], **more: Any) -> Route:
    """Return the route of a GET request. more: further fields of `Route`."""
    return Route("GET", path, summary, answer, **more)


def post(
    path: str, summary: str, answer: Callable[..., Response], *bodies: Body, **more: Any
) -> Route:
    """Return the route of a POST request."""
    return Route("POST", path, summary, answer, bodies, **more)


def delete(path: str, summary: str, answer: Callable[..., Response]) -> Route:
    """Return the route of a DELETE request."""
    return Route("DELETE", path, summary, answer)


@dataclass(frozen=True, slots=True)
class Errors:
    """The shape of errors of an API."""

    write: ErrorBody
    prefixes: tuple[str, ...]
    """What the paths begin with whose errors have this shape. The longest prefix counts."""

    def reach(self, path: str) -> int:
        """Return the length of the longest prefix that matches a path, or its alias; else 0."""
        alias = path.removeprefix(_ALIAS)
        path = alias if _is_aliased(alias) else path
        return max((len(prefix) for prefix in self.prefixes if path.startswith(prefix)), default=0)


def _is_aliased(path: str) -> bool:
    return path.startswith("/v1/")


def _always(server: ServerOptions) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Api:
    """The routes that clients of one server expect."""

    owner: str
    """The server, or the organisation, that defines the API."""
    routes: tuple[Route, ...]
    kinds: tuple[Kind, ...] = ("generation",)
    """The kinds of models that have the routes."""
    errors: Errors | None = None
    """None: the errors have LMI's shape."""
    is_enabled: Callable[[ServerOptions], bool] = _always

    def add_to(self, app: Flask, service: object) -> None:
        """Add the routes to the app."""
        for route in self.routes:
            route.add_to(app, service)


@dataclass(frozen=True, slots=True)
class Contract:
    """What a container answers."""

    apis: tuple[Api, ...]
    invocation: Invocation
