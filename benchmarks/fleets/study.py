"""The study: capacities of fleets of several sizes and routings, and their table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.fleets.capacity import Service, sustained_rate
from benchmarks.simulate.cost import Hardware

Progress = Callable[[str, float], None]
Known = Mapping[tuple[str, int, str], Sequence[float]]
"""Rates by machine, number of machines and routing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A type of machine."""

    name: str
    hardware: Hardware
    dollars_per_hour: float


@dataclass(frozen=True, slots=True)
class FleetRow:
    """A fleet behind one routing."""

    machine: str
    num_machines: int
    dollars_per_hour: float
    """Price of the whole fleet."""
    routing: str
    rates: Sequence[float]
    """Requests per second that the fleet sustains, by round. Every round has other requests."""

    @property
    def rate(self) -> float:
        return sum(self.rates) / len(self.rates)

    @property
    def requests_per_dollar(self) -> float:
        return 3600 * self.rate / self.dollars_per_hour


@dataclass(frozen=True, slots=True)
class Size:
    """A number of machines, and how often such a fleet is simulated, each time with other requests.

    The rate that a small fleet sustains depends on its part of the trace.
    """

    num_machines: int
    num_rounds: int

    @property
    def work(self) -> int:
        """Machines to simulate in all rounds. The running time is roughly proportional to it."""
        return self.num_machines * self.num_rounds


def study(
    service: Service,
    machines: Sequence[Machine],
    sizes: Sequence[Size],
    routings: Sequence[str],
    known: Known,
    progress: Progress,
) -> Iterator[FleetRow]:
    """Yield a row for each machine, size and routing.

    known: rates that need not be simulated. progress: called with the name of a simulation and its
    simulated seconds. Raises ValueError if a machine has too little memory for one sequence.
    """
    for machine in machines:
        of_one: dict[str, float] = {}  # the next size probably has the same rate per machine
        for size in sizes:
            count = size.num_machines
            for routing in routings:
                rates = known.get((machine.name, count, routing)) or _rates(
                    service, machine, size, routing, of_one.get(routing, 0.0), progress
                )
                of_one[routing] = rates[-1] / count
                yield FleetRow(
                    machine.name, count, count * machine.dollars_per_hour, routing, rates
                )


def _rates(
    service: Service,
    machine: Machine,
    size: Size,
    routing: str,
    of_one: float,
    progress: Progress,
) -> list[float]:
    """Return the rate of each round.

    of_one: requests per second per machine with which the first search begins; 0 if not known.
    """
    count = size.num_machines
    rates: list[float] = []
    for seed in range(size.num_rounds):
        rate = sustained_rate(
            service,
            machine.hardware,
            count,
            routing,
            seed=seed,
            near=of_one * count if of_one else None,
            progress=partial(progress, f"{count} x {machine.name}, {routing}"),
        )
        rates.append(rate)
        of_one = rate / count
    return rates


def table(rows: Sequence[FleetRow]) -> list[str]:
    """Return the lines of a Markdown table: a line for each fleet, with columns by routing."""
    routings = list(dict.fromkeys(row.routing for row in rows))
    fleets = list(dict.fromkeys((row.machine, row.num_machines) for row in rows))
    found = {(row.machine, row.num_machines, row.routing): row for row in rows}
    titles = ["machine", "machines", "$ per hour"]
    titles += [f"requests/s, {routing}" for routing in routings]
    titles += [f"requests per $, {routing}" for routing in routings]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for machine, size in fleets:
        of_fleet = [found[machine, size, routing] for routing in routings]
        cells = [machine, f"{size:,}", f"{of_fleet[0].dollars_per_hour:,.2f}"]
        cells += [_rate(row) for row in of_fleet]
        cells += [f"{row.requests_per_dollar:,.0f}" for row in of_fleet]
        lines.append(_line(cells))
    return lines


def _rate(row: FleetRow) -> str:
    mean = f"{row.rate:,.3g}" if row.rate < 1000 else f"{row.rate:,.0f}"
    if len(row.rates) == 1:
        return mean
    return f"{mean} ({min(row.rates):.3g} to {max(row.rates):.3g})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
