"""How an endpoint is, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.aws import Aws
from deploy.endpoint import Endpoint
from deploy.errors import DeployError
from deploy.scaling import Scaling


def status_lines(aws: Aws, name: str) -> Iterator[str]:
    """Raises DeployError where there is no such endpoint."""
    endpoint = Endpoint(aws, name)
    there = endpoint.describe()
    if there is None:
        raise DeployError(f"there is no endpoint {name} in {aws.region}")
    yield f"endpoint {name}: {there['EndpointStatus']}{_reason(there)}"
    configuration = aws.sagemaker.describe_endpoint_config(
        EndpointConfigName=there["EndpointConfigName"]
    )
    (variant,) = configuration["ProductionVariants"]
    counts = next(iter(there.get("ProductionVariants", [])), {})
    yield (
        f"  instances: {counts.get('CurrentInstanceCount', 0)} of {variant['InstanceType']}, "
        f"{counts.get('DesiredInstanceCount', 0)} wanted"
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
        yield from _model(aws.sagemaker.describe_model(ModelName=model_name))


def _model(model: dict[str, Any]) -> Iterator[str]:
    container = model["PrimaryContainer"]
    yield f"  image: {container['Image']}"
    yield f"  model: {container['ModelDataSource']['S3DataSource']['S3Uri']}"


def _reason(description: dict[str, Any]) -> str:
    reason = description.get("FailureReason")
    return f": {reason}" if reason else ""
