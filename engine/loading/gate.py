"""The gate: a model is served by a decoder only if that gives the logits of transformers' own code.

Names suggest, trials decide. A prompt is computed in chunks through the paged path, with the very
kernels that will serve, and compared with transformers' layers and eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from core.errors import ConfigurationError
from core.plan import Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from core.sizing import LayerShape
from engine.attention.backends import AttentionBackend, make_backend
from engine.attention.call import AttendsPaged, UnsupportedModelError
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.inputs import InputBuilder
from engine.loading.model_source import ModelSource
from engine.staging import Staging

PROBE_LENGTH = 40
PROBE_BLOCK_SIZE = 16
PROBE_CHUNKS = ((0, 19), (19, 20), (39, 1))
"""A prompt, more of it, and a decode step: all that attention is ever asked for."""
MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of the probe's logits; a wrong model is off by about 1."""
MAX_KERNEL_ERROR = 0.5
"""In low precision, of layers that are right in fp32: more than rounding, or a router's near ties,
explains."""


class Computes(Protocol):
    """A decoder of either way."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, paged: AttendsPaged
    ) -> Tensor:
        """ids, positions, rows: [T], [T], [R] int64 → [R, vocabulary]."""
        ...


@torch.inference_mode()
def paged_logits(
    decoder: Computes,
    vocab_size: int,
    shapes: list[LayerShape],
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend | None = None,
) -> Tensor:
    """[vocabulary] fp32, after the probe's last token; its blocks do not follow one another.

    backend: None for the one that will serve.
    """
    num_blocks = -(-PROBE_LENGTH // PROBE_BLOCK_SIZE)
    cache = KVCache(shapes, num_blocks, PROBE_BLOCK_SIZE, dtype, device)
    if backend is None:
        backend, _ = make_backend(device, shapes, PROBE_BLOCK_SIZE, PROBE_LENGTH, dtype)
    sequence = Sequence(0, probe_ids(vocab_size), SamplingParams())
    blocks = tuple(reversed(range(num_blocks)))
    builder = InputBuilder(PROBE_BLOCK_SIZE, Staging(device))
    logits: Tensor | None = None
    for start, length in PROBE_CHUNKS:
        is_last = start + length == PROBE_LENGTH
        inputs = builder.build(StepPlan((Chunk(sequence, start, length, blocks, is_last),)))
        step = PagedStep(inputs.batch, cache, backend)
        logits = decoder(inputs.tokens[0], inputs.tokens[1], inputs.logit_rows, step)
    assert logits is not None
    return logits[0].float()


@torch.inference_mode()
def eager_logits(model: Any, vocab_size: int) -> Tensor:
    """The same of one of transformers' models, whose attention is eager."""
    ids = torch.tensor([probe_ids(vocab_size)], device=model.device)
    positions = torch.arange(PROBE_LENGTH, device=model.device)[None]
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -1].float()


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Infinite for NaN."""
    error = (logits - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(float("inf")).item()


def refuse(error: float) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"paged and eager attention give different logits (relative error {error:.2g})"
    )


def load_reference(source: ModelSource, attention: str = "eager") -> Any:
    """One of transformers' models, on the source's device.

    Raises UnsupportedModelError where it cannot be had with this attention, ConfigurationError
    where its files cannot be read.
    """
    try:
        with _quietly():
            model, missing = source.load_whole(AutoModelForCausalLM, attention)
    except KeyError as error:  # a table of attention classes by name
        raise UnsupportedModelError("its attention is a class of its own") from error
    except ValueError as error:
        raise UnsupportedModelError(f"transformers cannot load it so: {error}") from error
    except Exception as error:  # whatever a library for files of weights may raise
        raise ConfigurationError(f"transformers cannot read {source.model_dir}: {error}") from error
    if missing:  # which transformers would draw at random
        raise ConfigurationError(
            f"{source.model_dir} has no tensor '{missing[0]}': the download is incomplete, or "
            "config.json is of another model"
        )
    return model.to(source.device).eval()


def probe_ids(vocab_size: int) -> list[int]:
    """Spread over the vocabulary, and all different where it is large enough."""
    return [(1 + 7919 * place) % vocab_size for place in range(PROBE_LENGTH)]


@contextmanager
def _quietly() -> Iterator[None]:
    """Of a model's first layers transformers would say that most of the file is unused."""
    level = transformers_logging.get_verbosity()
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shows_progress:
            transformers_logging.enable_progress_bar()
