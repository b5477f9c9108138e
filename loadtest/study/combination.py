"""Results of several commands as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec

from loadtest.study.results import Results, Run


def combined(parts: Sequence[Results]) -> Results:
    """Return the results of several commands as one.

    If a fact about the machines differs, such as the commit, the combined fact has every value with
    its workloads. The rounds of a server are numbered consecutively over all parts.

    Raises ValueError if the results do not belong in one table. That is so if

    - a part is given twice,
    - a sweep is combined with other results or with a different sweep,
    - the parts differ in their seeds or in their use of servers,
    - the same workload has different machines or loads, or
    - the same server has different settings.
    """
    for one, other in combinations(parts, 2):
        _require_comparable(one, other)
    first = parts[0]
    notes = [note for part in parts for note in part.notes]
    objective = next((part.objective for part in parts if part.objective), {})
    if any(part.objective not in ({}, objective) for part in parts):
        notes.append("The runs had different objectives (--slo): goodput refers to the first.")
    return msgspec.structs.replace(
        first,
        command="\n".join(part.command for part in parts),
        machine={name: _fact(parts, name) for part in parts for name in part.machine},
        notes=notes,
        objective=objective,
        trials=[trial for part in parts for trial in part.trials],
        runs=_numbered_on(parts),
    )


def _require_comparable(one: Results, other: Results) -> None:
    if (one.created, one.command) == (other.created, other.command):
        raise ValueError(
            f"the results of {one.command!r}, created {one.created}, are given twice; "
            "give them once"
        )
    _require_equal("results", "kind", _kind(one), _kind(other))
    _require_equal("results", "seed", one.seed, other.seed)
    _require_equal("results", "use of servers", _servers(one), _servers(other))
    if one.slo:
        _require_equal("sweeps", "objective (--slo)", one.slo, other.slo)
        _require_equal("sweeps", "workload", _names(one), _names(other))
    for workload in set(_workloads(one)) & set(_workloads(other)):
        for name in one.machine | other.machine:
            values = [part.machine.get(name, "unknown") for part in (one, other)]
            _require_equal(f"two results of {workload}", name, *values)
    _require_same_load(one, other)


def _require_same_load(one: Results, other: Results) -> None:
    """Compare what all servers of a workload share, then the settings of each server."""
    loads = {(run.workload, run.variant, run.rate if one.slo else None): run for run in one.runs}
    scales = {(run.workload, run.variant): run.length_scale for run in one.runs}
    settings = {(run.workload, run.label): run.settings for run in one.runs}
    for run in other.runs:
        what = f"two results of {run.workload}"
        same = loads.get((run.workload, run.variant, run.rate if one.slo else None), run)
        _require_equal(what, "load", same.loop, run.loop)
        scale = scales.get((run.workload, run.variant), run.length_scale)
        _require_equal(what, "length scale", scale, run.length_scale)
        known = settings.get((run.workload, run.label), run.settings)
        what = f"two results of {run.label} on {run.workload}"
        _require_equal(what, "settings", known, run.settings)


def _require_equal(what: str, name: str, one: object, other: object) -> None:
    if one != other:
        raise ValueError(
            f"cannot combine {what}, whose {name} differs: {one} and {other}; "
            "write a report of each"
        )


def _kind(results: Results) -> str:
    return "a sweep" if results.slo else "no sweep"


def _servers(results: Results) -> str:
    return "one per run" if results.fresh_servers else "one for all runs"


def _names(results: Results) -> str:
    return ", ".join(sorted(_workloads(results)))


def _workloads(results: Results) -> Sequence[str]:
    return list(dict.fromkeys(run.workload for run in results.runs))


def _numbered_on(parts: Sequence[Results]) -> list[Run]:
    """Return all runs. A server's rounds in a part follow its rounds in the earlier parts."""
    runs: list[Run] = []
    highest: dict[tuple[str, str, float | None], int] = {}
    for part in parts:
        before = dict(highest)
        for run in part.runs:
            place = (run.workload, run.label, run.rate)
            number = before.get(place, 0) + run.round
            highest[place] = max(highest.get(place, 0), number)
            runs.append(msgspec.structs.replace(run, round=number))
    return runs


def _fact(parts: Sequence[Results], name: str) -> str:
    """Return a fact about the machines. If its values differ, name the workloads of each value."""
    by_value: dict[str, dict[str, None]] = {}
    for part in parts:
        found = by_value.setdefault(part.machine.get(name, "unknown"), {})
        found.update(dict.fromkeys(_workloads(part)))
    if len(by_value) == 1:
        return next(iter(by_value))
    return "; ".join(f"{value} ({', '.join(found)})" for value, found in by_value.items())
