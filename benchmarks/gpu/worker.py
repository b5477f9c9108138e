"""Runs jobs in a separate process and writes their events to stdout, one JSON object per line.

Usage: `python -m benchmarks.gpu.worker JOB...`, where a job is `section` or `section/case`.
benchmarks.gpu reads the events; an illegal memory access or a crash only ends this process.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.sections import SECTIONS, case_of, seconds_of, section_of

Emit = Callable[[dict[str, Any]], None]
MAX_LEFT_BEHIND = 2**30
"""Bytes of GPU memory that a job may leave allocated without a note."""


def main(arguments: list[str]) -> None:
    options = parse_arguments(arguments)
    if options.dry:
        # NOTE: must be set before anything imports triton, because @triton.jit reads it.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["OMP_NUM_THREADS"] = "1"  # the interpreter's tensors are tiny
    emit = _own_stdout()
    emit({"event": "machine", "machine": _machine(options.dry)})
    for job in options.jobs:
        run_job(job, options, emit)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.worker")
    parser.add_argument("jobs", nargs="+")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--without-flashinfer", action="store_true")
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--stretch", type=float, default=1.0)
    return parser.parse_args(arguments)


def run_job(job: str, options: argparse.Namespace, emit: Emit) -> None:
    from benchmarks.gpu.bench import Bench

    emit({"event": "begin", "job": job})
    begin = time.monotonic()
    try:
        bench = Bench(
            is_dry=options.dry,
            use_flashinfer=not options.without_flashinfer,
            seconds=seconds_of(job) * options.stretch,
            emit=emit,
            shape=options.shape,
        )
        module = importlib.import_module(f"benchmarks.gpu.{SECTIONS[section_of(job)].module}")
        module.run(bench, *filter(None, [case_of(job)]))
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).strip() or "no message").splitlines()[0][:160]
        emit({"event": "note", "text": f"section failed: {type(error).__name__}: {reason}"})
        if "CUDA error" in str(error):
            sys.exit(1)  # this process's CUDA context is lost
    free_memory(options.dry, emit)
    emit({"event": "end", "seconds": round(time.monotonic() - begin, 1)})


def free_memory(is_dry: bool, emit: Emit) -> None:
    """Free the GPU memory for the next job; emit a note if some remains allocated."""
    import torch

    gc.collect()
    if is_dry:
        return
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    if left > MAX_LEFT_BEHIND:
        text = f"{left / 2**30:.1f} GiB of GPU memory are still allocated"
        emit({"event": "note", "text": text})


def _own_stdout() -> Emit:
    """Reserve stdout for events and redirect the libraries' prints to stderr."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        stream.write(json.dumps(event) + "\n")
        stream.flush()

    return emit


def _machine(is_dry: bool) -> dict[str, Any]:
    import torch

    names = ("torch", "triton", "numpy", "transformers", "flashinfer-python")
    facts: dict[str, Any] = {
        "gpu": None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in names},
    }
    if not is_dry:
        if not torch.cuda.is_available():
            sys.exit("torch finds no CUDA device; use --dry to run without one")
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["multiprocessors"] = properties.multi_processor_count
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["l2_mib"] = round(properties.L2_cache_size / 2**20, 1)
    return facts


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads that a library has left running
