"""Loads our decoder, after a trial of its first layers beside transformers' own."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention.backends import AttentionBackend, TorchBackend
from engine.attention.call import UnsupportedModelError
from engine.loading.gate import (
    MAX_KERNEL_ERROR,
    MAX_RELATIVE_ERROR,
    eager_logits,
    load_reference,
    paged_logits,
    refuse,
    relative_error,
)
from engine.loading.model_source import ModelSource
from engine.model.checkpoint import Checkpoint, checkpoint_of, open_checkpoint
from engine.model.decoder import Decoder
from engine.model.loader import Loader
from engine.model.native import NativeLayers
from engine.model.spec import DecoderSpec, read_spec
from engine.phases import Phases
from kernels.cpu.prepared import UnpreparedError

RANDOM = "random weights"


@torch.inference_mode()
def load_own(source: ModelSource, max_length: int, phases: Phases) -> Decoder:
    """max_length: most tokens of a sequence.

    Raises UnsupportedModelError where the table has no row for the model or the trial fails,
    ConfigurationError where a tensor is missing, left over, misshapen or broken.
    """
    spec = read_spec(source.config, max_length)
    try:
        _check(source, spec)
    finally:
        phases.end("trial of the first layers")
    checkpoint = _checkpoint(source, spec)
    decoder = _decoder(checkpoint, source, spec, len(spec.layers), shows_progress=True)
    checkpoint.require_nothing_left(but=f"{spec.family.head}.weight" if spec.is_tied else "")
    phases.end("weights")
    return decoder


def _check(source: ModelSource, spec: DecoderSpec) -> None:
    """In fp32 the layers must be the same. In low precision, where a router's near ties may fall
    either way, only kernels that compute something else are looked for."""
    is_low = source.dtype != torch.float32
    # On CUDA fp32 serves nobody, so its attention need not be the fastest.
    backend = TorchBackend() if is_low and source.device.type == "cuda" else None
    error = _trial(source.in_fp32(), spec, backend)
    if error > MAX_RELATIVE_ERROR[torch.float32]:
        raise refuse(error)
    if is_low:
        error = _trial(source, spec)
        if error > MAX_KERNEL_ERROR:
            raise refuse(error)


def _trial(
    source: ModelSource, spec: DecoderSpec, backend: AttentionBackend | None = None
) -> float:
    """The relative error of as many layers as have one of each kind, with these weights."""
    first = source.with_config(spec.config_of_first(spec.sample_layers))
    if source.is_dummy:
        reference = load_reference(first)
        checkpoint = checkpoint_of(reference.state_dict(), spec.family, RANDOM)
        logits = _logits(checkpoint, source, spec, backend)
    else:  # one after the other, so that neither is there twice
        checkpoint = open_checkpoint(source.model_dir, spec.family)
        logits = _logits(checkpoint, source, spec, backend)
        reference = load_reference(first)
    try:
        return relative_error(logits, eager_logits(reference, spec.vocab_size))
    except Exception as error:  # whatever model code may raise on a config that it does not expect
        raise UnsupportedModelError(f"transformers' own layers fail: {error}") from error


def _logits(
    checkpoint: Checkpoint,
    source: ModelSource,
    spec: DecoderSpec,
    backend: AttentionBackend | None,
) -> Tensor:
    num_layers = spec.sample_layers
    decoder = _decoder(checkpoint, source, spec, num_layers)
    shapes = spec.shapes[:num_layers]
    return paged_logits(decoder, spec.vocab_size, shapes, source.device, source.dtype, backend)


def _checkpoint(source: ModelSource, spec: DecoderSpec) -> Checkpoint:
    if not source.is_dummy:
        return open_checkpoint(source.model_dir, spec.family)
    checkpoint = checkpoint_of(load_reference(source).state_dict(), spec.family, RANDOM)
    gc.collect()  # modules may refer to themselves; now each tensor goes when it is taken
    return checkpoint


def _decoder(
    checkpoint: Checkpoint,
    source: ModelSource,
    spec: DecoderSpec,
    num_layers: int,
    *,
    shows_progress: bool = False,
) -> Decoder:
    def progress(layers: Sequence[int]) -> Iterable[int]:
        is_hidden = not shows_progress or not sys.stderr.isatty()
        return tqdm(layers, desc="loading layers", disable=is_hidden)

    is_transposed = spec.family.is_transposed
    loader = Loader(checkpoint, source.device, source.dtype, is_transposed=is_transposed)
    decoder = Decoder(loader, spec, num_layers, progress)
    with suppress(UnpreparedError):
        decoder.native = NativeLayers(decoder)
    return decoder
