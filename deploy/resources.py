"""What a deployment has on SageMaker, found by its tag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.aws import TAG, Aws


@dataclass(frozen=True, slots=True)
class Kind:
    """One of SageMaker's resources, by its names in the API."""

    word: str
    noun: str
    listing: str
    deletion: str


COMPONENT = Kind(
    "component", "InferenceComponent", "list_inference_components", "delete_inference_component"
)
ENDPOINT = Kind("endpoint", "Endpoint", "list_endpoints", "delete_endpoint")
CONFIGURATION = Kind(
    "configuration", "EndpointConfig", "list_endpoint_configs", "delete_endpoint_config"
)
MODEL = Kind("model", "Model", "list_models", "delete_model")
KINDS = (COMPONENT, ENDPOINT, CONFIGURATION, MODEL)
"""In the order in which they can be removed."""


@dataclass(frozen=True, slots=True)
class Resource:
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.word} {self.name}"

    def delete(self, aws: Aws) -> None:
        getattr(aws.sagemaker, self.kind.deletion)(**{f"{self.kind.noun}Name": self.name})


def owned(aws: Aws, deployment: str) -> Iterator[Resource]:
    """Everything with the deployment's tag, in the order in which it can be removed.

    SageMaker's own listings, since those of the tagging service are minutes behind.
    """
    for kind in KINDS:
        pages = aws.sagemaker.get_paginator(kind.listing).paginate(NameContains=deployment)
        for page in pages:
            for entry in page.get(f"{kind.noun}s", []):
                if tags_of(aws, entry[f"{kind.noun}Arn"]).get(TAG) == deployment:
                    yield Resource(kind, entry[f"{kind.noun}Name"])


def tags_of(aws: Aws, arn: str) -> dict[str, str]:
    """Tags of something of SageMaker's."""
    pages = aws.sagemaker.get_paginator("list_tags").paginate(ResourceArn=arn)
    return {tag["Key"]: tag["Value"] for page in pages for tag in page.get("Tags", [])}
