"""Read the CloudWatch logs of an endpoint's containers."""

from __future__ import annotations

from deploy.sagemaker.resources.aws import Aws, none_if_missing

_MAX_STREAMS = 5
"""Number of containers to read: those that logged last."""
_GROUPS = ("/aws/sagemaker/Endpoints/{}", "/aws/sagemaker/InferenceComponents/{}")


def last_lines(aws: Aws, name: str, count: int) -> list[str]:
    """Return the last `count` lines of the containers of an endpoint or component, oldest first."""
    events = []
    for group in (template.format(name) for template in _GROUPS):
        for stream in _streams(aws, group):
            events += aws.client("logs").get_log_events(
                logGroupName=group, logStreamName=stream, limit=count, startFromHead=False
            )["events"]
    events.sort(key=lambda event: event["timestamp"])
    return [event["message"].rstrip() for event in events[-count:]]


def _streams(aws: Aws, group: str) -> list[str]:
    answer = none_if_missing(
        aws.client("logs").describe_log_streams,
        logGroupName=group,
        orderBy="LastEventTime",
        descending=True,
        limit=_MAX_STREAMS,
    )
    return [stream["logStreamName"] for stream in (answer or {}).get("logStreams", [])]
