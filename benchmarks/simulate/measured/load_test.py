"""The runs in a load test's results.json: the requests sent to each strategy, and the results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from core.configuration.options import Options, make_options, option_table
from core.configuration.strategy_table import BATCHING_NAMES, Batching

SEVERAL_SEQUENCES = ("parallel", "beam")
"""Workloads whose requests have several sequences, which results.json does not tell apart."""
COUNTERS = ("steps", "step_sequences", "step_tokens")
"""Counters of the server's /metrics that the load test samples."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of a run."""

    prompt_tokens: int
    output_tokens: int
    due_s: float | None
    """Arrival in seconds since the start of an open loop; None in a closed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run of one strategy."""

    workload: str
    name: str
    """As the load test names it, such as `dynamic (tuned)`."""
    batching: Batching
    options: Options
    device: Literal["cuda", "cpu"]
    num_blocks: int
    """KV blocks that the server had."""
    users: int | None
    """Users of a closed loop; None in an open one."""
    requests: Sequence[Sent]
    """In the order in which they are sent."""
    seconds: float
    """From the first request to the last answer."""
    requests_per_s: float
    num_steps: float
    num_sequences: float
    """Sum over steps of the sequences in them."""
    num_tokens: float
    """Sum over steps of the tokens that they compute."""
    prefix_tokens: int
    """Length of the prefix that all prompts share, inferred from the hits of the prefix cache."""

    @property
    def batch(self) -> float:
        """Mean sequences in a step."""
        return self.num_sequences / self.num_steps


def read_runs(folder: Path) -> list[MeasuredRun]:
    """Return the whole runs of our strategies in results.json that can be simulated.

    Variants of a workload, and servers with several copies of the model, are left out.

    Raises OSError if there is no such file, and ValueError or KeyError if it is of another kind.
    """
    found = json.loads((folder / "results.json").read_text())
    has_gpu = found["machine"].get("GPU", "none") != "none"
    runs = [
        _run(run, has_gpu)
        for run in found["runs"]
        if run["is_whole"]
        and not run["variant"]
        and run["workload"] not in SEVERAL_SEQUENCES
        and run["settings"].get("option.batching") in BATCHING_NAMES
        and all(name in _last(run) for name in COUNTERS)
    ]
    return [run for run in runs if run.num_steps > 0 and run.options.layout.copies == 1]


def _run(run: Mapping[str, Any], has_gpu: bool) -> MeasuredRun:
    measures, first, last = run["measures"], _metrics(run)[0], _last(run)
    options = _options(run["settings"])
    hits = (measures["inside"]["prefix_hits"] or 0.0) * measures["prompt_tokens"]
    records = sorted(run["records"], key=lambda record: record["index"])
    steps, sequences, tokens = (last[name] - first[name] for name in COUNTERS)
    return MeasuredRun(
        workload=run["workload"],
        name=run["name"],
        batching=run["settings"]["option.batching"],
        options=options,
        device="cuda" if has_gpu and options.execution.device != "cpu" else "cpu",
        num_blocks=int(last["kv_blocks"]),
        users=run["users"],
        requests=[
            Sent(record["prompt_tokens"], record["asked_tokens"], record["due_s"])
            for record in records
        ],
        seconds=measures["seconds"],
        requests_per_s=measures["requests_per_s"],
        num_steps=steps,
        num_sequences=sequences,
        num_tokens=tokens,
        prefix_tokens=_whole_blocks(hits, options.memory.block_size),
    )


def _whole_blocks(num_hits: float, block_size: int) -> int:
    """Return the tokens that a prompt finds in the prefix cache, in whole blocks.

    num_hits: mean tokens found. The first use of a prefix finds nothing, so the mean is rounded up.
    Less than a block is not a shared prefix: it comes from requests that continue after a
    preemption.
    """
    return block_size * math.ceil(num_hits / block_size) if num_hits >= block_size else 0


def _options(settings: Mapping[str, str]) -> Options:
    by_key = {option.key: option for option in option_table().values()}
    known = {by_key[key]: text for key, text in settings.items() if key in by_key}
    return make_options({option.name: option.parse(text) for option, text in known.items()})


def _metrics(run: Mapping[str, Any]) -> list[dict[str, float]]:
    return [sample["metrics"] for sample in run["samples"] if sample["metrics"]]


def _last(run: Mapping[str, Any]) -> dict[str, float]:
    return next(reversed(_metrics(run)), {})
