"""The gate: a decoder serves a model only if its logits agree with those of transformers' own code.

The name of a model type proves nothing, so every model is tried. A probe prompt runs in chunks
through the paged path, with the kernels that will serve. Its logits are compared with those of
transformers' layers and eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Layers
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.configuration.kv_layout import KVLayout, LayerShape
from core.errors import ConfigurationError
from core.foreign_code import contained
from core.plan import NO_STATE, BlockTable, Chunk, StateSlots, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.attention.backends import AttentionBackend, make_backend
from engine.attention.call import PagedAttention, UnsupportedModelError
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.loading.model_source import ModelSource
from engine.model.checkpoint import Checkpoint
from engine.model.families import FAMILIES
from engine.model.spec import DecoderSpec
from engine.staging import Staging
from engine.step.column import Column
from engine.step.step_inputs import InputBuilder

if TYPE_CHECKING:
    from core.states.layout import LayerState

PROBE_LENGTH = 40
PROBE_BLOCK_SIZE = 16
PROBE_CHUNKS = ((0, 19), (19, 20), (39, 1))
"""(start, length) of a prompt chunk, a later chunk and a decode step: all cases of attention."""
MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Limits for the relative error of the logits, by dtype. A wrong model has an error of about 1."""
MAX_KERNEL_ERROR = 0.5
"""Limit for layers that have passed in fp32 and are tried again as they will serve: in low
precision, or quantized. Rounding and a router's near ties stay below it."""


PagedDecoder = Callable[[Tensor, Tensor, Tensor, PagedAttention], Tensor]
"""Our decoder or transformers' model: returns logits [R, vocab_size] for token ids [T], positions
[T], rows [R] and the attention."""


@torch.inference_mode()
def paged_logits(
    decoder: PagedDecoder,
    vocab_size: int,
    shapes: list[LayerShape],
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend | None = None,
    *,
    in_segments: bool = False,
    states: Layers[LayerState] = (),
) -> Tensor:
    """Return the decoder's logits [vocab_size] in fp32 after the probe's last token.

    The probe's KV blocks are in reverse order, so that a wrong block table changes the logits.
    backend: None for the backend that will serve. in_segments: as in `make_backend`. states: those
    of the layers that keep one.
    """
    num_blocks = -(-PROBE_LENGTH // PROBE_BLOCK_SIZE)
    layout = KVLayout.uniform(PROBE_BLOCK_SIZE)
    pool, columns, slots = None, list[Column](), NO_STATE
    if states:
        from engine.attention.states import StatePool
        from engine.step.state_column import StateColumn

        pool, slots = StatePool(states, 1, dtype, device), StateSlots(0, 0)
        columns.append(StateColumn())
    cache = KVCache(shapes, num_blocks, layout, dtype, device, states=pool)
    if backend is None:
        backend, _ = make_backend(
            device, shapes, PROBE_BLOCK_SIZE, PROBE_LENGTH, dtype, in_segments=in_segments
        )
    sequence = Sequence(0, probe_ids(vocab_size), SamplingParams())
    blocks = BlockTable(tuple(reversed(range(num_blocks))))
    builder = InputBuilder(layout.groups, Staging(device))
    logits: Tensor | None = None
    for start, length in PROBE_CHUNKS:
        is_last = start + length == PROBE_LENGTH
        chunk = Chunk(sequence, start, length, (blocks,), is_last, state=slots)
        inputs = builder.build(StepPlan((chunk,)), columns=columns)
        step = PagedStep(inputs.batches, cache, backend)
        logits = decoder(inputs.token_ids, inputs.positions, inputs.logit_rows, step)
    assert logits is not None
    return logits[0].float()


@torch.inference_mode()
def eager_logits(model: Any, vocab_size: int) -> Tensor:
    """Return the same logits as `paged_logits`, from a transformers model with eager attention."""
    ids = torch.tensor([probe_ids(vocab_size)], device=model.device)
    positions = torch.arange(PROBE_LENGTH, device=model.device)[None]
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -1].float()


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected logit; infinity for NaN."""
    error = (logits - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(float("inf")).item()


def mismatch_error(error: float) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"paged and eager attention give different logits (relative error {error:.2g})"
    )


def load_reference(
    source: ModelSource, attention: str = "eager", state: Mapping[str, Tensor] | None = None
) -> Any:
    """Load a transformers model on the source's device.

    state: tensors to use instead of the files' tensors, by their names in the files.
    Raises UnsupportedModelError if transformers cannot load it with this attention implementation,
    ConfigurationError if its files cannot be read, and NotKeptError as `require_class` does.
    """
    source.require_class()
    # Imported only here, since a later start needs none of it.
    from transformers import AutoModelForCausalLM, AutoModelForPreTraining

    try:
        with contained, quietly():
            kind = AutoModelForCausalLM
            if (
                type(source.config) not in kind._model_mapping
                and source.config.model_type in FAMILIES
            ):
                kind = AutoModelForPreTraining  # Mistral 4's
            model, missing = source.load_with_missing(kind, attention, state)
    except KeyError as error:  # the model's own table of attention classes lacks `attention`
        raise UnsupportedModelError("it has custom attention classes") from error
    except ValueError as error:
        raise UnsupportedModelError(f"transformers cannot load it: {error}") from error
    except Exception as error:  # the weight file libraries may raise anything
        raise ConfigurationError(f"transformers cannot read {source.model_dir}: {error}") from error
    if missing:  # transformers would initialize them randomly
        raise ConfigurationError(
            f"{source.model_dir} has no tensor '{missing[0]}': the download is incomplete, or "
            "config.json belongs to another model"
        )
    return model.to(source.device).eval()


def cut_to_layers(checkpoint: Checkpoint, source: ModelSource, spec: DecoderSpec) -> None:
    """Cut tensors that have a part for each layer to the layers that the source's config has."""
    if spec.family.is_gemma4:
        from engine.model.gemma4.inputs import keep_first_layers

        keep_first_layers(checkpoint, source.config)


def probe_ids(vocab_size: int) -> list[int]:
    """Return the probe's token ids: spread over the vocabulary, distinct if it is large enough."""
    return [(1 + 7919 * index) % vocab_size for index in range(PROBE_LENGTH)]


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers, which would warn that most tensors of the files are unused."""
    from transformers.utils import logging as transformers_logging

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
