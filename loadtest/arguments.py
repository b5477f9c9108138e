"""The options of the command line, with their help."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtest.workloads import WORKLOADS, Workload


def make_parser() -> argparse.ArgumentParser:
    """Parses a whole command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description="Measures serving containers over HTTP."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compare = _command(commands, "compare", "the same work against each strategy, or a server")
    _add_subjects(compare)
    _add_load(compare)
    compare.add_argument("--requests", type=_count, default=500, help="of each run (default: 500)")
    compare.add_argument(
        "--workload",
        type=_workloads,
        default=[WORKLOADS["aws"]],
        metavar="NAME,...",
        help="workloads, separated by commas (default: aws)",
    )
    sweep = _command(commands, "sweep", "the highest rate that holds a service level objective")
    _add_subjects(sweep)
    _add_load(sweep)
    sweep.add_argument(
        "--workload", type=_workload, default=WORKLOADS["chat"], metavar="NAME", help="(chat)"
    )
    sweep.add_argument(
        "--slo",
        default="ttft_p99=2s,itl_p99=200ms",
        metavar="BOUNDS",
        help="ttft, itl, e2e or queue, _, mean, p50, p90, p99 or max, =, a time "
        "(default: %(default)s)",
    )
    sweep.add_argument(
        "--seconds",
        type=_positive,
        default=30.0,
        help="of requests at each rate; long against the answers and the bounds (default: 30)",
    )
    sweep.add_argument(
        "--rates", type=_rates, default=[], metavar="R,...", help="requests/s to try, no search"
    )
    sweep.add_argument(
        "--first-rate", type=_positive, default=1.0, help="where the search begins (default: 1)"
    )
    sweep.add_argument(
        "--refinements", type=int, default=3, help="halvings of the last interval (default: 3)"
    )
    report = _command(commands, "report", "report.html again, of results that are there")
    report.add_argument("results", type=Path, nargs="+", help="results.json, or their folders")
    report.add_argument("--out", type=Path, required=True, metavar="DIR")
    report.add_argument("--pictures", action="store_true", help="also every chart as a PNG")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    names = "\n".join(f"  {each.name:27}{each.doc}" for each in WORKLOADS.values())
    return commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"workloads:\n{names}" if name != "report" else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_subjects(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--strategies",
        type=_names,
        default=["none", "dynamic", "continuous", "paged"],
        metavar="NAME,...",
        help="of our container, each in a fresh process (default: all four)",
    )
    group.add_argument(
        "--properties",
        type=Path,
        default=Path("serving.properties"),
        metavar="FILE",
        help="of all of them, beside option.batching (default: %(default)s)",
    )
    group.add_argument("--model-dir", type=Path, metavar="DIR", help="as the container takes it")
    group.add_argument("--target", metavar="URL", help="a running server instead")
    group.add_argument(
        "--sagemaker",
        metavar="ENDPOINT",
        help="a SageMaker endpoint instead, by AWS's own configuration; with --target, of the "
        "runtime at that address",
    )
    group.add_argument(
        "--schema",
        choices=["lmi", "openai"],
        default="lmi",
        help="lmi: inputs and parameters, also of text-generation-inference; openai: completions",
    )
    group.add_argument("--path", help="in place of /invocations, or /v1/completions")
    group.add_argument(
        "--timeout", type=_positive, default=600.0, help="seconds without a byte (default: 600)"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent")
    group.add_argument("--users", type=_count, default=50, help="of a closed loop (default: 50)")
    group.add_argument(
        "--rate", type=_positive, help="requests/s of an open loop, whatever the workload's"
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help="lengths and arrivals: TIMESTAMP, ContextTokens, GeneratedTokens",
    )
    group.add_argument(
        "--time-scale", type=_positive, default=1.0, help="arrivals so many times as fast"
    )
    group.add_argument(
        "--length-scale", type=_positive, default=1.0, help="factor on all lengths (default: 1)"
    )
    group.add_argument(
        "--max-length",
        type=_count,
        help="leave out what has more tokens (default: what the server says of itself)",
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths, texts and arrivals")
    group.add_argument(
        "--warm-up", type=int, default=16, help="requests before, not counted (default: 16)"
    )
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help="for what is found")


def _workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"no workload {name}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _workloads(text: str) -> list[Workload]:
    return [_workload(name) for name in _names(text)]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _rates(text: str) -> list[float]:
    return [_positive(each) for each in text.split(",")]


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    return int(_positive(text))
