"""Replay a recording of `longshore serve --record DIR`, with the strategies that serve.

Without options, the schedule is computed again from the recorded requests, and compared step for
step; if it differs, the first difference is printed and the exit code is 1. With options, computes
what would have happened with them: the same requests at the same times, and a cost model of a step
that is fitted to the recording. --trace and --rate replace the requests. --page shows any moment.

Without DIR, computes what a GPU that you do not have would do, from its data sheet: no model runs,
and no speed is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.load.lengths import ALPACA, SHAREGPT, read_timed_trace
from benchmarks.replay.cost import fitted
from benchmarks.replay.figures import Figures, table
from benchmarks.replay.forecast import check_computable, forecast
from benchmarks.replay.recorded import recorded_tally, title
from benchmarks.replay.reproduce import reproduce
from benchmarks.replay.roofline import GPUS, MODELS, Hardware
from benchmarks.replay.script import Script, script_of, set_load
from benchmarks.replay.settings import (
    add_options,
    add_recording,
    changed,
    given_options,
    positive,
)
from benchmarks.replay.synthetic import (
    BLOCK_SIZE,
    RooflineCost,
    header_of,
    poisson,
    script_of_lengths,
)
from core.configuration.record import Value
from core.configuration.strategy_table import BATCHING_NAMES
from core.errors import ConfigurationError
from engine.observers.frames import Header
from engine.observers.store import Recording, read_recording

DEFAULT_LENGTH = 4096
PAGE_PORT = 8090
MEANS = {"sharegpt": SHAREGPT, "alpaca": ALPACA}
EXAMPLES = """examples:
  %(prog)s DIR                                    # is the schedule reproduced?
  %(prog)s DIR --batching continuous              # another strategy
  %(prog)s DIR --max-rolling-batch-size 64 --load 1.5   # other limits, half as many requests more
  %(prog)s DIR --page                             # look at it in a browser
  %(prog)s DIR --trace azure_llm_2023_conv.csv    # other requests
  %(prog)s --model llama-3.1-8b --gpu h100 --rate 8     # all strategies on a GPU
"""


def main(arguments: list[str] | None = None, prog: str = "python -m benchmarks.replay") -> int:
    """Return the exit code: 1 if the schedule is not reproduced."""
    parser = make_parser(prog)
    given = parser.parse_args(arguments)
    try:
        changes = given_options(given)
        if given.recording is None and given.page is None:
            return _assume(given, changes)
        if given.recording is None:
            raise ValueError("--page needs DIR, the folder of a recording")
        is_changed = bool(changes or given.load != 1.0 or _has_requests(given))
        if given.page is not None:
            return _serve_page(given, is_changed=is_changed)
        recording = read_recording(given.recording, given.run)
        if is_changed:
            return _forecast(recording, changes, given)
        return _reproduce(recording)
    except (OSError, ValueError, ConfigurationError) as error:
        parser.error(str(error))


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recording(parser)
    parser.add_argument(
        "--page", type=int, nargs="?", const=PAGE_PORT, metavar="PORT",
        help="serve a page of the recording on this machine: any moment, why requests waited, "
        "and what would have followed with other options (default port: %(const)s)",
    )  # fmt: skip
    _add_requests(parser.add_argument_group("other requests"))
    machine = parser.add_argument_group("without DIR: the machine")
    machine.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    machine.add_argument("--gpu", choices=GPUS, default="h100")
    machine.add_argument("--gpus", type=int, default=1, metavar="N", help="that share the model")
    add_options(parser.add_argument_group("options of `longshore serve` to change"))
    return parser


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", type=Path, metavar="CSV",
        help="take them from a file with the columns TIMESTAMP, ContextTokens, GeneratedTokens",
    )  # fmt: skip
    group.add_argument("--rate", type=positive, metavar="R", help="let R a second arrive at random")
    group.add_argument(
        "--duration", type=positive, default=600.0, metavar="S",
        help="--rate: for so many seconds (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--lengths", choices=MEANS, default="sharegpt",
        help="--rate: log-normal lengths with the means of this data set (default: sharegpt)",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="--rate: random seed (default: 0)")


def _serve_page(given: argparse.Namespace, *, is_changed: bool) -> int:
    if is_changed:
        raise ValueError("--page shows what was recorded; leave the other options out")
    from benchmarks.replay.page.server import serve_page

    print("replaying the recording", flush=True)
    serve_page(lambda: read_recording(given.recording, given.run), given.page)
    return 0


def _reproduce(recording: Recording) -> int:
    rows = {"recorded": recorded_tally(recording).figures()}
    print(title(recording), "", *table(rows), "", sep="\n")
    if not recording.is_whole and recording.header.settings.enable_prefix_caching:
        print("The beginning was deleted, so what was cached then is unknown: nothing is compared.")
        return 0
    found = reproduce(recording)
    if found.difference is None:
        print(f"The replay of {found.num_steps} steps is the same, step for step.")
        return 0
    print(f"The replay is not the same: {found.difference}")
    return 1


def _forecast(recording: Recording, changes: Mapping[str, Value], given: argparse.Namespace) -> int:
    header = recording.header
    check_computable(header)
    cost = fitted(recording.frames)
    settings = changed(header.settings, changes)
    print(title(recording), cost.quality, "", sep="\n")
    rows: dict[str, Figures | None] = {"recorded": recorded_tally(recording).figures()}
    script = script_of(recording.frames, header.link_tokens)
    rows["recorded options, computed"], _ = forecast(header, header.settings, script, cost)
    if _has_requests(given):
        script = _other_requests(given, header)
    set_load(script, given.load)
    found, num_refused = forecast(header, settings, script, cost)
    rows[_name(changes, given)] = found
    print(*table(rows), "", sep="\n")
    _print_refused(num_refused)
    return 0


def _assume(given: argparse.Namespace, changes: Mapping[str, Value]) -> int:
    """Compute the strategies on a machine from its data sheet."""
    if not _has_requests(given):
        raise ValueError("without DIR, name the requests: --trace CSV or --rate R")
    hardware = Hardware(MODELS[given.model], GPUS[given.gpu], given.gpus)
    header = header_of(hardware, given.max_model_len or DEFAULT_LENGTH)
    names = [changes["batching"]] if "batching" in changes else BATCHING_NAMES
    rows: dict[str, Figures | None] = {}
    num_refused = 0
    for name in names:
        script = _other_requests(given, header)
        set_load(script, given.load)
        settings = changed(header.settings, {**changes, "batching": name})
        rows[str(name)], num_refused = forecast(header, settings, script, RooflineCost(hardware))
    efficiency = hardware.efficiency
    print(
        f"COMPUTED, not measured: {hardware.name}, {header.settings.num_blocks} blocks of "
        f"{BLOCK_SIZE} tokens; {efficiency.bandwidth:.0%} of the data sheet's bandwidth, "
        f"{efficiency.flops:.0%} of its FLOP/s, {efficiency.overhead_s * 1e3:g} ms overhead a step",
        "",
        *table(rows),
        "",
        sep="\n",
    )
    _print_refused(num_refused)
    return 0


def _has_requests(given: argparse.Namespace) -> bool:
    return given.trace is not None or given.rate is not None


def _other_requests(given: argparse.Namespace, header: Header) -> Script:
    if given.trace is not None:
        timed = read_timed_trace(given.trace)
    else:
        longest = header.settings.max_model_len
        timed = poisson(given.rate, given.duration, MEANS[given.lengths], longest, given.seed)
    return script_of_lengths(timed, header.link_tokens)


def _name(changes: Mapping[str, Value], given: argparse.Namespace) -> str:
    names = [f"{name}={value}" for name, value in changes.items()]
    names += [f"load={given.load:g}"] if given.load != 1.0 else []
    names += [f"trace={given.trace.name}"] if given.trace is not None else []
    names += [f"rate={given.rate:g}"] if given.rate is not None else []
    return f"**{' '.join(names)}**"


def _print_refused(num_refused: int) -> None:
    if num_refused:
        print(f"{num_refused} requests do not fit with these options, and were refused.")


if __name__ == "__main__":
    sys.exit(main())
