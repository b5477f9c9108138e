"""Draws a token for each non-greedy row with Triton kernels, which sort nothing.

The tokens are the same as those of draw.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.sampling.draw import Draw, uniforms
from engine.sampling.rows import Row, integers
from engine.staging import Upload
from kernels.sampling.candidates import collect_candidates
from kernels.sampling.draw_tokens import draw_tokens
from kernels.sampling.filter_limits import filter_limits
from kernels.sampling.token_weights import DrawnRows


def plan_draws(rows: Sequence[Row], vocab_size: int, upload: Upload) -> list[Draw]:
    """Plan the draws of the rows that are not greedy, all at once."""
    indices = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if not indices:
        return []
    random = [rows[index] for index in indices]
    all_params = [row.params for row in random]
    row_index = upload.put(integers(indices))
    temperature = upload.put(np.array([params.temperature for params in all_params], np.float32))
    min_p = upload.put(np.array([params.min_p for params in all_params], np.float32))
    top_k = upload.put(integers([min(params.top_k, vocab_size) for params in all_params]))
    top_p = upload.put(np.array([params.top_p for params in all_params]))
    typical_p = upload.put(np.array([params.typical_p for params in all_params]))
    uniform = upload.put(uniforms(random))
    columns = (row_index, temperature, min_p, top_k, top_p, typical_p)

    def draw(scores: Tensor, token_ids: Tensor) -> None:
        drawn_rows = DrawnRows(*(column.tensor for column in columns))
        limits = filter_limits(collect_candidates(scores, token_ids, drawn_rows), drawn_rows)
        draw_tokens(scores, token_ids, drawn_rows, limits, uniform.tensor)

    return [draw]
