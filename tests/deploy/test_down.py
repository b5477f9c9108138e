"""`deploy down`: the resources that are removed and those that are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.__main__ import main
from deploy.sagemaker.down import list_remaining, take_down
from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.resources.aws import Aws
from deploy.sagemaker.resources.tags import TAG
from tests.deploy.conftest import CREATING, ROLE, Clock, Failure, Faulty
from tests.deploy.test_up import BUCKET

Capture = pytest.CaptureFixture[str]
Peek = Callable[[str], Any]


def endpoints(peek: Peek) -> set[str]:
    return {
        endpoint["EndpointName"] for endpoint in peek("sagemaker").list_endpoints()["Endpoints"]
    }


def test_exactly_the_deployment_is_removed(
    faulty: Faulty, up: list[str], peek: Peek, capsys: Capture
) -> None:
    assert main([*up, "--max-instances", "2"]) == 0
    assert main(["up", "--name", "demo-2", *up[3:]]) == 0
    sagemaker, s3 = peek("sagemaker"), peek("s3")
    model = sagemaker.list_models()["Models"][0]["ModelName"]
    container = sagemaker.describe_model(ModelName=model)["PrimaryContainer"]
    for name, value in (("demo-by-hand", None), ("demo-other", "other")):
        tags = [{"Key": TAG, "Value": value}] if value else []
        request = {"ModelName": name, "ExecutionRoleArn": ROLE, "PrimaryContainer": container}
        sagemaker.create_model(**request, Tags=tags)
    s3.put_object(Bucket=BUCKET, Key="longshore/demo/notes.txt", Body=b"by hand")
    capsys.readouterr()

    assert main(["down", "--name", "demo"]) == 0
    removed = capsys.readouterr().out
    assert "removed endpoint demo\n" in removed
    assert f"removed 4 objects in s3://{BUCKET}" in removed
    assert endpoints(peek) == {"demo-2"}
    names = [entry["ModelName"] for entry in sagemaker.list_models()["Models"]]
    assert sorted(entry for entry in names if not entry.startswith("demo-2-")) == [
        "demo-by-hand",
        "demo-other",
    ]
    targets = peek("application-autoscaling").describe_scalable_targets(
        ServiceNamespace="sagemaker"
    )
    assert targets["ScalableTargets"] == []
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert "longshore/demo/notes.txt" in keys
    assert len([key for key in keys if key.startswith("longshore/demo-2/")]) == 4

    assert main(["down", "--name", "demo-2"]) == 0
    s3.head_bucket(Bucket=BUCKET)
    s3.delete_object(Bucket=BUCKET, Key="longshore/demo/notes.txt")
    assert main(["down", "--name", "demo-2"]) == 0
    assert f"removed bucket {BUCKET}" in capsys.readouterr().out
    assert s3.list_buckets()["Buckets"] == []


def test_a_users_own_bucket_is_kept(faulty: Faulty, up: list[str], peek: Peek) -> None:
    place = {"LocationConstraint": "eu-west-1"}
    peek("s3").create_bucket(Bucket="mine", CreateBucketConfiguration=place)
    assert main([*up, "--bucket", "mine"]) == 0
    assert main(["down", "--name", "demo", "--bucket", "mine"]) == 0
    assert "Contents" not in peek("s3").list_objects_v2(Bucket="mine")


def test_an_endpoint_being_created_is_waited_for(
    aws: Aws, faulty: Faulty, up: list[str], printed: list[str], peek: Peek
) -> None:
    assert main(up) == 0
    there = {**CREATING, "EndpointStatus": "InService"}
    gone = Failure("ValidationException", 'Could not find endpoint "demo".')
    faulty.answers("DescribeEndpoint", CREATING, CREATING, there, there, gone)
    take_down(aws, "demo")
    assert printed.count("endpoint demo is Creating; waiting until it can be deleted") == 2
    assert endpoints(peek) == set()
    assert list_remaining(aws, "demo") == []


def test_waiting_for_an_endpoint_times_out(
    aws: Aws, faulty: Faulty, up: list[str], clock: Clock
) -> None:
    assert main(up) == 0
    faulty.answers("DescribeEndpoint", CREATING)
    with pytest.raises(
        DeployError, match=r"is Creating \(--timeout\); run the down command again later"
    ):
        take_down(aws, "demo", timeout_s=100)
    assert 100 < clock.now < 200


def test_a_denied_removal_says_how_to_continue(
    faulty: Faulty, up: list[str], capsys: Capture
) -> None:
    assert main(up) == 0
    faulty.answers("DeleteEndpointConfig", Failure("AccessDeniedException", "no"))
    assert main(["down", "--name", "demo"]) == 1
    printed = capsys.readouterr()
    assert (
        "demo is not completely removed; run again: longshore deploy down --name demo --region"
        in printed.out
    )
    assert "DeleteEndpointConfig: AccessDeniedException: no" in printed.err
    faulty.clear()
    assert main(["down", "--name", "demo"]) == 0


def test_dry_run_removes_nothing(
    faulty: Faulty, up: list[str], capsys: Capture, peek: Peek
) -> None:
    assert main(up) == 0
    capsys.readouterr()
    assert main(["down", "--name", "demo", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'sagemaker.DeleteEndpoint {"EndpointName": "demo"}' in lines
    operations = [line.split()[0] for line in lines]
    assert operations == [
        "sagemaker.DeleteEndpoint",
        "sagemaker.DeleteEndpointConfig",
        "sagemaker.DeleteModel",
        "s3.DeleteObjects",
    ]
    assert endpoints(peek) == {"demo"}
