"""Command line of the simulator."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.load.lengths import ALPACA, SHAREGPT
from benchmarks.simulate.cost import GPUS, MODELS, Efficiency
from benchmarks.simulate.system import SYSTEMS
from core.routing import ROUTERS

MEANS = {"sharegpt": SHAREGPT, "alpaca": ALPACA}
EXAMPLES = """examples:
  %(prog)s                                    # OPT-13B on an A100-40GB, ShareGPT-like lengths
  %(prog)s --model opt-66b --gpus 4           # tensor parallel
  %(prog)s --duration 3600                    # an hour of requests, as in docs/benchmarks.md
  %(prog)s --rate 1.5                         # one request rate, instead of the highest
"""
DEFAULT_SYSTEMS = [name for name in SYSTEMS if name != "none"]


def make_parser(description: str, prog: str) -> argparse.ArgumentParser:
    assumed = Efficiency()
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    machine = parser.add_argument_group("machines")
    machine.add_argument(
        "--model", choices=MODELS, default="opt-13b", help="model to serve (default: %(default)s)"
    )
    machine.add_argument(
        "--gpu", choices=GPUS, default="a100-40gb", help="GPU type (default: %(default)s)"
    )
    machine.add_argument(
        "--gpus", type=count, default=1, metavar="N",
        help="GPUs per machine, which share the model by tensor parallelism (default: 1)",
    )  # fmt: skip
    machine.add_argument(
        "--machines", type=count, default=1, metavar="N", help="number of machines (default: 1)"
    )
    machine.add_argument(
        "--router", choices=ROUTERS, default="least-loaded",
        help="router in front of the machines (default: %(default)s)",
    )  # fmt: skip
    machine.add_argument(
        "--calibrate", type=Path, metavar="PATH",
        help="take the efficiencies from gpu.json of `make gpu` on this type of GPU, instead of "
        "the next three options",
    )  # fmt: skip
    machine.add_argument(
        "--bandwidth-efficiency", type=_share, default=assumed.bandwidth, metavar="SHARE",
        help="share of the peak bandwidth that is reached (assumed default: %(default)s)",
    )  # fmt: skip
    machine.add_argument(
        "--flops-efficiency", type=_share, default=assumed.flops, metavar="SHARE",
        help="share of the peak FLOP/s that is reached (assumed default: %(default)s)",
    )  # fmt: skip
    machine.add_argument(
        "--overhead-ms", type=float, default=assumed.overhead_s * 1e3, metavar="MS",
        help="fixed overhead of each step (assumed default: %(default)s)",
    )  # fmt: skip
    _add_traffic(parser.add_argument_group("requests"))
    systems = parser.add_argument_group("systems")
    systems.add_argument(
        "--systems", type=_systems, default=DEFAULT_SYSTEMS, metavar="NAME,...",
        help=f"systems to simulate, out of {', '.join(SYSTEMS)} (default: all but none)",
    )  # fmt: skip
    systems.add_argument(
        "--max-sequences", type=count, default=256, metavar="N",
        help="maximum sequences that run at once (default: 256)",
    )  # fmt: skip
    systems.add_argument(
        "--max-step-tokens", type=count, default=2048, metavar="N",
        help="maximum tokens in a step (default: 2048)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="also write the full results to this file"
    )
    return parser


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", type=Path, metavar="CSV",
        help="trace with the columns TIMESTAMP, ContextTokens and GeneratedTokens; its arrivals "
        "are scaled to each rate",
    )  # fmt: skip
    group.add_argument(
        "--lengths", choices=MEANS, default="sharegpt",
        help="without a trace: log-normal lengths with the means of this data set "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--duration", type=positive, default=1200.0, metavar="SECONDS",
        help="time span over which requests arrive; a longer time is closer to the steady state "
        "(default: 1200)",
    )  # fmt: skip
    group.add_argument(
        "--rate", type=_rate, metavar="R",
        help="requests/s over all machines, or `trace` for the trace's own rate "
        "(default: search for the highest rate that is sustained)",
    )  # fmt: skip
    group.add_argument(
        "--bound", type=positive, default=0.5, metavar="S",
        help="a rate is sustained if the mean of latency divided by output length is at most "
        "this, in seconds per token (default: 0.5)",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    group.add_argument(
        "--max-length", type=count, default=2048, metavar="TOKENS",
        help="maximum tokens of prompt and output; longer requests are skipped (default: 2048)",
    )  # fmt: skip
    group.add_argument(
        "--prefixes", type=count, default=1, metavar="N",
        help="number of distinct prompt prefixes (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--prefix-tokens", type=int, default=0, metavar="TOKENS",
        help="length of a prefix, which is added to the prompt; if it is above 0, paged uses "
        "prefix caching (default: 0)",
    )  # fmt: skip


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def _share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError("must be at most 1")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _rate(text: str) -> float | str:
    return text if text == "trace" else positive(text)


def _systems(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(
            f"unknown system {', '.join(unknown)}; choose from {', '.join(SYSTEMS)}"
        )
    return names
