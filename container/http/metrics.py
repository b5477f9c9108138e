"""The engines' metrics in Prometheus format, with vLLM's names where the meaning is the same.

The values arrive with the engines' heartbeats. Every front-end worker receives them, so each worker
can answer `/metrics` by itself. As in vLLM, each of several engines has series of its own, with its
number as the label `engine`; their sum is left to Prometheus.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from container.http.merged_metrics import MergedMetrics
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.protocol.facts import Facts
from core.protocol.stats import Histogram, Stats

WAITING = ("slots", "blocks", "batch", "budget")
"""Why the first waiting request may wait; docs/operate.md explains them."""
DEFERRED = ("batch",)
"""Of these, what is no lack of capacity."""
MIMETYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(client: EngineClient, model_name: str, options: Options) -> bytes:
    """Return the body of a `/metrics` response.

    Raises EngineUnavailableError while no engine is ready.
    """
    labels = {"model_name": model_name, "batching": client.facts.batching}
    has_several = len(client.copies) > 1
    engines = [
        _EngineMetrics(
            copy.state.facts,
            copy.state.stats,
            {**labels, "engine": str(number)} if has_several else labels,
            options,
        )
        for number, copy in enumerate(client.copies)
        if copy.state.is_ready
    ]
    registry = CollectorRegistry()
    registry.register(MergedMetrics(metric for engine in engines for metric in engine.collect()))
    if has_several:
        serving = Gauge(
            "longshore:copies_serving",
            "Copies of the model that are serving requests.",
            tuple(labels),
            registry=registry,
        )
        serving.labels(*labels.values()).set(client.num_serving())
    return generate_latest(registry)


class _EngineMetrics:
    def __init__(
        self, facts: Facts, stats: Stats, labels: Mapping[str, str], options: Options
    ) -> None:
        self._facts = facts
        self._options = options
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._infos()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        facts, stats = self._facts, self._stats
        used = stats.num_held_blocks / max(1, facts.num_kv_blocks)
        values = (
            ("vllm:num_requests_running", stats.num_running, "Sequences that are running."),
            ("vllm:num_requests_waiting", stats.num_waiting,
             "Sequences that wait to be scheduled."),
            ("vllm:kv_cache_usage_perc", used,
             "Fraction of the KV blocks that is in use, from 0 to 1."),
            ("longshore:kv_blocks", facts.num_kv_blocks, "All KV blocks, in use or free."),
            ("longshore:kv_block_tokens", facts.block_size, "Tokens per KV block."),
            ("longshore:kv_blocks_held", stats.num_held_blocks, "KV blocks in use."),
            ("longshore:kv_tokens_filled", stats.num_filled_tokens,
             "Token slots that have been written, in the KV blocks that are in use."),
        )  # fmt: skip
        for name, value, doc in values:
            if "kv_" in name and not facts.num_kv_blocks:
                continue  # the task has no KV cache
            yield self._gauge(name, doc, value)
        waiting = dict.fromkeys(WAITING, 0) | stats.waiting
        num_deferred = sum(count for reason, count in waiting.items() if reason in DEFERRED)
        by_reason = (
            ("vllm:num_requests_waiting_by_reason",
             {"capacity": sum(waiting.values()) - num_deferred, "deferred": num_deferred},
             "Sequences that wait, by reason: capacity, or deferred for a batch to fill."),
            ("longshore:requests_waiting", waiting,
             "Sequences that wait, by why the first does: slots, blocks, batch or budget."),
        )  # fmt: skip
        for name, counts, doc in by_reason:
            family = GaugeMetricFamily(name, doc, labels=(*self._labels, "reason"))
            for reason, count in counts.items():
                family.add_metric((*self._labels.values(), reason), count)
            yield family

    def _infos(self) -> Iterator[Metric]:
        """Yield the gauges whose labels hold the information."""
        facts, memory = self._facts, self._options.memory
        if facts.num_kv_blocks:
            yield self._gauge(
                "vllm:cache_config_info",
                "The labels describe the KV cache.",
                1.0,
                block_size=facts.block_size,
                num_gpu_blocks=facts.num_kv_blocks,
                num_cpu_blocks=facts.num_swap_blocks,
                cache_dtype=facts.kv_dtype,
                enable_prefix_caching=memory.enable_prefix_caching,
                gpu_memory_utilization=memory.gpu_memory_utilization,
            )
        for info in self._stats.infos:
            yield self._gauge(info.name, info.doc, time.time(), **info.labels)

    def _gauge(self, name: str, doc: str, value: float, **labels: object) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=(*self._labels, *labels))
        family.add_metric((*self._labels.values(), *map(str, labels.values())), value)
        return family

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        preemptions = {"swap": stats.num_swaps, "recompute": stats.num_recomputes}
        sums: tuple[tuple[str, float, str], ...] = (
            ("vllm:prompt_tokens", stats.num_prompt_tokens,
             "Prompt tokens of requests that got their first token."),
            ("vllm:generation_tokens", stats.num_generated_tokens,
             "Generated tokens of all requests."),
            ("vllm:prefix_cache_queries", stats.num_prefix_queries,
             "Tokens that were looked up in the prefix cache."),
            ("vllm:prefix_cache_hits", stats.num_prefix_hits,
             "Tokens that were found in the prefix cache."),
            ("vllm:num_preemptions", sum(preemptions.values()), "Preemptions of all modes."),
            ("longshore:steps", stats.num_steps, "Forward passes."),
            ("longshore:step_sequences", stats.num_step_sequences,
             "Sequences in a step, summed over all steps."),
            ("longshore:step_tokens", int(stats.iteration_tokens.sum),
             "Tokens computed in a step, summed over all steps."),
            ("longshore:host_seconds", stats.host_s,
             "Time of the engine's loop, without the model's forward pass and without waiting."),
        )  # fmt: skip
        for name, value, doc in sums:
            yield self._counter(name, doc, {"": value})
        by_label = (
            ("vllm:request_success", stats.finished, "finished_reason",
             "Sequences that ended, by reason: stop, length, abort or error."),
            ("longshore:requests_aborted", stats.aborted, "reason",
             "Requests that were aborted while they ran or waited, by reason."),
            ("longshore:requests_refused", stats.refused, "reason",
             "HTTP requests that were refused with a 4xx, 503 or 507, by reason."),
            ("longshore:preemptions", preemptions, "mode",
             "Preemptions, by what happens to the KV blocks: swap or recompute."),
        )  # fmt: skip
        for name, values, label, doc in by_label:
            yield self._counter(name, doc, values, label)

        for total in stats.totals:
            yield self._counter(total.name, total.doc, total.values, total.label)

    def _counter(self, name: str, doc: str, values: Mapping[str, float], label: str = "") -> Metric:
        family = CounterMetricFamily(name, doc, labels=(*self._labels, *filter(None, [label])))
        for label_value, value in values.items():
            further = [label_value] if label else []
            family.add_metric((*self._labels.values(), *further), value)
        return family

    def _histograms(self) -> Iterator[Metric]:
        stats = self._stats
        histograms = (
            ("vllm:time_to_first_token_seconds", stats.first_token,
             "Time from a request's arrival to its first token."),
            ("vllm:inter_token_latency_seconds", stats.inter_token,
             "Time between two tokens of a sequence."),
            ("vllm:request_queue_time_seconds", stats.queue,
             "Time from a request's arrival to its scheduling."),
            ("vllm:request_prefill_time_seconds", stats.prefill,
             "Time from a request's scheduling to its first token."),
            ("vllm:request_decode_time_seconds", stats.decode,
             "Time from a request's first token to its end."),
            ("vllm:request_inference_time_seconds", stats.inference,
             "Time from a request's scheduling to its end."),
            ("vllm:e2e_request_latency_seconds", stats.end_to_end,
             "Time from a request's arrival to its end."),
            ("vllm:request_time_per_output_token_seconds", stats.per_output_token,
             "Mean time between the tokens of a sequence."),
            ("vllm:request_prompt_tokens", stats.prompt_tokens, "Prompt tokens of a sequence."),
            ("vllm:request_generation_tokens", stats.generation_tokens,
             "Generated tokens of a sequence."),
            ("vllm:request_max_num_generation_tokens", stats.max_generation_tokens,
             "Generated tokens of a request's longest sequence."),
            ("vllm:request_params_n", stats.params_n, "Sequences that a request asks for."),
            ("vllm:request_params_max_tokens", stats.params_max_tokens, "max_tokens of a request."),
            ("vllm:iteration_tokens_total", stats.iteration_tokens, "Tokens computed in a step."),
        )  # fmt: skip
        for name, histogram, doc in histograms:
            family = HistogramMetricFamily(name, doc, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), _buckets(histogram), histogram.sum)
            yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return pairs of an upper bound and the number of values up to it."""
    bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
