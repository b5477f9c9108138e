"""Command line options and their help texts."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtest.load.workloads import WORKLOADS, Workload
from loadtest.report.style import OURS
from loadtest.servers.running import Running, parse_running

EXAMPLES = {
    "compare": (
        "--users 8 --requests 40 --rounds 1 --no-tuning    # a quick look, with the demo model",
        "--model-dir DIR --workload chat,shared-prefix",
        "--target http://host:8000 --schema openai         # a running server",
        "--subject vllm=openai+http://host:8000            # a server beside our strategies",
    ),
    "sweep": ("--strategies continuous,paged --slo ttft_p99=2s,itl_p99=200ms",),
}
"""Arguments to show in the help of commands that send workloads."""
_DEFAULT_PROPERTIES = (
    "(default: serving.properties in the working directory, if it exists; otherwise the model of "
    "`longshore serve`)"
)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the whole command line. prog: the program's name in its help."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Load-test serving containers over HTTP."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compare = _command(
        commands,
        "compare",
        "run the same requests, in rounds, against each batching strategy or a server",
    )
    _add_subjects(compare)
    _add_load(compare)
    compare.add_argument(
        "--requests", type=count, default=500, help="requests per run (default: 500)"
    )
    compare.add_argument(
        "--seconds",
        type=positive,
        help="stop sending after this many seconds, even if fewer requests than --requests have "
        "been sent; a slow server then gets fewer requests (default: send all)",
    )
    compare.add_argument(
        "--rounds",
        type=count,
        default=3,
        help="how often each workload runs on each server; the servers take turns, and fewer than "
        "3 rounds prove nothing (default: 3)",
    )
    compare.add_argument(
        "--fresh",
        action="store_true",
        help="start a new server for every run; by default, servers keep running between runs if "
        "the machine has no GPU and the properties set option.num_kv_blocks or "
        "option.kv_cache_memory_bytes",
    )
    compare.add_argument(
        "--record",
        action="store_true",
        help="record in --out what our containers schedule, for `longshore replay`; each run has a "
        "new server then, and is measured once, whatever else the machine does",
    )
    compare.add_argument(
        "--workload",
        type=_workloads,
        default=[WORKLOADS["aws"]],
        metavar="NAME,...",
        help="comma-separated workloads (default: aws)",
    )
    compare.add_argument(
        "--no-tuning",
        dest="tunes",
        action="store_false",
        help="measure dynamic batching only with the batch size and delay of the properties; by "
        "default, short runs before the rounds also look for better ones",
    )
    sweep = _command(
        commands, "sweep", "find the highest request rate that meets a service level objective"
    )
    _add_subjects(sweep)
    _add_load(sweep)
    sweep.add_argument(
        "--workload",
        type=_workload,
        default=WORKLOADS["chat"],
        metavar="NAME",
        help="workload (default: chat)",
    )
    sweep.add_argument(
        "--seconds",
        type=positive,
        default=30.0,
        help="how long each rate is measured, in seconds; this should be much longer than a "
        "response takes and than the bounds of --slo (default: 30)",
    )
    sweep.add_argument(
        "--rates",
        type=_rates,
        default=[],
        metavar="R,...",
        help="measure these rates, in requests/s, instead of searching",
    )
    sweep.add_argument(
        "--first-rate",
        type=positive,
        default=1.0,
        help="requests/s at which the search starts (default: 1)",
    )
    sweep.add_argument(
        "--refinements",
        type=int,
        default=3,
        help="bisection steps after the first rate that fails (default: 3)",
    )
    report = _command(commands, "report", "write report.html from existing results")
    report.add_argument("results", type=Path, nargs="+", help="results.json files or their folders")
    report.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the report"
    )
    report.add_argument("--pictures", action="store_true", help="also write each chart as a PNG")
    return parser


def add_properties(parser: argparse._ActionsContainer, text: str) -> None:
    parser.add_argument("--properties", type=Path, metavar="FILE", help=text)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    names = "\n".join(f"  {workload.name:27}{workload.doc}" for workload in WORKLOADS.values())
    examples = "\n".join(f"  %(prog)s {arguments}" for arguments in EXAMPLES.get(name, ()))
    shown = f"examples:\n{examples}\n\nworkloads:\n{names}"
    return commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=shown if name in EXAMPLES else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_subjects(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers under test")
    group.add_argument(
        "--strategies",
        type=names,
        default=list(OURS),
        metavar="NAME,...",
        help="strategies of our container, each in a process of its own; '' to run no container "
        "(default: all)",
    )
    add_properties(
        group,
        "serving.properties of each container that is started; the strategy replaces its "
        f"option.batching {_DEFAULT_PROPERTIES}",
    )
    group.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="passed to the container as --model-dir"
    )
    group.add_argument(
        "--subject",
        type=_running,
        action="append",
        default=[],
        metavar="NAME=URL",
        help="also measure this running server, with the same requests as the others; write "
        "NAME=openai+URL or NAME=lmi+URL if it has another schema than --schema, and "
        "NAME=sagemaker:ENDPOINT for a SageMaker endpoint; may be repeated",
    )
    group.add_argument(
        "--target", metavar="URL", help="measure a running server instead of the strategies"
    )
    group.add_argument(
        "--sagemaker",
        metavar="ENDPOINT",
        help="measure a SageMaker endpoint instead of the strategies, with boto3's credentials and "
        "region; with --target, the requests go through the SageMaker runtime at that URL",
    )
    group.add_argument(
        "--schema",
        choices=["lmi", "openai"],
        default="lmi",
        help="request schema; lmi: inputs and parameters, as in text-generation-inference; "
        "openai: completions (default: lmi)",
    )
    group.add_argument("--path", help="request path (default: /invocations or /v1/completions)")
    group.add_argument(
        "--timeout",
        type=positive,
        default=600.0,
        help="seconds without data before a request fails (default: 600)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--users", type=count, default=50, help="concurrent users of a closed loop (default: 50)"
    )
    group.add_argument(
        "--rate",
        type=positive,
        help="requests/s; turns any workload into an open loop, and replaces the "
        "workload's own rate",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help="take lengths and arrivals from a trace with the columns TIMESTAMP, ContextTokens and "
        "GeneratedTokens",
    )
    group.add_argument(
        "--time-scale",
        type=positive,
        default=1.0,
        help="factor by which the requests of a trace or workload arrive faster (default: 1)",
    )
    group.add_argument(
        "--length-scale",
        type=positive,
        default=1.0,
        help="factor for the lengths of all prompts and outputs (default: 1)",
    )
    group.add_argument(
        "--max-length",
        type=count,
        help="skip requests with more tokens, prompt and output together (default: the limit that "
        "the server reports)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="seed for lengths, prompts and arrivals (default: 0)"
    )
    group.add_argument(
        "--slo", default="ttft_p99=2s,itl_p99=200ms", metavar="BOUNDS",
        help="comma-separated bounds NAME_STATISTIC=VALUE: NAME is ttft, itl, e2e or queue, "
        "STATISTIC is mean, p50, p90, p99 or max, VALUE is in s or ms; goodput counts the requests "
        "whose own figures meet every VALUE, whatever the STATISTIC (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--warm-up",
        type=int,
        default=16,
        help="warm-up requests before each run, which are not counted (default: 16)",
    )
    group.add_argument(
        "--out", type=Path, default=Path("build/loadtest"), metavar="DIR",
        help="folder for the results (default: %(default)s)",
    )  # fmt: skip


def _workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(
            f"unknown workload {name}; choose from {', '.join(WORKLOADS)}"
        )
    return WORKLOADS[name]


def _workloads(text: str) -> list[Workload]:
    return [_workload(name) for name in names(text)]


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _running(text: str) -> Running:
    try:
        return parse_running(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rates(text: str) -> list[float]:
    return [positive(rate) for rate in text.split(",")]


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:  # also refuses nan
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
