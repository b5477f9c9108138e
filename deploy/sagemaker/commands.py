"""Runs the commands of `deploy`, given their parsed arguments."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from deploy.sagemaker.compare import LoadTest, compare
from deploy.sagemaker.down import list_remaining, take_down
from deploy.sagemaker.dry_run import DryRun
from deploy.sagemaker.errors import DeployError, explain
from deploy.sagemaker.package import Package, make_package
from deploy.sagemaker.resources.aws import Aws
from deploy.sagemaker.resources.deployment import Deployment
from deploy.sagemaker.resources.image import ensure_repository, push_commands
from deploy.sagemaker.resources.logs import last_lines
from deploy.sagemaker.runtime import Runtime
from deploy.sagemaker.status import status_lines
from deploy.sagemaker.up import bring_up

_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


def run(parsed: argparse.Namespace) -> int:
    """Run a command and return the exit code."""
    try:
        _COMMANDS[parsed.command](parsed)
    except (DeployError, ClientError, BotoCoreError) as error:
        return _fail(_describe(error), _EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", _EXIT_INTERRUPTED)
    return 0


def _up(parsed: argparse.Namespace) -> None:
    deployment, package = _deployment(parsed), _package(parsed, parsed.strategy)
    aws = _aws(parsed)
    try:
        _bring_up(aws, parsed, deployment, package)
    except BaseException:
        _print_remaining(aws, parsed)
        raise
    aws.say(f"longshore deploy stream --name {parsed.name} 'Once upon a time'")


def _bring_up(
    aws: Aws, parsed: argparse.Namespace, deployment: Deployment, package: Package
) -> None:
    bring_up(
        aws,
        deployment,
        package,
        bucket_name=parsed.bucket,
        as_archive=parsed.archive,
        timeout_s=parsed.timeout,
    )


def _print_remaining(aws: Aws, parsed: argparse.Namespace) -> None:
    """Print what a failed command has left behind, and the command that removes it."""
    cleanup = _down_command(aws, parsed, parsed.name)
    try:
        remaining = list_remaining(aws, parsed.name, bucket_name=parsed.bucket)
    except (ClientError, BotoCoreError) as error:
        print(f"could not list what was created ({_describe(error)}); remove it with: {cleanup}")
        return
    if not remaining:
        print("nothing was created")
        return
    print("left behind:", *(f"  {resource}" for resource in remaining), sep="\n")
    print(f"run the same command again to continue, or remove everything: {cleanup}")


def _down_command(aws: Aws, parsed: argparse.Namespace, name: str) -> str:
    bucket = f" --bucket {parsed.bucket}" if parsed.bucket else ""
    return f"longshore deploy down --name {name} --region {aws.region}{bucket}"


def _compare(parsed: argparse.Namespace) -> None:
    aws = _aws(parsed)
    compare(
        aws,
        parsed.name,
        parsed.strategies,
        bring_up=lambda name, strategy: _bring_up(
            aws, parsed, _deployment(parsed, name), _package(parsed, strategy)
        ),
        load_test=LoadTest(aws, parsed.load),
        take_down=lambda name: _take_down(aws, parsed, name),
        out=parsed.out,
    )


def _down(parsed: argparse.Namespace) -> None:
    _take_down(_aws(parsed, sends_reads=True), parsed, parsed.name)


def _take_down(aws: Aws, parsed: argparse.Namespace, name: str) -> None:
    try:
        removed = take_down(aws, name, bucket_name=parsed.bucket, timeout_s=parsed.timeout)
    except BaseException:
        print(f"{name} is not completely removed; run again: {_down_command(aws, parsed, name)}")
        raise
    if not removed:
        aws.say(f"{name} has no resources in {aws.region}")


def _image(parsed: argparse.Namespace) -> None:
    # stdout holds shell commands only, so messages go to stderr.
    aws = _aws(parsed, say=lambda line: print(line, file=sys.stderr))
    uri = f"{ensure_repository(aws, parsed.repository)}:{parsed.tag}"
    for line in push_commands(aws, uri, parsed.device):
        print(line)


def _invoke(parsed: argparse.Namespace) -> None:
    print(_runtime(parsed).invoke(_body(parsed)))


def _stream(parsed: argparse.Namespace) -> None:
    for line in _runtime(parsed).stream(_body(parsed)):
        print(line, flush=True)


def _status(parsed: argparse.Namespace) -> None:
    for line in status_lines(_aws(parsed), parsed.name):
        print(line)


def _logs(parsed: argparse.Namespace) -> None:
    lines = last_lines(_aws(parsed), parsed.name, parsed.lines)
    if not lines:
        raise DeployError(f"{parsed.name} has not logged anything")
    for line in lines:
        print(line)


_COMMANDS = {
    "up": _up,
    "invoke": _invoke,
    "stream": _stream,
    "status": _status,
    "logs": _logs,
    "compare": _compare,
    "down": _down,
    "image": _image,
}


def _aws(
    parsed: argparse.Namespace, *, sends_reads: bool = False, say: Callable[[str], None] = print
) -> Aws:
    """Return the AWS clients; with `sends_reads` a dry run still looks up what exists."""
    dry_run = DryRun(print, sends_reads=sends_reads) if getattr(parsed, "dry_run", False) else None
    return Aws(parsed.region, dry_run=dry_run, say=say)


def _runtime(parsed: argparse.Namespace) -> Runtime:
    return Runtime(_aws(parsed), parsed.name, component=parsed.component)


def _deployment(parsed: argparse.Namespace, name: str | None = None) -> Deployment:
    return Deployment(
        name=name or parsed.name,
        image=parsed.image,
        role=parsed.role,
        instance_type=parsed.instance_type,
        instances=parsed.instances,
        max_instances=parsed.max_instances or parsed.instances,
        target_concurrency=parsed.target_concurrency,
        startup_timeout_s=parsed.startup_timeout,
        download_timeout_s=parsed.download_timeout,
        ami=parsed.ami,
        environment=dict(_variable(text) for text in parsed.env),
        is_component=parsed.component,
        accelerators=parsed.accelerators,
        memory_mib=parsed.memory_mib,
    )


def _package(parsed: argparse.Namespace, strategy: str | None) -> Package:
    return make_package(
        model_dir=parsed.model_dir,
        model_id=parsed.model_id,
        properties=parsed.properties,
        strategy=strategy,
    )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise DeployError(f"--env {text}: expected NAME=VALUE")
    return name, value


def _body(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the request body, in LMI's schema unless --body is given."""
    if parsed.body is None:
        body: Any = {"inputs": parsed.inputs}
    else:
        try:
            body = json.loads(parsed.body)
        except ValueError as error:
            raise DeployError(f"--body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise DeployError("--body is not a JSON object")
    if parsed.max_new_tokens is not None:
        body.setdefault("parameters", {})["max_new_tokens"] = parsed.max_new_tokens
    return body


def _describe(error: Exception) -> str:
    return explain(error) if isinstance(error, ClientError) else str(error)


def _fail(reason: str, code: int) -> int:
    print(f"deploy: {reason}", file=sys.stderr)
    return code
