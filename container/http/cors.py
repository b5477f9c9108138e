"""Cross-origin resource sharing: lets pages of another origin call the server from a browser."""

from __future__ import annotations

from flask import Flask, Response, request

_EXPOSED = "X-Request-Id, X-Longshore-Digest, X-Longshore-Warning, Retry-After"


def register_cors(app: Flask, origin: str) -> None:
    """Allow pages of this origin, or of all with `*`, to call every route.

    They may read the response's body and the headers listed here.

    Flask itself answers the OPTIONS request that a browser sends before such a call.
    """

    def add(response: Response) -> Response:
        headers = response.headers
        headers["Access-Control-Allow-Origin"] = origin
        headers["Access-Control-Expose-Headers"] = _EXPOSED
        if request.method == "OPTIONS":
            headers["Access-Control-Allow-Methods"] = response.headers.get("Allow", "")
            requested = request.headers.get("Access-Control-Request-Headers", "")
            headers["Access-Control-Allow-Headers"] = requested
            headers["Access-Control-Max-Age"] = "600"
        return response

    app.after_request(add)
