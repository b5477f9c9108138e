"""Reproduce the PagedAttention paper's memory figures with our strategies.

The real strategies and memory managers run with an executor that computes nothing, on the request
lengths of a trace. docs/benchmarks.md describes the differences from the paper.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.load.lengths import Lengths, read_trace, synthetic_lengths
from benchmarks.memory.usage import Usage, make, measure
from core.request import Request
from core.sampling import SamplingParams
from strategies.beam_group import BeamSearches

Row = dict[str, Any]
RESERVATIONS = {"Orca (Max)": "max", "Orca (Pow2)": "pow2", "Orca (Oracle)": "oracle"}
PAPER_USED = {
    "Orca (Max)": "20.4 %",
    "Orca (Pow2)": "26.8 %",
    "Orca (Oracle)": "38.2 %",
    "paged": "96.3 %",
}
WIDTHS = (2, 4, 6)


def main() -> None:
    options = _parse()
    if options.trace is not None:
        lengths = read_trace(options.trace, options.requests, options.max_length)
        source = options.trace.name
    else:
        lengths = synthetic_lengths(options.requests, options.max_length)
        source = "synthetic"
    cases = list(_cases(lengths, options))
    rows = [case() for case in tqdm(cases, desc="Cases", disable=None)]
    if options.out is not None:
        settings = {"trace": source, "requests": len(lengths), "tokens": options.tokens,
                    "max_length": options.max_length}  # fmt: skip
        options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
    print(f"{len(lengths)} requests, {source}; {options.tokens} token slots in blocks of 16")
    print(f"{'measure':46} {'ours':>8}  paper")
    for row in rows:
        print(f"{row['what']:46} {row['value']:8.1%}  {row['paper']:24} {row['note']}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        help="CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens "
        "(default: synthetic lengths)",
    )
    parser.add_argument(
        "--requests", type=int, default=300, help="number of requests (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=16_384,
        help="token slots of the KV cache (default: %(default)s)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=2048,
        help="maximum tokens of prompt and output (default: %(default)s)",
    )
    parser.add_argument(
        "--system-prompt",
        type=int,
        default=512,
        help="tokens of the prefix that all prompts share in the prefix caching cases "
        "(default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="also write the rows to this file as JSON")
    return parser.parse_args()


def _cases(lengths: list[Lengths], options: argparse.Namespace) -> Iterator[Callable[[], Row]]:
    def run(batching: str, requests: list[Request], **changes: object) -> Usage:
        longest = options.max_length + options.system_prompt
        return measure(make(batching, options.tokens, longest, **changes), requests)

    def used(name: str, **changes: object) -> Row:
        batching = "continuous" if name in RESERVATIONS else "paged"
        usage = measure(
            make(batching, options.tokens, options.max_length, **changes), _requests(lengths)
        )
        running = usage.num_running / max(1, usage.num_steps)
        what = f"reserved slots used, {name}"
        return _row(what, usage.used, PAPER_USED[name], running, usage.used_of_all)

    for name, reservation in RESERVATIONS.items():
        yield lambda name=name, reservation=reservation: used(name, kv_reservation=reservation)
    yield lambda: used("paged")
    few = lengths[: len(lengths) // 5]
    for width in WIDTHS:
        yield lambda width=width: _row(
            f"blocks saved by sharing, {width} samples",
            run("paged", _requests(few, n=width)).shared,
            "6.1 % to 9.8 % (2 to 6)",
        )
    for width in WIDTHS:
        yield lambda width=width: _row(
            f"blocks saved by sharing, {width} beams",
            run("paged", _requests(few, num_beams=width)).shared,
            "37.6 % to 55.2 % (2 to 6)",
        )

    def prefix() -> Row:
        requests = _requests(lengths, system_prompt=options.system_prompt)
        without = run("paged", requests).computed_tokens
        requests = _requests(lengths, system_prompt=options.system_prompt)
        cached = run("paged", requests, enable_prefix_caching=True).computed_tokens
        what = f"computed tokens saved, {options.system_prompt}-token prefix"
        return _row(what, 1 - cached / without, "")

    yield prefix


def _requests(lengths: list[Lengths], *, system_prompt: int = 0, **params: Any) -> list[Request]:
    """Return requests whose prompts share nothing beyond the first `system_prompt` tokens."""
    requests: list[Request] = []
    id = 0
    for number, length in enumerate(lengths):
        prompt = [*range(system_prompt), *[-1 - number] * length.prompt]
        sampling = SamplingParams(max_tokens=length.generated, seed=number, **params)
        beams = BeamSearches().part(sampling, len(prompt))
        requests.append(Request(id, prompt, sampling, parts=(beams,) if beams else ()))
        id += len(requests[-1].sequence_ids)
    return requests


def _row(
    what: str, value: float, paper: str, running: float = 0.0, used_of_all: float = 0.0
) -> Row:
    """running: mean number of running sequences; used_of_all: used share of the whole KV cache."""
    note = f"{used_of_all:.1%} of the KV cache, {running:.1f} running" if running else ""
    return {"what": what, "value": value, "paper": paper, "note": note,
            "running": running, "used_of_all": used_of_all}  # fmt: skip


if __name__ == "__main__":
    main()
