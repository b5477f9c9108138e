"""The removal of everything that a deployment has, found by its tag."""

from __future__ import annotations

from deploy.aws import Aws
from deploy.bucket import Bucket
from deploy.deployment import check_name
from deploy.endpoint import POLL_S, SETTLED, Endpoint
from deploy.errors import DeployError
from deploy.resources import COMPONENT, ENDPOINT, Resource, owned
from deploy.scaling import Scaling


def take_down(
    aws: Aws, name: str, *, bucket_name: str | None = None, timeout_s: float = 3600.0
) -> list[str]:
    """Removes what has the deployment's tag and nothing else; says what that was.

    It may be repeated. CloudWatch's log groups are SageMaker's own, and stay. Raises DeployError
    where SageMaker takes longer.
    """
    check_name(name)
    gone: list[str] = []
    for resource in list(owned(aws, name)):
        if resource.kind in (COMPONENT, ENDPOINT):
            gone += Scaling(aws, name, is_component=resource.kind is COMPONENT).remove()
            _delete_and_wait(aws, resource, timeout_s)
        else:
            resource.delete(aws)
        gone.append(str(resource))
        aws.say(f"removed {resource}")
    return gone + _remove_objects(aws, name, bucket_name)


def remains(aws: Aws, name: str, *, bucket_name: str | None = None) -> list[str]:
    """What there is of a deployment, in words."""
    there = [str(resource) for resource in owned(aws, name)]
    bucket = Bucket(aws, bucket_name)
    if bucket.exists() and (count := len(list(bucket.keys_of(name)))):
        there.append(f"{count} objects in s3://{bucket.name}")
    return there


def _remove_objects(aws: Aws, name: str, bucket_name: str | None) -> list[str]:
    bucket = Bucket(aws, bucket_name)
    if not bucket.exists():
        return []
    gone: list[str] = []
    if count := bucket.remove(name):
        gone.append(f"{count} objects in s3://{bucket.name}")
    if bucket.remove_if_empty():
        gone.append(f"bucket {bucket.name}")
    for each in gone:
        aws.say(f"removed {each}")
    return gone


def _delete_and_wait(aws: Aws, resource: Resource, timeout_s: float) -> None:
    """A component must be gone before its endpoint goes, and that before its configuration."""
    endpoint = Endpoint(aws, resource.name)
    is_endpoint = resource.kind is ENDPOINT
    describe = endpoint.describe if is_endpoint else endpoint.describe_component
    deadline = aws.clock() + timeout_s
    # SageMaker deletes no endpoint that it is still making or changing.
    while is_endpoint and (there := describe()) and there["EndpointStatus"] not in SETTLED:
        _check_time(aws, deadline, f"{resource} is {there['EndpointStatus']}")
        aws.say(f"{resource} is {there['EndpointStatus']}; waiting until it can be deleted")
        aws.sleep(POLL_S)
    resource.delete(aws)
    while not aws.is_dry_run and describe() is not None:
        _check_time(aws, deadline, f"{resource} is being deleted")
        aws.sleep(POLL_S)


def _check_time(aws: Aws, deadline: float, state: str) -> None:
    if aws.clock() > deadline:
        raise DeployError(f"{state} and takes long; run down again later")
