"""Checks and times the sampler's kernels against torch operations, which sort the logits.

Only the device's work after the parameters' copy is timed: the most likely tokens, the filters and
the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.sampling import draw
from engine.sampling.kernels import SamplingKernels, make_sampling_kernels
from engine.sampling.rows import Row
from engine.staging import Staging, Upload
from kernels.sampling import torch_logits

VOCAB_SIZE, DRY_VOCAB_SIZE = 128256, 300
ZIPF = 1.5
"""Exponent of the tokens' probabilities by rank: the first gets 38 %, the first 50 get 89 %."""
FILTERS: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "min-p 0.1": {"min_p": 0.1},
    "typical-p 0.9": {"typical_p": 0.9},
    "all filters": {"min_p": 0.01, "top_k": 1000, "top_p": 0.9, "typical_p": 0.9},
}


class Case(NamedTuple):
    num_rows: int
    filters: str
    logits: str
    """"zipf": like the logits of a language model. "flat": normally distributed."""

    def __str__(self) -> str:
        return f"{self.filters}, {self.num_rows} rows, {self.logits}"


def run(bench: Bench) -> None:
    for case in _cases(bench):
        if bench.has_no_time_for(str(case)):
            return
        bench.attempt(str(case), partial(_measure, bench, case))


def _cases(bench: Bench) -> Iterator[Case]:
    if bench.is_dry:
        yield Case(1, "all filters", "zipf")
        yield Case(2, "greedy", "flat")
        return
    for filters in FILTERS:
        yield Case(256, filters, "zipf")
    for filters, num_rows in product(("top-p 0.9", "top-k 50"), (1, 32)):
        yield Case(num_rows, filters, "zipf")
    for filters in ("top-p 0.9", "top-k 50"):
        yield Case(256, filters, "flat")


def _measure(bench: Bench, case: Case) -> None:
    first = _logits(bench, case)
    sets = [
        first,
        *(_logits(bench, case) for _ in range(bench.num_sets(first.nbytes, max_sets=8) - 1)),
    ]
    steps = {
        "ours": _sampling(bench, case, make_sampling_kernels(torch.device("cuda"))),
        "torch": _sampling(bench, case, SamplingKernels(torch_logits.best_tokens, draw.plan_draws)),
    }
    tokens = [step(first) for step in (steps["ours"], *steps.values())]
    bench.row(
        what=str(case),
        bytes=first.nbytes,
        us={
            name: bench.time_us([partial(step, logits) for logits in sets])
            for name, step in steps.items()
        },
        verdict="ok" if all(torch.equal(tokens[0], other) for other in tokens[1:]) else "WRONG",
    )


def _sampling(bench: Bench, case: Case, kernels: SamplingKernels) -> Callable[[Tensor], Tensor]:
    """Return a function of logits that samples a token for each row, each with its own seed."""
    rows = [
        Row(Sequence(id, [1], SamplingParams(seed=id, **FILTERS[case.filters])), 1)
        for id in range(case.num_rows)
    ]
    upload = Upload(Staging(bench.device))
    draws = kernels.plan_draws(rows, _vocab_size(bench), upload)
    upload.send()

    def sample(logits: Tensor) -> Tensor:
        token_ids, _ = kernels.best_tokens(logits)
        for apply in draws:
            apply(logits, token_ids)
        return token_ids

    return sample


def _logits(bench: Bench, case: Case) -> Tensor:
    noise = torch.randn(case.num_rows, _vocab_size(bench), device=bench.device)
    if case.logits == "flat":
        return noise
    return -ZIPF * (noise.argsort(1) + 1).float().log()


def _vocab_size(bench: Bench) -> int:
    return DRY_VOCAB_SIZE if bench.is_dry else VOCAB_SIZE
