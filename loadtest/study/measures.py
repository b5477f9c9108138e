"""Summarizes the records and samples of a run into the figures of tables and charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from loadtest.load.record import Record
from loadtest.servers.watch import Sample

MAX_OTHER_CORES = 0.2
"""A run during which other processes used more cores than this proves little."""

MAX_CLIENT_CORES = 0.8
"""The client has one thread, so a client that used more than this may have limited the run."""


class Spread(msgspec.Struct, kw_only=True):
    """Statistics of a duration, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Summarize the values that are not None; returns None if there are none."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        return cls(
            mean=math.fsum(known) / len(known),
            p50=quantile(known, 0.5),
            p90=quantile(known, 0.9),
            p99=quantile(known, 0.99),
            max=known[-1],
        )


class ServerMeasures(msgspec.Struct, kw_only=True):
    """Measures from the server's own counters; None where it does not export them."""

    batch: float | None = None
    """Mean sequences per step."""
    step_s: float | None = None
    """Seconds of the run per step."""
    host_s: float | None = None
    """Seconds per step in which the engine's loop neither ran the model nor waited."""
    kv_used: float | None = None
    """Share of KV blocks in use, averaged over the samples in which any is in use."""
    kv_filled: float | None = None
    """Share of the token slots of used KV blocks that are filled, averaged as for `kv_used`."""
    preemptions: float | None = None
    prefix_hits: float | None = None
    """Share of prompt tokens found in the prefix cache."""
    drafts_accepted: float | None = None
    """Share of the tokens proposed for a step that were right. None: there were none."""
    steps_drafted: float | None = None
    """Share of the steps with decodes that verified proposed tokens. None: no speculation."""


class Measures(msgspec.Struct, kw_only=True):
    """Measures of a run, over successful requests unless noted otherwise."""

    num_good: int
    num_errors: int
    seconds: float
    """From sending the first request to the end of the last response."""
    requests_per_s: float
    tokens_per_s: float | None
    """Output tokens as counted by the server; None if it does not report counts."""
    prompt_tokens: float
    """Mean per request."""
    output_tokens: float | None
    """Mean per request, over all its samples."""
    num_short: int
    """Requests whose output is shorter or longer than requested, as counted by the server."""
    first_token: Spread | None
    gap: Spread | None
    """Inter-token latency: time between two arrivals of tokens of one sample."""
    latency: Spread | None
    queue: Spread | None
    """Queue time by the server's clock."""
    late_s: float | None
    """Open loop: longest delay between a request's due time and its sending."""
    pace: float | None = None
    """Open loop: the span of due times divided by the span of response ends. Below 1, the server or
    the client falls behind, however good the latencies still are."""
    awscurl_tps: float | None
    """awscurl's formula: requests over the sum of their latencies, times clients."""
    client_cpu: float | None
    """Cores used by this process."""
    server_cpu: float | None
    other_cpu: float | None
    """Cores used by other processes, which client and server could not use."""
    gpu: float | None
    inside: ServerMeasures


def measures_of(
    records: Sequence[Record],
    gaps_s: Sequence[float],
    samples: Sequence[Sample],
    *,
    clients: int | None,
) -> Measures:
    """Compute the measures of a run.

    gaps_s: inter-token gaps of the successful requests. clients: number of users in a closed loop,
    None in an open one.
    """
    good = [record for record in records if record.is_good]
    start = min((record.sent_s for record in records), default=0.0)
    end = max((record.finished_s for record in records), default=0.0)
    seconds = max(end - start, 1e-9)
    outputs = [record.output_tokens for record in good]
    counted = [count for count in outputs if count is not None]
    knows_outputs = len(counted) == len(good) > 0
    latencies = math.fsum(record.latency_s for record in good)
    during = [sample for sample in samples if sample.at_s <= end]
    return Measures(
        num_good=len(good),
        num_errors=len(records) - len(good),
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        tokens_per_s=sum(counted) / seconds if knows_outputs else None,
        prompt_tokens=sum(record.prompt_tokens for record in good) / max(1, len(good)),
        output_tokens=sum(counted) / len(good) if knows_outputs else None,
        num_short=sum(record.output_tokens not in (None, record.asked_tokens) for record in good),
        first_token=Spread.of(record.first_token_s for record in good),
        gap=Spread.of(gaps_s),
        latency=Spread.of(record.latency_s for record in good),
        queue=Spread.of(record.queue_s for record in good),
        late_s=max(
            (record.sent_s - record.due_s for record in records if record.due_s is not None),
            default=None,
        ),
        pace=_pace(good),
        awscurl_tps=len(good) / latencies * clients if clients and latencies else None,
        client_cpu=mean(sample.client_cpu for sample in during),
        server_cpu=mean(sample.server_cpu for sample in during),
        other_cpu=mean(map(_other_cpu, during)),
        gpu=mean(sample.gpu for sample in during),
        inside=_server_measures(samples, during, seconds),
    )


def _pace(records: Sequence[Record]) -> float | None:
    due = [record.due_s for record in records if record.due_s is not None]
    ends = [record.finished_s for record in records if record.due_s is not None]
    span = max(ends, default=0.0) - min(ends, default=0.0)
    return (max(due) - min(due)) / span if span else None


def _other_cpu(sample: Sample) -> float | None:
    if sample.machine_cpu is None or sample.server_cpu is None or sample.client_cpu is None:
        return None
    # Rounded, since what is left of differences of equal times is no time.
    return round(max(0.0, sample.machine_cpu - sample.server_cpu - sample.client_cpu), 6)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as `share` of the ascending values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def quantiles(values: Iterable[float], count: int = 200) -> list[float]:
    """Return `count` + 1 evenly spaced quantiles from minimum to maximum; empty if no values."""
    ordered = sorted(values)
    return [quantile(ordered, i / count) for i in range(count + 1)] if ordered else []


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def filled(metrics: dict[str, float]) -> float | None:
    """Return the share of all KV token slots that hold a token of a running sequence, or None."""
    capacity = metrics.get("kv_blocks", 0.0) * metrics.get("kv_block_tokens", 0.0)
    if not capacity or "kv_tokens_filled" not in metrics:
        return None
    return metrics["kv_tokens_filled"] / capacity


def _server_measures(
    all_samples: Sequence[Sample], during: Sequence[Sample], seconds: float
) -> ServerMeasures:
    """Compute measures from /metrics.

    Counters use all samples, because the last one is taken once the server's counters have
    settled; gauges use only the samples taken during the run.
    """
    seen = [sample.metrics for sample in all_samples if sample.metrics]

    def increase(key: str) -> float | None:
        values = [metrics[key] for metrics in seen if key in metrics]
        return values[-1] - values[0] if values else None

    steps, queries = increase("steps"), increase("prefix_queries")
    drafts, decode_steps = increase("draft_tokens"), increase("decode_steps")
    host_s = increase("host_s")
    busy = [sample.metrics for sample in during if sample.metrics.get("kv_used")]
    return ServerMeasures(
        batch=(increase("step_sequences") or 0.0) / steps if steps else None,
        step_s=seconds / steps if steps else None,
        host_s=host_s / steps if steps and host_s is not None else None,
        kv_used=mean(metrics["kv_used"] for metrics in busy),
        kv_filled=mean(
            share / metrics["kv_used"] for metrics in busy if (share := filled(metrics)) is not None
        ),
        preemptions=increase("preemptions"),
        prefix_hits=(increase("prefix_hits") or 0.0) / queries if queries else None,
        drafts_accepted=(increase("accepted_tokens") or 0.0) / drafts if drafts else None,
        steps_drafted=(increase("drafted_steps") or 0.0) / decode_steps if decode_steps else None,
    )
