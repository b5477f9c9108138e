"""A head: one layer that reads a hidden state and the token after it, and predicts the next one.

```
hidden states of the model  |  h0  h1  h2        of the tokens before the newest one
tokens                      |  t1  t2  t3        t3 is the newest
first pass                     ─────────▶ g3 ▶ d4
further passes                    g3, d4 ▶ g4 ▶ d5
```

What the head itself computes of a draft, g, takes the place of a state that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.plan import Chunk
from engine.attention.call import PagedAttention
from engine.model.norms import Norm, add_and_norm
from engine.model.rotary import Rotary, StepAngles
from engine.model.spec import DecoderSpec
from engine.speculation.heads.hidden_states import HiddenStates
from engine.staging import Slot, Upload
from engine.step.column import Applied, Column
from engine.step.places import Places
from engine.step.step_inputs import StepInputs


class HeadChunk(Chunk, frozen=True):
    """Tokens of a sequence without its first token: the state at each position is of the token
    before."""

    rows: tuple[int, ...] = ()
    """For each token, the row of its state."""
    is_draft: bool = False
    """Whether these are rows of what the head itself has computed in its last pass."""

    @property
    def num_tokens(self) -> int:
        return self.end + 1


class BlockInputs(NamedTuple):
    """What a head's layer reads of T tokens."""

    embedded: Tensor
    """[T, hidden]."""
    states: Tensor
    """[T, hidden]: of the token before each."""
    angles: StepAngles
    paged: PagedAttention
    rows: Tensor | None
    """As in `Layer`."""


class Block(Protocol):
    def __call__(self, inputs: BlockInputs) -> tuple[Tensor, Tensor | None]:
        """Return what `Layer` returns."""
        ...


class Ends(NamedTuple):
    """What is before and after a head's layer, of the model or of its own."""

    device: torch.device
    embed: Callable[[Tensor, Tensor], Tensor]
    """From ids and positions, [T], to [T, hidden]."""
    logits: Callable[[Tensor], Tensor]
    """From normed states, [R, hidden], to [R, vocabulary]."""
    chains_normed: bool = True
    """Whether the normed state takes the place of one that is not known; else what it is of."""


class Head:
    """See `engine.step.passes.PackedForward`. A pass reads known tokens or drafts, never both."""

    def __init__(
        self, block: Block, norm: Norm, rotary: Rotary, ends: Ends, own: DecoderSpec
    ) -> None:
        """own: of a model that has only the head's layer."""
        self.device = ends.device
        self.shapes, self.width = own.shapes, own.hidden_size
        self.states: HiddenStates | None = None
        """Those of the model, once there is memory for them."""
        self.rows: dict[int, int] = {}
        """The rows of `_own`, by sequence id."""
        self._own: Tensor | None = None
        """[S, hidden]: what the last pass has computed of each sequence's last token."""
        self._block, self._norm, self._rotary, self._ends = block, norm, rotary, ends

    def forward(self, inputs: StepInputs, paged: PagedAttention) -> Tensor:
        [column] = inputs.columns
        assert isinstance(column, _Rows), "the executor has a `RowsColumn`"
        states = self._source(is_draft=column.is_draft).index_select(0, column.rows)
        embedded = self._ends.embed(inputs.token_ids, inputs.positions)
        rows = inputs.logit_rows
        kept = rows if len(rows) < len(embedded) else None
        angles = self._rotary(inputs.positions)
        hidden, output = self._block(BlockInputs(embedded, states, angles, paged, kept))
        hidden, normed = add_and_norm(hidden, output, self._norm)
        if kept is None:
            hidden, normed = hidden.index_select(0, rows), normed.index_select(0, rows)
        self._own = normed if self._ends.chains_normed else hidden
        self.rows = {chunk.sequence.id: row for row, chunk in enumerate(inputs.sampled_chunks)}
        return self._ends.logits(normed)

    def _source(self, *, is_draft: bool) -> Tensor:
        if is_draft:
            assert self._own is not None, "a first pass reads no drafts"
            return self._own
        assert self.states is not None, "the model keeps its states"
        return self.states.rows


class RowsColumn(Column):
    """Finds the states of a pass's tokens. Of other chunks, which are only timed, any will do."""

    needs_part = False

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return True

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> Applied:
        rows = np.zeros(tokens.shape[1], np.int64)
        is_draft = False
        for chunk, start in places:
            if isinstance(chunk, HeadChunk):
                rows[start : start + chunk.length] = chunk.rows
                is_draft = chunk.is_draft
        return _Rows(upload.put(rows), is_draft=is_draft)


class _Rows(Applied):
    def __init__(self, rows: Slot, *, is_draft: bool) -> None:
        """rows: [T] int64."""
        self._rows = rows
        self.is_draft = is_draft

    @property
    def rows(self) -> Tensor:
        return self._rows.tensor


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Return [T, 2 * hidden]."""
    return torch.cat([first, second], -1)
