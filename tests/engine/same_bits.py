"""Answers bit by bit: alone under the strategy `none`, and in random schedules.

    python -m tests.engine.same_bits --seconds 600 --seed 0

A run has one seed: a model, a dtype, a strategy with its limits, memory and preemption, a number of
threads, and requests of all kinds, of which some are probes. Each probe must get the tokens, the
log-probabilities, the likeliest tokens and the scores of its prompt that it gets alone, to the bit.
Requests are sent twice, so that the second time prefixes are cached. It goes on until there was a
preemption, a hit and a run of each strategy, and fails if MOST_RUNS have not shown them.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from core.configuration.strategy_table import BATCHING_NAMES
from engine import LLM, LoRARequest, SamplingParams
from tests.engine.lora.adapter_files import write_adapter
from tests.engine.tiny_models import VOCABULARY, save_tiny_model

LENGTHS = (1, 17, 100, 270, 600)
"""Of the probes' prompts. Above 512 tokens the keys of a decode are split."""
NUM_NEW = 8
MOST_RUNS = 60
"""After these, no longer time is given, as a slow machine needs, to what was not seen."""
DTYPES: Mapping[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "fp32", "quantize": "int8"},
    "int4": {"dtype": "bf16", "quantize": "int4"},
}
MODELS: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 100},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8},
    "gpt_oss": {"sliding_window": 100},
}
ROOM = {"max_position_embeddings": 1024, "num_hidden_layers": 2}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"temperature": 0, "presence_penalty": 0.5},
)
Values = tuple[list[Any], list[Any]]


def probe_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def probe_params(kind: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, logprobs=3, **KINDS[kind])


def values(output: Any, *, with_answer: bool = True) -> Values:
    """Return the ids and exact log-probabilities of the answer, and those of the prompt."""
    answer, prompt = output.outputs[0], output.prompt_logprobs or []
    rows = zip(answer.token_ids, answer.logprobs, strict=True) if with_answer else ()
    return [(token, _entries(row)) for token, row in rows], [_entries(row) for row in prompt if row]


def _entries(row: Any) -> list[tuple[int, float, int]]:
    return [(token, entry.logprob, entry.rank) for token, entry in row.items()]


@dataclass
class Subject:
    """A model in a dtype, and what its probes get alone."""

    path: Path
    options: dict[str, Any]
    adapter: Path | None = None
    lengths: tuple[int, ...] = LENGTHS
    scores_like_answers: bool = True
    """Whether an answer that is scored as a prompt gets the values that it had as an answer."""
    _alone: dict[tuple[int, int], Values] = field(default_factory=dict)

    @property
    def prompts(self) -> list[list[int]]:
        return probe_prompts(self.lengths)

    def requests(self, adapted: list[bool]) -> list[LoRARequest | None] | None:
        if self.adapter is None:
            return None
        return [LoRARequest("a", 1, str(self.adapter)) if has else None for has in adapted]

    def adapts(self, probe: int) -> bool:
        """Whether the probe uses the adapter."""
        return self.adapter is not None and probe % 2 == 1

    def alone(self, keys: list[tuple[int, int]]) -> dict[tuple[int, int], Values]:
        """Return what probes get alone. keys: probes and kinds of requests."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._alone]
        if missing:
            torch.set_num_threads(1)
            with LLM(self.path, batching="none", max_rolling_batch_prefill_tokens=2048,
                     num_kv_blocks=100, enable_lora=self.adapter is not None,
                     **self.options) as llm:  # fmt: skip
                for probe, kind in missing:
                    output = self._answer(llm, probe, self.prompts[probe], probe_params(kind))
                    self._alone[probe, kind] = values(output)
                    if kind == 0 and self.scores_like_answers:
                        self._check_scores(llm, probe)
        return self._alone

    def _answer(self, llm: LLM, probe: int, prompt: list[int], params: SamplingParams) -> Any:
        adapter = self.requests([self.adapts(probe)])
        return llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)[0]

    def _check_scores(self, llm: LLM, probe: int) -> None:
        """An answer that is scored as a prompt has the log-probabilities it was generated with."""
        answer = self._alone[probe, 0][0]
        prompt = self.prompts[probe] + [token for token, _ in answer]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        _, scores = values(self._answer(llm, probe, prompt, params), with_answer=False)
        scored = [entries[0] for entries in scores[-len(answer) :]]
        assert scored == [entries[0] for _, entries in answer]


def random_options(rng: random.Random) -> dict[str, Any]:
    """Return a strategy, its limits and its memory, of which `paged` often gets too little."""
    batching = rng.choice(BATCHING_NAMES)
    options: dict[str, Any] = {
        "batching": batching,
        "block_size": rng.choice((8, 16, 32)),
        "max_rolling_batch_prefill_tokens": rng.choice((16, 33, 64, 100, 256, 2048)),
        "max_rolling_batch_size": rng.choice((4, 12, 96)),
        "num_kv_blocks": 4000,
    }
    if batching == "dynamic":
        options |= {"max_batch_delay": 0, "batch_size": rng.choice((3, 16))}
    elif batching == "continuous":
        options |= {"kv_reservation": rng.choice(("pow2", "oracle"))}
    elif batching == "paged":
        options |= {"enable_prefix_caching": rng.random() < 0.6, "swap_space_gib": 0.1,
                    "preemption_mode": rng.choice(("recompute", "swap"))}  # fmt: skip
        if rng.random() < 0.6:
            options |= {"block_size": 4, "num_kv_blocks": rng.choice((29, 45)),
                        "max_rolling_batch_size": 12}  # fmt: skip
    return options


def run(
    subject: Subject, seed: int, counts: Counter[str], options: dict[str, Any] | None = None
) -> None:
    """Run one schedule. Raises AssertionError, with the seed, if a bit differs."""
    rng = random.Random(seed)
    options = options or random_options(rng)
    longest = options["num_kv_blocks"] * options["block_size"] - 4 * NUM_NEW
    fitting = [probe for probe, length in enumerate(subject.lengths) if length <= longest]
    num_threads = rng.choice((1, 1, 1, 2, 3))
    probes = [(rng.choice(fitting), rng.randrange(len(KINDS)))
              for _ in range(rng.randint(1, 4))]  # fmt: skip
    alone = subject.alone(probes)
    torch.set_num_threads(num_threads)
    prompts, params, adapted = [], [], []
    for probe, kind in probes:
        prompts.append(subject.prompts[probe])
        params.append(probe_params(kind))
        adapted.append(subject.adapts(probe))
    for _ in range(rng.choice((0, 1, 3, 7, 15, 30))):
        length = min(rng.choice((1, 3, 9, 30, 70, 150)), longest, max(subject.lengths))
        prompts.append([rng.randrange(3, VOCABULARY) for _ in range(length)])
        params.append(SamplingParams(max_tokens=rng.randint(1, 4 * NUM_NEW), ignore_eos=True,
                                     temperature=rng.choice((0, 1.0)),
                                     logprobs=rng.choice((None, 0, 5, 20))))  # fmt: skip
        adapted.append(rng.random() < 0.3)
    order = rng.sample(range(len(prompts)), len(prompts))
    settings = {**subject.options, **options, "enable_lora": subject.adapter is not None}
    with LLM(subject.path, **settings) as llm:
        for turn in range(2):
            outputs = llm.generate(
                [prompts[place] for place in order], [params[place] for place in order],
                lora_request=subject.requests([adapted[place] for place in order]),
                use_tqdm=False,
            )  # fmt: skip
            by_place = dict(zip(order, outputs, strict=True))
            for place, key in enumerate(probes):
                assert values(by_place[place]) == alone[key], (seed, subject, settings, key, turn)
        strategy = llm.llm_engine.strategy
        counts["preemptions"] += getattr(strategy, "num_preemptions", 0)
        counts["prefix hits"] += getattr(strategy, "num_prefix_hits", 0)
    counts["runs"] += 1
    counts["answers"] += 2 * len(probes)
    counts[str(options["batching"])] += 1


def make_subjects(
    folder: Path, wanted: Callable[[str, str], bool] = lambda model, dtype: True
) -> list[Subject]:
    """Return the models of MODELS in each dtype, llama in fp32 and bf16 also with an adapter."""
    subjects = []
    for model, changes in MODELS.items():
        path = save_tiny_model(model, folder / model, is_wide=True, changes={**ROOM, **changes})
        for name, options in DTYPES.items():
            if wanted(model, name):
                subjects.append(Subject(path, dict(options)))
                if model == "llama" and "quantize" not in options:
                    adapter = write_adapter(path, folder / "adapter")
                    subjects.append(Subject(path, dict(options), adapter))
    return subjects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; others follow")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        subjects = make_subjects(Path(folder))
        for seed in range(args.seed, sys.maxsize):
            is_over = time.monotonic() - start >= args.seconds
            if is_over and (not _unseen(counts) or counts["runs"] >= MOST_RUNS):
                break
            run(subjects[seed % len(subjects)], seed, counts)
    print(", ".join(f"{count} {name}" for name, count in counts.items()), "and not one bit differs")
    unseen = _unseen(counts)
    if unseen:
        print(f"not seen in {counts['runs']} runs: {', '.join(unseen)}", file=sys.stderr)
    return 1 if unseen else 0


def _unseen(counts: Counter[str]) -> list[str]:
    return [name for name in ("preemptions", "prefix hits", *BATCHING_NAMES) if not counts[name]]


if __name__ == "__main__":
    sys.exit(main())
