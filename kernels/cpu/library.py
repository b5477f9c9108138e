"""Compiles this package's C++ for the CPU at hand, once, into a cache, and loads it.

The library has no threads of its own: it is linked against no OpenMP runtime and so finds the one
that torch has loaded, whose threads and number of threads it shares.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = ("attention.cpp", "calls.cpp", "elementwise.cpp", "linear.cpp", "logits.cpp")
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC")
COMPILE_SECONDS = 120
WIDTH = 16
"""Rows of numbers must be a multiple of that long: the longest vectors there are."""
SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class LibraryError(Exception):
    """No library for this machine; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Target:
    """CPUs that can run the same machine code."""

    name: str
    features: frozenset[str]
    """What /proc/cpuinfo calls what they must have."""
    flags: tuple[str, ...]


AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
TARGETS = (
    Target("avx512bf16", AVX512 | {"avx512_bf16"}, ("-march=x86-64-v4", "-mavx512bf16")),
    Target("avx512", AVX512, ("-march=x86-64-v4",)),
    Target("avx2", AVX2, ("-march=x86-64-v3",)),
    Target("neon", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""The best first."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """For this process. Raises LibraryError."""
    target = host_target()
    directory = cache_directory()
    try:
        return ctypes.CDLL(str(build(target, directory)))
    except PermissionError:
        # Once loaded it needs no file.
        with tempfile.TemporaryDirectory(prefix="longshore-") as private:
            return ctypes.CDLL(str(build(target, Path(private))))
    except OSError as error:
        raise LibraryError(f"the compiled kernels cannot be loaded: {error}") from error


def what_is_lacking() -> str | None:
    """Why there is no library on this machine; None if there is one."""
    try:
        load_library()
    except LibraryError as error:
        return str(error)
    return None


def host_target() -> Target:
    """Raises LibraryError for a CPU that none fits."""
    try:
        features = set(Path("/proc/cpuinfo").read_text().split())
    except OSError as error:
        raise LibraryError(f"the CPU's features are unknown: {error}") from error
    for target in TARGETS:
        if target.features <= features:
            return target
    raise LibraryError(f"the CPU has none of {', '.join(target.name for target in TARGETS)}")


def cache_directory() -> Path:
    """$LONGSHORE_CACHE, or `longshore` where a user's caches are."""
    own = os.environ.get("LONGSHORE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longshore"


def build(target: Target, directory: Path) -> Path:
    """The library's file in `directory`, compiled if it is not there yet (some seconds).

    Raises LibraryError, and PermissionError where it cannot be written.
    """
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    headers = sorted(Path(__file__).parent.glob("*.h"))
    content = b"".join(path.read_bytes() for path in [*sources, *headers])
    flags = [*FLAGS, *target.flags]
    digest = hashlib.sha256(content + " ".join(flags).encode()).hexdigest()[:16]
    library = directory / f"kernels-{target.name}-{digest}.so"
    if library.exists():
        return library
    compiler = find_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as work:
        objects = [f"{work}/{source.stem}.o" for source in sources]
        for source, object in zip(sources, objects, strict=True):
            _run([compiler, *flags, "-c", str(source), "-o", object])
        # Without -fopenmp, which would link a second runtime beside torch's.
        _run([compiler, "-shared", *objects, "-o", f"{work}/library.so"])
        os.replace(f"{work}/library.so", library)  # whole, whoever else compiles it now
    return library


def find_compiler() -> str:
    """$CXX, g++ or c++. Raises LibraryError."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    raise LibraryError("there is no C++ compiler (g++)")


def function(name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    """Of the library: takes one structure by reference."""
    return getattr(load_library(), f"{name}_{SUFFIXES[dtype]}")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise LibraryError(f"{command[0]} took more than {COMPILE_SECONDS} s") from error
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[0]
        raise LibraryError(f"{command[0]} failed: {reason}")
