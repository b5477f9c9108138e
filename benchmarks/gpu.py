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
from pathlib import Path
from typing import IO

from benchmarks.report import Report, table_text
from benchmarks.sections import SECTIONS, jobs_of, one_process, seconds_of, section_of
from benchmarks.shapes import SHAPES

GRACE_SECONDS = 60
"""Extra time for the case that is running when a section's time is up, and for a worker's start."""
TABLE = Path(__file__).resolve().parents[1] / "kernels" / "configurations.json"


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
        print(f"full results: {options.out / 'gpu.json'}")
    sys.exit(0 if all(map(report.is_sound, report.sections)) else 1)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
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
        help=f"comma-separated sections to run, out of {','.join(SECTIONS)} (default: all)",
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
    return names


def run_worker(remaining: list[str], report: Report, options: argparse.Namespace) -> list[str]:
    """Run one worker on the first of these jobs; return the jobs left for the next worker."""
    jobs = one_process(remaining, is_dry=options.dry)
    command = [sys.executable, "-m", "benchmarks.worker", *jobs]
    command += ["--shape", options.shape, "--stretch", str(options.stretch)]
    if options.dry:
        command.append("--dry")
    if "flashinfer" in report.sections and not report.is_sound("flashinfer"):
        command.append("--without-flashinfer")
    worker = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TRITON_DEFAULT_FP_FUSION": "1"},
    )
    assert worker.stdout
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_forward, args=(worker.stdout, lines), daemon=True)
    reader.start()
    with worker:
        try:
            current, reason = collect(lines, report, options.out, options.stretch)
        finally:
            worker.kill()
            reader.join()
    if current is None and reason is None:
        return remaining[len(jobs) :]
    failed = current or jobs[0]
    report.section(section_of(failed))["notes"].append(f"worker failed at {failed}: {reason}")
    # No job was running, so the worker probably did not start; another one would not either.
    return remaining[remaining.index(current) + 1 :] if current else []


def collect(
    lines: queue.SimpleQueue[str],
    report: Report,
    out: Path,
    stretch: float = 1.0,
    grace_s: float = GRACE_SECONDS,
) -> tuple[str | None, str | None]:
    """Read a worker's events until it ends.

    Returns the job that was running and the reason for the failure; both are None on success.
    """
    current: str | None = None
    is_started = False
    limit = time.monotonic() + grace_s
    while True:
        try:
            line = lines.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            return current, "it hung"
        if not line:
            ended_well = is_started and current is None
            return (None, None) if ended_well else (current, "it died; see above")
        event = json.loads(line)
        report.take(event)
        if event["event"] == "begin":
            is_started, current = True, str(event["job"])
            limit = time.monotonic() + seconds_of(current) * stretch + grace_s
        elif event["event"] == "end":
            current = None
            limit = time.monotonic() + grace_s
            report.write(out)
        _progress(event)


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
