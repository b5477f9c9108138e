"""What an endpoint's containers have written, in CloudWatch."""

from __future__ import annotations

from deploy.aws import Aws, found

_MAX_STREAMS = 5
"""Containers looked at, those that wrote last."""
_GROUPS = ("/aws/sagemaker/Endpoints/{}", "/aws/sagemaker/InferenceComponents/{}")


def last_lines(aws: Aws, name: str, count: int) -> list[str]:
    """The newest lines of all containers of an endpoint or its component, oldest first."""
    events = []
    for group in (each.format(name) for each in _GROUPS):
        for stream in _streams(aws, group):
            events += aws.client("logs").get_log_events(
                logGroupName=group, logStreamName=stream, limit=count, startFromHead=False
            )["events"]
    events.sort(key=lambda event: event["timestamp"])
    return [event["message"].rstrip() for event in events[-count:]]


def _streams(aws: Aws, group: str) -> list[str]:
    answer = found(
        aws.client("logs").describe_log_streams,
        logGroupName=group,
        orderBy="LastEventTime",
        descending=True,
        limit=_MAX_STREAMS,
    )
    return [each["logStreamName"] for each in (answer or {}).get("logStreams", [])]
