"""Embeds the same texts with Longshore and with sentence-transformers, on this machine's CPU.

Usage: `python -m benchmarks.embeddings --shape bge-small`. Both run without a server and take
turns. A call gets 1, 8 or 64 texts of 32 to 512 tokens. sentence-transformers gets an environment
of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cpu.peer_python import make_peer, versions
from benchmarks.embeddings import calls
from benchmarks.embeddings.model import SHAPES, make_texts, write_model

PEER = "sentence-transformers"
AT_ONCE = (1, 8, 64)
ROOT = Path(__file__).parents[2]


def main() -> None:
    options = _parser().parse_args()
    model, work = options.out / options.shape, options.out / "work.json"
    if not (model / "modules.json").exists():
        model.mkdir(parents=True, exist_ok=True)
        write_model(options.shape, model)
    settings = {"dtype": options.dtype, "seconds": options.seconds, "at_once": AT_ONCE}
    work.write_text(json.dumps(settings | {"texts": make_texts(256)}))
    peer = options.peer_python or make_peer(PEER, options.out / "peers" / PEER)
    pythons = {"longshore": Path(sys.executable), PEER: peer}
    rounds = [
        {system: _measure(system, python, model, work) for system, python in pythons.items()}
        for _ in range(options.rounds)
    ]
    print(f"{options.shape}, {options.dtype}, {os.cpu_count()} cores; {versions(peer)}")
    for line in table(rounds):
        print(line)


def table(rounds: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table. rounds: the results of both systems in each round."""
    lines = ["| texts at once | longshore, texts/s | p99 | peer, texts/s | p99 | ratio |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for size in AT_ONCE:
        cells: list[str] = []
        rates: list[list[float]] = []
        for system in ("longshore", PEER):
            seconds = [result[system]["seconds"][str(size)] for result in rounds]
            rates.append([size * len(taken) / sum(taken) for taken in seconds])
            p99 = np.quantile(np.concatenate(seconds), 0.99)
            cells += [f"{median(rates[-1]):.1f}", f"{1000 * p99:.0f} ms"]
        ratio = median(ours / theirs for ours, theirs in zip(*rates, strict=True))
        lines.append(f"| {size} | {' | '.join(cells)} | {ratio:.2f} |")
    ours, theirs = (np.array(rounds[0][system]["vectors"]) for system in ("longshore", PEER))
    lines.append(f"least cosine of both systems' vectors: {(ours * theirs).sum(1).min():.6f}")
    return lines


def _measure(system: str, python: Path, model: Path, work: Path) -> dict[str, Any]:
    command = [python, calls.__file__, system, model, work]
    environment = os.environ | {"PYTHONPATH": str(ROOT) if system == "longshore" else ""}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embeddings", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="bge-small")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3, help="of both systems (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="per size (%(default)s)")
    parser.add_argument("--peer-python", type=Path, help=f"an interpreter that has {PEER}")
    parser.add_argument("--out", type=Path, default=Path("build/embeddings"))
    return parser


if __name__ == "__main__":
    main()
