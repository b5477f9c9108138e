"""`deploy status` and `deploy logs`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from deploy.__main__ import main
from tests.deploy.conftest import FAILED, IMAGE, Faulty

Capture = pytest.CaptureFixture[str]


def test_status_of_a_running_endpoint(faulty: Faulty, up: list[str], capsys: Capture) -> None:
    assert main([*up, "--max-instances", "4"]) == 0
    capsys.readouterr()
    assert main(["status", "--name", "demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "endpoint demo: InService",
        "  instances: 1 of ml.g4dn.xlarge, 1 desired",
        "  scaling: 1 to 4",
    ]
    assert lines[3] == f"  image: {IMAGE}"
    assert lines[4].startswith("  model: s3://longshore-123456789012-eu-west-1/longshore/demo/")
    assert main(up) == 0, "without --max-instances, the same command ends scaling"
    capsys.readouterr()
    assert main(["status", "--name", "demo"]) == 0
    assert "  scaling: none" in capsys.readouterr().out.splitlines()


def test_status_of_a_failed_endpoint(
    faulty: Faulty, up: list[str], capsys: Capture, peek: Callable[[str], Any]
) -> None:
    assert main(up) == 0
    there = peek("sagemaker").describe_endpoint(EndpointName="demo")
    faulty.answers(
        "DescribeEndpoint", {**FAILED, "EndpointConfigName": there["EndpointConfigName"]}
    )
    assert main(["status", "--name", "demo"]) == 0
    assert "endpoint demo: Failed: no answer to /ping" in capsys.readouterr().out


def test_status_without_an_endpoint(faulty: Faulty, capsys: Capture) -> None:
    assert main(["status", "--name", "demo"]) == 1
    assert "endpoint demo does not exist in eu-west-1" in capsys.readouterr().err


def test_logs(faulty: Faulty, capsys: Capture, peek: Callable[[str], Any]) -> None:
    assert main(["logs", "--name", "demo"]) == 1
    assert "demo has not logged anything" in capsys.readouterr().err
    logs, now_ms = peek("logs"), int(time.time() * 1000)
    for group in ("Endpoints", "InferenceComponents"):
        names = {"logGroupName": f"/aws/sagemaker/{group}/demo", "logStreamName": "s"}
        logs.create_log_group(logGroupName=names["logGroupName"])
        logs.create_log_stream(**names)
        events = [{"timestamp": now_ms + n, "message": f"{group} {n}\n"} for n in range(3)]
        logs.put_log_events(**names, logEvents=events)
    assert main(["logs", "--name", "demo", "--lines", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["InferenceComponents 1", "Endpoints 2", "InferenceComponents 2"]
