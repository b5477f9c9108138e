"""The engine's figures in Prometheus' form, by vLLM's names where they mean the same.

All of them come with the engine's heartbeats, which every front-end worker hears: whichever of
them is asked gives the same answer, and none needs to share anything with the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from core.messages import Facts
from core.stats import BOUNDS_S, Durations, Stats

MIMETYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(facts: Facts, stats: Stats, model_name: str) -> bytes:
    """The body of `/metrics`."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(facts, stats, model_name))
    return generate_latest(registry)


class _EngineCollector(Collector):
    def __init__(self, facts: Facts, stats: Stats, model_name: str) -> None:
        self._facts = facts
        self._stats = stats
        self._labels = {"model_name": model_name, "batching": facts.batching}

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        facts, stats = self._facts, self._stats
        used = stats.num_held_blocks / max(1, facts.num_kv_blocks)
        for name, value, doc in (
            ("vllm:num_requests_running", stats.num_running, "Sequences in the batch."),
            ("vllm:num_requests_waiting", stats.num_waiting, "Sequences that wait for a place."),
            ("vllm:kv_cache_usage_perc", used, "Held KV blocks, 1 being all."),
            ("longshore:kv_blocks", facts.num_kv_blocks, "KV blocks in all."),
            ("longshore:kv_block_tokens", facts.block_size, "Tokens in a KV block."),
            ("longshore:kv_blocks_held", stats.num_held_blocks, "KV blocks held."),
            (
                "longshore:kv_tokens_filled",
                stats.num_filled_tokens,
                "Tokens whose K and V are in held blocks; the rest of these is reserved or empty.",
            ),
        ):
            if "kv_" in name and not facts.num_kv_blocks:
                continue  # the task is not to generate
            family = GaugeMetricFamily(name, doc, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        preemptions = {"swap": stats.num_swaps, "recompute": stats.num_recomputes}
        sums: tuple[tuple[str, int, str], ...] = (
            ("vllm:prompt_tokens", stats.num_prompt_tokens, "Prompt tokens."),
            ("vllm:generation_tokens", stats.num_generated_tokens, "Generated tokens."),
            ("vllm:prefix_cache_queries", stats.num_prefix_queries, "Tokens looked up."),
            ("vllm:prefix_cache_hits", stats.num_prefix_hits, "Tokens found."),
            ("vllm:num_preemptions", sum(preemptions.values()), "Preemptions."),
            ("longshore:steps", stats.num_steps, "Forward passes."),
            ("longshore:step_sequences", stats.num_step_sequences, "Sequences over all steps."),
            ("longshore:step_tokens", stats.num_step_tokens, "Tokens computed."),
        )
        for name, value, doc in sums:
            yield self._counter(name, doc, {"": value})
        yield self._counter(
            "vllm:request_success", "Answers that ended.", stats.finished, "finished_reason"
        )
        yield self._counter(
            "longshore:preemptions", "Preemptions, by what becomes of K and V.", preemptions, "mode"
        )

    def _counter(self, name: str, doc: str, values: dict[str, int], label: str = "") -> Metric:
        family = CounterMetricFamily(name, doc, labels=(*self._labels, *filter(None, [label])))
        for value_of_label, value in values.items():
            own = [value_of_label] if label else []
            family.add_metric((*self._labels.values(), *own), value)
        return family

    def _histograms(self) -> Iterator[Metric]:
        stats = self._stats
        for name, durations, doc in (
            ("vllm:time_to_first_token_seconds", stats.first_token, "Arrival to first token."),
            ("vllm:inter_token_latency_seconds", stats.inter_token, "Between two tokens."),
            ("vllm:request_queue_time_seconds", stats.queue, "Arrival to admission."),
            ("vllm:request_prefill_time_seconds", stats.prefill, "Admission to first token."),
            ("vllm:request_decode_time_seconds", stats.decode, "First token to the end."),
            ("vllm:e2e_request_latency_seconds", stats.whole, "Arrival to the end."),
        ):
            family = HistogramMetricFamily(name, doc, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), _buckets(durations), durations.sum_s)
            yield family


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Pairs of upper bound and count of all up to it."""
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(durations.counts)), strict=True))
