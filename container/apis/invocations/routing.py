"""AWS's `route=PATH` in a request to /invocations: the request goes to another path of the app.

SageMaker forwards only /invocations, so this is how clients of an endpoint reach the other routes.
AWS's vLLM image reads the same header in the same way.
"""

from __future__ import annotations

import re

from flask import Response, current_app, request
from werkzeug.datastructures import Headers
from werkzeug.exceptions import NotFound
from werkzeug.routing import RequestRedirect

from container.http.headers import CUSTOM_ATTRIBUTES


def named_path(attributes: str) -> str | None:
    """Return the path that the header's text names, if any."""
    named = re.search(r"(?:^|[\s,;])route=(/[^\s,;]+)", attributes)
    return named and named[1]


def routed_answer(headers: Headers) -> Response | None:
    """Return the answer of the path that the headers name; None if they name no other path.

    Raises NotFound or MethodNotAllowed if no POST route has the path.
    """
    path = named_path(headers.get(CUSTOM_ATTRIBUTES, ""))
    return None if path in (None, request.path) else _answer_of(path)


def _answer_of(path: str) -> Response:
    request.path = path  # so that an error has the format of that path
    try:
        endpoint, arguments = current_app.url_map.bind("").match(path, method="POST")
    except RequestRedirect:  # the path has too many slashes, and a client cannot follow a header
        raise NotFound from None
    view = current_app.ensure_sync(current_app.view_functions[endpoint])
    return current_app.make_response(view(**arguments))
