"""Remove all resources of a deployment, found by its tag."""

from __future__ import annotations

from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.resources.aws import Aws
from deploy.sagemaker.resources.bucket import Bucket
from deploy.sagemaker.resources.deployment import check_name
from deploy.sagemaker.resources.endpoint import POLL_S, SETTLED, Endpoint
from deploy.sagemaker.resources.resources import COMPONENT, ENDPOINT, Resource, owned
from deploy.sagemaker.resources.scaling import Scaling


def take_down(
    aws: Aws, name: str, *, bucket_name: str | None = None, timeout_s: float = 3600.0
) -> list[str]:
    """Remove everything that has the deployment's tag; return what was removed.

    Without that tag, only the scaling of these resources is removed, and our own bucket once it is
    empty. SageMaker owns the CloudWatch log groups, so they stay. May be repeated. Raises
    DeployError if SageMaker takes longer than `timeout_s`.
    """
    check_name(name)
    removed: list[str] = []
    for resource in list(owned(aws, name)):
        if resource.kind in (COMPONENT, ENDPOINT):
            removed += Scaling(aws, name, is_component=resource.kind is COMPONENT).remove()
            _delete_and_wait(aws, resource, timeout_s)
        else:
            resource.delete(aws)
        removed.append(str(resource))
        aws.say(f"removed {resource}")
    return removed + _remove_objects(aws, name, bucket_name)


def list_remaining(aws: Aws, name: str, *, bucket_name: str | None = None) -> list[str]:
    """Return a description of each resource that a deployment has."""
    remaining = [str(resource) for resource in owned(aws, name)]
    bucket = Bucket(aws, bucket_name)
    if bucket.exists() and (count := len(list(bucket.keys_of(name)))):
        remaining.append(f"{count} objects in s3://{bucket.name}")
    return remaining


def _remove_objects(aws: Aws, name: str, bucket_name: str | None) -> list[str]:
    bucket = Bucket(aws, bucket_name)
    if not bucket.exists():
        return []
    removed: list[str] = []
    if count := bucket.remove(name):
        removed.append(f"{count} objects in s3://{bucket.name}")
    if bucket.remove_if_empty():
        removed.append(f"bucket {bucket.name}")
    for description in removed:
        aws.say(f"removed {description}")
    return removed


def _delete_and_wait(aws: Aws, resource: Resource, timeout_s: float) -> None:
    """Delete a resource and wait until it is gone.

    A component must be gone before its endpoint is deleted, and the endpoint before its
    configuration.
    """
    endpoint = Endpoint(aws, resource.name)
    is_endpoint = resource.kind is ENDPOINT
    describe = endpoint.describe if is_endpoint else endpoint.describe_component
    deadline = aws.clock() + timeout_s
    # SageMaker cannot delete an endpoint while it is creating or updating it.
    while is_endpoint and (state := describe()) and state["EndpointStatus"] not in SETTLED:
        _check_deadline(aws, deadline, f"{resource} is {state['EndpointStatus']}")
        aws.say(f"{resource} is {state['EndpointStatus']}; waiting until it can be deleted")
        aws.sleep(POLL_S)
    resource.delete(aws)
    while not aws.is_dry_run and describe() is not None:
        _check_deadline(aws, deadline, f"{resource} is still being deleted")
        aws.sleep(POLL_S)


def _check_deadline(aws: Aws, deadline: float, state: str) -> None:
    if aws.clock() > deadline:
        raise DeployError(f"{state} (--timeout); run the down command again later")
