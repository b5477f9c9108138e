"""What goes wrong on the way to an endpoint."""

from __future__ import annotations

from botocore.exceptions import ClientError

_CURES = {
    "AccessDenied": "the caller's credentials lack this permission",
    "AccessDeniedException": "the caller's credentials lack this permission",
    "ResourceLimitExceeded": "Service Quotas, under SageMaker, is where to ask for more",
    "ExpiredToken": "sign in again",
    "ExpiredTokenException": "sign in again",
    "UnrecognizedClientException": "the credentials are not of this account or region",
}


class DeployError(Exception):
    """Its text is for the user: what happened and what to do."""


def is_missing(error: ClientError) -> bool:
    """Whether AWS says that what was asked for does not exist.

    SageMaker has no code of its own for it.
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


def explained(error: ClientError) -> str:
    """The call that failed, AWS's reason, and the cure where there is one."""
    details = error.response["Error"]
    cure = _CURES.get(_code(error))
    reason = f"{error.operation_name}: {_code(error)}: {details.get('Message', '')}".rstrip(": ")
    return f"{reason} ({cure})" if cure else reason


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code", ""))
