"""Norms, attention blocks, gated MLPs and whole layers of a decoder as a few calls.

They are proposed like what is fused, and after it: what has its products in panels, and its norms,
activation and rotary embedding replaced, loses its own code to what on trial computes the same;
then so do layers that are nothing but these. A call that has what the trial had not, such as a
mask, goes the old way. See `kernels.cpu.prepared`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.sizing import LayerShape
from engine.attention import AttendsPaged, AttentionCall
from engine.attention_backend import CpuBackend
from engine.fusion import Fusion
from engine.kv_cache import KVCache
from engine.merged import MergedPart
from engine.paged_step import PagedStep
from engine.panels import PanelLinear
from engine.proposal import Function, Proposal
from engine.replacements import COS_PARTS, norm_eps
from kernels.batch import PagedBatch
from kernels.cpu.prepared import (
    Heads,
    PreparedAttention,
    PreparedLayer,
    PreparedMLP,
    PreparedNorm,
    PreparedProduct,
    UnpreparedError,
)

Forwards = Mapping[nn.Module, Function]
"""What layers have got instead of their own."""
Parts = dict[nn.Module, Any]
"""By module: the prepared norm, MLP, attention or layer that takes its place."""
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The children of a layer as Llama's is; whether it computes the same shows on trial."""
HIDDEN, ANGLES = "hidden_states", "position_embeddings"
PROBE_ROWS = 7
BLOCK_SIZE = 16
ABSENT = ("attention_mask", "past_key_values")
"""Keywords that must be None."""


def prepare(fusion: Fusion, model: nn.Module, probe: Callable[[AttendsPaged], object]) -> None:
    """Has the layers that were fused run prepared, where that computes the same.

    probe: does a forward pass of the model over a prompt.
    """
    layers = [layer for layer in model.modules() if _children(layer) == LAYER_PARTS]
    attentions = [layer for layer in fusion.forwards if hasattr(layer, "layer_idx")]
    watch = _watched([*attentions, *layers], probe)
    parts: Parts = {}
    for proposal in _part_proposals(fusion.forwards, watch, parts):
        fusion.consider(proposal)
    for layer in layers:
        with suppress(KeyError, UnpreparedError):  # of one that is not there
            fusion.consider(_layer(layer, watch, parts))
    fusion.apply()


def _children(layer: nn.Module) -> set[str]:
    """Names, but of what does nothing in inference."""
    return {name for name, each in layer.named_children() if not isinstance(each, nn.Dropout)}


def _watched(modules: list[nn.Module], probe: Callable[[AttendsPaged], object]) -> _Watch:
    watch = _Watch()
    hooks = [each.register_forward_hook(watch.note, with_kwargs=True) for each in modules]
    probe(watch)
    for hook in hooks:
        hook.remove()
    return watch


def _part_proposals(forwards: Forwards, watch: _Watch, parts: Parts) -> Iterator[Proposal]:
    for layer, own in list(forwards.items()):
        form = own.keywords if isinstance(own, partial) else {}
        try:
            if layer in watch.keywords:
                yield _attention(layer, own, watch, forwards, parts)
            elif "name" in form:
                yield _mlp(layer, own, form["name"], parts)
            elif "rounds_first" in form:
                yield _norm(layer, own, form, parts)
        except UnpreparedError:
            continue


class _Watch:
    """Attends to nothing, and notes how layers are called and what their attention asks for."""

    def __init__(self) -> None:
        self.keywords: dict[nn.Module, dict[str, Any]] = {}
        self.gives_tuple: dict[nn.Module, bool] = {}
        self.calls: dict[int, AttentionCall] = {}
        """By layer index."""

    def note(
        self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        if len(arguments) <= 1:
            self.keywords[layer] = _named(arguments, keywords)
            self.gives_tuple[layer] = isinstance(result, tuple)

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[-1])


def _norm(layer: Any, own: Function, form: Mapping[str, Any], parts: Parts) -> Proposal:
    prepared = _prepared_norm(layer, form)
    return _rows_proposal("RMSNorm", layer, own, prepared, len(layer.weight), parts)


def _mlp(layer: Any, own: Function, activation: Any, parts: Parts) -> Proposal:
    gate_up = _product(_whole(layer, "gate_proj", "gate_up_proj"))
    prepared = PreparedMLP(gate_up, _product(layer.down_proj), activation)
    width = layer.down_proj.out_features
    return _rows_proposal("gated MLP", layer, own, prepared, width, parts)


def _rows_proposal(
    what: str,
    layer: nn.Module,
    own: Function,
    prepared: PreparedNorm | PreparedMLP,
    width: int,
    parts: Parts,
) -> Proposal:
    def forward(x: Tensor) -> Tensor:
        return prepared(x) if _fits(x, prepared.dtype) else own(x)

    def install(_: Function) -> Mapping[nn.Module, Function]:
        parts[layer] = prepared
        return {layer: forward}

    return Proposal(
        what=f"prepared {what}",
        own=own,
        candidates=[prepared],
        samples=[(torch.randn(1, PROBE_ROWS, width).to(prepared.dtype),)],
        install=install,
    )


def _attention(
    layer: Any, own: Function, watch: _Watch, forwards: Forwards, parts: Parts
) -> Proposal:
    call, angles = watch.calls.get(layer.layer_idx), watch.keywords[layer].get(ANGLES)
    if call is None or angles is None:
        raise UnpreparedError("its attention is called otherwise")
    norms = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]
    heads = partial(
        Heads,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        key_dim=call.key.shape[2],
        value_dim=call.value.shape[2],
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=None if call.sinks is None else call.sinks.float().clone(),
        norms=None if norms == [None, None] else _head_norms(norms, forwards),
    )
    qkv, out = _product(_whole(layer, "q_proj", "qkv_proj")), _product(layer.o_proj)
    choices = [heads(rotary_dim=repeats * angles[0].shape[-1]) for repeats in COS_PARTS]
    candidates = [
        PreparedAttention(qkv, out, each)
        for each in choices
        if PreparedAttention.computes(qkv, out, each)
    ]
    if not candidates:
        raise UnpreparedError("the C++ does not compute such heads")
    return _paged_proposal("attention", layer, own, candidates, call, watch, parts)


def _layer(layer: Any, watch: _Watch, parts: Parts) -> Proposal:
    norms = parts[layer.input_layernorm], parts[layer.post_attention_layernorm]
    prepared = PreparedLayer(norms, parts[layer.self_attn], parts[layer.mlp])
    call = watch.calls[layer.self_attn.layer_idx]
    return _paged_proposal("decoder layer", layer, layer.forward, [prepared], call, watch, parts)


def _paged_proposal(
    what: str,
    layer: nn.Module,
    own: Function,
    candidates: Sequence[PreparedAttention | PreparedLayer],
    call: AttentionCall,
    watch: _Watch,
    parts: Parts,
) -> Proposal:
    """Of what takes hidden states and a paged step, and gives hidden states, or those first."""
    keywords, index = watch.keywords[layer], call.layer
    names = frozenset(keywords)
    if not {HIDDEN, ANGLES, "paged"} <= names:
        raise UnpreparedError(f"its {what} is called otherwise")
    step, hidden = _trial_step(call), keywords[HIDDEN]
    is_first = watch.gives_tuple[layer]

    def try_own(hidden: Tensor) -> Any:
        result = own(**{**keywords, HIDDEN: hidden, "paged": step})
        return result[0] if is_first else result

    def try_candidate(hidden: Tensor, prepared: Function) -> Tensor:
        keys, values = step.cache.keys[index], step.cache.values[index]
        return prepared(hidden, *keywords[ANGLES], keys, values, step.batch)

    def install(candidate: Function) -> Mapping[nn.Module, Function]:
        assert isinstance(candidate, partial)
        prepared = parts[layer] = candidate.keywords["prepared"]

        def forward(*arguments: Any, **others: Any) -> Any:
            given = _named(arguments, others)
            if len(arguments) > 1 or given.keys() != names or not _is_plain(given, prepared.dtype):
                return own(*arguments, **others)
            (cos, sin), paged = given[ANGLES], given["paged"]
            keys, values = paged.cache.keys[index], paged.cache.values[index]
            taken = given[HIDDEN], cos, sin, keys, values, paged.batch
            if isinstance(prepared, PreparedLayer):
                result = prepared(*taken, paged.rows_after(index))
            else:
                result = prepared(*taken)
            return (result, None) if is_first else result

        return {layer: forward}

    return Proposal(
        what=f"prepared {what}",
        own=try_own,
        candidates=[partial(try_candidate, prepared=each) for each in candidates],
        samples=[(torch.randn(hidden.shape).to(hidden.dtype),)],
        install=install,
    )


def _named(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a call that may have given its hidden states, and nothing else, without one."""
    return {**dict(zip((HIDDEN,), arguments, strict=False)), **keywords}


def _is_plain(keywords: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether a layer is called as the engine's steps call it."""
    paged = keywords["paged"]
    tensors = keywords[HIDDEN], *keywords[ANGLES]
    return (
        isinstance(paged, PagedStep)
        and isinstance(paged.backend, CpuBackend)
        and all(_fits(each, dtype) for each in tensors)
        and all(keywords.get(name) is None for name in ABSENT)
    )


def _fits(rows: Tensor, dtype: torch.dtype) -> bool:
    return (
        rows.dtype == dtype
        and rows.ndim == 3
        and rows.shape[0] == 1
        and rows.is_contiguous()
        and not torch.compiler.is_compiling()
    )


def _product(layer: Any) -> PreparedProduct:
    if not isinstance(layer, PanelLinear):
        raise UnpreparedError("its product has no panels")
    if layer.panels.dim() == 3 and layer.panels.dtype == torch.bfloat16 and not layer.is_narrowed:
        raise UnpreparedError("its rows become fp32 for each product")
    bias = None if layer.bias is None else layer.bias.float().clone()
    return PreparedProduct(layer.panels, layer.out_features, bias)


def _whole(layer: Any, part: str, whole: str) -> Any:
    """What leaves several results side by side: merged here, or one from the start (Phi-3)."""
    first = getattr(layer, part, None)
    return first.merged.whole if isinstance(first, MergedPart) else getattr(layer, whole, None)


def _head_norms(norms: list[Any], forwards: Forwards) -> tuple[PreparedNorm, PreparedNorm]:
    forms = [getattr(forwards.get(each), "keywords", {}) for each in norms]
    query, key = map(_prepared_norm, norms, forms)
    return query, key


def _prepared_norm(layer: Any, form: Mapping[str, Any]) -> PreparedNorm:
    if "rounds_first" not in form:
        raise UnpreparedError("its norm is not replaced")
    return PreparedNorm(layer.weight, norm_eps(layer), **form)


def _trial_step(call: AttentionCall) -> PagedStep:
    """One prompt, in blocks that do not follow one another."""
    num_tokens = len(call.query)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = LayerShape(call.key.shape[1], call.key.shape[2], call.value.shape[2])
    table = torch.arange(num_blocks, dtype=torch.int32).flip(0)
    slots = table.repeat_interleave(BLOCK_SIZE)[:num_tokens].long() * BLOCK_SIZE
    batch = PagedBatch(
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=table[None].contiguous(),
        slot_mapping=slots + torch.arange(num_tokens) % BLOCK_SIZE,
        spans=((0, num_tokens, num_tokens),),
    )
    shapes = [shape] * (call.layer + 1)
    cache = KVCache(shapes, num_blocks, BLOCK_SIZE, call.key.dtype, call.key.device)
    return PagedStep(batch, cache, CpuBackend())
