"""Measure what speculation gains: for given shares of right drafts, and for two kinds of text.

    python -m benchmarks.speculation models/demo
    python -m benchmarks.speculation DIR --dtype bf16 --users 1,8 --given 0.8 --wall
    python -m benchmarks.speculation models/demo --draft-model draft --always
    python -m benchmarks.speculation models/demo --wall --peer-python VLLM/bin/python
    python -m benchmarks.speculation --results FILE --draw docs/speculation.svg

In one process and on the same engine, each round answers requests of its own, without drafts and
with them; the answers must be equal. A gain is the median of the rounds' ratios, with the lowest
and the highest. By default, times are the CPU time of one thread, which other processes disturb
less, also those of the steps' costs, which are measured first.

given     a draft is right with this probability, by construction: answers are known beforehand.
          The ideal is what the measured costs of steps allow with the best number of drafts
repeats   greedy answers to a refrain, by the proposer that --method names, or by a draft model
text      greedy answers to text that does not repeat, by a draft model
plain     answers sampled at temperature 1: in text is nothing to gain, and nothing must be lost
vLLM      `repeats` by vLLM with n-grams, beside vLLM without them. Each has a process of its own
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cpu.machine import describe_machine
from benchmarks.cpu.peer_python import versions
from benchmarks.cpu.work import DTYPES
from benchmarks.speculation_chart import draw, ideal_gain
from core.sequence import Sequence as TokenSequence
from engine import LLM, SamplingParams
from engine.speculation.start import Speculative
from strategies.speculation.costs import StepCosts
from strategies.speculation.policy import Policy
from strategies.speculation.proposer import Proposal, Proposer
from strategies.speculation.speculation import Speculation

ROOT = Path(__file__).parents[1]
REFRAIN, LINE = "{1}: {0}\n" * 6, "{1}: {0}\n"
"""Prompts: a line and a name, six times or once."""
Answers = Mapping[tuple[int, ...], Sequence[int]]
LINES = ("O Romeo, Romeo, wherefore art thou Romeo?", "Now is the winter of our discontent.",
         "Friends, Romans, countrymen, lend me your ears.")  # fmt: skip


class GivenProposer(Proposer):
    """Proposes the tokens of known answers, each right with the same probability."""

    def __init__(self, answers: Answers, acceptance: float, vocab_size: int) -> None:
        """answers: by prompt."""
        self.answers, self.acceptance, self.vocab_size = answers, acceptance, vocab_size
        self.rng = random.Random(0)

    def begin(self, sequence: TokenSequence) -> GivenLookup:
        return GivenLookup(self, sequence)


class GivenLookup:
    def __init__(self, proposer: GivenProposer, sequence: TokenSequence) -> None:
        self._proposer = proposer
        self._tokens, self._start = sequence.token_ids, sequence.num_prompt_tokens
        self._answer = proposer.answers[tuple(self._tokens[: self._start])]

    def propose(self, count: int) -> Proposal:
        given, start = self._proposer, len(self._tokens) - self._start
        drafts = [
            token if given.rng.random() < given.acceptance else (token + 1) % given.vocab_size
            for token in self._answer[start : start + count]
        ]
        return Proposal(tuple(drafts), match=16)

    def end(self) -> None: ...


@dataclass(frozen=True)
class Gain:
    what: str
    users: int
    tokens_per_s: float
    """Without drafts."""
    gain: float
    lowest: float
    highest: float
    tokens_per_step: float
    """Of a sequence, with drafts."""
    accepted: float
    """The share of drafts."""
    ideal: float | None = None


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._clock: Callable[[], float] = (
            time.perf_counter if arguments.wall else time.process_time
        )
        self._llm = LLM(
            arguments.model,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            load_format=arguments.load_format,
            speculative_method=None if arguments.draft_model else arguments.method,
            speculative_draft_model=arguments.draft_model,
            num_speculative_tokens=arguments.drafts,
            speculation="always",  # until the costs are measured
            max_rolling_batch_size=max(arguments.users),
            enable_prefix_caching=False,  # or the second run of a round computes fewer prompts
        )
        engine = self._llm.llm_engine
        extension = engine.strategy.extension
        assert isinstance(extension, Speculation)
        assert extension.proposer is not None
        self._speculation, self._own = extension, extension.proposer
        feature = Speculative.of(engine.features)
        assert feature is not None
        self.costs: StepCosts = feature.measured_costs(
            engine.executor, engine.facts.max_model_len, engine.facts.vocab_size, self._clock
        )

    def given(self, users: int, acceptance: float) -> Gain:
        form = "{} {}"
        prompts = [text for turn in self._turns for text in prompts_of(users, form, turn)]
        outputs = self._llm.generate(prompts, self._params(temperature=0), use_tqdm=False)
        answers = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in outputs}
        proposer = GivenProposer(answers, acceptance, self._llm.llm_engine.facts.vocab_size)
        ideal = ideal_gain(self.costs, users, acceptance, self._arguments.drafts)
        return self._gain(f"given {acceptance}", users, form, 0, proposer, ideal)

    def repeats(self, users: int) -> Gain:
        return self._gain("repeats", users, REFRAIN, 0, self._own)

    def text(self, users: int) -> Gain:
        return self._gain("text", users, LINE, 0, self._own)

    def plain(self, users: int) -> Gain:
        return self._gain("plain", users, LINE, 1, self._own)

    @property
    def _turns(self) -> range:
        return turns(self._arguments.rounds)

    def _gain(
        self,
        what: str,
        users: int,
        form: str,
        temperature: float,
        proposer: Proposer,
        ideal: float | None = None,
    ) -> Gain:
        self._speculation.policy = Policy() if self._arguments.always else Policy(self.costs)
        params = self._params(temperature)
        first, *rounds = (prompts_of(users, form, turn) for turn in self._turns)
        self._run(first, params, proposer)
        counts, before = self._speculation.counts, asdict(self._speculation.counts)
        ratios, seconds, num_tokens, num_steps = [], [], 0, 0
        for number, prompts in enumerate(rounds):
            # In turns, so that a machine that becomes slower favours neither.
            order = (None, proposer) if number % 2 == 0 else (proposer, None)
            runs = {each: self._run(prompts, params, each) for each in order}
            plain, expected, _ = runs[None]
            drafting, answers, steps = runs[proposer]
            assert answers == expected, "an answer with drafts differs"
            ratios.append(plain / drafting)
            seconds.append(plain)
            num_tokens = sum(map(len, answers))
            num_steps += steps
        num_drafts = counts.num_draft_tokens - before["num_draft_tokens"]
        num_accepted = counts.num_accepted - sum(before["accepted"])
        return Gain(
            what,
            users,
            num_tokens / median(seconds),
            median(ratios),
            min(ratios),
            max(ratios),
            num_tokens * len(rounds) / users / num_steps,
            num_accepted / max(1, num_drafts),
            ideal,
        )

    def _run(
        self, prompts: list[str], params: SamplingParams, proposer: Proposer | None
    ) -> tuple[float, list[list[int]], int]:
        """Return the seconds, the answers and the steps. proposer: None for no drafts."""
        engine = self._llm.llm_engine
        engine.strategy.extension = self._speculation if proposer is not None else None
        if proposer is not None:
            self._speculation.proposer = proposer
        num_steps, begin = engine.num_steps, self._clock()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = self._clock() - begin
        answers = [output.outputs[0].token_ids for output in outputs]
        return seconds, answers, engine.num_steps - num_steps

    def _params(self, temperature: float) -> SamplingParams:
        return SamplingParams(
            temperature=temperature, seed=1, max_tokens=self._arguments.tokens, ignore_eos=True
        )


def turns(rounds: int) -> range:
    """Return numbers that tell the requests of the rounds, and those before the first, apart.

    A proposer that remembers answers must not know those of a round from the one before.
    """
    return range(rounds + 1)


def prompts_of(users: int, form: str, turn: int) -> list[str]:
    numbers = range(turn * users, (turn + 1) * users)
    return [form.format(LINES[number % len(LINES)], f"Lord {number}") for number in numbers]


def of_vllm(parsed: argparse.Namespace) -> list[Gain]:
    """Return what vLLM gains, for each number of users."""
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": parsed.drafts,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 16,
    }
    plain, drafting = _run_vllm(parsed, None), _run_vllm(parsed, drafts)
    gains: list[Gain] = []
    for users, without, found in zip(parsed.users, plain, drafting, strict=True):
        pairs = zip(without["seconds"], found["seconds"], strict=True)
        ratios = [seconds / others for seconds, others in pairs]
        num_drafts, num_accepted = found["counts"]
        num_tokens = users * parsed.tokens
        all_tokens = num_tokens * parsed.rounds
        gains.append(
            Gain(
                "vLLM",
                users,
                num_tokens / median(without["seconds"]),
                median(ratios),
                min(ratios),
                max(ratios),
                all_tokens / max(1, all_tokens - num_accepted),
                num_accepted / max(1, num_drafts),
            )
        )
    return gains


def _run_vllm(parsed: argparse.Namespace, drafts: Mapping[str, Any] | None) -> list[Any]:
    """Return what `benchmarks.speculation_peer` prints. Raises CalledProcessError."""
    options = {
        "model": parsed.model,
        "dtype": DTYPES.get(parsed.dtype, parsed.dtype),
        "max_model_len": 1024,
        "max_num_seqs": max(parsed.users),
        "enable_prefix_caching": False,
        "speculative_config": drafts,
    }
    cases = [
        [prompts_of(users, REFRAIN, turn) for turn in turns(parsed.rounds)]
        for users in parsed.users
    ]
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(parsed.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as in our process
        **({"LD_PRELOAD": parsed.preload} if parsed.preload else {}),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"options": options, "tokens": parsed.tokens, "cases": cases}, file)
        file.flush()
        command = [parsed.peer_python, "-m", "benchmarks.speculation_peer", file.name]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.results is not None:
        found = json.loads(parsed.results.read_text())
    else:
        found = _measure(parsed, sys.argv[1:] if arguments is None else arguments)
    if parsed.out is not None:
        parsed.out.write_text(json.dumps(found, indent=1) + "\n")
    if parsed.draw is not None:
        draw(found, parsed.draw)
    return 0


def _measure(parsed: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Print the gains, and return what `--out` writes."""
    torch.set_num_threads(parsed.threads)
    bench = Bench(parsed)
    gains: list[Gain] = []
    for users in parsed.users:
        for gain in (
            *(bench.given(users, share) for share in parsed.given),
            bench.repeats(users),
            *([bench.text(users)] if parsed.draft_model else []),
            bench.plain(users),
        ):
            print(_line(gain), flush=True)
            gains.append(gain)
    for gain in of_vllm(parsed) if parsed.peer_python else []:
        print(_line(gain), flush=True)
        gains.append(gain)
    paths = ("out", "results", "draw")
    return {
        "command": f"python -m benchmarks.speculation {shlex.join(arguments)}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": versions(parsed.peer_python) if parsed.peer_python else {},
        "arguments": {name: value for name, value in vars(parsed).items() if name not in paths},
        "costs": asdict(bench.costs),
        "gains": [asdict(gain) for gain in gains],
    }


def _line(gain: Gain) -> str:
    ideal = "" if gain.ideal is None else f", ideal {gain.ideal:.2f}"
    return (
        f"{gain.what:10} {gain.users:3} users: {gain.tokens_per_s:8,.0f} tokens/s, "
        f"{gain.gain:.2f}x ({gain.lowest:.2f} to {gain.highest:.2f}){ideal}; "
        f"{gain.tokens_per_step:.2f} tokens a step, {gain.accepted:.0%} accepted"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default="models/demo")
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram")
    parser.add_argument("--draft-model", default=None, help="directory; in place of --method")
    parser.add_argument("--always", action="store_true", help="draft also where it does not pay")
    parser.add_argument("--drafts", type=int, default=5, help="option.num_speculative_tokens")
    parser.add_argument("--users", type=_numbers(int), default=[1, 4, 16, 50])
    parser.add_argument("--given", type=_numbers(float), default=[0.2, 0.4, 0.6, 0.8, 0.9])
    parser.add_argument("--tokens", type=int, default=120, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="measure wall time")
    parser.add_argument(
        "--preload", default="", help="libraries to preload into vLLM, which recommends libiomp5"
    )
    parser.add_argument(
        "--peer-python", default=None, help="of an environment with vLLM, timed by the wall"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the results")
    parser.add_argument(
        "--draw", type=Path, default=None, help="SVG file for curves of the results"
    )
    parser.add_argument(
        "--results", type=Path, default=None, help="draw those of this JSON file; measure nothing"
    )
    return parser


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
