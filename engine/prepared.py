"""Norms, attention blocks and gated MLPs of a decoder as a few calls; see `kernels.cpu.prepared`.

They are proposed like what is fused, and after it: a layer whose products lie in panels, and whose
norms, activation and rotary embedding were replaced, loses its own code to what on trial computes
the same. A call that has what the trial had not, such as a mask, goes the old way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    PreparedMLP,
    PreparedNorm,
    PreparedProduct,
    UnpreparedError,
)

Forwards = Mapping[nn.Module, Function]
"""What layers have got instead of their own."""
PROBE_ROWS = 7
BLOCK_SIZE = 16
ABSENT = ("attention_mask", "past_key_values")
"""Keywords that must be None."""


def prepare(fusion: Fusion, probe: Callable[[AttendsPaged], object]) -> None:
    """Has the layers that were fused run prepared, where that computes the same.

    probe: does a forward pass over a prompt.
    """
    for proposal in _proposals(fusion.forwards, probe):
        fusion.consider(proposal)
    fusion.apply()


def _proposals(forwards: Forwards, probe: Callable[[AttendsPaged], object]) -> Iterator[Proposal]:
    watch = _Watch()
    hooks = [
        layer.register_forward_pre_hook(watch.note, with_kwargs=True)
        for layer in forwards
        if hasattr(layer, "layer_idx")
    ]
    probe(watch)
    for hook in hooks:
        hook.remove()
    for layer, own in list(forwards.items()):
        form = own.keywords if isinstance(own, partial) else {}
        try:
            if layer in watch.keywords:
                yield _attention(layer, own, watch, forwards)
            elif "name" in form:
                yield _mlp(layer, own, form["name"])
            elif "rounds_first" in form:
                yield _norm(layer, own, form)
        except UnpreparedError:
            continue


class _Watch:
    """Attends to nothing, and notes how attention layers are called and what they ask for."""

    def __init__(self) -> None:
        self.keywords: dict[nn.Module, dict[str, Any]] = {}
        self.calls: dict[int, AttentionCall] = {}
        """By layer index."""

    def note(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not arguments:
            self.keywords[layer] = keywords

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[-1])


def _norm(layer: Any, own: Function, form: Mapping[str, Any]) -> Proposal:
    return _rows_proposal("RMSNorm", layer, own, _prepared_norm(layer, form), len(layer.weight))


def _mlp(layer: Any, own: Function, activation: Any) -> Proposal:
    gate_up = _product(_whole(layer, "gate_proj", "gate_up_proj"))
    prepared = PreparedMLP(gate_up, _product(layer.down_proj), activation)
    return _rows_proposal("gated MLP", layer, own, prepared, layer.down_proj.out_features)


def _rows_proposal(
    what: str, layer: nn.Module, own: Function, prepared: PreparedNorm | PreparedMLP, width: int
) -> Proposal:
    def forward(x: Tensor) -> Tensor:
        return prepared(x) if _fits(x, prepared.dtype) else own(x)

    return Proposal(
        what=f"prepared {what}",
        own=own,
        candidates=[prepared],
        samples=[(torch.randn(1, PROBE_ROWS, width).to(prepared.dtype),)],
        install=lambda _: {layer: forward},
    )


def _attention(layer: Any, own: Function, watch: _Watch, forwards: Forwards) -> Proposal:
    keywords, call = watch.keywords[layer], watch.calls.get(layer.layer_idx)
    hidden, angles = keywords.get("hidden_states"), keywords.get("position_embeddings")
    if call is None or hidden is None or angles is None or "paged" not in keywords:
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
    names, index = frozenset(keywords), call.layer  # all that is kept of the trial
    qkv, out = _product(_whole(layer, "q_proj", "qkv_proj")), _product(layer.o_proj)
    choices = [heads(rotary_dim=parts * angles[0].shape[-1]) for parts in COS_PARTS]
    candidates = [
        PreparedAttention(qkv, out, each)
        for each in choices
        if PreparedAttention.computes(qkv, out, each)
    ]
    if not candidates:
        raise UnpreparedError("the C++ does not compute such heads")
    step, (cos, sin) = _trial_step(call), angles
    keys, values = step.cache.keys[index], step.cache.values[index]

    def try_own(hidden: Tensor) -> Tensor:
        return own(**{**keywords, "hidden_states": hidden, "paged": step})[0]

    def try_candidate(hidden: Tensor, prepared: PreparedAttention) -> Tensor:
        return prepared(hidden, cos, sin, keys, values, step.batch)

    def install(candidate: Function) -> Mapping[nn.Module, Function]:
        assert isinstance(candidate, partial)
        prepared: PreparedAttention = candidate.keywords["prepared"]

        def forward(*arguments: Any, **given: Any) -> Any:
            if arguments or given.keys() != names or not _is_plain(given, qkv.dtype):
                return own(*arguments, **given)
            paged: PagedStep = given["paged"]
            keys, values = paged.cache.keys[index], paged.cache.values[index]
            cos, sin = given["position_embeddings"]
            return prepared(given["hidden_states"], cos, sin, keys, values, paged.batch), None

        return {layer: forward}

    return Proposal(
        what="prepared attention",
        own=try_own,
        candidates=[partial(try_candidate, prepared=each) for each in candidates],
        samples=[(torch.randn(hidden.shape).to(hidden.dtype),)],
        install=install,
    )


def _is_plain(keywords: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether attention is called as the engine's steps do."""
    paged = keywords["paged"]
    tensors = keywords["hidden_states"], *keywords["position_embeddings"]
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
