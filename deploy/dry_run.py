"""Calls that are printed instead of made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boto3

ACCOUNT = "111122223333"
"""AWS's own example, since asking for the account would be a call."""
_READS = ("Describe", "Get", "Head", "List")
_ANSWERS: dict[str, dict[str, Any]] = {
    "GetCallerIdentity": {"Account": ACCOUNT},
    "DescribeEndpoint": {"EndpointStatus": "InService"},
    "DescribeInferenceComponent": {"InferenceComponentStatus": "InService"},
}
_LISTINGS = ("ScalableTargets",)
_NOT_THERE = {"Error": {"Code": "ValidationException", "Message": "Could not find it (dry run)"}}


class DryRun:
    """Stands in botocore's way after it has checked the parameters and before it sends them.

    What was not made before does not exist, and what was made works at once. `reads`: calls that
    only look are sent, to show what a removal would find.
    """

    def __init__(self, say: Callable[[str], None], *, reads: bool = False) -> None:
        self._say = say
        self._reads = reads
        self._made: set[tuple[str, str]] = set()
        """Kinds and names."""

    def watch(self, session: boto3.Session) -> None:
        """All clients that the session makes from now on."""
        session.events.register("before-parameter-build.*.*", self._keep_parameters)
        session.events.register("before-call.*.*", self._answer)

    def _keep_parameters(self, params: Any, model: Any, context: Any, **_: Any) -> None:
        context["longshore"] = params

    def _answer(self, model: Any, context: Any, **_: Any) -> tuple[Any, Any] | None:
        """What botocore takes for the HTTP response and its contents; None sends the call."""
        is_read = model.name.startswith(_READS)
        if is_read and self._reads:
            return None
        parameters = context["longshore"]
        text = json.dumps(parameters, default=_summary)
        self._say(f"{model.service_model.service_name}.{model.name} {text}")
        verb, kind = re.findall("^([A-Z][a-z]+)(.*)", model.name)[0]
        thing = kind, parameters.get(f"{kind}Name") or parameters.get(kind)
        if verb == "Create":
            self._made.add(thing)
        elif verb == "Delete":
            self._made.discard(thing)
        elif verb in ("Describe", "Head") and kind not in _LISTINGS and thing not in self._made:
            return SimpleNamespace(status_code=400), _NOT_THERE
        return SimpleNamespace(status_code=200), _ANSWERS.get(model.name, {})


def _summary(body: Any) -> str:
    """Of what is no JSON: a file's contents."""
    return f"<{len(body)} bytes>" if hasattr(body, "__len__") else f"<{type(body).__name__}>"
