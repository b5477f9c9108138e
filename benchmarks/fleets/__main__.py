"""Simulate how many requests per second fleets of 1 to 1,000 machines sustain, and what they cost.

No model runs and no speed is measured: benchmarks/simulate says what is computed. The load grows
with the fleet: each machine adds the requests of --trace, starting at a random place in it, so the
bursts of larger fleets even out. Each prompt begins with one of --prefixes texts per machine. The
routing `sessions` treats requests that begin with the same text as a session, which goes to one
machine.

The rate of a fleet is the highest at which the mean of latency over output length stays within
--bound. The program knows no prices; give them with --prices. docs/scaling.md explains the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.fleets.capacity import ROUTINGS, Service
from benchmarks.fleets.results import Results
from benchmarks.fleets.study import Machine, Progress, Row, Size, study, table
from benchmarks.load.lengths import read_timed_trace
from benchmarks.simulate.arguments import count, positive
from benchmarks.simulate.cost import GPUS, MODELS, Hardware
from benchmarks.simulate.traffic import Prefixes

EXAMPLES = """examples:
  %(prog)s --trace azure_llm_2023_conv.csv --prices a10g=1.00,l40s=1.90 --sizes 1,8,64
  %(prog)s --trace azure_llm_2023_conv.csv --prices 4xa10g=5.70 --model opt-13b
"""
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
DEFAULT_ROUTINGS = ["round-robin", "sessions", "prefix-aware"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        service, machines = _service(options), _machines(options)
        rows = _run(service, machines, options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n".join([_title(service, options), "", *table(rows)]))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleets",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_fleets(parser.add_argument_group("fleets"))
    _add_requests(parser.add_argument_group("requests"))
    parser.add_argument(
        "--json", type=Path, metavar="OUT",
        help="also write the results to this file after each fleet, and skip the fleets whose "
        "results are already in it",
    )  # fmt: skip
    return parser


def _add_fleets(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prices", type=_prices, required=True, metavar="[Nx]GPU=DOLLARS,...",
        help="types of machine, each with its price per hour; the N GPUs of a machine share the "
        f"model by tensor parallelism. GPUs: {', '.join(GPUS)}",
    )  # fmt: skip
    group.add_argument(
        "--sizes", type=_sizes, default=SIZES, metavar="N,...",
        help=f"numbers of machines of the fleets (default: {','.join(map(str, SIZES))})",
    )  # fmt: skip
    group.add_argument(
        "--rounds", type=count, default=16, metavar="N",
        help="simulate a fleet of M machines N / M times, but at least once; every time, the "
        "requests are different ones (default: 16)",
    )  # fmt: skip
    group.add_argument(
        "--routings", type=_routings, default=DEFAULT_ROUTINGS, metavar="NAME,...",
        help=f"routings to compare: {', '.join(ROUTINGS)} (default: {','.join(DEFAULT_ROUTINGS)})",
    )  # fmt: skip
    group.add_argument(
        "--max-sequences", type=count, default=256, metavar="N",
        help="maximum sequences that run at once on a machine (default: 256)",
    )  # fmt: skip
    group.add_argument(
        "--model",
        choices=MODELS,
        default="llama-3.1-8b",
        help="model to serve (default: %(default)s)",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", type=Path, required=True, metavar="CSV",
        help="trace with the columns TIMESTAMP, ContextTokens and GeneratedTokens",
    )  # fmt: skip
    group.add_argument(
        "--duration", type=positive, default=60.0, metavar="SECONDS",
        help="time span over which requests arrive (default: 60)",
    )  # fmt: skip
    group.add_argument(
        "--bound", type=positive, default=0.1, metavar="S",
        help="upper bound of the mean of latency divided by output length, in seconds per token "
        "(default: 0.1)",
    )  # fmt: skip
    group.add_argument(
        "--max-length", type=count, default=4096, metavar="TOKENS",
        help="maximum tokens of prompt and output; longer requests are left out (default: 4096)",
    )  # fmt: skip
    group.add_argument(
        "--prefixes", type=count, default=10, metavar="N",
        help="number of texts with which prompts begin, for each machine of a fleet (default: 10)",
    )  # fmt: skip
    group.add_argument(
        "--prefix-tokens", type=count, default=512, metavar="TOKENS",
        help="length of such a text, which comes before a prompt of the trace (default: 512)",
    )  # fmt: skip


def _run(service: Service, machines: Sequence[Machine], options: argparse.Namespace) -> list[Row]:
    """Simulate the fleets that --json does not have yet."""
    results = None if options.json is None else Results(options.json, _settings(options))
    known = {} if results is None else results.known()
    sizes = [Size(size, max(1, options.rounds // size)) for size in options.sizes]
    work = {size.num_machines: size.work for size in sizes}
    total = len(machines) * len(options.routings) * sum(work.values())
    rows: list[Row] = []
    with tqdm(total=total, unit="machine", disable=None) as bar:  # on terminals only
        for row in study(service, machines, sizes, options.routings, known, _progress(bar)):
            rows.append(row)
            if results is not None:
                results.add(row)
            bar.update(work[row.num_machines])
    return rows


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the options that the rate of a fleet depends on."""
    others = {"prices", "sizes", "routings", "json"}
    return {name: str(value) for name, value in vars(options).items() if name not in others}


def _progress(bar: tqdm) -> Progress:
    def show(name: str, now: float) -> None:
        bar.set_description(f"{name}, {now:.0f} s")

    return show


def _service(options: argparse.Namespace) -> Service:
    if options.prefix_tokens >= options.max_length - 1:
        raise ValueError(
            f"--prefix-tokens {options.prefix_tokens}: must leave room for a prompt and an answer "
            f"within --max-length {options.max_length}"
        )
    return Service(
        trace=read_timed_trace(options.trace),
        max_length=options.max_length,
        prefixes=Prefixes(options.prefixes, options.prefix_tokens),
        duration_s=options.duration,
        bound=options.bound,
        max_sequences=options.max_sequences,
    )


def _machines(options: argparse.Namespace) -> list[Machine]:
    model = MODELS[options.model]
    return [
        Machine(gpu if num == 1 else f"{num} x {gpu}", Hardware(model, GPUS[gpu], num), dollars)
        for num, gpu, dollars in options.prices
    ]


def _title(service: Service, options: argparse.Namespace) -> str:
    traffic = service.traffic(1, 0)
    efficiency = Hardware(MODELS[options.model], next(iter(GPUS.values()))).efficiency
    return (
        f"SIMULATION: {options.model}, paged; {options.trace.name} "
        f"({traffic.num_left_out} requests over {options.max_length} tokens left out), "
        f"{service.duration_s:g} s; {service.prefixes.count} prefixes of "
        f"{service.prefixes.num_tokens} tokens per machine; bound {service.bound:g} s/token; "
        f"{efficiency.bandwidth:.0%} of bandwidth, {efficiency.flops:.0%} of FLOP/s, "
        f"{efficiency.overhead_s * 1e3:g} ms overhead per step; prices as given"
    )


def _prices(text: str) -> list[tuple[int, str, float]]:
    return [_price(part) for part in text.split(",")]


def _price(text: str) -> tuple[int, str, float]:
    """Parse [Nx]GPU=DOLLARS."""
    machine, _, dollars = text.partition("=")
    number, _, gpu = machine.partition("x") if machine[:1].isdecimal() else ("1", "", machine)
    try:
        parsed = count(number), gpu, positive(dollars)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: expected [Nx]GPU=DOLLARS, such as a10g=1.00 or 4xa10g=5.70"
        ) from None
    if gpu not in GPUS:
        raise argparse.ArgumentTypeError(f"{gpu}: no such GPU; choose from {', '.join(GPUS)}")
    return parsed


def _sizes(text: str) -> list[int]:
    try:
        return [count(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers, such as 1,8,64") from None


def _routings(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ROUTINGS]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: no such routing; choose from {', '.join(ROUTINGS)}"
        )
    return names


if __name__ == "__main__":
    main()
