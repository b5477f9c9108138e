"""Describes the machine and the installed package versions, without importing the packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil

PACKAGES = ("longshore", "torch", "transformers", "triton", "gunicorn", "locust")


def describe_machine() -> dict[str, str]:
    """Return facts by name, without the unknown ones."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "processor": f"{_processor()}, {cores} cores for this process",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPU": _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "none",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "commit": _output_of("git", "describe", "--always", "--dirty"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
    }
    found |= {name: _version(name) for name in PACKAGES}
    return {name: value for name, value in found.items() if value}


def has_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU."""
    return bool(_output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output_of(*command: str) -> str:
    """Return a command's stdout, or an empty string if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
