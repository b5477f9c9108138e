"""Bring an endpoint into service."""

from __future__ import annotations

from deploy.sagemaker.package import Package
from deploy.sagemaker.resources.aws import Aws
from deploy.sagemaker.resources.bucket import Bucket
from deploy.sagemaker.resources.deployment import Deployment
from deploy.sagemaker.resources.endpoint import Endpoint
from deploy.sagemaker.resources.scaling import Scaling


def bring_up(
    aws: Aws,
    deployment: Deployment,
    package: Package,
    *,
    bucket_name: str | None = None,
    as_archive: bool = False,
    timeout_s: float = 3600.0,
) -> None:
    """Upload the package, then create or update the endpoint and its scaling.

    Does only what is missing, so it may be repeated after any failure. Raises DeployError or
    botocore's errors. Resources created before an error remain;
    `deploy.sagemaker.down.list_remaining` lists them.
    """
    bucket = Bucket(aws, bucket_name)
    bucket.ensure()
    model_uri = bucket.upload(deployment.name, package, as_archive=as_archive)
    aws.say(f"model at {model_uri}")
    Endpoint(aws, deployment.name).ensure(deployment, model_uri, timeout_s)
    Scaling(aws, deployment.name, is_component=deployment.is_component).ensure(deployment)
