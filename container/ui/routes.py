"""The routes of the live page, and the check of which clients may use them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from flask import Flask, Response, abort, request
from werkzeug.datastructures import Headers

from container.http.service import Service
from container.ui.events import event_stream
from core.configuration.options import ServerOptions

PAGE_PATH = "/"
FILE_PATH = "/ui/<name>"
EVENTS_PATH = "/ui/events"
"""The page and its files hold no data. The events do: numbers about requests, but no text."""
KEYLESS_ENDPOINTS = ("page", "page's file")
"""Flask's names of the routes that need no API key: the page asks its user for one."""
EVENTS_ENDPOINT = "events"
"""Flask's name of the route of the events, which also tell the page when its engine is down."""

_STATIC = Path(__file__).parent / "static"
_MIMETYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""Headers that a proxy adds. A proxy on this machine may have clients elsewhere."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    mimetype: str


class Page:
    """A page and its files, for the clients that option.ui serves."""

    def __init__(self, server: ServerOptions, name: str) -> None:
        """`name` is the file to serve at `/`."""
        self._is_local_only = server.ui == "auto"
        self._name = name
        self._files = _load_files()

    def add_to(self, app: Flask) -> None:
        app.add_url_rule(PAGE_PATH, "page", self.page)
        app.add_url_rule(FILE_PATH, "page's file", self.file)

    def page(self) -> Response:
        return self.file(self._name)

    def file(self, name: str) -> Response:
        self.check_client()
        file = self._files.get(name)
        if file is None:
            abort(404)
        return Response(file.content, mimetype=file.mimetype, headers=_HEADERS)

    def check_client(self) -> None:
        """Answer 404, as if there were no page, to clients that option.ui=auto does not serve."""
        if self._is_local_only and not _is_local(request.remote_addr, request.headers):
            abort(404)


class PageRoutes:
    """The page and its events, for a model that generates text."""

    def __init__(self, service: Service, *, has_chat_template: bool) -> None:
        self._service = service
        self._about = {"model_name": service.model_name, "chat": has_chat_template}
        self._page = Page(service.options.server, "page.html")

    def add_to(self, app: Flask) -> None:
        """Add the routes to the app, unless option.ui turns them off."""
        if self._service.options.server.ui != "false":
            self._page.add_to(app)
            app.add_url_rule(EVENTS_PATH, EVENTS_ENDPOINT, self.events)

    def events(self) -> Response:
        """Stream the events of the first engine, or of the copy that `?copy=` names."""
        self._page.check_client()
        copy, copies = request.args.get("copy", 0, type=int), self._service.client.copies
        if not 0 <= copy < len(copies):
            abort(404)
        about = {"copy": copy, "copies": len(copies)} if len(copies) > 1 else {}
        stream = event_stream(copies[copy], self._service.options, self._about | about)
        return Response(stream, mimetype="text/event-stream", headers={"Cache-Control": "no-store"})


def _is_local(address: str | None, headers: Headers) -> bool:
    """Return whether the request comes from a browser on this machine, without a proxy.

    Another site may resolve its own name to this machine (DNS rebinding), and a simple proxy may
    add no header. The Host header reveals both.
    """
    if any(name in headers for name in _FORWARDED):
        return False
    try:
        host = urlsplit(f"//{headers.get('Host', '')}").hostname or ""
        is_own = host == "localhost" or ipaddress.ip_address(host).is_loopback
        return is_own and ipaddress.ip_address(address or "").is_loopback
    except ValueError:
        # The Host header has another name, or the client has no address. A client of a Unix socket
        # has none, and may be a proxy that forwards the requests of others.
        return False


def _load_files() -> Mapping[str, _File]:
    return {
        path.name: _File(path.read_bytes(), _MIMETYPES[path.suffix])
        for path in _STATIC.iterdir()
        if path.suffix in _MIMETYPES
    }
