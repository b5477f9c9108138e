"""A fuzz of the strategies: random workloads against a reference, checked after every step.

    python -m tests.strategies.fuzz --seconds 600 --seed 0

A run is made of one seed: a strategy, its memory and limits, requests of all kinds, clients that
leave, and faults: steps that fail, run out of memory or cannot sample, and exceptions
at a random line of the strategy's own code. It runs the engine with the fake executor, which reads
each prefix through the block tables. Checked are

* the plan: its limits, and that no block is written that another sequence reads;
* the memory: `check_integrity` after every step, and at the end no held block;
* each answer: its tokens are a prefix of the reference's, and it ends exactly once; the whole
  request ends at once if it fails, and it fails only by a fault that was injected;
* scores of the prompt, which come once and in order, and grammars, which see each token once;
* that nothing starves: nobody overtakes a waiting request of a higher rank, and all work ends.

If `PagedMemory._replace` replaces a duplicate block in one table only, as it once did, the seeds
135, 170, 347, 400 and 730 find it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import msgspec

import strategies
from core.adapter import Adapted, Adapter
from core.beams import BeamSearch
from core.configuration.kv_layout import CacheGroup, KVLayout
from core.configuration.strategy_table import BATCHING_NAMES, Batching
from core.errors import GenerationError, RequestError
from core.images import Images, PromptImage
from core.part import Feature, Part
from core.plan import Chunk, StepPlan
from core.request import Request
from core.sampling import Finish, Sampled, SamplingParams, SequenceFailure
from core.structured_outputs import StructuredOutputsParams
from engine.engine import MAX_FAILED_STEPS, Engine
from engine.sampling.ngrams import NgramLimits
from engine.scores.part import PromptScores
from strategies.base import Strategy
from strategies.beam_group import BeamSearches
from strategies.memory.blocks import PagedMemory
from strategies.memory.states import StateMemory
from tests.engine.serve.serving import FACTS
from tests.strategies.fakes import (
    EOS,
    VOCABULARY,
    FakeExecutor,
    check_plan,
    next_candidates,
    next_token,
    strategy_of,
)

SEEDS_OF_DUPLICATES = (135, 170, 347, 400, 730)
BLOCK_SIZE = 4
Groups = tuple[CacheGroup, ...]
ONE_GROUP = (CacheGroup(BLOCK_SIZE),)
SEVERAL_GROUPS: dict[str, Groups] = {
    "full, window 5": (CacheGroup(4), CacheGroup(2, 5)),
    "window 7": (CacheGroup(2, 7),),
    "full, windows 6, 11": (CacheGroup(8), CacheGroup(2, 6), CacheGroup(4, 11), CacheGroup(2, 6)),
    "two full, window 1": (CacheGroup(4), CacheGroup(2), CacheGroup(2, 1)),
}
IMAGE_TOKEN = 1
MAX_STEPS = 4_000
STRATEGIES = str(Path(strategies.__file__).parent)
ADAPTERS = {name: Adapter(name, "", 8, slot, "", slot + 1) for slot, name in enumerate("AB")}


class Injected(Exception):
    """An error that the fuzz raises on purpose."""


class Saboteur:
    """Raises at a random line of a random function of the strategies, again and again.

    A function that rarely runs, such as one that swaps, is as likely as one that always does.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._functions: dict[str, None] = {}
        """Functions that have run."""
        self._target = ""
        self._num_lines = 0
        """Lines of the target that may still run."""
        self._num_calls = rng.randint(3, 40)
        """Calls to leave alone."""
        self.num_raised = 0

    def call(self, function: Callable[[], Any]) -> Any:
        self._num_calls -= 1
        if self._num_calls == 0:
            self._target = self._rng.choice([*self._functions])
            self._num_lines = self._rng.randint(0, 15)
        elif self._num_calls < -20:
            self._rest()  # that function no longer runs
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(None)

    def _rest(self) -> None:
        self._target, self._num_calls = "", self._rng.randint(1, 20)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        # A `Feature.part` runs before the strategy gets the request.
        is_strategy = frame.f_code.co_filename.startswith(STRATEGIES)
        if not is_strategy or frame.f_code.co_name == "part":
            return None
        self._functions[frame.f_code.co_qualname] = None
        return self._line if frame.f_code.co_qualname == self._target else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._num_lines -= 1
            if self._num_lines < 0 and not _is_for_observer(frame):
                self.num_raised += 1
                self._rest()
                raise Injected(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        return self._line


def _is_for_observer(frame: FrameType | None) -> bool:
    """Whether an observer has called the strategy. Nobody contains its exceptions."""
    while frame is not None and frame.f_code.co_filename.startswith(STRATEGIES):
        frame = frame.f_back
    return frame is not None and Path(frame.f_code.co_filename).parent.name == "observers"


class Executor(FakeExecutor):
    """The fake executor with images, scores, grammars and faults."""

    def __init__(
        self, layout: KVLayout, rng: random.Random, rates: dict[str, float], counts: Counter[str]
    ) -> None:
        super().__init__(layout)
        self._rng = rng
        self.rates = rates
        self._counts = counts
        self._consumed: Counter[int] = Counter()
        """Tokens that the grammar of each sequence has seen."""
        self._num_failed = 0
        self.strategy: Strategy

    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> Step:
        self._check(plan)
        self._counts["chunks"] += len(plan.chunks)
        for kind, error in (("no memory", MemoryError), ("lost submits", Injected)):
            if self._strikes(kind):
                # Some layers have run already.
                self.states |= dict.fromkeys(written_slots(plan), 0)
                raise error("injected")
        result = dict(self.run(plan))
        for id in result:
            if self._strikes("failed sequences", counts=False):
                result[id] = SequenceFailure("injected")
        between_tokens()
        return Step(self, plan, result, {slot: self.states[slot] for slot in written_slots(plan)})

    def spoil(self, states: dict[int, int]) -> None:
        """Let these states be wrong, by slot, unless a later step has overwritten them."""
        self.states |= {slot: 0 for slot, state in states.items() if self.states[slot] == state}

    def _check(self, plan: StepPlan) -> None:
        """Check a plan, without exceptions in the strategy's code that the check calls."""
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            check_plan(self.strategy, plan)
        finally:
            sys.settrace(trace)

    def strikes_wait(self) -> bool:
        is_lost = self._strikes("lost steps")
        self._num_failed *= is_lost
        return is_lost

    def _strikes(self, kind: str, *, counts: bool = True) -> bool:
        """Whether a fault of this kind happens now; never so many that the engine gives up."""
        strikes = self._rng.random() < self.rates.get(kind, 0)
        if counts and strikes:
            strikes = self._num_failed < MAX_FAILED_STEPS - 1
            self._num_failed += strikes
        self._counts[kind] += strikes
        return strikes

    def digest(self, sequence: Any, prefix: Any) -> int:
        part = Images.of(sequence.parts)
        images = part.within(0, len(prefix)) if part is not None else ()
        digests = tuple(image.digest for image in images)
        return hash((sequence.prefix_salt, digests, tuple(prefix)))

    def sample(self, chunk: Chunk, prefix: Any) -> Any:
        sequence = chunk.sequence
        assert sequence.chunk_end(chunk.end) == chunk.end, "an image is cut"
        sampled = super().sample(chunk, prefix)
        if sequence.params.structured_outputs is None or not chunk.samples_token:
            return sampled
        assert not chunk.ends_in_flight, "the grammar does not know the newest token"
        assert self._consumed[sequence.id] == sequence.num_generated_tokens
        self._consumed[sequence.id] += 1
        is_complete = self._consumed[sequence.id] == grammar_length(sequence.params)
        return Sampled(
            sampled.token_ids, sampled.logprobs, (), sampled.prompt_logprobs, is_complete
        )


@dataclass
class Step:
    executor: Executor
    plan: StepPlan
    result: dict[int, Any]
    states: dict[int, int]
    """The states that the step has written, by slot."""

    def wait(self) -> dict[int, Any]:
        if self.executor.strikes_wait():
            self.executor.spoil(self.states)
            raise Injected("injected")
        return self.result


def written_slots(plan: StepPlan) -> Iterator[int]:
    """Yield the slots of states that a plan writes."""
    for chunk in plan.chunks:
        slots = (*chunk.state.written, *(slot for _, slot in chunk.state.kept))
        yield from (slot for slot in slots if slot >= 0)


class Constrained(Part):
    needs_newest = True


class Grammars(Feature):
    """Stands for the engine's compiled grammars, which the fake executor does without."""

    fields = ("structured_outputs",)

    def part(self, params: SamplingParams, num_prompt_tokens: int) -> Part | None:
        return Constrained() if params.structured_outputs is not None else None


def grammar_length(params: SamplingParams) -> int:
    """Return after how many tokens the fake grammar is complete."""
    assert params.structured_outputs is not None
    assert params.structured_outputs.regex is not None
    return len(params.structured_outputs.regex)


@dataclass
class Client:
    """A request, and what its client has got."""

    at: float
    prompt: list[int]
    params: SamplingParams
    adapter: str
    images: tuple[PromptImage, ...]
    leaves_at: float
    """A deadline, or a client that leaves."""
    leaves_in_step: bool
    index: int | None
    """The answer to abort; None: all."""
    id: int = -1
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    open: set[int] = field(default_factory=set[int])
    finish: dict[int, Finish] = field(default_factory=dict[int, Finish])
    scores: list[int] = field(default_factory=list[int])

    def parts(self) -> tuple[Part, ...]:
        """Return the parts that the server would make."""
        adapted = [Adapted(ADAPTERS[self.adapter])] if self.adapter else []
        return (*adapted, *([Images(self.images)] if self.images else []))

    def expected(self) -> list[tuple[list[int], Finish]]:
        """Return each answer of the reference, which computes one after the other."""
        request = Request(self.id, self.prompt, self.params, eos_token_ids=[EOS])
        if self.params.beam_width:
            return beams(request)
        return [answer(sequence) for sequence in request.sequences]


def answer(sequence: Any) -> tuple[list[int], Finish]:
    while sequence.finish is None:
        token = next_token(sequence.id, sequence.token_ids)
        form = sequence.params.structured_outputs
        is_complete = form is not None and sequence.num_generated_tokens + 1 == grammar_length(
            sequence.params
        )
        sequence.append(Sampled((token,), (-0.5,), ends_answer=is_complete))
    return sequence.token_ids[sequence.num_prompt_tokens :], sequence.finish


def beams(request: Request) -> list[tuple[list[int], Finish]]:
    [sequence] = request.sequences
    search = BeamSearch(request.params, sequence.stop_token_ids)
    while not search.is_done:
        prefixes = ([*sequence.token_ids, *beam.token_ids] for beam in search.beams)
        search.advance([next_candidates(sequence, prefix) for prefix in prefixes])
    best = search.hypotheses[: request.params.n]
    return [(list(hypothesis.token_ids), hypothesis.finish) for hypothesis in best]


class Run:
    """One seed."""

    has_states: ClassVar[bool] = False
    num_spare_states: ClassVar[int] = 0

    def __init__(self, seed: int, counts: Counter[str], groups: Groups = ONE_GROUP) -> None:
        self.rng = rng = random.Random(seed)
        self.counts = counts
        self.focus = rng.choice(("mixed", "mixed", "duplicates", "faults", "exceptions"))
        is_duplicates = self.focus == "duplicates"
        batching = "paged" if is_duplicates or rng.random() < 0.4 else rng.choice(BATCHING_NAMES)
        self.batching: Batching = batching
        self.max_model_len = rng.choice((24, 36, 48))
        self.settings: dict[str, Any] = {
            "num_blocks": self.max_model_len // BLOCK_SIZE + rng.choice((0, 1, 3, 8, 20)),
            "max_model_len": self.max_model_len,
            "max_step_tokens": rng.choice((3, 7, 16, 40)),
            "max_sequences": rng.randint(1, 8),
            "max_delay_s": rng.choice((0.0, 3.0)),
            "kv_reservation": rng.choice(("max", "pow2", "oracle")),
            "enable_prefix_caching": rng.random() < 0.8,
            "preemption_mode": rng.choice(("recompute", "swap", "auto")),
            "num_swap_blocks": rng.choice((0, 5, 40)),
        }
        if is_duplicates or rng.random() < 0.5:
            self.settings |= {
                "num_blocks": self.max_model_len // BLOCK_SIZE + rng.randint(0, 6),
                "max_step_tokens": rng.choice((16, 40, 80)),
                "max_sequences": rng.randint(4, 8),
                "enable_prefix_caching": is_duplicates or rng.random() < 0.5,
                "preemption_mode": rng.choice(("swap", "auto")),
                "num_swap_blocks": 40,
            }
        layout = KVLayout(groups, step_tokens=2 * self.settings["max_step_tokens"])
        more = layout.blocks_for(self.max_model_len) - self.max_model_len // BLOCK_SIZE
        self.settings |= {"layout": layout, "num_blocks": self.settings["num_blocks"] + more}
        kinds = ("no memory", "lost submits", "lost steps", "failed sequences")
        rate = {"faults": rng.choice((0.02, 0.1)), "exceptions": rng.choice((0.0, 0.02))}.get(
            self.focus, 0.0
        )
        rates = dict.fromkeys(kinds, rate)
        if self.has_states:
            num_running = max(self.settings["max_sequences"], rng.choice((0, 3, 6)))
            self.settings["num_states"] = num_running + self.num_spare_states
            self.settings["num_spare_states"] = self.num_spare_states
            self.settings["num_swap_states"] = rng.choice((0, 2, 40))
            if self.settings["enable_prefix_caching"] and layout.keeps_all:
                self.settings["num_checkpoints"] = rng.choice((0, 1, 2, 5, 40))
                self.settings["num_host_checkpoints"] = rng.choice((0, 1, 3, 40))
        self.saboteur = Saboteur(rng) if self.focus == "exceptions" else None
        self.strategy = strategy_of(batching, **self.settings)
        self.executor = Executor(layout, rng, rates, counts)
        self.executor.strategy = self.strategy
        facts = msgspec.structs.replace(
            FACTS, max_model_len=self.max_model_len, vocab_size=VOCABULARY, takes_images=True
        )
        self.engine = Engine(
            self.strategy,
            self.executor,
            facts,
            overlaps=is_duplicates or rng.random() < 0.5,
            features=(PromptScores(), Grammars(), NgramLimits(), BeamSearches()),
        )
        self.now = rng.choice((0.0, 1e6))
        self.todo = sorted((self._client() for _ in range(rng.randint(1, 14))), key=lambda c: c.at)
        self.clients: dict[int, Client] = {}

    def _client(self) -> Client:
        rng = self.rng
        shared = self.focus == "duplicates" or rng.random() < 0.4
        lengths = (13, 14, 17, 18) if shared else range(1, self.max_model_len)
        length = min(rng.choice(lengths), self.max_model_len - 2)
        seed = random.Random(rng.choice((0, 0, 1)) if shared else rng.random())
        prompt = [seed.randrange(2, VOCABULARY) for _ in range(length)]
        params = self._params(length)
        images = self._images(prompt) if rng.random() < 0.15 else ()
        at = self.now + (rng.randint(0, 30) if rng.random() < (0.2 if shared else 0.9) else 0)
        leaves = at + rng.randint(0, 25) if rng.random() < 0.25 else float("inf")
        index = rng.choice((None, None, 0, 1))
        adapter = rng.choice(("", "A", "B")) if rng.random() < 0.3 else ""
        return Client(at, prompt, params, adapter, images, leaves, rng.random() < 0.5, index)

    def _params(self, num_prompt: int) -> SamplingParams:
        rng = self.rng
        kinds: list[dict[str, Any]] = [
            {}, {"n": 2}, {"n": 2}, {"n": 4}, {"n": 2, "best_of": 3}, {"num_beams": 2},
            {"num_beams": 3, "n": 2, "length_penalty": -1.0}, {"prompt_logprobs": 0},
            {"n": 2, "prompt_logprobs": 0}, {"no_repeat_ngram_size": 9}, {"cache_salt": "other"},
            {"structured_outputs": StructuredOutputsParams(regex="a" * rng.randint(1, 9))},
            {"stop_token_ids": (rng.randrange(VOCABULARY),)},
        ]  # fmt: skip
        fields = rng.choice(kinds[1:4] if self.focus == "duplicates" else kinds)
        fields = fields | {
            "ignore_eos": rng.random() < 0.6,
            "priority": rng.choice((0, 0, 0, -1, 1)),
        }
        return SamplingParams(max_tokens=rng.randint(1, self.max_model_len - num_prompt), **fields)

    def _images(self, prompt: list[int]) -> tuple[PromptImage, ...]:
        """Put an image into a prompt, in place of other tokens."""
        rng = self.rng
        start = rng.randrange(len(prompt))
        # A step must be able to hold a whole image.
        most = min(len(prompt) - start, self.settings["max_step_tokens"])
        length = rng.randint(1, most)
        prompt[start : start + length] = [IMAGE_TOKEN] * length
        digest = rng.choice((b"one", b"two"))
        return (PromptImage(start, length, digest, {}, None, rng.random() < 0.5),)

    def run(self) -> None:
        for steps in itertools.count():
            assert steps < MAX_STEPS, "no progress"
            self._arrive()
            self._leave(in_step=False)
            if not self.engine.has_work():
                if not self.todo:
                    break
                self.now = max(self.now, self.todo[0].at)
                continue
            self._step()
            self.now += self.rng.choice((0, 1, 1, 2))
        self._serve_one_more()
        self._check_end()

    def _serve_one_more(self) -> None:
        """Check that the engine still answers, whatever has happened."""
        if self.saboteur is not None:
            self.counts["exceptions"] += self.saboteur.num_raised
        self.saboteur = None
        self.executor.rates.clear()
        params = SamplingParams(max_tokens=3)
        last = Client(self.now, [2, 3], params, "", (), float("inf"), False, None)
        self.todo.append(last)
        self._arrive()
        while self.engine.has_work():
            self._step()
        assert last.finish, "a later request is not served"

    def _arrive(self) -> None:
        while self.todo and self.todo[0].at <= self.now:
            client = self.todo.pop(0)
            try:
                client.id = self._call(
                    lambda client=client: self.engine.add(
                        client.prompt, client.params, self.now, client.parts()
                    )
                )
            except RequestError:
                self.counts["refused"] += 1
                continue
            except GenerationError:
                continue  # by an injected exception
            self.counts["requests"] += 1
            client.open = set(range(client.params.num_answers))
            self.clients[client.id] = client

    def _leave(self, *, in_step: bool) -> None:
        for client in self.clients.values():
            if client.leaves_at > self.now or client.leaves_in_step != in_step or not client.open:
                continue
            index = client.index
            gone = client.open & ({index} if index is not None else client.open)
            if client.params.beam_width and index is not None:
                gone = set()  # beams are no answers yet
            if gone:
                self.counts["aborts"] += 1
                client.open -= gone
                client.leaves_at = float("inf")
                # As the server does, which says that the whole request ends with its last answer.
                whole = None if not client.open else index
                self._call(lambda id=client.id, whole=whole: self.engine.abort(id, whole))

    def _step(self) -> None:
        running = set(self.strategy.running)
        was_idle = not running
        outputs = self._call(lambda: self.engine.step(self.now, lambda: self._leave(in_step=True)))
        self.counts["steps"] += 1
        for output in outputs:
            self._take(output)
        self.strategy.memory.check_integrity()
        self._check_order(running)
        if was_idle and not self.strategy.running and self.strategy.waiting:
            wake_at = self._call(self.engine.wake_at)
            self.now = max(self.now, wake_at or self.now)

    def _call(self, call: Callable[[], Any]) -> Any:
        """Call the engine, perhaps with an exception within the strategy."""
        if self.saboteur is None or sys.gettrace():
            return call()
        return self.saboteur.call(call)

    def _take(self, output: Any) -> None:
        client = self.clients[output.request_id]
        if output.finish == Finish.ERROR:
            assert "njected" in output.failure or "out of memory" in output.failure, output.failure
            assert client.open, "an error after the end"
            self.counts["failed requests"] += 1
            client.open.clear()
            return
        assert output.index in client.open, "an output after the end"
        client.tokens.setdefault(output.index, []).extend(output.token_ids)
        client.scores += [score.rank for score in output.prompt_logprobs]
        if output.finish is not None:
            client.finish[output.index] = output.finish
            client.open.remove(output.index)

    def _check_order(self, ran: set[Any]) -> None:
        """Check that no request of a higher rank waits for one that has just been admitted."""
        strategy = self.strategy
        assert [*strategy.running] == sorted(strategy.running, key=lambda group: group.rank)
        assert [*strategy.waiting] == sorted(strategy.waiting, key=lambda group: group.rank)
        admitted = [group.rank for group in strategy.running if group not in ran]
        if admitted and strategy.waiting:
            assert max(admitted) < strategy.waiting[0].rank, "a request was overtaken"

    def _check_end(self) -> None:
        strategy = self.strategy
        assert not strategy._group_of
        assert strategy.memory.num_held_blocks == 0, "a block is lost"
        if isinstance(strategy.memory, PagedMemory):
            assert not strategy.memory._swapped, "host blocks of requests that have ended"
        if isinstance(strategy.memory, StateMemory):
            assert not strategy.memory.states.slots.held, "slots of requests that have ended"
        for client in self.clients.values():
            assert not client.open, "an answer did not end"
            expected = client.expected()
            for index, tokens in client.tokens.items():
                whole, finish = expected[index]
                assert tokens == whole[: len(tokens)]
                if index in client.finish:
                    assert (tokens, client.finish[index]) == (whole, finish)
            whole_scores = list(range(len(client.prompt) - 1))
            assert client.scores == whole_scores[: len(client.scores)]
            if 0 in client.finish and client.params.prompt_logprobs is not None:
                assert client.scores == whole_scores
        self.counts["preemptions"] += strategy.num_preemptions
        self.counts["swaps"] += strategy.num_swaps
        self.counts["prefix hits"] += strategy.num_prefix_hits
        self.counts["answers"] += sum(len(client.finish) for client in self.clients.values())
        self.counts["runs"] += 1


class RunWithStates(Run):
    """A model whose layers keep a state."""

    has_states = True


def fuzz(
    seed: int, counts: Counter[str], groups: Groups = ONE_GROUP, kind: type[Run] = Run
) -> None:
    """Run one seed, and count what happened. An error names the seed."""
    run = kind(seed, counts, groups)
    logging.disable()  # the engine logs each injected fault
    try:
        run.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, {run.focus}, {type(run.strategy).__name__}, {run.settings}")
        raise
    finally:
        logging.disable(logging.NOTSET)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.strategies.fuzz", description="Fuzz.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parsed = parser.parse_args()
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + parsed.seconds
    for seed in itertools.count(parsed.seed * 1_000_000):
        if time.monotonic() >= deadline:
            break
        groups = [ONE_GROUP, *SEVERAL_GROUPS.values()][seed % 5]
        fuzz(seed, counts, groups, RunWithStates if seed % 3 == 0 else Run)
    print(*(f"{kind} {count:,}" for kind, count in counts.items()), sep=", ")


if __name__ == "__main__":
    main()
