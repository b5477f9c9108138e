"""Find the SageMaker resources of a deployment by its tag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.sagemaker.resources.aws import Aws
from deploy.sagemaker.resources.tags import TAG


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of SageMaker resource, with its names in the API."""

    title: str
    noun: str
    list_operation: str
    delete_operation: str


COMPONENT = Kind(
    "component", "InferenceComponent", "list_inference_components", "delete_inference_component"
)
ENDPOINT = Kind("endpoint", "Endpoint", "list_endpoints", "delete_endpoint")
CONFIGURATION = Kind(
    "configuration", "EndpointConfig", "list_endpoint_configs", "delete_endpoint_config"
)
MODEL = Kind("model", "Model", "list_models", "delete_model")
KINDS = (COMPONENT, ENDPOINT, CONFIGURATION, MODEL)
"""In the order in which SageMaker allows them to be deleted."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A SageMaker resource of a deployment."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.title} {self.name}"

    def delete(self, aws: Aws) -> None:
        getattr(aws.sagemaker, self.kind.delete_operation)(**{f"{self.kind.noun}Name": self.name})


def owned(aws: Aws, deployment: str) -> Iterator[Resource]:
    """Yield all resources with the deployment's tag, in the order in which they can be deleted.

    Uses SageMaker's own listings, because those of the tagging service lag by minutes.
    """
    for kind in KINDS:
        pages = aws.sagemaker.get_paginator(kind.list_operation).paginate(NameContains=deployment)
        for page in pages:
            for entry in page.get(f"{kind.noun}s", []):
                if tags_of(aws, entry[f"{kind.noun}Arn"]).get(TAG) == deployment:
                    yield Resource(kind, entry[f"{kind.noun}Name"])


def tags_of(aws: Aws, arn: str) -> dict[str, str]:
    """Return the tags of a SageMaker resource."""
    pages = aws.sagemaker.get_paginator("list_tags").paginate(ResourceArn=arn)
    return {tag["Key"]: tag["Value"] for page in pages for tag in page.get("Tags", [])}
