"""Steps in which every running sequence gets one token and nothing else happens, taken at once.

They are most of all steps. What a strategy would do in them is known (`is_quiet`), so its sequences
and its memory are moved to where these steps would leave them.
The result is exact, the clock to the last bit; tests compare it with every step taken singly.
"""

from __future__ import annotations

from collections.abc import Collection

from benchmarks.simulate.cost import Hardware
from benchmarks.simulate.executor import tokens
from core.plan import Chunk, StepPlan
from core.sequence import Sequence
from strategies.base import Strategy
from strategies.memory.base import KVMemory, Span
from strategies.memory.blocks import PagedMemory


def is_quiet(strategy: Strategy, plan: StepPlan, num_running: int, num_ended: int) -> bool:
    """Whether the next step is known to be one token of each running sequence, and nothing else.

    Either nobody waits, and everybody has sampled; or the step before was just such a step, and
    nobody has ended: then who waited was refused, and will be again, since slots stay taken, free
    blocks only become fewer, no prompt is completed that others could share, and generated tokens
    are nobody else's prefix. In both cases for as long as no answer reaches its last token, the
    blocks last, and nobody comes to an empty queue.

    num_running: of the plan; num_ended: answers that ended with it, which is committed.
    """
    if len(plan.chunks) != num_running:
        return False
    if not strategy.waiting:
        return all(chunk.samples for chunk in plan.chunks)
    return not num_ended and not plan.moves and all(map(_decodes, plan.chunks))


def _decodes(chunk: Chunk) -> bool:
    return chunk.length == 1 and chunk.start >= chunk.sequence.num_prompt_tokens


def leap(strategy: Strategy, hardware: Hardware, clock: float, until: float) -> tuple[float, int]:
    """Takes as many such steps as begin before `until`; returns the clock, and their number.

    To be called while `is_quiet` holds.
    """
    sequences = [each for group in strategy.running for each in group.sequences]
    most = min(each.max_length - each.num_tokens for each in sequences) - 1
    if isinstance(strategy.memory, PagedMemory):
        most = min(most, _room(strategy.memory, sequences))
    count, num_kv_tokens, steps = len(sequences), sum(each.num_tokens for each in sequences), 0
    while steps < most and clock < until:
        clock += hardware.decode_s(count, num_kv_tokens)
        num_kv_tokens += count
        steps += 1
    if steps:
        for each in sequences:
            _decode(strategy.memory, each, steps)
    return clock, steps


def _room(memory: PagedMemory, sequences: Collection[Sequence]) -> int:
    """The most tokens for which every sequence still finds blocks.

    ```
    slots left of last blocks, sorted   0   3   3   7  12      free = 2 blocks, beside full rounds
                                                ^ the third sequence to need one finds none
    ```
    """
    size = memory.block_size
    left = sorted(-each.num_computed_tokens % size for each in sequences)
    rounds, rest = divmod(memory.num_free_blocks, len(sequences))
    return rounds * size + left[rest]


def _decode(memory: KVMemory, sequence: Sequence, steps: int) -> None:
    """What schedule and commit would do to it in so many steps."""
    start = sequence.num_computed_tokens
    end = start + steps
    if isinstance(memory, PagedMemory) and -start % memory.block_size < steps:
        has_blocks = memory.reserve([Span(sequence.id, start, end)])
        assert has_blocks, "there was room"
    sampled = tokens(sequence, steps)
    sequence.token_ids += sampled.token_ids
    sequence.logprobs += sampled.logprobs
    sequence.num_computed_tokens = end
    memory.commit(Chunk(sequence, start, steps, memory.table(sequence.id), samples=True))
