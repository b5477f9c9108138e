"""Embeds the same texts with Longshore and with other systems.

All run without a server and take turns, each alone. A call gets 1, 8 or 64 texts of 32 to 512
tokens, as of so many clients that send together.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.http_server import ROOT, MeasurementError
from benchmarks.cpu.machine import disturbance, heading
from benchmarks.cpu.peer_python import names_out_of, python_of, versions
from benchmarks.cpu.table import ratio, spread
from benchmarks.cpu.work import DTYPES
from benchmarks.embeddings import calls
from benchmarks.embeddings.model import SHAPES, make_texts, true_vectors, write_model

OURS, *PEERS = calls.SYSTEMS
AT_ONCE = (1, 8, 64)
NUM_TEXTS = 256
Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""By system, the results of each round: `seconds` of the calls by their size, and `cosine`, the
least one of a vector and transformers'."""


def main() -> int:
    options = _parse()
    model, work = options.out / options.shape, options.out / "work.json"
    if not (model / "modules.json").exists():  # the last file written
        write_model(options.shape, model)
    texts = make_texts(NUM_TEXTS)
    settings = {
        "dtype": options.dtype,
        "device": options.device,
        "seconds": options.seconds,
        "at_once": AT_ONCE,
    }
    work.write_text(json.dumps(settings | {"texts": texts}))
    peers = options.out / "peers"
    pythons = {name: python_of(name, options.peer_python, peers) for name in (OURS, *options.vs)}
    found: dict[str, Any] = {
        **heading("benchmarks.embeddings", sys.argv[1:]),
        "versions": {name: versions(python) for name, python in pythons.items()},
        "shape": options.shape,
        "work": settings,
        "disturbed": [],
    }
    expected = true_vectors(model, texts[: calls.NUM_COMPARED]).numpy()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    try:
        for number in range(1, options.rounds + 1):
            for name, python in pythons.items():
                print(f"round {number} of {options.rounds}: {name}", file=sys.stderr)
                found["disturbed"] += disturbance(name)
                result = _measure(name, python, model, work)
                vectors = np.array(result.pop("vectors"))
                result["cosine"] = float((vectors * expected).sum(1).min())
                runs[name].append(result)
            content = json.dumps(found | {"runs": runs}, indent=1)
            (options.out / "embeddings.json").write_text(content + "\n")
    except MeasurementError as error:
        print(f"benchmarks.embeddings: {error}", file=sys.stderr)
        return 1
    print(*table(runs), sep="\n")
    notes = [
        options.shape,
        options.dtype,
        options.device,
        found["machine"],
        found["date"],
        *found["disturbed"],
    ]
    print("; ".join(notes))
    return 0


def table(runs: Runs) -> list[str]:
    """Return the lines of a Markdown table. Ratios are ours to the system's."""
    lines = ["| texts at once | system | texts/s | ours / system | p99, ms | least cosine |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for size in map(str, AT_ONCE):
        ours = _rates(runs[OURS], size)
        for name, results in runs.items():
            rates = _rates(results, size)
            taken = np.concatenate([result["seconds"][size] for result in results])
            p99 = f"{1000 * np.quantile(taken, 0.99):.0f}"
            cosine = f"{min(result['cosine'] for result in results):.6f}"
            cells = [size, name, spread(rates, 1), ratio(ours, rates), p99, cosine]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rates(results: Sequence[Mapping[str, Any]], size: str) -> list[float]:
    """Return the texts per second of each round."""
    return [
        int(size) * len(result["seconds"][size]) / sum(result["seconds"][size])
        for result in results
    ]


def _measure(system: str, python: Path, model: Path, work: Path) -> dict[str, Any]:
    command = [str(part) for part in (python, calls.__file__, system, model, work)]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths) if system == OURS else "",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",  # infinity-emb would send statistics of its use
    }
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment)
    if done.returncode:
        raise MeasurementError(f"{shlex.join(command)} exited with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embeddings", description=__doc__)
    parser.add_argument(
        "--vs",
        type=names_out_of(PEERS),
        default=[],
        metavar="NAME,...",
        help=f"systems to compare with, out of {', '.join(PEERS)} (default: none)",
    )
    parser.add_argument("--shape", choices=SHAPES, default="bge-small")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="of all systems (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="per size (%(default)s)")
    parser.add_argument(
        "--peer-python",
        type=Path,
        help="interpreter of an environment that has the one system of --vs (default: create one)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "embeddings")
    parser.add_argument(
        "--dry", action="store_true", help="test the benchmark with a tiny model and short calls"
    )
    options = parser.parse_args()
    if options.peer_python and len(options.vs) != 1:
        parser.error("--peer-python is for one system: use it with --vs and one of its names")
    if options.dtype != "fp32" and "fastembed" in options.vs:
        parser.error("fastembed computes in fp32: leave it out, or leave out --dtype")
    if options.device != "cpu" and "fastembed" in options.vs:
        parser.error("fastembed computes on CPUs here: leave it out, or leave out --device")
    if options.dry:
        options.shape, options.rounds, options.seconds = "dry", 1, 0.05
    options.out = options.out.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
