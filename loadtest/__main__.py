"""The command line: `compare` and `sweep` measure, `report` draws what was measured."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from loadtest.results import Results, Run, read_results
from loadtest.workloads import WORKLOADS, Workload

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    parsed = parser.parse_args(given)
    if parsed.command == "report":
        return _report(parsed)
    return _measure(parser, parsed, f"python -m loadtest {shlex.join(given)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description="Measures serving containers over HTTP."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compare = _command(commands, "compare", "the same work against each strategy, or a server")
    _add_subjects(compare)
    _add_load(compare)
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
    group.add_argument("--requests", type=_count, default=500, help="of each run (default: 500)")
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


def _measure(parser: argparse.ArgumentParser, parsed: argparse.Namespace, command: str) -> int:
    import locust  # noqa: F401 - patches sockets, which must come before anything that uses them

    from loadtest.machine import describe_machine
    from loadtest.measure import WarmUpError
    from loadtest.server import ServerError
    from loadtest.slo import parse_slo

    try:
        slo = parse_slo(parsed.slo) if parsed.command == "sweep" else {}
    except ValueError as error:
        parser.error(str(error))
    results = Results(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=parsed.seed,
        machine=describe_machine(),
        slo=slo,
    )

    def keep(run: Run) -> None:
        """After each run, so that whatever ends this process leaves what there was."""
        results.runs.append(run)
        results.write(parsed.out)

    for number in (signal.SIGINT, signal.SIGTERM):  # whichever it is, servers must be stopped
        signal.signal(number, signal.default_int_handler)
    code = 0
    try:
        if not _run(parser, parsed, results, keep):
            code = EXIT_INTERRUPTED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except (ServerError, WarmUpError, ValueError, OSError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        code = EXIT_FAILED
    if code:
        results.notes.append("Not all of it: the command was ended before its time.")
    return _write(results, parsed.out) or code


def _run(
    parser: argparse.ArgumentParser,
    parsed: argparse.Namespace,
    results: Results,
    keep: Callable[[Run], None],
) -> bool:
    from loadtest.compare import compare
    from loadtest.plan import Load
    from loadtest.sweep import sweep

    subjects = _subjects(parser, parsed)
    load = Load(
        requests=parsed.requests,
        users=parsed.users,
        rate=parsed.rate,
        trace=parsed.trace,
        time_scale=parsed.time_scale,
        length_scale=parsed.length_scale,
        max_length=parsed.max_length,
        seed=parsed.seed,
    )
    if parsed.command == "compare":
        return compare(subjects, parsed.workload, load, num_warm_up=parsed.warm_up, on_run=keep)
    return sweep(
        subjects,
        parsed.workload,
        load,
        results.slo,
        rates=parsed.rates,
        first_rate=parsed.first_rate,
        num_refinements=parsed.refinements,
        num_warm_up=parsed.warm_up,
        on_run=keep,
    )


def _subjects(parser: argparse.ArgumentParser, parsed: argparse.Namespace):
    from loadtest.endpoint import Endpoint
    from loadtest.server import read_properties
    from loadtest.subjects import Strategies, Target

    if parsed.target or parsed.sagemaker:
        endpoint = Endpoint(
            url=parsed.target,
            sagemaker=parsed.sagemaker,
            schema=parsed.schema,
            path=parsed.path,
            timeout_s=parsed.timeout,
        )
        return Target(endpoint=endpoint)
    if not parsed.properties.is_file():
        parser.error(f"{parsed.properties} is no file; --properties names another")
    return Strategies(
        names=parsed.strategies,
        properties=read_properties(parsed.properties),
        model_dir=parsed.model_dir,
        logs=parsed.out / "logs",
        schema=parsed.schema,
        timeout_s=parsed.timeout,
    )


def _report(parsed: argparse.Namespace) -> int:
    first, *others = [read_results(path) for path in parsed.results]
    for other in others:
        first.runs += other.runs
        first.notes += other.notes
        first.slo |= other.slo
        first.command += f"\n{other.command}"
    code = _write(first, parsed.out)
    if parsed.pictures and not code:
        from loadtest.report.page import write_pictures

        for path in write_pictures(first, parsed.out):
            print(f"wrote {path}")
    return code


def _write(results: Results, out: Path) -> int:
    """results.json, requests.csv and report.html, of whatever there is."""
    if not results.runs:
        print("loadtest: nothing was measured", file=sys.stderr)
        return EXIT_FAILED
    from loadtest.report.page import write_report

    results.write(out)
    print(f"wrote {write_report(results, out)}")
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
