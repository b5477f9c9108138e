"""Measure what speculation gains: for given shares of right drafts, and for two kinds of text.

    python -m benchmarks.speculation models/demo
    python -m benchmarks.speculation llama-88m --dtype bf16 --users 1,8 --given 0.8 --wall
    python -m benchmarks.speculation llama-3.1-8b --dtype bf16 --users 1,4  # on a GPU
    python -m benchmarks.speculation models/demo --draft-model draft --always
    python -m benchmarks.speculation llama-88m --dtype bf16 --draft-layers 2 --users 1,4,16
    python -m benchmarks.speculation models/demo --wall --peer-python VLLM/bin/python
    python -m benchmarks.speculation models/demo --wall --llama-server PATH/llama-server
    python -m benchmarks.speculation --results FILE --draw docs/speculation.svg

In one process and on the same engine, each round answers requests of its own, without drafts and
with them; the answers must be equal. A gain is the median of the rounds' ratios, with the lowest
and the highest. By default, times on a CPU are the CPU time of one thread, which other processes
disturb less, also those of the steps' costs, which are measured first.

given     a draft is right with this probability, by construction: answers are known beforehand.
          The ideal is what the measured costs of steps allow with the best number of drafts
repeats   greedy answers to a refrain, by the proposer that --method names, or by a draft model
text      greedy answers to text that does not repeat, by a draft model
plain     answers sampled at temperature 1: in text is nothing to gain, and nothing must be lost
right     greedy answers by a draft model that is always right: the first layers of the model, whose
          other layers take as long as before and add nothing (--draft-layers; nothing else is run)
vLLM      `repeats` by vLLM with n-grams, beside vLLM without them. Each has a process of its own
llama.cpp `repeats` by llama.cpp's server with n-grams, beside the server without them
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cpu.machine import heading
from benchmarks.cpu.peer_python import versions
from benchmarks.speculation.cases import LINE, REFRAIN, Gain, prompts_of, turns
from benchmarks.speculation.chart import draw, ideal_gain
from benchmarks.speculation.models import model_of, write_models
from benchmarks.speculation.peers import llama_cpp_version, of_llama_cpp, of_vllm
from core.sequence import Sequence as TokenSequence
from engine import LLM, SamplingParams
from engine.speculation.start import Speculative
from strategies.speculation.costs import StepCosts
from strategies.speculation.policy import Policy
from strategies.speculation.proposer import Proposal, Proposer
from strategies.speculation.speculation import Speculation

Answers = Mapping[tuple[int, ...], Sequence[int]]


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


class Bench:
    def __init__(
        self, arguments: argparse.Namespace, model: Path, draft_model: str | Path | None
    ) -> None:
        self._arguments = arguments
        self._clock: Callable[[], float] = (
            time.perf_counter if arguments.wall or _gpu() else time.process_time
        )
        self._llm = LLM(
            model,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            load_format=arguments.load_format,
            speculative_method=None if draft_model else arguments.method,
            speculative_draft_model=draft_model and str(draft_model),
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

    def right(self, users: int) -> Gain:
        ideal = ideal_gain(self.costs, users, 1.0, self._arguments.drafts)
        return self._gain("right", users, LINE, 0, self._own, ideal)

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
        self._speculation.policy = (
            Policy() if self._arguments.always else Policy(self.costs, self._clock)
        )
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
    gains: list[Gain] = []
    with tempfile.TemporaryDirectory() as folder:
        model, draft_model = model_of(parsed.model, Path(folder)), parsed.draft_model
        if parsed.draft_layers:
            model, draft_model = write_models(model, parsed.draft_layers, Path(folder))
        bench = Bench(parsed, model, draft_model)
        for gain in _gains(bench, parsed, model):
            print(gain, flush=True)
            gains.append(gain)
    paths = ("out", "results", "draw")
    return {
        **heading("benchmarks.speculation", arguments),
        "gpu": _gpu(),
        "versions": _versions(parsed),
        "arguments": {name: value for name, value in vars(parsed).items() if name not in paths},
        "costs": asdict(bench.costs),
        "gains": [asdict(gain) for gain in gains],
    }


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _versions(parsed: argparse.Namespace) -> dict[str, str]:
    """Return those of the other systems."""
    found = versions(parsed.peer_python) if parsed.peer_python else {}
    if parsed.llama_server:
        found["llama.cpp"] = llama_cpp_version(parsed.llama_server)
    return found


def _gains(bench: Bench, parsed: argparse.Namespace, model: Path) -> Iterator[Gain]:
    if parsed.draft_layers:
        yield from map(bench.right, parsed.users)
        return
    for users in parsed.users:
        for share in parsed.given:
            yield bench.given(users, share)
        yield bench.repeats(users)
        if parsed.draft_model:
            yield bench.text(users)
        yield bench.plain(users)
    if parsed.peer_python:
        yield from of_vllm(parsed, model)
    if parsed.llama_server:
        yield from of_llama_cpp(parsed, model)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="models/demo",
        help="directory, or a shape of benchmarks.cpu or benchmarks.gpu, with random weights",
    )
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram")
    parser.add_argument("--draft-model", default=None, help="directory; in place of --method")
    parser.add_argument(
        "--draft-layers", type=int, default=0, help="draft with so many layers, which are right"
    )
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
    parser.add_argument(
        "--llama-server", default=None, help="llama.cpp's server, timed by the wall (--dtype too)"
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
    return lambda text: [kind(part) for part in text.split(",") if part]


if __name__ == "__main__":
    raise SystemExit(main())
