"""A transformers decoder that runs packed, and the gate that keeps the others out.

Many architectures accept a foreign attention function and then silently compute something else
(their own mask, a state per sequence, attention called twice). So a model is let in only if a
survey sees each layer call attention exactly once, and a prompt computed in chunks through the
paged path gives the logits of transformers' own layers and eager attention.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from core.errors import ConfigurationError
from core.plan import Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from core.sizing import LayerShape
from engine.attention import (
    ATTENTION_NAME,
    AttendsPaged,
    AttentionCall,
    UnsupportedModelError,
    register_attention,
)
from engine.attention_backend import make_backend
from engine.compiled import CompiledForward, Forward
from engine.fusion import Fusion, fuse, unfuse
from engine.inputs import InputBuilder, StepInputs
from engine.kv_cache import KVCache
from engine.lora.memory import AdapterMemory
from engine.lora.products import find_products
from engine.model_source import ModelSource
from engine.paged_step import PagedStep
from engine.prepared import prepare
from engine.staging import Staging

PROBE_LENGTH = 40
PROBE_BLOCK_SIZE = 16
PROBE_CHUNKS = ((0, 19), (19, 20), (39, 1))
"""A prompt, more of it, and a decode step: all that attention is ever asked for."""
PACKED_LAYER_TYPES = {"full_attention", "sliding_attention"}
MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of the probe's logits; a wrong model is off by about 1."""


class PackedModel:
    """A decoder whose attention is ours. Make it with `load_packed_model`."""

    def __init__(self, model: Any, shapes: list[LayerShape]) -> None:
        self.shapes = shapes
        self.notes: tuple[str, ...] = ()
        self._model = model
        self._can_keep_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._logits: Forward = self._eager_logits
        self.adapter_memory: AdapterMemory | None = None
        """Once `adapt` was called."""

    @property
    def config(self) -> PreTrainedConfig:
        return self._model.config

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def weights_bytes(self) -> int:
        return self._model.get_memory_footprint()

    @torch.inference_mode()
    def adapt(self, num_slots: int, max_rank: int) -> AdapterMemory:
        """Gives the linear layers room for adapters; to be called once.

        Raises UnsupportedModelError where the model has no such layers.
        """
        head = self._model.get_output_embeddings()
        products = find_products(
            self._model, head, lambda: _forward_probe(self._model, paged=_Survey()), PROBE_LENGTH
        )
        if not products:
            raise UnsupportedModelError("it has no linear layers that see each token once")
        self.adapter_memory = AdapterMemory(products, num_slots, max_rank, self.device)
        return self.adapter_memory

    def compile(self, backend: str = "inductor") -> None:
        """From now on `forward` runs compiled. Takes minutes; raises what the compiler raises."""
        self._logits = CompiledForward(self._eager_logits, self.device, backend)

    def forward(self, inputs: StepInputs, paged: AttendsPaged) -> Tensor:
        """Logits [S + R, vocabulary] of the rows to sample after and of those that score."""
        if self.adapter_memory is not None:
            self.adapter_memory.choose(inputs.adapter_slots)
        return self._logits(inputs.input_ids, inputs.position_ids, inputs.logit_rows, paged)

    def _eager_logits(
        self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, paged: AttendsPaged
    ) -> Tensor:
        keywords: dict[str, Any] = {"logits_to_keep": rows} if self._can_keep_rows else {}
        logits = self._model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            use_cache=False,
            paged=paged,
            **keywords,
        ).logits[0]
        return logits if self._can_keep_rows else logits[rows]


def load_packed_model(
    source: ModelSource,
    *,
    is_fused: bool = False,
    in_panels: bool = False,
    is_prepared: bool = False,
) -> PackedModel:
    """Loads, surveys, fuses its layers if asked to (`engine.fusion.fuse`), and probes.

    is_prepared: what is fused and in panels is prepared too (`engine.prepared`).


    Raises UnsupportedModelError with the reason.
    """
    model = _load(source).to(source.device).eval()
    _check_architecture(model)
    packed = PackedModel(model, _survey(model))
    if is_fused:
        packed.notes = (_fuse(packed, model, in_panels, is_prepared),)
    else:
        _check_logits(packed, model, Fusion())
    if source.device.type == "cuda":
        torch.cuda.empty_cache()  # the memory that is left for K and V is asked of the device
    return packed


def _load(source: ModelSource) -> Any:
    register_attention()
    try:
        return source.load(AutoModelForCausalLM, attn_implementation=ATTENTION_NAME)
    except KeyError as error:  # a table of attention classes by name
        raise UnsupportedModelError("its attention is a class of its own") from error
    except ValueError as error:
        raise UnsupportedModelError(f"transformers cannot load it so: {error}") from error
    except Exception as error:  # whatever a library for files of weights may raise
        raise ConfigurationError(f"transformers cannot read {source.model_dir}: {error}") from error


def _fuse(packed: PackedModel, model: Any, in_panels: bool, is_prepared: bool) -> str:
    """Fuses the model's layers, or leaves them where the logits differ; the note on either."""
    fusion = fuse(model, in_panels=in_panels)
    try:
        if is_prepared:
            with torch.inference_mode():
                prepare(fusion, model, lambda paged: _forward_probe(model, paged=paged))
        _check_logits(packed, model, fusion)
    except Exception as error:  # whatever fused layers may raise where they do not fit
        unfuse(model, fusion)
        _check_logits(packed, model, Fusion())
        return f"nothing fused: on trial, {error}"
    return str(fusion)


def _check_logits(packed: PackedModel, model: Any, fusion: Fusion) -> None:
    """Raises UnsupportedModelError where paged attention or the fusion changes the answer."""
    if _probe(packed, model, fusion) <= MAX_RELATIVE_ERROR[packed.dtype]:
        return
    # In low precision a router's near ties may fall either way; in fp32 they do not.
    with _in_fp32(model):
        error = _probe(packed, model, fusion)
    if not error <= MAX_RELATIVE_ERROR[torch.float32]:
        raise UnsupportedModelError(
            f"paged and eager attention give different logits (relative error {error:.2g})"
        )


def _check_architecture(model: Any) -> None:
    """What a short probe cannot see: state beside K/V, and masks that differ only far away."""
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


class _Survey:
    """Attends to nothing and notes what each layer hands in."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.num_calls: Counter[int] = Counter()

    def attend(self, call: AttentionCall) -> Tensor:
        self.num_calls[call.layer] += 1
        (_, num_kv_heads, key_dim), value_dim = call.key.shape, call.value.shape[-1]
        self.shapes[call.layer] = LayerShape(num_kv_heads, key_dim, value_dim)
        return call.query.new_zeros(*call.query.shape[:2], value_dim)


@torch.inference_mode()
def _survey(model: Any) -> list[LayerShape]:
    """The shape of every layer's K/V."""
    survey = _Survey()
    _forward_probe(model, paged=survey)
    num_layers = model.config.get_text_config().num_hidden_layers
    if not survey.num_calls:
        raise UnsupportedModelError("its layers never call the attention function")
    if dict(survey.num_calls) != dict.fromkeys(range(num_layers), 1):
        raise UnsupportedModelError("its layers do not each call attention exactly once")
    return [survey.shapes[layer] for layer in range(num_layers)]


@torch.inference_mode()
def _probe(packed: PackedModel, model: Any, fusion: Fusion) -> float:
    """The relative error of paged logits against transformers' own; infinite for NaN."""
    num_blocks = -(-PROBE_LENGTH // PROBE_BLOCK_SIZE)
    cache = KVCache(packed.shapes, num_blocks, PROBE_BLOCK_SIZE, packed.dtype, packed.device)
    backend, _ = make_backend(
        packed.device, packed.shapes, PROBE_BLOCK_SIZE, PROBE_LENGTH, packed.dtype
    )
    sequence = Sequence(0, _probe_ids(model), SamplingParams())
    blocks = tuple(reversed(range(num_blocks)))
    logits: Tensor | None = None
    builder = InputBuilder(PROBE_BLOCK_SIZE, Staging(packed.device))
    for start, length in PROBE_CHUNKS:
        is_last = start + length == PROBE_LENGTH
        inputs = builder.build(StepPlan((Chunk(sequence, start, length, blocks, is_last),)))
        step = PagedStep(inputs.batch, cache, backend, inputs.logit_rows)
        logits = packed.forward(inputs, step)
    assert logits is not None
    model.set_attn_implementation("eager")
    try:
        with fusion.undone():
            expected = _forward_probe(model)[:, -1].float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    error = (logits.float() - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(float("inf")).item()


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


def _forward_probe(model: Any, **keywords: object) -> Tensor:
    ids = torch.tensor([_probe_ids(model)], device=model.device)
    positions = torch.arange(PROBE_LENGTH, device=model.device)[None]
    return model(input_ids=ids, position_ids=positions, use_cache=False, **keywords).logits


def _probe_ids(model: Any) -> list[int]:
    """Spread over the vocabulary, and all different where it is large enough."""
    vocab_size: int = model.config.get_text_config().vocab_size
    return [(1 + 7919 * place) % vocab_size for place in range(PROBE_LENGTH)]
