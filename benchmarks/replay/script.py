"""What the requests of a recording do, whatever the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from core.beams import Beam, BeamSearch, Candidates, Hypothesis
from core.part import Part
from core.request import Request
from core.sampling import Finish, SamplingParams
from engine.executor import FailedAt
from engine.observers.frames import (
    DIGEST_BYTES,
    Aborted,
    AnyFrame,
    Arrived,
    Done,
    Scheduled,
    Searched,
    Waited,
)
from strategies.beam_group import BeamGroup
from strategies.group import Grouping

Row = tuple[int, int, int]
"""A chunk: the sequence's id, its start and its length."""
OnTokens = Callable[[int, float, int], None]
"""Gets a sequence's id, the time, and how many tokens the sequence gets then."""
VOCABULARY = 2**62
"""Tokens of a replay are below: 0, or the digest of the link that the token ends."""
END = VOCABULARY - 1
"""Ends an answer before its greatest length."""


@dataclass(slots=True)
class Script:
    """The arrivals of a recording, and what each sequence will generate."""

    link_tokens: int
    arrivals: list[Arrived] = field(default_factory=list[Arrived])
    num_generated: dict[int, int] = field(default_factory=dict[int, int])
    """By sequence id: tokens generated, as far as the recording goes."""
    ended: set[int] = field(default_factory=set[int])
    """Sequences that ended by themselves before their greatest length, with the last of these
    tokens."""
    links: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """The token at a position of a sequence, by its id and the position, if it ends a link."""
    beams: defaultdict[int, list[Searched]] = field(
        default_factory=lambda: defaultdict[int, list[Searched]](list)
    )
    aborts: list[Aborted] = field(default_factory=list[Aborted])
    failures: dict[int, FailedAt] = field(default_factory=dict[int, FailedAt])
    """Steps that failed, by number."""
    not_sampled: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Steps, by number, and sequences for which they could not sample a token."""

    lengths: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Tokens that a step computed for a sequence, if more than one, by the step's number and id."""
    counts: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Tokens that a sequence got from a step, if more than one, in the same way."""

    def token(self, sequence_id: int, position: int) -> int:
        return self.links.get((sequence_id, position), 0)

    def end_as_recorded(self) -> None:
        """Let every answer end with the tokens that it had in the recording, for any reason.

        One that has its greatest length ends anyway.
        """
        self.ended |= {
            id
            for arrived in self.arrivals
            for id in range(arrived.id, arrived.id + arrived.num_samples)
            if self.num_generated[id] < arrived.max_tokens
        }

    def prompt(self, arrived: Arrived) -> list[int]:
        """Return tokens whose links are the same as another prompt's if the recorded ones were."""
        tokens = [0] * arrived.num_prompt_tokens
        for index, token in enumerate(_tokens(arrived.links)):
            tokens[(index + 1) * self.link_tokens - 1] = token
        return tokens

    def parts(self, arrived: Arrived) -> tuple[Part, ...]:
        parts: list[Part] = []
        if arrived.needs_newest or arrived.uncut:
            parts.append(RecordedPart(needs_newest=arrived.needs_newest, uncut=arrived.uncut))
        if arrived.width:
            parts.append(RecordedBeams(self.beams[arrived.id], self.link_tokens))
        return tuple(parts)


def params_of(arrived: Arrived) -> SamplingParams:
    """Return the sampling parameters that matter to a strategy."""
    width, num_samples = arrived.width, arrived.num_samples
    return SamplingParams(
        temperature=0,
        stop_token_ids=(END,),
        max_tokens=arrived.max_tokens,
        n=arrived.num_answers,
        best_of=None if width or num_samples == arrived.num_answers else num_samples,
        num_beams=width or 1,
        priority=arrived.priority,
        prompt_logprobs=0 if arrived.is_scored else None,
        cache_salt=arrived.salt.hex(),
        seed=0,
    )


def script_of(
    frames: Iterable[AnyFrame],
    link_tokens: int,
    on_tokens: OnTokens = lambda id, at, count: None,
) -> Script:
    """Read what every request of a recording did. on_tokens: gets each sequence's new tokens."""
    script = Script(link_tokens)
    lengths: dict[int, int] = {}
    now = 0.0
    for frame, number, rows in committed_steps(frames):
        match frame:
            case Arrived():
                script.arrivals.append(frame)
                for id in range(frame.id, frame.id + frame.num_samples):
                    lengths[id] = frame.num_prompt_tokens
                    script.num_generated[id] = 0
            case Aborted():
                script.aborts.append(frame)
            case Done():
                at = now + frame.wall_ns / 1e9
                for id, count in _read_step(script, lengths, frame, number, rows):
                    on_tokens(id, at, count)
            case Scheduled() | Waited():
                now = frame.at
            case _:
                pass
    return script


def _read_step(
    script: Script, lengths: dict[int, int], done: Done, number: int, rows: list[Row]
) -> Iterator[tuple[int, int]]:
    """Note what a step has done. Yield the sequences that got tokens, with their number."""
    script.not_sampled |= {(number, id) for id in done.not_sampled}
    for id, end, token in zip(done.link_ids, done.link_ends, _tokens(done.links), strict=True):
        script.links[id, end - 1] = token
    for step in done.searched:
        script.beams[step.request_id].append(step)
    script.lengths |= {(number, id): length for id, _, length in rows if length > 1}
    if done.failed is not None:
        script.failures[number] = done.failed
        return
    answered = {row.id: row for row in done.answered}
    for id, start, length in rows:
        # A chunk that reaches the newest token samples the next one.
        if id in lengths and lengths[id] <= start + length and id not in script.ended:
            count = answered[id].num_tokens if id in answered else 1
            if count > 1:
                script.counts[number, id] = count
            lengths[id] += count
            script.num_generated[id] += count
            if id in answered and answered[id].is_last:
                script.ended.add(id)
            yield id, count


def committed_steps(frames: Iterable[AnyFrame]) -> Iterator[tuple[AnyFrame, int, list[Row]]]:
    """Yield every frame with the number of its step, from 0, or of the next one.

    A `Done` comes with the rows of its step.
    """
    rows: list[Row] = []
    steps: dict[int, list[Row]] = {}
    number = 0
    for frame in frames:
        if isinstance(frame, Done):
            step = number - 1 - frame.num_newer
            yield frame, step, steps.pop(step, [])
            continue
        yield frame, number, []
        if isinstance(frame, Scheduled):
            rows = rows_of(frame, rows)
            steps[number] = rows
            number += 1


def rows_of(frame: Scheduled, before: list[Row]) -> list[Row]:
    """Return the rows of a step. before: those of the last step."""
    if frame.ids is None or frame.starts is None or frame.lengths is None:
        return [(id, start + length, length) for id, start, length in before]
    return list(zip(frame.ids, frame.starts, frame.lengths, strict=True))


def set_load(script: Script, load: float) -> None:
    """Let everything of a script happen `load` times as fast."""
    script.arrivals = [msgspec.structs.replace(each, at=each.at / load) for each in script.arrivals]
    script.aborts = [
        msgspec.structs.replace(each, at_ns=round(each.at_ns / load)) for each in script.aborts
    ]


class RecordedPart(Part):
    """Stands for the parts of a recorded request."""

    __slots__ = ("needs_newest", "uncut")

    def __init__(self, *, needs_newest: bool, uncut: tuple[tuple[int, int], ...]) -> None:
        self.needs_newest = needs_newest
        self.uncut = uncut

    def chunk_end(self, end: int) -> int:
        return next((start for start, stop in self.uncut if start < end < stop), end)


class RecordedBeams(Grouping):
    """Groups the beams of a recorded search, which continue as they did."""

    __slots__ = ("_link_tokens", "_steps")

    def __init__(self, steps: list[Searched], link_tokens: int) -> None:
        self._steps = steps
        self._link_tokens = link_tokens

    def group(self, request: Request) -> BeamGroup:
        group = BeamGroup(request)
        group.search = RecordedSearch(request.params, self._steps)
        return group


class RecordedSearch(BeamSearch):
    """Keeps the beams that a recorded search kept, whatever the candidates. Then it is done."""

    def __init__(self, params: SamplingParams, steps: list[Searched]) -> None:
        super().__init__(params, {})
        self._steps = iter(steps)
        self._num_answers = params.n

    def advance(self, candidates: object) -> None:
        step = next(self._steps, None)
        if step is None or not step.parents:
            self.is_done = True
            self.hypotheses = [Hypothesis((0,), (0.0,), Finish.LENGTH, 0.0)] * self._num_answers
            return
        tokens = _tokens(step.links) if step.links else [0] * len(step.parents)
        self.beams = [
            Beam(parent, (token,), (0.0,), 0.0)
            for parent, token in zip(step.parents, tokens, strict=True)
        ]


def _tokens(digests: bytes) -> list[int]:
    parts = (digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES))
    return [int.from_bytes(part) >> 2 for part in parts]


NO_CANDIDATES = Candidates((), ())
