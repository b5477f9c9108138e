"""Takes many quiet steps at once.

In a quiet step, every running sequence gets one token, and nothing else happens. Most steps are
quiet. `is_quiet` says when quiet steps are certain to follow; `leap` then puts sequences and KV
memory directly into the state after them. The result is exact, including the clock to the last bit;
tests compare it with single steps.
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
    """Return whether the next step is certain to only decode one token per running sequence.

    There are two such cases:
    - No request waits, and all running sequences have sampled.
    - The last step was already such a step, and no sequence finished in it. The waiting requests
      were refused then and will be refused again: no slot becomes free, free blocks only become
      fewer, no prompt completes that others could share, and generated tokens are never another
      request's prefix.

    Both last until a sequence reaches its last token, the free blocks run out, or a request
    arrives that is the first in the queue.

    num_running: running sequences of the plan; num_ended: sequences that finished with it. The
    plan must be committed.
    """
    if len(plan.chunks) != num_running:
        return False
    if not strategy.waiting:
        return all(chunk.samples_token for chunk in plan.chunks)
    return not num_ended and not plan.moves and all(map(_decodes, plan.chunks))


def _decodes(chunk: Chunk) -> bool:
    return chunk.length == 1 and chunk.start >= chunk.sequence.num_prompt_tokens


def leap(strategy: Strategy, hardware: Hardware, clock: float, until: float) -> tuple[float, int]:
    """Take all quiet steps that begin before `until`; return the new clock and their number.

    `is_quiet` must hold.
    """
    sequences = [sequence for group in strategy.running for sequence in group.sequences]
    max_steps = min(sequence.max_length - sequence.num_tokens for sequence in sequences) - 1
    if isinstance(strategy.memory, PagedMemory):
        max_steps = min(max_steps, _room(strategy.memory, sequences))
    count, steps = len(sequences), 0
    num_kv_tokens = sum(sequence.num_tokens for sequence in sequences)
    while steps < max_steps and clock < until:
        clock += hardware.decode_s(count, num_kv_tokens)
        num_kv_tokens += count
        steps += 1
    if steps:
        for sequence in sequences:
            _decode(strategy.memory, sequence, steps)
    return clock, steps


def _room(memory: PagedMemory, sequences: Collection[Sequence]) -> int:
    """Return how many tokens every sequence can get before the free blocks run out.

    A round gives each sequence one free block. `rest` blocks remain after the full rounds:

    ```
    free slots in last blocks, sorted   0   3   3   7  12      rest = 2 blocks
                                                ^ the third sequence to need a block gets none
    ```
    """
    size = memory.block_size
    left = sorted(-sequence.num_computed_tokens % size for sequence in sequences)
    rounds, rest = divmod(memory.num_free_blocks, len(sequences))
    return rounds * size + left[rest]


def _decode(memory: KVMemory, sequence: Sequence, steps: int) -> None:
    """Apply what schedule and commit would do to a sequence in `steps` steps."""
    start = sequence.num_computed_tokens
    end = start + steps
    if isinstance(memory, PagedMemory) and -start % memory.block_size < steps:
        has_blocks = memory.reserve([Span(sequence.id, start, end)])
        assert has_blocks, "_room allowed more steps than there are blocks for"
    sampled = tokens(sequence, steps)
    sequence.token_ids += sampled.token_ids
    sequence.logprobs += sampled.logprobs
    sequence.num_computed_tokens = end
    memory.commit(Chunk(sequence, start, steps, memory.table(sequence.id), samples_token=True))
