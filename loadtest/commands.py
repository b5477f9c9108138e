"""Runs the commands of `loadtest`, given their parsed arguments."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tqdm import tqdm

from loadtest.study.combination import combined
from loadtest.study.results import Results, Run, read_results

if TYPE_CHECKING:  # these import locust, which monkey-patches the process
    from loadtest.servers.endpoint import Endpoint
    from loadtest.study.subjects import Strategies, Subjects
    from loadtest.study.tuning import Trial

FIXED_MEMORY = {"option.num_kv_blocks", "option.kv_cache_memory_bytes"}
"""Without one of these, an engine's KV memory depends on what other servers have left."""
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(parser: argparse.ArgumentParser, parsed: argparse.Namespace, command: str) -> int:
    """Run a command and return the exit code.

    parser: reports usage errors. command: the whole command line, which the results quote.
    """
    if parsed.command == "report":
        return _report(parsed)
    return _measure(parser, parsed, command)


def _measure(parser: argparse.ArgumentParser, parsed: argparse.Namespace, command: str) -> int:
    import locust  # noqa: F401 - monkey-patches sockets, so it must precede modules that use them

    from loadtest.machine import describe_machine
    from loadtest.report import page  # noqa: F401 - fails now if a package for the report is missing
    from loadtest.servers.server import ServerError
    from loadtest.study.measure import WarmUpError
    from loadtest.study.slo import parse_slo, per_request
    from loadtest.study.subjects import SubjectError

    try:
        slo = parse_slo(parsed.slo)
    except ValueError as error:
        parser.error(str(error))
    results = Results(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=parsed.seed,
        machine=describe_machine(),
        slo=slo if parsed.command == "sweep" else {},
        objective=per_request(slo),
    )

    def save(run: Run) -> None:
        """Write all results after each run, so that they survive a crash."""
        results.runs.append(run)
        results.write(parsed.out)

    def save_trial(trial: Trial) -> None:
        results.trials.append(trial)
        results.write(parsed.out)

    for number in (signal.SIGINT, signal.SIGTERM):  # both must unwind and stop the servers
        signal.signal(number, signal.default_int_handler)
    code = 0
    try:
        if not _run(parser, parsed, results, save, save_trial):
            code = EXIT_INTERRUPTED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except (ServerError, SubjectError, WarmUpError, ValueError, OSError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        code = EXIT_FAILED
    if code:
        results.notes.append("Incomplete: the command did not run to its end.")
    written = _write(results, parsed.out)
    return code or written


def _run(
    parser: argparse.ArgumentParser,
    parsed: argparse.Namespace,
    results: Results,
    save: Callable[[Run], None],
    save_trial: Callable[[Trial], None],
) -> bool:
    """Run `compare` or `sweep`. Returns False if it was interrupted."""
    from loadtest.load.request_plan import Load
    from loadtest.study.compare import MAX_ATTEMPTS, Comparison
    from loadtest.study.measure import measure
    from loadtest.study.sweep import sweep

    subjects = _subjects(parser, parsed)
    subjects.require_up()
    load = Load(
        num_requests=getattr(parsed, "requests", 0),  # a sweep sets it for each rate
        seconds=parsed.seconds if parsed.command == "compare" else None,
        users=parsed.users,
        rate=parsed.rate,
        trace=parsed.trace,
        time_scale=parsed.time_scale,
        length_scale=parsed.length_scale,
        max_length=parsed.max_length,
        seed=parsed.seed,
    )
    if parsed.command == "compare":
        results.fresh_servers = not subjects.keeps_servers
        tunes = parsed.tunes and subjects.has_dynamic
        with Comparison(
            subjects,
            load,
            num_warm_up=parsed.warm_up,
            measure=measure,
            say=tqdm.write,
            max_attempts=1 if parsed.record else MAX_ATTEMPTS,
        ) as comparison:
            for workload in parsed.workload:
                tuned = comparison.tune(workload, save_trial) if tunes else None
                for run in comparison.rounds(workload, parsed.rounds, tuned):
                    save(run)
                if not results.runs[-1].is_whole:
                    return False
                if results.runs[-1].round < parsed.rounds:
                    results.notes.append(_stopped(workload.name, results.runs[-1].round))
                    tqdm.write(results.notes[-1])
            return True
    return sweep(
        subjects,
        parsed.workload,
        load,
        results.slo,
        seconds=parsed.seconds,
        rates=parsed.rates,
        first_rate=parsed.first_rate,
        num_refinements=parsed.refinements,
        num_warm_up=parsed.warm_up,
        on_run=save,
    )


def _stopped(workload: str, num_rounds: int) -> str:
    return (
        f"{workload}: stopped after {num_rounds} round{'s' * (num_rounds > 1)}, because other "
        "processes disturbed every server, so no winner could be named; run it again on an idle "
        "machine."
    )


def _subjects(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> Subjects:
    from loadtest.study.subjects import Subjects

    running = _running(parser, parsed)
    if parsed.target or parsed.sagemaker:
        return Subjects(strategies=None, running=running)
    strategies = _strategies(parser, parsed)
    if not strategies.names and not running:
        parser.error("nothing to measure: give --strategies or --subject")
    return Subjects(strategies=strategies if strategies.names else None, running=running)


def _running(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> dict[str, Endpoint]:
    """Return the endpoints of `--target`, `--sagemaker` and `--subject`, by name."""
    from loadtest.report.style import STRATEGIES
    from loadtest.servers.endpoint import Endpoint

    found: dict[str, Endpoint] = {}
    if parsed.target or parsed.sagemaker:
        name = parsed.sagemaker or urlsplit(parsed.target).netloc or parsed.target
        found[name] = Endpoint(
            url=parsed.target,
            sagemaker=parsed.sagemaker,
            schema=parsed.schema,
            path=parsed.path,
            timeout_s=parsed.timeout,
        )
    for server in parsed.subject:
        if server.name in {*STRATEGIES, *found}:
            parser.error(f"--subject {server.name}: the name is taken; choose another")
        found[server.name] = Endpoint(
            url=server.url,
            sagemaker=server.sagemaker,
            schema=server.schema or parsed.schema,
            path=parsed.path if server.schema in (None, parsed.schema) else None,
            timeout_s=parsed.timeout,
        )
    return found


def _strategies(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> Strategies:
    from loadtest.machine import has_gpu
    from loadtest.servers.server import given_properties
    from loadtest.study.subjects import Strategies

    try:
        properties = given_properties(parsed.properties)
    except ValueError as error:
        parser.error(str(error))
    records = parsed.command == "compare" and parsed.record
    return Strategies(
        names=parsed.strategies,
        properties=properties,
        record=parsed.out / "recordings" if records else None,
        keeps_servers=parsed.command == "compare"
        and not (parsed.fresh or records)
        and not has_gpu()
        and not FIXED_MEMORY.isdisjoint(properties),
        model_dir=parsed.model_dir,
        logs=parsed.out / "logs",
        schema=parsed.schema,
        path=parsed.path,
        timeout_s=parsed.timeout,
    )


def _report(parsed: argparse.Namespace) -> int:
    try:
        results = combined([read_results(path) for path in parsed.results])
    except ValueError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return EXIT_FAILED
    code = _write(results, parsed.out)
    if parsed.pictures and not code:
        from loadtest.report.page import write_pictures

        for path in write_pictures(results, parsed.out):
            print(f"wrote {path}")
    return code


def _write(results: Results, out: Path) -> int:
    """Write the results and the reports. Returns EXIT_FAILED if there is no run."""
    if not results.runs:
        print("loadtest: no results", file=sys.stderr)
        return EXIT_FAILED
    from loadtest.report.page import write_markdown, write_report

    results.write(out)
    print(f"wrote {write_report(results, out)}")
    print(f"wrote {write_markdown(results, out)}")
    return 0
