"""Runs sections in a process of its own and writes what they find to stdout, a JSON line an event.

`python -m benchmarks.worker [--dry] [--without-flashinfer] SECTION...`. benchmarks.gpu reads it; an
illegal memory access or a crash ends this process only.
"""

from __future__ import annotations

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

from benchmarks.sections import SECTIONS

Emit = Callable[[dict[str, Any]], None]


def main(arguments: list[str]) -> None:
    is_dry = "--dry" in arguments
    if is_dry:
        # NOTE: before anything imports triton: @triton.jit decides by it.
        os.environ["TRITON_INTERPRET"] = "1"
    emit = _own_stdout()
    emit({"event": "machine", "machine": _machine(is_dry)})
    for name in arguments:
        if name in SECTIONS:
            _run(name, arguments, emit)


def _run(name: str, arguments: list[str], emit: Emit) -> None:
    from benchmarks.bench import Bench

    emit({"event": "begin", "section": name})
    begin = time.monotonic()
    try:
        bench = Bench(
            is_dry="--dry" in arguments,
            may_flashinfer="--without-flashinfer" not in arguments,
            seconds=SECTIONS[name].seconds,
            emit=emit,
        )
        importlib.import_module(f"benchmarks.{SECTIONS[name].module}").run(bench)
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).strip() or "no message").splitlines()[0][:160]
        emit({"event": "note", "text": f"section failed: {type(error).__name__}: {reason}"})
        if "CUDA error" in str(error):
            sys.exit(1)  # the device is lost to this process
    emit({"event": "end", "seconds": round(time.monotonic() - begin, 1)})


def _own_stdout() -> Emit:
    """Events go to what was stdout; what libraries print goes to stderr."""
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
            sys.exit("torch sees no CUDA device; --dry runs without one")
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
