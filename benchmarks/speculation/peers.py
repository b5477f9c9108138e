"""What drafts from earlier text gain in vLLM and in llama.cpp, for `benchmarks.speculation`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.cpu.http_server import ROOT, running_server
from benchmarks.cpu.work import DTYPES
from benchmarks.speculation.cases import REFRAIN, Gain, gain_of, prompts_of, turns

SHORTEST, LONGEST = 2, 16
"""Tokens of a match, as in our own n-grams."""
LOOKUPS = ("ngram-simple", "ngram-cache")
"""llama.cpp's ways to draft from the text before."""
GGUF_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def of_vllm(parsed: argparse.Namespace, model: Path) -> list[Gain]:
    """Return what vLLM gains, for each number of users."""
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": parsed.drafts,
        "prompt_lookup_min": SHORTEST,
        "prompt_lookup_max": LONGEST,
    }
    plain, drafting = (_run_vllm(parsed, model, each) for each in (None, drafts))
    return [
        gain_of("vLLM", users, parsed.tokens, without["seconds"], found["seconds"], found["counts"])
        for users, without, found in zip(parsed.users, plain, drafting, strict=True)
    ]


def _run_vllm(
    parsed: argparse.Namespace, model: Path, drafts: Mapping[str, Any] | None
) -> list[Any]:
    """Return what `benchmarks.speculation.vllm_peer` prints. Raises CalledProcessError."""
    options = {
        "model": str(model.resolve()),
        "dtype": DTYPES.get(parsed.dtype, parsed.dtype),
        "max_model_len": 1024,
        "max_num_seqs": max(parsed.users),
        "enable_prefix_caching": False,
        "speculative_config": drafts,
    }
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(parsed.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as in our process
        **({"LD_PRELOAD": parsed.preload} if parsed.preload else {}),
    }
    cases = [_rounds(users, parsed.rounds) for users in parsed.users]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"options": options, "tokens": parsed.tokens, "cases": cases}, file)
        file.flush()
        command = [parsed.peer_python, "-m", "benchmarks.speculation.vllm_peer", file.name]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def of_llama_cpp(parsed: argparse.Namespace, model: Path) -> list[Gain]:
    """Return what llama.cpp's server gains, for each number of users.

    Raises MeasurementError if a server does not start, and CalledProcessError if the model cannot
    be written as GGUF.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        kind = GGUF_TYPES.get(parsed.dtype, "F32")
        writer = [
            sys.executable,
            "-m",
            "benchmarks.gguf.writer",
            str(model.resolve()),
            kind,
            str(file),
        ]
        subprocess.run(writer, cwd=ROOT, check=True)
        gains: list[Gain] = []
        for users in parsed.users:
            plain, _ = _run_llama_cpp(parsed, users, file, [])
            for kind in LOOKUPS:
                options = _lookup(kind, parsed.drafts)
                drafting, counts = _run_llama_cpp(parsed, users, file, options)
                what = f"llama.cpp {kind}"
                gains.append(gain_of(what, users, parsed.tokens, plain, drafting, counts))
    return gains


def llama_cpp_version(server: str) -> str:
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).strip().splitlines()[0]


def _lookup(kind: str, drafts: int) -> list[str]:
    """Return options of llama.cpp's server."""
    if kind == "ngram-cache":
        return ["--spec-type", kind, "--spec-draft-n-max", str(drafts)]
    sizes = {"size-n": SHORTEST, "size-m": drafts, "min-hits": 1}
    options = [(f"--spec-{kind}-{name}", str(value)) for name, value in sizes.items()]
    return ["--spec-type", kind, *chain(*options)]


def _run_llama_cpp(
    parsed: argparse.Namespace, users: int, file: Path, drafts: Sequence[str]
) -> tuple[list[float], list[int]]:
    """Return the seconds of each round, and the numbers of drafts and of right drafts."""
    command = [parsed.llama_server, "--model", str(file), "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--threads", str(parsed.threads), "--threads-batch", str(parsed.threads)]
    command += ["--parallel", str(users), "--ctx-size", str(1024 * users), *drafts]
    first, *rounds = _rounds(users, parsed.rounds)
    seconds: list[float] = []
    counts = [0, 0]
    log = file.with_suffix(".log")
    with running_server(command, {}, "/health", log) as url, ThreadPoolExecutor(users) as pool:

        def run(prompts: Sequence[str]) -> list[dict[str, Any]]:
            return [*pool.map(lambda prompt: _answer(url, prompt, parsed.tokens), prompts)]

        run(first)
        for prompts in rounds:
            begin = time.perf_counter()
            timings = run(prompts)
            seconds.append(time.perf_counter() - begin)
            for place, name in enumerate(("draft_n", "draft_n_accepted")):
                counts[place] += sum(timing.get(name, 0) for timing in timings)
    return seconds, counts


def _answer(url: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the server's timings of an answer."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/completion",
        json.dumps(body | {"cache_prompt": False}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        found = json.load(response)
    assert found["tokens_predicted"] == tokens, "the answer is as long as ours"
    return found["timings"]


def _rounds(users: int, rounds: int) -> list[list[str]]:
    """Return the prompts of each round, of which the first is a warm-up."""
    return [prompts_of(users, REFRAIN, turn) for turn in turns(rounds)]
