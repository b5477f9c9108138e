"""Admits only requests with a valid API key, within the key's limits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from flask import Flask, g, request
from werkzeug.datastructures import Headers, WWWAuthenticate
from werkzeug.exceptions import Unauthorized

from container.http.health import HEALTH_PATHS
from container.security.api_keys import ApiKey, configured_keys, find_api_key
from container.security.rate_limits import RateLimits
from core.configuration.options import ServerOptions

_HEADERS = "send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"


class Gate:
    """Checks each request before its body is read. Create it before the workers are forked."""

    def __init__(
        self,
        keys: Sequence[ApiKey],
        *,
        open_paths: Sequence[str] = HEALTH_PATHS,
        limits: RateLimits | None = None,
    ) -> None:
        """open_paths: paths that need no key. limits: None enforces no limits."""
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._limits = limits

    def add_to(self, app: Flask, keyless_endpoints: Collection[str] = ()) -> None:
        """Check every request of an app, except those to `keyless_endpoints`.

        keyless_endpoints: Flask's names of routes that need no key. OPTIONS requests pass too:
        browsers send them without a key before a request from a page of another origin.
        """

        def check() -> None:
            if request.method != "OPTIONS" and request.endpoint not in keyless_endpoints:
                self._check()

        app.before_request(check)

    def _check(self) -> None:
        if request.path in self._open_paths:
            return
        index = find_api_key(self._keys, self._given_key(request.headers))
        if index is None:
            raise Unauthorized(
                f"the API key is missing or unknown; {_HEADERS}",
                www_authenticate=WWWAuthenticate("bearer", {"realm": "longshore"}),
            )
        g.context.api_key = self._keys[index].name
        if self._limits is not None:
            self._limits.admit(index)
            g.context.charge = partial(self._limits.charge, index)

    @staticmethod
    def _given_key(headers: Headers) -> str:
        """Return the key in OpenAI's or else in Anthropic's header; '' if there is none."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def open_gate(
    server: ServerOptions, *, open_paths: Sequence[str] = HEALTH_PATHS, has_limits: bool = True
) -> Gate | None:
    """Return the gate of `option.api_keys_file`, or None without that option.

    `has_limits`: whether it enforces the limits of the keys.

    Raises ConfigurationError as `configured_keys` does.
    """
    keys = configured_keys(server)
    if keys is None:
        return None
    return Gate(keys, open_paths=open_paths, limits=RateLimits(keys) if has_limits else None)
