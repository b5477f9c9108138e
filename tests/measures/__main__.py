"""Measures how much of the code a reader must read: `python -m tests.measures`.

Runs from the root of the repository, in a minute. docs/design.md explains the measures and has
their goals; tests/test_measures.py has limits for smear and closure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable

from tests.measures import option, requests, tree
from tests.measures.option import Stay
from tests.measures.smear import FEATURES
from tests.measures.trace import Function

DOORS = (
    "engine.step.packed_executor",
    "container.apis.text.api",
    "engine.offline.llm",
    "engine.builders.packed",
    "strategies.paged",
)
PATHS = {"front end": requests.front_end, "engine": requests.engine}
"""What runs for one streamed request, in two halves."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.measures", description=__doc__)
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    parser.add_argument("--static", action="store_true", help="only smear and closure; no request")
    parser.add_argument("--feature", choices=FEATURES, help="the files that name it, with counts")
    parser.add_argument("--door", choices=DOORS, help="the files that it imports")
    parser.add_argument(
        "--path", choices=PATHS, help="the functions that run, most idle lines first"
    )
    parser.add_argument("--walk", choices=PATHS, help="the functions, as each is first called")
    parser.add_argument(
        "--option",
        metavar="KEY=VALUE",
        help="the functions that hold an option with a rare value; * marks those of the engine",
    )
    args = parser.parse_args()
    if args.feature:
        _print_counts(FEATURES[args.feature].named_in)
    elif args.door:
        print(
            *sorted(tree.name(tree.files()[module]) for module in tree.closure(args.door)), sep="\n"
        )
    elif args.path:
        _print_functions(PATHS[args.path]())
    elif args.walk:
        for function in PATHS[args.walk]():
            print(f"{function.place:<46} {'  ' * function.depth}{function.name}")
    elif args.option:
        key, _, text = args.option.partition("=")
        for stay in option.walk(key, text):
            mark = "*" if stay.is_in_engine else " "
            print(f"{mark} {stay.place:<46} {'  ' * stay.depth}{stay.name}")
    else:
        measures = _measures(with_requests=not args.static)
        print(json.dumps(measures, indent=2) if args.json else _table(measures))


def _measures(*, with_requests: bool) -> dict[str, dict[str, float]]:
    """Return each measure's figures by name."""
    found: dict[str, dict[str, float]] = {}
    if with_requests:
        ran = {}
        for path, run in PATHS.items():
            print(f"one request through the {path} ...", file=sys.stderr)
            ran[path] = run()
        found["reading bill"] = {path: _bill(ran[path]) for path in ran} | {
            "in all": sum(map(_bill, ran.values()))
        }
        found["live share"] = {path: _live_share(ran[path]) for path in ran}
        print(f"a start with {'='.join(option.USUAL)} ...", file=sys.stderr)
        found["walk"] = _walk(option.walk(*option.USUAL))
    found["smear"] = {name: len(feature.named_in) for name, feature in FEATURES.items()}
    found["closure"] = {door: len(tree.closure(door)) for door in DOORS}
    return found


def _walk(stays: list[Stay]) -> dict[str, float]:
    in_engine = [stay for stay in stays if stay.is_in_engine]
    return {
        "functions": len(stays),
        "files": len({stay.file for stay in stays}),
        "functions of the engine": len(in_engine),
        "files of these": len({stay.file for stay in in_engine}),
    }


def _bill(functions: Iterable[Function]) -> int:
    return sum(function.lines for function in functions)


def _live_share(functions: list[Function]) -> float:
    ran = sum(function.ran for function in functions)
    return round(ran / sum(function.statements for function in functions), 3)


def _table(measures: dict[str, dict[str, float]]) -> str:
    units = {
        "reading bill": "lines in the functions that run for one streamed request",
        "live share": "statements of these functions that run",
        "walk": f"what holds {option.USUAL[0]}, from serving.properties to a server that is built",
        "smear": "files outside a feature's home that name it",
        "closure": "files that a door imports",
    }
    lines = []
    for measure, figures in measures.items():
        lines.append(f"{measure}: {units[measure]}")
        for name, figure in figures.items():
            value = f"{figure:.1%}" if measure == "live share" else f"{figure:,}"
            lines.append(f"  {value:>7}  {name}")
    return "\n".join(lines)


def _print_counts(counts: dict[str, int]) -> None:
    for file, count in counts.items():
        print(f"{count:>5}  {file}")
    print(f"{sum(counts.values()):>5}  in {len(counts)} files")


def _print_functions(functions: list[Function]) -> None:
    print("lines  statements  of which ran")
    for function in sorted(functions, key=lambda each: each.ran - each.statements):
        counts = f"{function.lines:>5}{function.statements:>12}{function.ran:>14}"
        print(f"{counts}  {function.place} {function.name}")


if __name__ == "__main__":
    main()
