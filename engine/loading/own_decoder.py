"""Loads our own decoder, after comparing its first layers with transformers' own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigurationError
from core.foreign_code import contained
from engine.attention.backends import AttentionBackend, sdpa_backend
from engine.attention.call import UnsupportedModelError
from engine.group import Group
from engine.loading.gate import (
    MAX_KERNEL_ERROR,
    MAX_RELATIVE_ERROR,
    cut_to_layers,
    eager_logits,
    load_reference,
    mismatch_error,
    paged_logits,
    relative_error,
)
from engine.loading.model_source import ModelSource
from engine.model.checkpoint import Checkpoint, checkpoint_of, open_checkpoint
from engine.model.decoder import Decoder
from engine.model.loader import Loader
from engine.model.published.settings import read_spec
from engine.model.spec import DecoderSpec, is_unread
from engine.phases import Phases


@torch.inference_mode()
def load_own_decoder(
    source: ModelSource, max_length: int, phases: Phases, group: Group | None = None
) -> Decoder:
    """Load our decoder, or this process's part. max_length: maximum tokens of a sequence.

    Raises UnsupportedModelError if the family table lacks the model or the comparison fails. Raises
    ConfigurationError if a tensor is missing, unused, of the wrong shape or unreadable, or if the
    model cannot be split over the group.
    """
    group = group or Group(source.device)
    spec = read_spec(source.config, max_length, group.size)
    method = source.quantization
    if source.is_dummy and method is not None:
        raise ConfigurationError(
            f"option.load_format=dummy: random weights cannot have quant_method={method}; use a "
            "config.json without quantization_config, and set option.quantize"
        )
    try:
        _check(source, spec, group)
    finally:
        phases.end("trial of the first layers")
    checkpoint = _checkpoint(source, spec)
    shows_progress = group.rank == 0
    decoder = _decoder(
        checkpoint, source, spec, len(spec.layers), group, show_progress=shows_progress
    )
    checkpoint.keep(lambda name: not is_unread(spec, name))
    checkpoint.require_all_taken(except_for=f"{spec.family.head}.weight" if spec.is_tied else "")
    phases.end("weights")
    return decoder


def load_ends(source: ModelSource, spec: DecoderSpec) -> Decoder:
    """Load a decoder without layers, whole: the embedding, the final norm and the head."""
    return _decoder(_checkpoint(source, spec), source, spec, 0, Group(source.device))


def _check(source: ModelSource, spec: DecoderSpec, group: Group) -> None:
    """Raise UnsupportedModelError unless the first layers compute the same as transformers'.

    All of the group compute our layers; its first process compares them, and the others follow.

    The first comparison is in fp32. If the model will run in low precision or has quantized layers,
    ours run once more as they will serve, and are compared with the same logits. That limit is
    loose, because a router's near ties may go either way, so it only catches kernels that are
    plainly wrong.
    """
    first = source.with_config(spec.first_layers_config(spec.num_trial_layers))
    exact = first.for_comparison()
    is_low = source.dtype != torch.float32
    # A model that serves in low precision uses fp32 only here, so SDPA is fast enough on CUDA.
    is_cuda = source.device.type == "cuda"
    backend = sdpa_backend(source.device) if is_low and is_cuda else None
    logits = _logits(exact, spec, group, backend)
    # Our layers are freed before transformers' are loaded.
    expected = _expected(exact, logits, spec) if group.rank == 0 else None
    _require_agreement(logits, expected, MAX_RELATIVE_ERROR[torch.float32], group)
    if is_low or source.is_quantized:
        _require_agreement(_logits(first, spec, group), expected, MAX_KERNEL_ERROR, group)


def _require_agreement(logits: Tensor, expected: Tensor | None, limit: float, group: Group) -> None:
    """Raise UnsupportedModelError in all of the group if the relative error is above the limit.

    expected: None in all but its first process.
    """
    error = group.agree(0.0 if expected is None else relative_error(logits, expected))
    if error > limit:
        raise mismatch_error(error)


def _expected(source: ModelSource, logits: Tensor, spec: DecoderSpec) -> Tensor:
    """Return the logits [vocab_size] of as many of transformers' layers as the source's config has.

    Those of an earlier start are used if ours agree with them. Raises NotKeptError if they do not,
    or if there are none, and the config is a kept one.
    """
    from engine.loading.kept_logits import KeptLogits  # only this function needs it

    kept = KeptLogits(source)
    expected = kept.read()
    if expected is not None:
        expected = expected.to(logits.device)
        if relative_error(logits, expected) <= MAX_RELATIVE_ERROR[torch.float32]:
            return expected  # else the files may have changed
    source.require_class()
    reference = _reference(source, spec)
    try:
        with contained:
            expected = eager_logits(reference, spec.vocab_size)
    except Exception as error:  # model code may raise anything on an unexpected config
        raise UnsupportedModelError(f"transformers' own layers fail: {error}") from error
    kept.write(expected)
    return expected


def _logits(
    source: ModelSource, spec: DecoderSpec, group: Group, backend: AttentionBackend | None = None
) -> Tensor:
    """Return the logits of the first layers, of which the source's config has no others."""
    num_layers = spec.num_trial_layers
    decoder = _decoder(_checkpoint(source, spec), source, spec, num_layers, group)
    shapes = decoder.shapes[: spec.cache_index(num_layers)]
    return paged_logits(
        decoder,
        spec.vocab_size,
        shapes,
        source.device,
        source.dtype,
        backend,
        in_segments=source.is_pinned,
        states=spec.states[: spec.state_index(num_layers)],
    )


def _checkpoint(source: ModelSource, spec: DecoderSpec) -> Checkpoint:
    """Return the tensors of as many layers as the source's config has, or of more.

    Raises as `open_checkpoint` does.
    """
    if source.is_dummy:
        from engine.loading.random_weights import random_weights

        return checkpoint_of(random_weights(source), spec.family, "random weights")
    checkpoint = open_checkpoint(source.model_dir, spec.family, source.nested)
    cut_to_layers(checkpoint, source, spec)
    return checkpoint


def _reference(source: ModelSource, spec: DecoderSpec) -> Any:
    """Load transformers' model with our decoder's weights, rounded as ours are."""
    if not source.is_quantized:
        return _load_as_stored(source, spec)
    from engine.loading.dequantized import load_rounded

    return load_rounded(source, spec, _load_as_stored)


def _load_as_stored(source: ModelSource, spec: DecoderSpec) -> Any:
    """Load transformers' model with these tensors, where none is quantized.

    The source's config sets the number of layers. Raises as `load_reference` does.
    """
    if source.is_dummy:
        from engine.loading.random_weights import load_random_reference

        return load_random_reference(source)
    is_transposed = source.nested is not None and source.nested.has_transposed_experts
    if is_transposed or spec.family.is_gemma4:  # the files' tensors have other shapes
        checkpoint = _checkpoint(source, spec)
        state = {name: checkpoint.take_stored(name) for name in checkpoint.names()}
        return load_reference(replace(source, nested=None), state=state)
    return load_reference(source)


def _decoder(
    checkpoint: Checkpoint,
    source: ModelSource,
    spec: DecoderSpec,
    num_layers: int,
    group: Group,
    *,
    show_progress: bool = False,
) -> Decoder:
    loader = make_loader(checkpoint, source, spec, group)
    return make_decoder(loader, spec, num_layers, show_progress=show_progress)


def make_loader(
    checkpoint: Checkpoint, source: ModelSource, spec: DecoderSpec, group: Group
) -> Loader:
    """Return what loads tensors of the source's model as it is to be served."""
    make = partial(Loader, is_transposed=spec.family.is_transposed, group=group)
    if source.is_quantized or source.is_pinned:
        from engine.model.quantization.schemes import QuantizingLoader, read_scheme

        kind = QuantizingLoader
        if source.is_pinned:
            from engine.model.pinned.loader import PinnedLoader as kind

        make = partial(
            kind,
            is_transposed=spec.family.is_transposed,
            group=group,
            scheme=read_scheme(source.config),
            precision=source.precision,
            is_exact=source.is_exact or source.is_pinned,
        )
    return make(checkpoint, source.device, source.dtype)


def make_decoder(
    loader: Loader, spec: DecoderSpec, num_layers: int, *, show_progress: bool = False
) -> Decoder:
    """Load the first `num_layers` layers, with what is before and after them."""
    kind = Decoder
    if spec.family.is_gemma4:
        from engine.model.gemma4.decoder import Gemma4Decoder as kind
    elif spec.family.has_one_part:
        from engine.model.mixers.one_part import OnePartDecoder as kind
    if spec.family.has_multipliers:
        from engine.model.mixers.multipliers import Multipliers

        loader.factors = Multipliers(spec.config, loader.device)
    return kind(loader, spec, num_layers, show_progress=show_progress)
