"""A failure half-way prints the reason, the resources left, and how to remove them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from deploy.__main__ import main
from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.package import make_package
from deploy.sagemaker.resources import endpoint
from deploy.sagemaker.resources.aws import Aws
from deploy.sagemaker.resources.deployment import Deployment
from deploy.sagemaker.up import bring_up
from tests.deploy.conftest import CREATING, FAILED, IMAGE, ROLE, Clock, Failure, Faulty

Capture = pytest.CaptureFixture[str]
Peek = Callable[[str], Any]
CURE = "longshore deploy down --name demo --region eu-west-1"
ABSENT = Failure("ValidationException", 'Could not find endpoint "demo".')


def test_a_denied_call(faulty: Faulty, up: list[str], capsys: Capture) -> None:
    message = "User: arn:aws:iam::1:user/x is not authorized to perform: sagemaker:CreateModel"
    faulty.answers("CreateModel", Failure("AccessDeniedException", message))
    assert main(up) == 1
    printed = capsys.readouterr()
    assert f"CreateModel: AccessDeniedException: {message}" in printed.err
    assert "credentials lack this permission" in printed.err
    assert "4 objects in s3://longshore-" in printed.out
    assert CURE in printed.out
    assert main(["down", "--name", "demo"]) == 0
    assert main(["down", "--name", "demo"]) == 0
    assert "demo has no resources in eu-west-1" in capsys.readouterr().out


def test_a_failure_before_anything_is_created(
    faulty: Faulty, up: list[str], capsys: Capture, peek: Peek
) -> None:
    peek("s3").create_bucket(
        Bucket="mine", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    assert main([*up, "--bucket", "other"]) == 1
    assert "nothing was created" in capsys.readouterr().out


def test_an_exceeded_quota(faulty: Faulty, up: list[str], capsys: Capture) -> None:
    message = "The account-level service limit 'ml.g5.2xlarge for endpoint usage' is 0 Instances"
    faulty.answers("CreateEndpoint", Failure("ResourceLimitExceeded", message))
    assert main(up) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Service Quotas" in printed.err
    for what in ("configuration demo-", "model demo-", "objects in s3://"):
        assert what in printed.out
    faulty.clear()
    assert main(up) == 0, "the same command continues where it stopped"


def test_a_failed_endpoint_is_reported_with_its_log(
    faulty: Faulty, up: list[str], capsys: Capture, peek: Peek
) -> None:
    logs, group = peek("logs"), "/aws/sagemaker/Endpoints/demo"
    logs.create_log_group(logGroupName=group)
    now_ms = int(time.time() * 1000)  # CloudWatch rejects old events
    for stream, lines in (("a", ["first", "last"]), ("b", ["between"])):
        logs.create_log_stream(logGroupName=group, logStreamName=stream)
        first = now_ms + (5 if stream == "b" else 0)
        events = [{"timestamp": first + 10 * n, "message": line} for n, line in enumerate(lines)]
        logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
    faulty.answers("DescribeEndpoint", ABSENT, FAILED)
    assert main(up) == 1
    printed = capsys.readouterr()
    assert "endpoint demo is Failed: no answer to /ping" in printed.err
    assert printed.err.splitlines()[-3:] == ["first", "between", "last"]
    assert CURE in printed.out


def test_a_failed_endpoint_is_not_updated(faulty: Faulty, up: list[str], capsys: Capture) -> None:
    faulty.answers("DescribeEndpoint", FAILED)
    faulty.answers("ListTags", {"Tags": [{"Key": "longshore:deployment", "Value": "demo"}]})
    assert main(up) == 1
    assert "has failed; remove it first: no answer to /ping" in capsys.readouterr().err
    assert faulty.calls["CreateModel"] == 0


@pytest.fixture
def deployment() -> Deployment:
    return Deployment(name="demo", image=IMAGE, role=ROLE, instance_type="ml.g4dn.xlarge")


def test_waiting_times_out(
    aws: Aws, faulty: Faulty, clock: Clock, deployment: Deployment, printed: list[str]
) -> None:
    faulty.answers("DescribeEndpoint", ABSENT, CREATING)
    package = make_package(model_dir=None, model_id="org/m", properties=None, strategy=None)
    with pytest.raises(DeployError, match=r"still Creating after \d+ s \(--timeout\)"):
        bring_up(aws, deployment, package, timeout_s=150)
    assert 150 < clock.now < 150 + 2 * endpoint.POLL_S
    progress = [line for line in printed if "Creating after" in line]
    assert len(progress) == 3, "a line at 0, 60 and 120 s"


@pytest.mark.parametrize("operation", ["CreateModel", "DescribeEndpoint"])
def test_ctrl_c(
    faulty: Faulty,
    up: list[str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    """Ctrl-C during a call of `operation`: the command says how to remove what was created."""
    call = Aws.sagemaker.fget

    def interrupted(aws: Aws) -> Any:
        client = call(aws)

        def press(**_: Any) -> None:
            monkeypatch.undo()
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            raise KeyboardInterrupt

        client.meta.events.register(f"before-call.sagemaker.{operation}", press)
        return client

    environment = {name: value for name, value in os.environ.items() if "AWS" in name}
    monkeypatch.setattr(Aws, "sagemaker", property(interrupted))
    assert main(up) == 130
    printed = capsys.readouterr()
    assert "deploy: interrupted" in printed.err
    assert CURE in printed.out


def test_the_cure_is_shown_even_if_what_was_created_cannot_be_listed(
    faulty: Faulty, up: list[str], capsys: Capture
) -> None:
    faulty.answers("ListModels", Failure("AccessDeniedException", "no"))
    faulty.answers("CreateEndpoint", Failure("ThrottlingException", "slow down"))
    assert main(up) == 1
    printed = capsys.readouterr()
    assert "could not list what was created (ListModels: AccessDeniedException: no" in printed.out
    assert CURE in printed.out
    assert "CreateEndpoint: ThrottlingException: slow down" in printed.err


def test_no_credentials_and_no_region(
    up: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert main(up) == 1
    assert "no region: use --region" in capsys.readouterr().err
    assert main([*up, "--region", "eu-west-1"]) == 1
    assert "Unable to locate credentials" in capsys.readouterr().err


def test_parameters_are_validated_before_anything_is_sent(
    faulty: Faulty, up: list[str], capsys: Capture
) -> None:
    """botocore validates parameters against AWS's own service descriptions."""
    up[up.index("--role") + 1] = "short"
    assert main(up) == 1
    assert "Invalid length for parameter ExecutionRoleArn" in capsys.readouterr().err
    assert faulty.calls["CreateModel"] == 0
