"""Compare our server on a CPU with other systems, on the same model and requests.

Builds the model with random weights and runs the systems in turns, each alone on the machine.
docs/benchmarks.md describes the load and the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.cpu.http_server import ROOT, MeasurementError
from benchmarks.cpu.machine import copy_rate, disturbance, heading
from benchmarks.cpu.peer_python import PACKAGES, names_out_of, python_of, versions
from benchmarks.cpu.shapes import SHAPES
from benchmarks.cpu.systems import (
    GGUF_TYPES,
    OFFLINE,
    OURS,
    OURS_OFFLINE,
    PEERS,
    Q4_K_M,
    QUANTIZING,
    make_systems,
)
from benchmarks.cpu.table import share_line, table
from benchmarks.cpu.work import DTYPES, Result, Work
from benchmarks.gguf.files import gguf_path
from benchmarks.gguf.states import ARCHITECTURES

FOLDER = ROOT / "build" / "cpu"


def main() -> int:
    options = _parse()
    work = Work(
        users=options.users,
        requests=options.requests,
        requests_of_one=options.requests_of_one,
        dtype=options.dtype,
        quantize=options.quantize,
        seed=options.seed,
    )
    model = options.out / f"model-{options.shape}"
    if not (model / "tokenizer_config.json").exists():  # the last file written
        from benchmarks.cpu.model import write_model  # loads torch

        write_model(options.shape, model)
    peers = options.out / "peers"
    pythons = {name: python_of(name, options.peer_python, peers) for name in (OURS, *options.vs)}
    found: dict[str, Any] = {
        **heading("benchmarks.cpu", sys.argv[1:]),
        "versions": {name: versions(python) for name, python in pythons.items()},
        "shape": options.shape,
        "work": dataclasses.asdict(work),
        "disturbed": [],
        "copy_rates": [],
    }
    systems = make_systems(pythons, options.preload)
    runs: dict[str, list[Result]] = {name: [] for name in systems}
    try:
        for number in range(1, options.rounds + 1):
            found["copy_rates"].append(copy_rate())
            for name, measure in systems.items():
                print(f"round {number} of {options.rounds}: {name}", file=sys.stderr)
                found["disturbed"] += disturbance(name)
                sent = runs[OURS][-1].sent if runs[OURS] else []
                folder = options.out / f"round-{number}-{name}"
                runs[name].append(measure(model, work, sent, folder))
            _write(found, runs, options.out / "cpu.json")
    except MeasurementError as error:
        print(f"benchmarks.cpu: {error}", file=sys.stderr)
        return 1
    from benchmarks.cpu.model import bytes_per_token, bytes_per_token_of_file  # loads torch

    print(*table(runs), sep="\n")
    if options.quantize == Q4_K_M:
        num_bytes = bytes_per_token_of_file(gguf_path(model, GGUF_TYPES[Q4_K_M], options.out))
    else:
        num_bytes = bytes_per_token(model, options.quantize or options.dtype)
    print(share_line(runs[OURS], num_bytes, found["copy_rates"]))
    precision = [options.quantize] if options.quantize else []
    notes = [options.shape, options.dtype, *precision, found["machine"], found["date"]]
    notes += found["disturbed"]
    print("; ".join(notes))
    return 0


def _write(found: dict[str, Any], runs: dict[str, list[Result]], file: Path) -> None:
    """Write the results so far; called after each round, so that they survive a crash."""
    fields = {name: [dataclasses.asdict(run) for run in results] for name, results in runs.items()}
    file.write_text(json.dumps(found | {"runs": fields}, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument(
        "--vs",
        type=names_out_of(PEERS),
        default=[],
        metavar="NAME,...",
        help=f"systems to compare with, out of {', '.join(PEERS)} (default: none)",
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="llama-88m", help="model shape (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="compute dtype (default: %(default)s)"
    )
    parser.add_argument(
        "--quantize",
        choices=("int8", "int4", Q4_K_M),
        help=f"precision of the weights, in our server and {', '.join(QUANTIZING)} (default: "
        f"bf16); {Q4_K_M} is llama.cpp's mixture, of which both servers get one GGUF file",
    )
    parser.add_argument(
        "--users", type=int, default=50, help="concurrent users (default: %(default)s)"
    )
    parser.add_argument(
        "--requests", type=int, default=150, help="requests per run (default: %(default)s)"
    )
    parser.add_argument(
        "--requests-of-one",
        type=int,
        default=6,
        help="requests of a single user per run (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each system (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for lengths and prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--peer-python",
        type=Path,
        help="Python interpreter of an environment that has the system of --vs installed, if that "
        "system needs its own environment (default: create a virtual environment)",
    )
    parser.add_argument(
        "--preload",
        default="",
        metavar="LIB:...",
        help="libraries to preload into vLLM's server, which recommends libiomp5 and tcmalloc "
        "(default: none)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=FOLDER,
        help="folder for models, environments, logs and cpu.json (default: %(default)s)",
    )
    parser.add_argument(
        "--dry", action="store_true", help="test the benchmark with a tiny model and few requests"
    )
    options = parser.parse_args()
    if options.peer_python and len(set(options.vs) & PACKAGES.keys()) != 1:
        names = ", ".join(name for name in PEERS if name in PACKAGES)
        parser.error(f"--peer-python is for one system: use it with --vs and one of {names}")
    if options.quantize and not set(options.vs) <= set(QUANTIZING):
        parser.error(f"--quantize can only be used with --vs {', '.join(QUANTIZING)}")
    if options.quantize == Q4_K_M and options.vs != ["llama.cpp"]:
        parser.error(f"--quantize {Q4_K_M} needs --vs llama.cpp, which writes the file, alone")
    if options.quantize == Q4_K_M and SHAPES[options.shape]["model_type"] in ARCHITECTURES:
        parser.error(f"our server reads no GGUF files of --shape {options.shape}")
    if set(options.vs) & set(OFFLINE) and OURS_OFFLINE not in options.vs:
        options.vs.append(OURS_OFFLINE)
    if options.dry:
        options.shape, options.users, options.requests, options.rounds = "dry", 3, 4, 1
        options.requests_of_one = 1
    if options.preload and "vllm" not in options.vs:
        parser.error("--preload is for vLLM's server: use it with --vs vllm")
    options.out = options.out.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
