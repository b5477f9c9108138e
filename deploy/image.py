"""Where the image lies: a repository in ECR."""

from __future__ import annotations

from deploy.aws import Aws, found

OWN_TAG = "longshore:repository"


def ensure_repository(aws: Aws, name: str) -> str:
    """The repository's address; it is made where it is missing."""
    ecr = aws.client("ecr")
    there = found(ecr.describe_repositories, repositoryNames=[name])
    if there is not None:
        return there["repositories"][0]["repositoryUri"]
    ecr.create_repository(
        repositoryName=name,
        tags=[{"Key": OWN_TAG, "Value": "made"}],
        imageScanningConfiguration={"scanOnPush": True},
    )
    aws.say(f"made repository {name}")
    return f"{_registry(aws)}/{name}"


def push_commands(aws: Aws, uri: str, device: str) -> list[str]:
    """What builds the image and puts it at `uri`, for a shell at the top of the checkout."""
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
