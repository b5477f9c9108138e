"""The most likely next tokens of each beam, for beam search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from core.beams import Candidates, num_candidates
from core.plan import Chunk
from engine.staging import HostCopy, Staging


class BeamCandidates:
    """The candidates of a step's beams, on their way to the host."""

    def __init__(self, logits: Tensor, chunks: Sequence[Chunk], staging: Staging) -> None:
        """logits: [S, vocabulary], one row per chunk. Rows without beam search are skipped."""
        sequences = [chunk.sequence for chunk in chunks]
        beams = [(row, beam) for row, beam in enumerate(sequences) if beam.params.beam_width]
        self._counts = {
            beam.id: num_candidates(beam.params, len(beam.stop_token_ids)) for _, beam in beams
        }
        if not beams:
            return
        [rows] = staging.upload([np.array([row for row, _ in beams])])
        logprobs = logits.index_select(0, rows).float().log_softmax(-1)
        top = logprobs.topk(min(max(self._counts.values()), logits.shape[1]))
        self._copy = HostCopy([top.indices, top.values])

    def wait(self) -> dict[int, Candidates]:
        """Return the candidates of each beam, by sequence id."""
        if not self._counts:
            return {}
        rows = zip(*(tensor.tolist() for tensor in self._copy.wait()), strict=True)
        return {
            id: Candidates(tuple(token_ids[:count]), tuple(logprobs[:count]))
            for (id, count), (token_ids, logprobs) in zip(self._counts.items(), rows, strict=True)
        }
