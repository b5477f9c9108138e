"""The tag by which `down` knows a deployment's resources."""

from __future__ import annotations

TAG = "longshore:deployment"
"""The tag of a deployment's resources; its value is the deployment's name."""


def deployment_tags(name: str) -> list[dict[str, str]]:
    """Return the tags of a deployment's resources, in SageMaker's format."""
    return [{"Key": TAG, "Value": name}]
