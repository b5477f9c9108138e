"""The ECR repository of the image."""

from __future__ import annotations

from deploy.sagemaker.resources.aws import Aws, none_if_missing

OWN_TAG = "longshore:repository"


def ensure_repository(aws: Aws, name: str) -> str:
    """Create the repository if it is missing and return its URI."""
    ecr = aws.client("ecr")
    existing = none_if_missing(ecr.describe_repositories, repositoryNames=[name])
    if existing is not None:
        return existing["repositories"][0]["repositoryUri"]
    ecr.create_repository(
        repositoryName=name,
        tags=[{"Key": OWN_TAG, "Value": "made"}],
        imageScanningConfiguration={"scanOnPush": True},
    )
    aws.say(f"created repository {name}")
    return f"{_registry(aws)}/{name}"


def push_commands(aws: Aws, uri: str, device: str) -> list[str]:
    """Return the shell commands, for the repository root, that build the image and push it."""
    build = f"docker build --platform linux/amd64 --build-arg DEVICE={device} --tag {uri} ."
    return [
        f"aws ecr get-login-password --region {aws.region} | "
        f"docker login --username AWS --password-stdin {uri.split('/')[0]}",
        build,
        f"docker push {uri}",
    ]


def _registry(aws: Aws) -> str:
    partition = "amazonaws.com.cn" if aws.region.startswith("cn-") else "amazonaws.com"
    return f"{aws.account}.dkr.ecr.{aws.region}.{partition}"
