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
          The ideal is what the measured costs of steps allow with the best number of drafts. Each
          user asks four times, for answers of different lengths, as under a load: else the slowest
          answer of all decides, and only steps without drafts read several prompts at once
edits     the same text with another name, by --method: also answers known beforehand, which the
          engine's steps return in place of what the model samples
quotes    the third turn of a chat, which quotes the others, in the same way
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.cpu.machine import heading
from benchmarks.cpu.peer_python import versions
from benchmarks.speculation.cases import (
    EDITS,
    LINE,
    QUOTES,
    REFRAIN,
    Gain,
    Text,
    names_of,
    prompts_of,
    turns,
)
from benchmarks.speculation.chart import draw, ideal_gain
from benchmarks.speculation.given import Answers, GivenExecutor, GivenProposer
from benchmarks.speculation.models import model_of, write_models
from benchmarks.speculation.peers import llama_cpp_version, of_llama_cpp, of_vllm
from engine import LLM, SamplingParams
from engine.offline.prompts import Prompt
from engine.speculation.start import Speculative
from strategies.speculation.costs import StepCosts
from strategies.speculation.policy import Policy
from strategies.speculation.proposer import Proposer
from strategies.speculation.speculation import Speculation

Params = SamplingParams | Sequence[SamplingParams]
"""Of all prompts, or of each."""
NUM_ASKED = 4
"""Requests of each user, one after the other, where drafts are right by chance."""


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
        self._tokenizer = AutoTokenizer.from_pretrained(model)
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
        rounds = self._rounds(NUM_ASKED * users, "{} {}")
        tokens, lengths = self._arguments.tokens, random.Random(0)
        params = [self._params(0, lengths.randint(tokens // 2, tokens * 3 // 2)) for _ in rounds[0]]
        prompts = list(chain(*rounds))
        outputs = self._llm.generate(prompts, params * len(rounds), use_tqdm=False)
        answers: Answers = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in outputs}
        proposer = GivenProposer(answers, acceptance, self._llm.llm_engine.facts.vocab_size)
        ideal = ideal_gain(self.costs, users, acceptance, self._arguments.drafts)
        with self._at_once(users):
            return self._gain(f"given {acceptance}", users, rounds, params, proposer, ideal)

    @contextmanager
    def _at_once(self, users: int) -> Iterator[None]:
        """Answer no more requests at once. The next one begins when one of them ends."""
        strategy = self._llm.llm_engine.strategy
        limits, strategy.limits = strategy.limits, replace(strategy.limits, max_sequences=users)
        try:
            yield
        finally:
            strategy.limits = limits

    def of_text(self, what: str, users: int, text: Text) -> Gain:
        """Return the gain on a text that repeats its prompt, as the answer of any model."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        answers: dict[tuple[int, ...], list[int]] = {}
        rounds: list[list[Prompt]] = []
        for turn in turns(self._arguments.rounds):
            rounds.append([])
            for name in names_of(users, turn):
                prompt = encode(text.prompt.format(name))
                answers[tuple(prompt)] = encode(text.answer.format(name))
                rounds[-1].append({"prompt_token_ids": prompt})
        engine = self._llm.llm_engine
        executor = engine.executor
        engine.executor = GivenExecutor(executor, answers)
        params = self._params(0, min(self._arguments.tokens, *map(len, answers.values())))
        try:
            return self._gain(what, users, rounds, params, self._own)
        finally:
            engine.executor = executor

    def repeats(self, users: int) -> Gain:
        return self._gain(
            "repeats", users, self._rounds(users, REFRAIN), self._params(0), self._own
        )

    def text(self, users: int) -> Gain:
        return self._gain("text", users, self._rounds(users, LINE), self._params(0), self._own)

    def right(self, users: int) -> Gain:
        ideal = ideal_gain(self.costs, users, 1.0, self._arguments.drafts)
        rounds = self._rounds(users, LINE)
        return self._gain("right", users, rounds, self._params(0), self._own, ideal)

    def plain(self, users: int) -> Gain:
        return self._gain("plain", users, self._rounds(users, LINE), self._params(1), self._own)

    def _rounds(self, users: int, form: str) -> list[list[Prompt]]:
        """Return the prompts of each round, and before these those of a first run."""
        return [[*prompts_of(users, form, turn)] for turn in turns(self._arguments.rounds)]

    def _gain(
        self,
        what: str,
        users: int,
        prompts: Sequence[list[Prompt]],
        params: Params,
        proposer: Proposer,
        ideal: float | None = None,
    ) -> Gain:
        self._speculation.policy = (
            Policy() if self._arguments.always else Policy(self.costs, self._clock)
        )
        first, *rounds = prompts
        self._run(first, params, proposer)
        counts, before = self._speculation.counts, asdict(self._speculation.counts)
        ratios, seconds, num_tokens, num_steps = [], [], 0, 0
        for number, asked in enumerate(rounds):
            # In turns, so that a machine that becomes slower favours neither.
            order = (None, proposer) if number % 2 == 0 else (proposer, None)
            runs = {each: self._run(asked, params, each) for each in order}
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
        self, prompts: list[Prompt], params: Params, proposer: Proposer | None
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

    def _params(self, temperature: float, num_tokens: int | None = None) -> SamplingParams:
        count = num_tokens or self._arguments.tokens
        return SamplingParams(temperature=temperature, seed=1, max_tokens=count, ignore_eos=True)


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
        else:
            yield bench.of_text("edits", users, EDITS)
            yield bench.of_text("quotes", users, QUOTES)
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
