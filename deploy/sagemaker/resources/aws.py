"""The AWS account and region to deploy to."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import boto3
from botocore.exceptions import ClientError

from deploy.sagemaker.dry_run import DryRun
from deploy.sagemaker.errors import DeployError, is_missing


class Aws:
    """boto3 clients for one region, with a clock for waiting.

    boto3 finds credentials, region and endpoints as usual. With `dry_run`, that object prints and
    answers the calls, and `say` prints nothing.
    """

    def __init__(
        self,
        region: str | None = None,
        *,
        dry_run: DryRun | None = None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        session = boto3.Session(region_name=region)
        if session.region_name is None:
            raise DeployError("no region: use --region, or set AWS_DEFAULT_REGION")
        if dry_run is not None:
            dry_run.watch(session)
        self.region: str = session.region_name
        self.is_dry_run = dry_run is not None
        self.say: Callable[[str], object] = (lambda line: None) if self.is_dry_run else say
        self.clock = clock
        self.sleep = sleep
        self.client = cache(session.client)

    @property
    def sagemaker(self) -> Any:
        return self.client("sagemaker")

    @property
    def account(self) -> str:
        return self.client("sts").get_caller_identity()["Account"]


def none_if_missing(call: Callable[..., Any], **arguments: Any) -> dict[str, Any] | None:
    """Return the answer of `call(**arguments)`, or None if the resource does not exist."""
    try:
        return call(**arguments)
    except ClientError as error:
        if is_missing(error):
            return None
        raise
