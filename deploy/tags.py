"""The tag by which `down` knows a deployment's resources."""

from __future__ import annotations

TAG = "longshore:deployment"
"""Tag of every resource that we create, with the deployment's name. `down` removes no others."""


def deployment_tags(name: str) -> list[dict[str, str]]:
    """Return the tags of a deployment's resources, in SageMaker's format."""
    return [{"Key": TAG, "Value": name}]
