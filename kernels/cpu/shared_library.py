"""Compiles this package's C++ for the host CPU into a cached shared library, and loads it.

The library is not linked against an OpenMP runtime. So its OpenMP calls go to the runtime that
torch has loaded, and it shares torch's threads and thread count. This module does not import torch,
so that a process can compile while it imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

logger = logging.getLogger(__name__)

SOURCES = (
    "amx.cpp",
    "attention.cpp",
    "calls.cpp",
    "elementwise.cpp",
    "integers.cpp",
    "linear.cpp",
    "logits.cpp",
    "rounded.cpp",
    "state.cpp",
)
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC")
COMPILE_SECONDS = 120
SHIPPED = Path(__file__).parent
"""Where a wheel that was built with `kernels=yes` has the libraries of all targets."""
WIDTH = 16
"""Row lengths must be multiples of this, the fp32 lanes of an AVX-512 vector."""


class LibraryError(Exception):
    """The library is unavailable on this machine; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Target:
    """A class of CPUs that run the same machine code."""

    name: str
    features: frozenset[str]
    """Required CPU features, named as in /proc/cpuinfo."""
    flags: tuple[str, ...]
    """Compiler flags."""


AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
VNNI = "-mavx512vnni"
BF16 = AVX512 | {"avx512_vnni", "avx512_bf16"}
BF16_FLAGS = ("-march=x86-64-v4", VNNI, "-mavx512bf16")
TARGETS = (
    Target(
        "amx",
        BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Target("avx512bf16", BF16, BF16_FLAGS),
    Target("avx512vnni", AVX512 | {"avx512_vnni"}, ("-march=x86-64-v4", VNNI)),
    Target("avx512", AVX512, ("-march=x86-64-v4",)),
    Target("avxvnni", AVX2 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
    Target("avx2", AVX2, ("-march=x86-64-v3",)),
    Target("neon", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""Best first."""


class Library(ctypes.CDLL):
    """The library, loaded from a file that may be removed afterwards."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def load_library() -> Library:
    """Load the library, compiling it if needed. Raises LibraryError if it is unavailable.

    NOTE: torch must have been imported, because it brings the OpenMP runtime.
    """
    target = host_target()
    try:
        with contextlib.suppress(OSError):  # it is not there, or for other systems
            return Library(SHIPPED / file_name(target))
        with contextlib.suppress(OSError):
            return Library(build(target, cache_directory()))
        # The cache is read-only, full, of another user or missing. A loaded library no longer
        # needs its file.
        with tempfile.TemporaryDirectory(prefix="longshore-") as private:
            return Library(build(target, Path(private)))
    except OSError as error:
        raise LibraryError(f"the compiled kernels cannot be loaded: {error}") from error


def unavailable_reason() -> str | None:
    """Return why the library is unavailable on this machine, or None if it is available."""
    try:
        load_library()
    except LibraryError as error:
        return str(error)
    return None


def host_target() -> Target:
    """Return the best target for this machine. Raises LibraryError if none fits."""
    try:
        return host_targets()[0]
    except OSError as error:
        raise LibraryError(f"cannot read the CPU's features: {error}") from error
    except IndexError:
        names = ", ".join(target.name for target in TARGETS)
        raise LibraryError(f"the CPU supports none of {names}") from None


def host_targets() -> list[Target]:
    """Return the targets that this machine runs, best first. Raises OSError without /proc."""
    features = set(Path("/proc/cpuinfo").read_text().split())
    if "amx_tile" in features and not _may_use_tiles():
        features.remove("amx_tile")
    return [target for target in TARGETS if target.features <= features]


def _may_use_tiles() -> bool:
    """Ask Linux for AMX's registers, for all threads of this process. By default, it has none."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # arch_prctl(2), on x86-64
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def cache_directory() -> Path:
    """Return $LONGSHORE_CACHE, or `longshore` in the user's cache directory.

    Raises FileNotFoundError if the user has no home directory.
    """
    configured = os.environ.get("LONGSHORE_CACHE")
    if configured:
        return Path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longshore"
    except RuntimeError as error:  # a user id without an entry in /etc/passwd, and no $HOME
        raise FileNotFoundError(str(error)) from None


def build(target: Target, directory: Path) -> Path:
    """Return the path of the library in `directory`. If needed, compile it, which takes seconds.

    If another thread or process is compiling it, wait for that. Raises LibraryError if compiling
    fails, OSError if `directory` cannot be written.
    """
    library = directory / file_name(target)
    if library.exists():
        return library
    compiler = find_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory), tempfile.TemporaryDirectory(dir=directory) as work:
        if not library.exists():
            logger.warning("compiling the CPU kernels for %s (once)", target.name)
            # atomic: where no lock is possible, other processes may do the same
            os.replace(_compile([compiler, *FLAGS, *target.flags], work), library)
    return library


def file_name(target: Target) -> str:
    """Return the name of the library's file, which depends on the sources and the flags."""
    headers = sorted(path.name for path in Path(__file__).parent.glob("*.h"))
    content = b"".join(_source(name).read_bytes() for name in [*SOURCES, *headers])
    flags = " ".join([*FLAGS, *target.flags])
    digest = hashlib.sha256(content + flags.encode()).hexdigest()[:16]
    return f"kernels-{target.name}-{digest}.so"


def _source(name: str) -> Path:
    return Path(__file__).with_name(name)


def build_early() -> None:
    """Compile the library in another thread, if needed, while this one imports torch.

    `load_library` waits for it, and reports its errors.
    """

    def run() -> None:
        with contextlib.suppress(LibraryError, OSError):
            target = host_target()
            if not (SHIPPED / file_name(target)).exists():
                build(target, cache_directory())

    threading.Thread(target=run, name="kernels", daemon=True).start()


def _compile(command: Sequence[str], folder: str) -> str:
    """Compile the sources in a folder, and return the path of the library."""
    sources = [_source(name) for name in SOURCES]
    library, objects = f"{folder}/library.so", [f"{folder}/{source.stem}.o" for source in sources]
    # The largest come first, so that none of them runs alone at the end.
    pairs = sorted(zip(sources, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)
    _run_at_once([[*command, "-c", str(source), "-o", object] for source, object in pairs])
    # No -fopenmp here: it would link a second OpenMP runtime beside torch's.
    _run_at_once([[command[0], "-shared", *objects, "-o", library]])
    return library


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Wait until no other thread or process is in this block with the same directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock a directory
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def find_compiler() -> str:
    """Return the path of $CXX, g++ or c++, the first that exists. Raises LibraryError if none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    raise LibraryError("there is no C++ compiler (g++)")


def _run_at_once(commands: Sequence[Sequence[str]]) -> None:
    """Run compilers, as many at once as there are cores. Raises LibraryError if one fails."""
    running: deque[subprocess.Popen[str]] = deque()
    with contextlib.ExitStack() as stack:
        for command in commands:
            if len(running) == len(os.sched_getaffinity(0)):
                _finish(running.popleft())
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            running.append(stack.enter_context(process))
            stack.callback(process.kill)  # if another one fails
        for process in running:
            _finish(process)


def _finish(process: subprocess.Popen[str]) -> None:
    compiler, *_ = cast("list[str]", process.args)
    try:
        _, errors = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise LibraryError(f"{compiler} took more than {COMPILE_SECONDS} s") from error
    if process.returncode:
        reason = (errors.strip() or "no reason given").splitlines()[0]
        raise LibraryError(f"{compiler} failed: {reason}")
