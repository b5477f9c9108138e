"""`make gpu`: check and time the kernels and the engine on this GPU; see docs/benchmarks.md.

Sections run in worker processes. If a worker fails, crashes or hangs, its results so far are kept
and a new worker continues with the remaining sections. The tables are printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.report import Report, table_text
from benchmarks.gpu.sections import SECTIONS, jobs_of, one_process, seconds_of, section_of
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.targets import targets_text

GRACE_SECONDS = 60
"""Extra time for the case that is running when a section's time is up, and for a worker's start."""
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""The engine's own setting, made here before the first section uses the GPU."""
TABLE = Path(__file__).resolve().parents[2] / "kernels" / "configurations.json"


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    report = Report(is_dry=options.dry, shape=options.shape)
    remaining = jobs_of(options.sections)
    try:
        while remaining:
            remaining = run_worker(remaining, report, options)
    finally:
        report.write(options.out)
        if options.write_table and report.table is not None and not options.dry:
            TABLE.write_text(table_text(report.table))
        print(report.text())
        print(targets_text(report))
        print(f"full results: {options.out / 'gpu.json'}")
    sys.exit(0 if all(map(report.is_sound, options.sections)) else 1)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    titles = "".join(f"  {name:16}{section.title}\n" for name, section in SECTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"sections:\n{titles}",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/latest"),
        help="folder for the results (default: %(default)s)",
    )
    parser.add_argument(
        "--sections",
        type=_section_names,
        default=tuple(SECTIONS),
        help="comma-separated sections to run (default: all, which are listed below)",
    )
    parser.add_argument(
        "--dry", action="store_true", help="run tiny sizes on the CPU without timing them"
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="llama-2-7b",
        help="model shape of the engine sections (default: %(default)s)",
    )
    parser.add_argument(
        "--stretch",
        type=float,
        default=1.0,
        help="multiply every section's time budget, for slow GPUs or longer measurements "
        "(default: 1)",
    )
    parser.add_argument(
        "--write-table",
        action="store_true",
        help="write the sweep's table to kernels/configurations.json",
    )
    return parser.parse_args(arguments)


def _section_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(
            f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}"
        )
    # Without the ceilings, no other section's rates have their shares of them.
    return names if "ceilings" in names else ("ceilings", *names)


def run_worker(remaining: list[str], report: Report, options: argparse.Namespace) -> list[str]:
    """Run one worker on the first of these jobs; return the jobs left for the next worker."""
    jobs = one_process(remaining, is_dry=options.dry)
    command = [sys.executable, "-m", "benchmarks.gpu.worker", *jobs]
    command += ["--shape", options.shape, "--stretch", str(options.stretch)]
    if options.dry:
        command.append("--dry")
    if "flashinfer" in report.sections and not report.is_sound("flashinfer"):
        command.append("--without-flashinfer")
    worker = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=ALLOCATOR | os.environ | {"TRITON_DEFAULT_FP_FUSION": "1"},
    )
    assert worker.stdout
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_forward, args=(worker.stdout, lines), daemon=True)
    reader.start()
    with worker:
        try:
            progress = collect(lines, report, options.out, len(jobs), options.stretch)
        finally:
            worker.kill()
            reader.join()
    return _next_jobs(remaining, progress, report)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker got with its jobs."""

    num_finished: int
    current: str | None = None
    """The job that was running when the worker ended."""
    failure: str | None = None
    """Why the worker failed; None if it did all jobs."""


def _next_jobs(remaining: list[str], progress: Progress, report: Report) -> list[str]:
    """Return the jobs for the next worker, and note a failure of this one in the report."""
    num_finished = progress.num_finished
    if progress.failure is None:
        return remaining[num_finished:]
    if progress.current is not None:
        place, num_done = f"at {progress.current}", num_finished + 1
    elif num_finished > 0:
        place, num_done = f"after {remaining[num_finished - 1]}", num_finished
    else:
        # The worker probably did not start. Another worker would not either.
        place, num_done = f"before {remaining[0]}", len(remaining)
    job = progress.current or remaining[max(0, num_finished - 1)]
    note = f"worker failed {place}: {progress.failure}"
    report.section(section_of(job))["notes"].append(note)
    return remaining[num_done:]


def collect(
    lines: queue.SimpleQueue[str],
    report: Report,
    out: Path,
    num_jobs: int,
    stretch: float = 1.0,
    grace_s: float = GRACE_SECONDS,
) -> Progress:
    """Read a worker's events until it has finished its `num_jobs` jobs, dies or hangs."""
    num_finished, current = 0, None
    limit = time.monotonic() + grace_s
    while num_finished < num_jobs:
        try:
            line = lines.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            return Progress(num_finished, current, "it hung")
        if not line:
            return Progress(num_finished, current, "it died; see above")
        event = json.loads(line)
        report.take(event)
        if event["event"] == "begin":
            current = str(event["job"])
            limit = time.monotonic() + seconds_of(current) * stretch + grace_s
        elif event["event"] == "end":
            num_finished, current = num_finished + 1, None
            limit = time.monotonic() + grace_s
            report.write(out)
        _progress(event)
    return Progress(num_finished)


def _forward(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _progress(event: dict[str, object]) -> None:
    if event["event"] in ("begin", "note"):
        print(event.get("job") or event["text"], file=sys.stderr)
    elif event["event"] == "row":
        print(".", end="", file=sys.stderr, flush=True)
    elif event["event"] == "end":
        print(f" {event['seconds']} s", file=sys.stderr)


if __name__ == "__main__":
    main()
