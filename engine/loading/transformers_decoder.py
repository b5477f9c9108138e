"""Loads decoders outside the family table: transformers' own code with our attention.

Many architectures accept a custom attention function and then silently compute something else
(their own mask, a state per sequence, attention called twice). A model is accepted only if each
layer calls attention exactly once in a survey run, and the gate finds its logits unchanged.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from core.configuration.kv_layout import LayerShape
from engine.attention.call import AttentionCall, PagedAttention, UnsupportedModelError
from engine.loading.gate import (
    MAX_RELATIVE_ERROR,
    PROBE_LENGTH,
    eager_logits,
    load_reference,
    mismatch_error,
    paged_logits,
    probe_ids,
    relative_error,
)
from engine.loading.model_source import ModelSource
from engine.loading.transformers_attention import ATTENTION_NAME, register_attention
from engine.model.linear import After, Part
from engine.model.spec import is_long
from engine.phases import Phases
from engine.step.column import Applied

PACKED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class TransformersDecoder:
    """A transformers model whose attention is ours, made by `load_transformers_decoder`."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModelError unless each layer calls attention exactly once."""
        survey = _Survey(model)
        self.shapes = survey.layer_shapes()
        self.linears = survey.linears()
        self.num_bytes: int = model.get_memory_footprint()
        self._model = model
        self._can_keep_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        paged: PagedAttention,
        columns: Sequence[Applied] = (),
    ) -> Tensor:
        """Same as `engine.model.decoder.Decoder.__call__`."""
        keywords: dict[str, Any] = {"logits_to_keep": rows} if self._can_keep_rows else {}
        logits = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            paged=paged,
            **keywords,
        ).logits[0]
        return logits if self._can_keep_rows else logits[rows]


@torch.inference_mode()
def load_transformers_decoder(
    source: ModelSource, max_length: int, phases: Phases
) -> TransformersDecoder:
    """Load a model. max_length: maximum tokens of a sequence.

    Raises UnsupportedModelError with the reason if the model cannot run packed.
    """
    register_attention()
    model = load_reference(source, ATTENTION_NAME)
    phases.end("weights")
    _check_architecture(model, max_length)
    decoder = TransformersDecoder(model)
    if _error(decoder, model, source.dtype) > MAX_RELATIVE_ERROR[source.dtype]:
        # In low precision, a router's near ties may go either way. So the result in fp32 counts.
        with _in_fp32(model):
            error = _error(decoder, model, torch.float32)
        if error > MAX_RELATIVE_ERROR[torch.float32]:
            raise mismatch_error(error)
    phases.end("trial")
    return decoder


def _error(decoder: TransformersDecoder, model: Any, dtype: torch.dtype) -> float:
    """Return the relative error of the logits with our attention, compared with eager attention."""
    vocab_size = model.config.get_text_config().vocab_size
    logits = paged_logits(decoder, vocab_size, decoder.shapes, model.device, dtype)
    model.set_attn_implementation("eager")
    try:
        return relative_error(logits, eager_logits(model, vocab_size))
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _check_architecture(model: Any, max_length: int) -> None:
    """Raise UnsupportedModelError for features that the short probe cannot detect.

    These are state other than K/V, and differences that only long sequences show.
    """
    config = model.config.get_text_config()
    if model.config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedModelError("its attention cannot be replaced")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError("it does not use transformers' attention interface")
    other_types = set(getattr(config, "layer_types", None) or ()) - PACKED_LAYER_TYPES
    if other_types:
        raise UnsupportedModelError(f"it has layers of type {', '.join(sorted(other_types))}")
    source = inspect.getsource(sys.modules[type(model).__module__])
    if "create_chunked_causal_mask" in source:
        raise UnsupportedModelError("it uses chunked attention")
    for parameters in _ropes(config):
        if parameters.get("rope_type") == "longrope" and is_long(parameters, max_length):
            raise UnsupportedModelError(
                "its rotary embedding (longrope) depends on the longest sequence of the batch"
            )


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    ropes = (parameters, *parameters.values())
    return [rope for rope in ropes if isinstance(rope, dict)]


class _Survey:
    """Records the calls of attention, which returns zeros, and of linear layers in one probe."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._num_layers = config.num_hidden_layers
        self._shapes: dict[int, LayerShape] = {}
        self._num_calls: Counter[int] = Counter()
        self._num_rows: dict[str, list[int]] = {}
        """Number of rows of each call of a linear layer, by its name."""
        self._modules: dict[str, nn.Linear | Conv1D] = {}
        head, hooks = model.get_output_embeddings(), []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D) and module is not head:
                self._modules[name] = module
                hooks.append(module.register_forward_pre_hook(self._recorder(name)))
        ids = probe_ids(config.vocab_size)
        positions = torch.arange(PROBE_LENGTH, device=model.device)[None]
        model(
            input_ids=torch.tensor([ids], device=model.device),
            position_ids=positions,
            use_cache=False,
            paged=self,
        )
        for hook in hooks:
            hook.remove()

    def attend(self, call: AttentionCall) -> Tensor:
        self._num_calls[call.layer] += 1
        (_, num_kv_heads, key_dim), value_dim = call.key.shape, call.value.shape[-1]
        self._shapes[call.layer] = LayerShape(num_kv_heads, key_dim, value_dim, call.window)
        return call.query.new_zeros(*call.query.shape[:2], value_dim)

    def layer_shapes(self) -> list[LayerShape]:
        """Return the K/V shapes; raise UnsupportedModelError unless each layer called attention
        exactly once."""
        if not self._num_calls:
            raise UnsupportedModelError("its layers never call the attention function")
        if dict(self._num_calls) != dict.fromkeys(range(self._num_layers), 1):
            raise UnsupportedModelError("its layers do not each call attention exactly once")
        return [self._shapes[layer] for layer in range(self._num_layers)]

    def linears(self) -> list[HookedLinear]:
        """Return the linear layers called once, with one row per token; this excludes experts."""
        return [
            HookedLinear(name, self._modules[name])
            for name, calls in self._num_rows.items()
            if calls == [PROBE_LENGTH]
        ]

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            num_rows = inputs[0].shape[:-1].numel() if inputs else 0
            self._num_rows.setdefault(name, []).append(num_rows)

        return record


class HookedLinear:
    """One of transformers' linear layers, to which a column adds through a forward hook."""

    def __init__(self, name: str, module: nn.Linear | Conv1D) -> None:
        weight = module.weight
        sizes = weight.shape if isinstance(module, Conv1D) else weight.shape[::-1]
        self.in_features, out_features = sizes
        self.columns = range(self.in_features)
        self.parts = {name: Part(slice(0, out_features))}
        self.dtype = weight.dtype
        self._module = module

    def attach(self, after: After) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            outputs = after(inputs[0].flatten(0, -2), output.view(-1, output.shape[-1]))
            return outputs.view(output.shape)

        self._module.register_forward_hook(hook)


@contextmanager
def _in_fp32(model: Any) -> Iterator[None]:
    """Convert the model to fp32 within the context, and back without changing any value."""
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = [(tensor, tensor.dtype) for tensor in tensors if tensor.is_floating_point()]
    for tensor, _ in dtypes:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in dtypes:
            tensor.data = tensor.data.to(dtype)
