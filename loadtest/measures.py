"""What a run amounts to: the figures of tables and charts, from records and samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from loadtest.record import Record
from loadtest.watch import Sample


class Spread(msgspec.Struct, kw_only=True):
    """A distribution of seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None where there are no values."""
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


class Inside(msgspec.Struct, kw_only=True):
    """What the server's own counters say. Missing where it has none."""

    batch: float | None = None
    """Sequences of a step, on average."""
    step_s: float | None = None
    """Of the run's seconds, those for each step."""
    kv_used: float | None = None
    """Held KV blocks over all, averaged over time."""
    kv_filled: float | None = None
    """Tokens in held blocks over the room in them, averaged over time."""
    preemptions: float | None = None
    prefix_hits: float | None = None
    """Share of prompt tokens that were known."""


class Measures(msgspec.Struct, kw_only=True):
    """Of the requests with a whole answer, unless it says otherwise."""

    num_good: int
    num_errors: int
    seconds: float
    """From the first request's sending to the last answer's end."""
    requests_per_s: float
    tokens_per_s: float | None
    """Output tokens as the server counts them; None where it does not."""
    prompt_tokens: float
    """Mean of a request."""
    output_tokens: float | None
    num_short: int
    """Answers that the server counts shorter, or longer, than was asked for."""
    first_token: Spread | None
    gap: Spread | None
    """Between two arrivals of tokens of an answer."""
    latency: Spread | None
    queue: Spread | None
    """By the server's own clock."""
    late_s: float | None
    """In an open loop: the most that the client sent a request too late."""
    pace: float | None = None
    """In an open loop: the time in which requests fell due, over that in which answers ended. Below
    1 the server, or the client, falls behind, however good its latencies still are."""
    awscurl_tps: float | None
    """As awscurl has it: requests over the sum of their latencies, times clients."""
    client_cpu: float | None
    """Cores that this process used."""
    server_cpu: float | None
    other_cpu: float | None
    """Cores that neither of the two used, and that so were not there for them."""
    gpu: float | None
    inside: Inside


def measures_of(
    records: Sequence[Record],
    gaps_s: Sequence[float],
    samples: Sequence[Sample],
    *,
    clients: int | None,
) -> Measures:
    """clients: of a closed loop; None of an open one."""
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
        other_cpu=mean(map(_others, during)),
        gpu=mean(sample.gpu for sample in during),
        inside=_inside(samples, during, seconds),
    )


def _pace(records: Sequence[Record]) -> float | None:
    due = [record.due_s for record in records if record.due_s is not None]
    ends = [record.finished_s for record in records if record.due_s is not None]
    took = max(ends, default=0.0) - min(ends, default=0.0)
    return (max(due) - min(due)) / took if took else None


def _others(sample: Sample) -> float | None:
    if sample.machine_cpu is None or sample.server_cpu is None or sample.client_cpu is None:
        return None
    return max(0.0, sample.machine_cpu - sample.server_cpu - sample.client_cpu)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order: the smallest that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def quantiles(values: Iterable[float], count: int = 200) -> list[float]:
    """`count` + 1 of them, from the least to the most; none of nothing."""
    ordered = sorted(values)
    return [quantile(ordered, at / count) for at in range(count + 1)] if ordered else []


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def filled(metrics: dict[str, float]) -> float | None:
    """Tokens in held KV blocks over all room for tokens."""
    room = metrics.get("kv_blocks", 0.0) * metrics.get("kv_block_tokens", 0.0)
    return metrics["kv_tokens_filled"] / room if room and "kv_tokens_filled" in metrics else None


def _inside(all_samples: Sequence[Sample], during: Sequence[Sample], seconds: float) -> Inside:
    """Sums are of all samples, since the last is taken when the server's have settled."""
    seen = [sample.metrics for sample in all_samples if sample.metrics]

    def grown(key: str) -> float | None:
        values = [metrics[key] for metrics in seen if key in metrics]
        return values[-1] - values[0] if values else None

    steps, queries = grown("steps"), grown("prefix_queries")
    busy = [each.metrics for each in during if each.metrics.get("kv_used")]
    return Inside(
        batch=(grown("step_sequences") or 0.0) / steps if steps else None,
        step_s=seconds / steps if steps else None,
        kv_used=mean(metrics["kv_used"] for metrics in busy),
        kv_filled=mean(
            share / metrics["kv_used"] for metrics in busy if (share := filled(metrics)) is not None
        ),
        preemptions=grown("preemptions"),
        prefix_hits=(grown("prefix_hits") or 0.0) / queries if queries else None,
    )
