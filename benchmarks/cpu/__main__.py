"""`python -m benchmarks.cpu`: our server on a CPU, and others on the same model and requests.

It builds the model, with random weights, and runs each system alone on the machine, in turns.
docs/benchmarks.md says what is sent and how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cpu.http_server import ROOT, MeasurementError
from benchmarks.cpu.machine import busy_cores, describe_machine
from benchmarks.cpu.peer_python import PACKAGES, make_peer, versions
from benchmarks.cpu.shapes import SHAPES
from benchmarks.cpu.systems import OURS, PEERS, make_systems
from benchmarks.cpu.table import table
from benchmarks.cpu.work import DTYPES, Result, Work

FOLDER = ROOT / "build" / "cpu"
QUIET = 0.1
"""Cores that something else may use before a run counts as disturbed."""


def main() -> int:
    options = _parse()
    work = Work(
        users=options.users,
        requests=options.requests,
        requests_of_one=1 if options.dry else 6,
        dtype=options.dtype,
        seed=options.seed,
    )
    model = options.out / f"model-{options.shape}"
    if not (model / "tokenizer_config.json").exists():  # the last that is written
        from benchmarks.cpu.model import write_model  # loads torch

        write_model(options.shape, model)
    pythons = {name: _python(name, options) for name in (OURS, *options.vs)}
    found: dict[str, Any] = {
        "command": f"python -m benchmarks.cpu {shlex.join(sys.argv[1:])}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {name: versions(python) for name, python in pythons.items()},
        "shape": options.shape,
        "work": dataclasses.asdict(work),
        "disturbed": [],
    }
    systems = make_systems(pythons)
    runs: dict[str, list[Result]] = {name: [] for name in systems}
    try:
        for number in range(1, options.rounds + 1):
            for name, measure in systems.items():
                print(f"round {number} of {options.rounds}: {name}", file=sys.stderr)
                others = busy_cores()
                if others > QUIET:
                    found["disturbed"].append(f"{others:.1f} cores were busy before {name}")
                sent = runs[OURS][-1].sent if runs[OURS] else []
                folder = options.out / f"round-{number}-{name}"
                runs[name].append(measure(model, work, sent, folder))
            _write(found, runs, options.out / "cpu.json")
    except MeasurementError as error:
        print(f"benchmarks.cpu: {error}", file=sys.stderr)
        return 1
    print(*table(runs), sep="\n")
    notes = [options.shape, options.dtype, found["machine"], found["date"], *found["disturbed"]]
    print("; ".join(notes))
    return 0


def _python(name: str, options: argparse.Namespace) -> Path:
    """Of the environment that a system runs in."""
    if name not in PACKAGES:
        return Path(sys.executable)
    return options.peer_python or make_peer(name, options.out / "peers" / name)


def _write(found: dict[str, Any], runs: dict[str, list[Result]], file: Path) -> None:
    """After each round, so that whatever ends this process leaves what there was."""
    each = {name: [dataclasses.asdict(run) for run in results] for name, results in runs.items()}
    file.write_text(json.dumps(found | {"runs": each}, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument(
        "--vs", type=_peers, default=[], metavar="NAME,...", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-88m", help="(%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="(%(default)s)")
    parser.add_argument("--users", type=int, default=50, help="(%(default)s)")
    parser.add_argument("--requests", type=int, default=150, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, texts and tokens")
    parser.add_argument(
        "--peer-python",
        type=Path,
        help="of an environment that has the one system named by --vs; else it is made",
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="for models, environments, logs and cpu.json"
    )
    parser.add_argument(
        "--dry", action="store_true", help="a tiny model, few requests: that it runs, no figures"
    )
    options = parser.parse_args()
    if options.peer_python and len(set(options.vs) & PACKAGES.keys()) != 1:
        parser.error("--peer-python is for one system: say --vs vllm, or --vs openvino")
    if options.dry:
        options.shape, options.users, options.requests, options.rounds = "dry", 3, 4, 1
    options.out = options.out.resolve()
    return options


def _peers(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"no system {name}; there are {', '.join(PEERS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
