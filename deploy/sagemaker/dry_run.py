"""Dry runs: print AWS calls instead of making them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boto3

ACCOUNT = "111122223333"
"""AWS's example account number; getting the real one would take a call."""
_READS = ("Describe", "Get", "Head", "List")
_ANSWERS: dict[str, dict[str, Any]] = {
    "GetCallerIdentity": {"Account": ACCOUNT},
    "DescribeEndpoint": {"EndpointStatus": "InService"},
    "DescribeInferenceComponent": {"InferenceComponentStatus": "InService"},
}
_LISTINGS = ("ScalableTargets",)
_NOT_FOUND = {"Error": {"Code": "ValidationException", "Message": "Could not find it (dry run)"}}


class DryRun:
    """Intercepts botocore calls after parameter validation and before sending.

    Prints each call and fakes its response. A resource exists, and is in service, from the printed
    call that creates it to the printed call that deletes it. With `sends_reads`, read-only calls
    are really sent, so that a dry run of a removal lists the existing resources.
    """

    def __init__(self, say: Callable[[str], None], *, sends_reads: bool = False) -> None:
        self._say = say
        self._sends_reads = sends_reads
        self._created: set[tuple[str, str]] = set()
        """(kind, name) of the resources that exist in the dry run."""

    def watch(self, session: boto3.Session) -> None:
        """Intercept the calls of all clients that the session makes from now on."""
        session.events.register("before-parameter-build.*.*", self._keep_parameters)
        session.events.register("before-call.*.*", self._answer)

    def _keep_parameters(self, params: Any, model: Any, context: Any, **_: Any) -> None:
        context["longshore"] = params

    def _answer(self, model: Any, context: Any, **_: Any) -> tuple[Any, Any] | None:
        """Return the HTTP response and its parsed contents for botocore; None sends the call."""
        is_read = model.name.startswith(_READS)
        if is_read and self._sends_reads:
            return None
        parameters = context["longshore"]
        text = json.dumps(parameters, default=_summary)
        self._say(f"{model.service_model.service_name}.{model.name} {text}")
        verb, kind = re.findall("^([A-Z][a-z]+)(.*)", model.name)[0]
        resource = kind, parameters.get(f"{kind}Name") or parameters.get(kind)
        if verb == "Create":
            self._created.add(resource)
        elif verb == "Delete":
            self._created.discard(resource)
        elif (
            verb in ("Describe", "Head") and kind not in _LISTINGS and resource not in self._created
        ):
            return SimpleNamespace(status_code=400), _NOT_FOUND
        return SimpleNamespace(status_code=200), _ANSWERS.get(model.name, {})


def _summary(body: Any) -> str:
    """Describe a value that is not JSON serializable, such as a file's contents."""
    return f"<{len(body)} bytes>" if hasattr(body, "__len__") else f"<{type(body).__name__}>"
