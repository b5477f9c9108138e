"""What is removed, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.__main__ import main
from deploy.aws import TAG, Aws
from deploy.down import remains, take_down
from deploy.errors import DeployError
from tests.deploy.conftest import CREATING, ROLE, Clock, Failure, Faulty
from tests.deploy.test_up import BUCKET

Capture = pytest.CaptureFixture[str]
Peek = Callable[[str], Any]


def endpoints(peek: Peek) -> set[str]:
    return {each["EndpointName"] for each in peek("sagemaker").list_endpoints()["Endpoints"]}


def test_everything_goes_and_nothing_else(
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
    names = [each["ModelName"] for each in sagemaker.list_models()["Models"]]
    assert sorted(each for each in names if not each.startswith("demo-2-")) == [
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


def test_a_bucket_that_somebody_made_stays(faulty: Faulty, up: list[str], peek: Peek) -> None:
    place = {"LocationConstraint": "eu-west-1"}
    peek("s3").create_bucket(Bucket="mine", CreateBucketConfiguration=place)
    assert main([*up, "--bucket", "mine"]) == 0
    assert main(["down", "--name", "demo", "--bucket", "mine"]) == 0
    assert "Contents" not in peek("s3").list_objects_v2(Bucket="mine")


def test_an_endpoint_in_the_making_is_waited_for(
    aws: Aws, faulty: Faulty, up: list[str], said: list[str], peek: Peek
) -> None:
    assert main(up) == 0
    there = {**CREATING, "EndpointStatus": "InService"}
    gone = Failure("ValidationException", 'Could not find endpoint "demo".')
    faulty.answers("DescribeEndpoint", CREATING, CREATING, there, there, gone)
    take_down(aws, "demo")
    assert said.count("endpoint demo is Creating; waiting until it can be deleted") == 2
    assert endpoints(peek) == set()
    assert remains(aws, "demo") == []


def test_one_that_never_ends_is_given_up(
    aws: Aws, faulty: Faulty, up: list[str], clock: Clock
) -> None:
    assert main(up) == 0
    faulty.answers("DescribeEndpoint", CREATING)
    with pytest.raises(DeployError, match="is Creating and takes long; run down again later"):
        take_down(aws, "demo", timeout_s=100)
    assert 100 < clock.now < 200


def test_a_removal_that_is_denied_says_how_to_go_on(
    faulty: Faulty, up: list[str], capsys: Capture
) -> None:
    assert main(up) == 0
    faulty.answers("DeleteEndpointConfig", Failure("AccessDeniedException", "no"))
    assert main(["down", "--name", "demo"]) == 1
    said = capsys.readouterr()
    assert "not all of demo is removed: python -m deploy down --name demo --region" in said.out
    assert "DeleteEndpointConfig: AccessDeniedException: no" in said.err
    faulty.clear()
    assert main(["down", "--name", "demo"]) == 0


def test_dry_run_looks_and_removes_nothing(
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
