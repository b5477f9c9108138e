"""--dry-run needs no account: botocore validates each call, which is printed and not made."""

from __future__ import annotations

import json

import pytest

from deploy.__main__ import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)


def calls(text: str) -> dict[str, dict]:
    """Return the last parameters of each operation, in order of the first calls."""
    parts = (line.split(" ", 1) for line in text.splitlines() if line[:3] in ("sag", "s3.", "app"))
    return {name: json.loads(parameters) for name, parameters in parts}


def test_up_prints_its_calls(up: list[str], capsys: Capture) -> None:
    up[up.index("--instance-type") + 1] = "ml.g5.2xlarge"
    assert main([*up, "--dry-run", "--max-instances", "4", "--strategy", "paged"]) == 0
    text = capsys.readouterr().out
    made = calls(text)
    creations = [name for name in made if "Create" in name or "Put" in name or "Register" in name]
    assert creations == [
        "s3.CreateBucket",
        "s3.PutBucketTagging",
        "s3.PutObject",
        "sagemaker.CreateModel",
        "sagemaker.CreateEndpointConfig",
        "sagemaker.CreateEndpoint",
        "application-autoscaling.RegisterScalableTarget",
        "application-autoscaling.PutScalingPolicy",
    ]
    (variant,) = made["sagemaker.CreateEndpointConfig"]["ProductionVariants"]
    assert variant["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"
    assert made["application-autoscaling.RegisterScalableTarget"]["MaxCapacity"] == 4
    uploads = [line for line in text.splitlines() if line.startswith("s3.PutObject")]
    assert len(uploads) == 4
    assert '"Body": "<3000 bytes>"' in "".join(uploads)


def test_a_component_with_another_instance_image(up: list[str], capsys: Capture) -> None:
    ami = "al2-ami-sagemaker-inference-gpu-2"
    assert main([*up, "--dry-run", "--component", "--ami", ami]) == 0
    made = calls(capsys.readouterr().out)
    (variant,) = made["sagemaker.CreateEndpointConfig"]["ProductionVariants"]
    assert variant["InferenceAmiVersion"] == ami
    component = made["sagemaker.CreateInferenceComponent"]
    assert component["Specification"]["ModelName"] == made["sagemaker.CreateModel"]["ModelName"]


def test_mistakes_are_reported(up: list[str], capsys: Capture) -> None:
    assert main([*up, "--dry-run", "--instances", "0", "--max-instances", "1"]) == 1
    assert "--instances 0" in capsys.readouterr().err
    assert main([*up, "--dry-run", "--env", "nothing"]) == 1
    assert "--env nothing: expected NAME=VALUE" in capsys.readouterr().err


def test_image_prints_its_calls(capsys: Capture) -> None:
    assert main(["image", "--dry-run", "--tag", "1.0", "--device", "cpu"]) == 0
    *printed, login, build, push = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == [
        "ecr.DescribeRepositories",
        "ecr.CreateRepository",
        "sts.GetCallerIdentity",
    ]
    uri = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/longshore:1.0"
    assert login.endswith(f"docker login --username AWS --password-stdin {uri.split('/')[0]}")
    assert build == f"docker build --platform linux/amd64 --build-arg DEVICE=cpu --tag {uri} ."
    assert push == f"docker push {uri}"


def test_compare_prints_its_calls(up: list[str], capsys: Capture, tmp_path) -> None:
    options = ["--strategies", "none", "paged", "--out", str(tmp_path), "--dry-run"]
    assert main(["compare", *up[1:], *options, "--load", "--users", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("python")] == [
        f"python -m loadtest compare --sagemaker demo-{strategy} --out {tmp_path}/{strategy} "
        "--users 8"
        for strategy in ("none", "paged")
    ]
    made = [line for line in lines if line.startswith("sagemaker.CreateEndpoint ")]
    assert ["demo-none" in made[0], "demo-paged" in made[1]] == [True, True]
