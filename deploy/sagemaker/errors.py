"""Errors of a deployment, and hints for AWS's error codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

_HINTS = {
    "AccessDenied": "the caller's credentials lack this permission",
    "AccessDeniedException": "the caller's credentials lack this permission",
    "ResourceLimitExceeded": "request a higher limit in Service Quotas, under SageMaker",
    "ExpiredToken": "sign in again",
    "ExpiredTokenException": "sign in again",
    "UnrecognizedClientException": "the credentials do not belong to this account or region",
}


class DeployError(Exception):
    """An error whose message tells the user what happened and what to do."""


def is_missing(error: ClientError) -> bool:
    """Return whether AWS reports that the requested resource does not exist.

    SageMaker has no error code for that, so its message is searched.
    """
    code, message = _code(error), error.response["Error"].get("Message", "")
    if code == "ValidationException":
        return "could not find" in message.lower() or "does not exist" in message.lower()
    return code in (
        "404",
        "NoSuchBucket",
        "NoSuchKey",
        "NoSuchTagSet",
        "NotFound",
        "ObjectNotFoundException",
        "RepositoryNotFoundException",
        "ResourceNotFound",
        "ResourceNotFoundException",
    )


def explain(error: ClientError) -> str:
    """Return the failed call, AWS's reason, and a hint if there is one."""
    details = error.response["Error"]
    hint = _HINTS.get(_code(error))
    reason = f"{error.operation_name}: {_code(error)}: {details.get('Message', '')}".rstrip(": ")
    return f"{reason} ({hint})" if hint else reason


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code", ""))
