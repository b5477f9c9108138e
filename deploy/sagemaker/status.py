"""Print the status of an endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.resources.aws import Aws
from deploy.sagemaker.resources.endpoint import Endpoint
from deploy.sagemaker.resources.scaling import Scaling


def status_lines(aws: Aws, name: str) -> Iterator[str]:
    """Yield the lines that describe an endpoint. Raises DeployError if it does not exist."""
    endpoint = Endpoint(aws, name)
    description = endpoint.describe()
    if description is None:
        raise DeployError(f"endpoint {name} does not exist in {aws.region}")
    yield f"endpoint {name}: {description['EndpointStatus']}{_reason(description)}"
    configuration = aws.sagemaker.describe_endpoint_config(
        EndpointConfigName=description["EndpointConfigName"]
    )
    (variant,) = configuration["ProductionVariants"]
    counts = next(iter(description.get("ProductionVariants", [])), {})
    yield (
        f"  instances: {counts.get('CurrentInstanceCount', 0)} of {variant['InstanceType']}, "
        f"{counts.get('DesiredInstanceCount', 0)} desired"
    )
    component = None if "ModelName" in variant else endpoint.describe_component()
    if component is not None:
        copies = component.get("RuntimeConfig", {}).get("CurrentCopyCount", 0)
        state = component["InferenceComponentStatus"]
        yield f"  component: {state}{_reason(component)}, {copies} copies"
    bounds = Scaling(aws, name, is_component=component is not None).bounds()
    yield f"  scaling: {bounds[0]} to {bounds[1]}" if bounds else "  scaling: none"
    model_name = component["Specification"]["ModelName"] if component else variant.get("ModelName")
    if model_name:
        yield from _model_lines(aws.sagemaker.describe_model(ModelName=model_name))


def _model_lines(model: dict[str, Any]) -> Iterator[str]:
    container = model["PrimaryContainer"]
    yield f"  image: {container['Image']}"
    yield f"  model: {container['ModelDataSource']['S3DataSource']['S3Uri']}"


def _reason(description: dict[str, Any]) -> str:
    reason = description.get("FailureReason")
    return f": {reason}" if reason else ""
