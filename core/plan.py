"""A step as data: what a strategy plans, what an executor returns, what a client is told.

There is no prefill phase and no decode phase, only tokens whose K/V are not computed yet:
a prompt is a long chunk, a decode step a chunk of one, a chunked prompt several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.beams import Candidates, Hypotheses
from core.sampling import Failure, Finish, Sampled, TopLogprobs
from core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start : start + length` of a sequence, to be computed in this step.

    `blocks` is the sequence's block table: token position p lives in slot
    `p % block_size` of block `blocks[p // block_size]`. It covers every position up to
    `start + length`, and is valid until the plan is committed.

    The last of the tokens may be in flight: sampled by the step before, and known to the device
    alone.
    """

    sequence: Sequence
    start: int
    length: int
    blocks: tuple[int, ...]
    samples: bool
    """Whether the chunk ends at the newest token, so that the next one is sampled."""
    scored: range = range(0)
    """Its positions whose logits score the prompt token after them (`prompt_logprobs`)."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def ends_in_flight(self) -> bool:
        """Whether its last token is the one that the step before it samples."""
        return self.end > len(self.sequence.token_ids)


BlockPairs = tuple[tuple[int, int], ...]
"""Which block is copied to which."""


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Whole blocks, of all layers, to be moved before a step's forward pass, in this order.

    ```
    swap_outs   device ▶ host     what they leave on the device may be a target below
    swap_ins    host ▶ device     what they fill may be the source of a copy
    copies      device ▶ device   before the forward pass writes into their targets
    ```

    Each kind runs in no order: no block is the target of one move and part of another of its kind.
    """

    swap_outs: BlockPairs = ()
    swap_ins: BlockPairs = ()
    copies: BlockPairs = ()

    def __bool__(self) -> bool:
        return bool(self.swap_outs or self.swap_ins or self.copies)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Block moves, then one forward pass over chunks: at most one of each sequence, none empty."""

    chunks: tuple[Chunk, ...]
    moves: BlockMoves = field(default_factory=BlockMoves)
    swapped_out: tuple[Sequence, ...] = ()
    """Whose blocks `moves.swap_outs` saves: they are lost where the plan cannot be run."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


StepResult = Mapping[int, Sampled | Candidates | Hypotheses | Failure]
"""By sequence id, for each chunk with `samples` or `scored`: what was sampled and scored, or for a
beam what it may go on with, or the end of the search where the executor has run all of it; or why
it cannot go on."""


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one answer, or scores of its prompt; `finish` on the last ones, exactly once.

    Finish.ERROR ends the whole request, whatever the index.
    """

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | None
    index: int = 0
    """Which of the answers that it tells (`SamplingParams.num_answers`)."""
    top: tuple[TopLogprobs, ...] = ()
    """One a token, where the request wants `logprobs`."""
    prompt: tuple[TopLogprobs, ...] = ()
    """The next tokens of the prompt, from its second on, where it wants `prompt_logprobs`."""
    admitted: float | None = None
    """When the request was; None only with Finish.ERROR."""
    failure: str = ""
    """With Finish.ERROR: why."""
