"""The most likely next tokens of each beam, for beam search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.beams import Candidates, num_candidates
from core.plan import Chunk
from core.sampling import ChunkResult
from core.sequence import Sequence as Beam
from engine.staging import HostCopy, Slot, Upload
from engine.step.column import Applied, Column
from engine.step.places import Places


class BeamColumn(Column):
    """Finds the candidates of the beams whose next token is sampled."""

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return any(chunk.sequence.params.beam_width for chunk in chunks)

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> Applied:
        beams = {
            row: chunk.sequence
            for row, chunk in enumerate(places.sampled)
            if chunk.sequence.params.beam_width
        }
        return _Candidates(list(beams.values()), upload.put(np.array([*beams], np.int64)))


class _Candidates(Applied):
    def __init__(self, beams: Sequence[Beam], rows: Slot) -> None:
        """rows: [B] int64, each beam's row among the sampled ones."""
        self._counts = {
            beam.id: num_candidates(beam.params, len(beam.stop_token_ids)) for beam in beams
        }
        self._rows = rows
        self._copy: HostCopy | None = None

    def take(self, sampled: Tensor, extra: Tensor) -> None:
        if self._counts:
            logprobs = sampled.index_select(0, self._rows.tensor).float().log_softmax(-1)
            top = logprobs.topk(min(max(self._counts.values()), sampled.shape[1]))
            self._copy = HostCopy([top.indices, top.values])

    def add_to(self, results: dict[int, ChunkResult]) -> None:
        if self._copy is None:
            return
        rows = zip(*(tensor.tolist() for tensor in self._copy.wait()), strict=True)
        for (id, count), (token_ids, logprobs) in zip(self._counts.items(), rows, strict=True):
            results[id] = Candidates(tuple(token_ids[:count]), tuple(logprobs[:count]))
