"""Any other decoder by transformers' own code, of which attention alone is replaced.

Many architectures accept a foreign attention function and then silently compute something else
(their own mask, a state per sequence, attention called twice). So a model is let in only if a
survey sees each layer call attention exactly once, and the gate finds its logits unchanged.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from core.sizing import LayerShape
from engine.attention.call import (
    ATTENTION_NAME,
    AttendsPaged,
    AttentionCall,
    UnsupportedModelError,
    register_attention,
)
from engine.loading.gate import (
    MAX_RELATIVE_ERROR,
    PROBE_LENGTH,
    eager_logits,
    load_reference,
    paged_logits,
    probe_ids,
    refuse,
    relative_error,
)
from engine.loading.model_source import ModelSource
from engine.model.linear import Add, Part
from engine.model.spec import is_long
from engine.phases import Phases

PACKED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class ForeignDecoder:
    """transformers' model. Make it with `load_foreign`."""

    def __init__(self, model: Any, survey: _Survey) -> None:
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
        paged: AttendsPaged,
        *,
        has_adapters: bool = False,
    ) -> Tensor:
        """As `engine.model.decoder.Decoder`."""
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
def load_foreign(source: ModelSource, max_length: int, phases: Phases) -> ForeignDecoder:
    """max_length: most tokens of a sequence. Raises UnsupportedModelError with the reason."""
    register_attention()
    model = load_reference(source, ATTENTION_NAME)
    phases.end("weights")
    _check_architecture(model, max_length)
    decoder = ForeignDecoder(model, _survey(model))
    if _error(decoder, model, source.dtype) > MAX_RELATIVE_ERROR[source.dtype]:
        # In low precision a router's near ties may fall either way; in fp32 they do not.
        with _in_fp32(model):
            error = _error(decoder, model, torch.float32)
        if error > MAX_RELATIVE_ERROR[torch.float32]:
            raise refuse(error)
    phases.end("trial")
    return decoder


def _error(decoder: ForeignDecoder, model: Any, dtype: torch.dtype) -> float:
    vocab_size = model.config.get_text_config().vocab_size
    logits = paged_logits(decoder, vocab_size, decoder.shapes, model.device, dtype)
    model.set_attn_implementation("eager")
    try:
        return relative_error(logits, eager_logits(model, vocab_size))
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _check_architecture(model: Any, max_length: int) -> None:
    """What a short probe cannot see: state beside K/V, and what differs only far away."""
    config = model.config.get_text_config()
    if model.config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedModelError("its attention cannot be replaced")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError("its attention is not transformers' common one")
    foreign = set(getattr(config, "layer_types", None) or ()) - PACKED_LAYER_TYPES
    if foreign:
        raise UnsupportedModelError(f"it has layers of type {', '.join(sorted(foreign))}")
    source = inspect.getsource(sys.modules[type(model).__module__])
    if "create_chunked_causal_mask" in source:
        raise UnsupportedModelError("it attends in chunks")
    for parameters in _ropes(config):
        if parameters.get("rope_type") == "longrope" and is_long(parameters, max_length):
            raise UnsupportedModelError(
                "its rotary embedding (longrope) would change with the longest sequence at hand"
            )


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    return [each for each in (parameters, *parameters.values()) if isinstance(each, dict)]


class _Survey:
    """Attends to nothing, and notes what each layer hands in."""

    def __init__(self) -> None:
        self._shapes: dict[int, LayerShape] = {}
        self._num_calls: Counter[int] = Counter()
        self._num_rows: dict[str, list[int]] = {}
        """Of each call of a linear layer, by its name."""
        self._modules: dict[str, nn.Linear | Conv1D] = {}
        self._num_layers = 0

    def run(self, model: Any) -> None:
        self._num_layers = model.config.get_text_config().num_hidden_layers
        head, hooks = model.get_output_embeddings(), []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D) and module is not head:
                self._modules[name] = module
                hooks.append(module.register_forward_pre_hook(self._noting(name)))
        ids = probe_ids(model.config.get_text_config().vocab_size)
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
        self._shapes[call.layer] = LayerShape(num_kv_heads, key_dim, value_dim)
        return call.query.new_zeros(*call.query.shape[:2], value_dim)

    def layer_shapes(self) -> list[LayerShape]:
        """Raises UnsupportedModelError unless each layer has called attention once."""
        if not self._num_calls:
            raise UnsupportedModelError("its layers never call the attention function")
        if dict(self._num_calls) != dict.fromkeys(range(self._num_layers), 1):
            raise UnsupportedModelError("its layers do not each call attention exactly once")
        return [self._shapes[layer] for layer in range(self._num_layers)]

    def linears(self) -> list[HookedLinear]:
        """Those called once, with a row for each token, as experts of a router are not."""
        return [
            HookedLinear(name, self._modules[name])
            for name, calls in self._num_rows.items()
            if calls == [PROBE_LENGTH]
        ]

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            num_rows = inputs[0].shape[:-1].numel() if inputs else 0
            self._num_rows.setdefault(name, []).append(num_rows)

        return note


class HookedLinear:
    """One of transformers' linear layers, for adapters."""

    def __init__(self, name: str, module: nn.Linear | Conv1D) -> None:
        weight = module.weight
        sizes = weight.shape if isinstance(module, Conv1D) else weight.shape[::-1]
        self.in_features, out_features = sizes
        self.parts = {name: Part(slice(0, out_features))}
        self.dtype = weight.dtype
        self._module = module

    def attach(self, add: Add) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            add(inputs[0].flatten(0, -2), output.view(-1, output.shape[-1]))

        self._module.register_forward_hook(hook)


def _survey(model: Any) -> _Survey:
    survey = _Survey()
    survey.run(model)
    return survey


@contextmanager
def _in_fp32(model: Any) -> Iterator[None]:
    """The model in fp32 for a while; what it had before comes back to the bit."""
    tensors = [*model.parameters(), *model.buffers()]
    own = [(tensor, tensor.dtype) for tensor in tensors if tensor.is_floating_point()]
    for tensor, _ in own:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in own:
            tensor.data = tensor.data.to(dtype)
