"""Simulate which request rate each batching strategy sustains.

The real strategies and memory managers run on a simulated clock with a cost model of a step:
bytes of weights and K/V over bandwidth, FLOPs over FLOP/s, and a fixed overhead. No model runs, no
GPU is used and no speed is measured.

Without --rate, this searches for the highest rate at which the mean normalized latency (end-to-end
latency over output length) stays within --bound, as in the figures of the PagedAttention paper
(SOSP 2023). With --rate, every system serves that rate. docs/benchmarks.md explains the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from tqdm import tqdm

from benchmarks.load.lengths import read_timed_trace
from benchmarks.simulate.arguments import MEANS, make_parser
from benchmarks.simulate.calibration import CalibrationError, calibrated
from benchmarks.simulate.comparison import (
    WHY_DIFFERENT,
    Progress,
    SystemRow,
    Task,
    as_json,
    compare,
    replay,
)
from benchmarks.simulate.cost import GPUS, MODELS, Efficiency, Hardware
from benchmarks.simulate.system import Setup
from benchmarks.simulate.table import table
from benchmarks.simulate.traffic import Prefixes, Synthetic, Trace, Traffic


def main(arguments: list[str] | None = None, prog: str = "python -m benchmarks.simulate") -> None:
    parser = make_parser(__doc__ or "", prog)
    options = parser.parse_args(arguments)
    try:
        results = [_run(_hardware(options), options)]
        print(WHY_DIFFERENT)
    except (ValueError, OSError, CalibrationError) as error:
        parser.error(str(error))
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(
            json.dumps({"simulation": True, "settings": settings, "results": results}, indent=1)
            + "\n"
        )


def _run(hardware: Hardware, options: argparse.Namespace) -> dict[str, object]:
    """Simulate one machine, print the table, and return it for JSON."""
    if not 0 <= options.prefix_tokens < options.max_length - 1:
        raise ValueError("--prefix-tokens must leave room for a prompt within --max-length")
    traffic = _traffic(options)
    task = Task(
        setup=Setup(
            hardware=hardware,
            max_length=options.max_length,
            max_sequences=options.max_sequences,
            max_step_tokens=options.max_step_tokens,
            caches_prefixes=options.prefix_tokens > 0,
        ),
        traffic=traffic,
        duration_s=options.duration,
        systems=options.systems,
        num_machines=options.machines,
        router=options.router,
    )
    rate = options.rate
    if rate == "trace":
        if not isinstance(traffic, Trace):
            raise ValueError("--rate trace requires --trace")
        rate = traffic.rate
    rows = _rows(task, None if rate is None else float(rate), options.bound)
    title = _title(task, options)
    print("\n".join([title, "", *table(rows, is_knee=rate is None), ""]), flush=True)
    return {
        "title": title,
        "kv_tokens": hardware.num_kv_tokens,
        "efficiency": dataclasses.asdict(hardware.efficiency),
        "rows": as_json(rows),
    }


def _rows(task: Task, rate: float | None, bound: float) -> list[SystemRow]:
    total = round(task.duration_s)
    with tqdm(total=total, unit="s", desc="simulated", disable=None) as bar:  # only on a tty
        progress = _progress(bar)
        return compare(task, bound, progress) if rate is None else replay(task, rate, progress)


def _progress(bar: tqdm) -> Progress:
    """Return a callback that shows the current run's simulated seconds, up to the last arrival."""
    shown = ""

    def show(name: str, now: float) -> None:
        nonlocal shown
        if name != shown:
            shown = name
            bar.reset()
            bar.set_description(name)
        bar.update(max(0, min(round(now), bar.total) - bar.n))

    return show


def _title(task: Task, options: argparse.Namespace) -> str:
    source = options.trace.name if options.trace else f"{options.lengths}-like lengths, Poisson"
    hardware, efficiency = task.setup.hardware, task.setup.hardware.efficiency
    fleet = f", {task.num_machines} machines, {task.router}" if task.num_machines > 1 else ""
    num_skipped = task.traffic.num_left_out
    skipped = (
        f" ({num_skipped} requests over {options.max_length} tokens skipped)" if num_skipped else ""
    )
    return (
        f"SIMULATION: {hardware.name}{fleet}; KV cache of {hardware.num_kv_tokens} tokens; "
        f"{source}{skipped}, {task.duration_s:g} s, seed {options.seed}; "
        f"{efficiency.bandwidth:.0%} of bandwidth, {efficiency.flops:.0%} of FLOP/s, "
        f"{efficiency.overhead_s * 1e3:.3g} ms overhead per step"
        + (
            f", {efficiency.link:.0%} of the link and {efficiency.sum_s * 1e6:.3g} us for each sum "
            "over the GPUs"
            if hardware.num_gpus > 1
            else ""
        )
        + ("" if options.rate else f"; bound {options.bound:g} s/token")
    )


def _hardware(options: argparse.Namespace) -> Hardware:
    assumed = Efficiency(
        bandwidth=options.bandwidth_efficiency,
        flops=options.flops_efficiency,
        overhead_s=options.overhead_ms / 1e3,
    )
    hardware = Hardware(MODELS[options.model], GPUS[options.gpu], options.gpus, assumed)
    if options.calibrate is None:
        return hardware
    measured = calibrated(options.calibrate, hardware)
    return Hardware(hardware.model, hardware.gpu, hardware.num_gpus, measured)


def _traffic(options: argparse.Namespace) -> Traffic:
    prefixes = Prefixes(options.prefixes, options.prefix_tokens)
    if options.trace is None:
        return Synthetic(MEANS[options.lengths], options.max_length, prefixes, options.seed)
    return Trace(read_timed_trace(options.trace), options.max_length, prefixes, options.seed)


if __name__ == "__main__":
    main()
