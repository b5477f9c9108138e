"""Norms, attention blocks, gated MLPs and whole layers of a decoder as a few calls.

They are proposed like what is fused, and after it: what has its products in panels, and its norms,
activation and rotary embedding replaced, loses its own code to what on trial computes the same;
then so do layers that are nothing but these, and of layers that follow one another the first
computes all. A call that has what the trial had not, such as a mask, goes the old way. See
`kernels.cpu.prepared`.
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
from engine.call_form import ANGLES, HIDDEN, CallForm, attention_inputs, by_name, fits
from engine.fusion import Fusion
from engine.kv_cache import KVCache
from engine.merged import MergedPart
from engine.paged_step import PagedStep
from engine.panels import PanelLinear
from engine.proposal import Function, Proposal
from engine.replacements import COS_PARTS, norm_eps
from kernels.batch import PagedBatch
from kernels.cpu.prepared import (
    AttentionInputs,
    Heads,
    PreparedAttention,
    PreparedLayer,
    PreparedLayers,
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
PROBE_ROWS = 7
BLOCK_SIZE = 16


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
    for chain in _chains([each for each in layers if each in parts], watch, parts):
        fusion.forwards.update(chain.forwards())
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
        self.results: dict[nn.Module, Any] = {}
        self.calls: dict[int, AttentionCall] = {}
        """By layer index."""

    def note(
        self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        if len(arguments) <= 1:
            self.keywords[layer] = by_name(arguments, keywords)
            self.results[layer] = result

    def form(self, layer: nn.Module) -> CallForm:
        """Raises UnpreparedError."""
        names = frozenset(self.keywords[layer])
        if not {HIDDEN, ANGLES, "paged"} <= names:
            raise UnpreparedError("it is called otherwise")
        return CallForm(names, isinstance(self.results[layer], tuple))

    def follows(self, layer: nn.Module, before: nn.Module) -> bool:
        """Whether it was given what the one before returned, and else the same."""
        (hidden, angles), (_, others) = (
            [self.keywords[each][name] for name in (HIDDEN, ANGLES)] for each in (layer, before)
        )
        return hidden is self.form(before).hidden(self.results[before]) and angles is others

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
        return prepared(x) if fits(x, prepared.dtype) else own(x)

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
    form, index = watch.form(layer), call.layer

    def install(candidate: Function) -> Mapping[nn.Module, Function]:
        assert isinstance(candidate, partial)
        prepared = parts[layer] = candidate.keywords["run"]

        def forward(*arguments: Any, **keywords: Any) -> Any:
            given = form.plain(arguments, keywords, prepared.dtype)
            if given is None:
                return own(*arguments, **keywords)
            return form.returned(prepared(given[HIDDEN], attention_inputs(given, index)))

        return {layer: forward}

    return _paged_proposal("attention", layer, own, candidates, call, watch, install)


def _layer(layer: Any, watch: _Watch, parts: Parts) -> Proposal:
    norms = parts[layer.input_layernorm], parts[layer.post_attention_layernorm]
    prepared = PreparedLayer(norms, parts[layer.self_attn], parts[layer.mlp])
    alone = PreparedLayers([prepared])

    def run(hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        return alone(hidden, [inputs])

    def install(_: Function) -> Mapping[nn.Module, Function]:
        parts[layer] = prepared
        return {}  # but with those beside it

    call = watch.calls[layer.self_attn.layer_idx]
    return _paged_proposal("decoder layer", layer, layer.forward, [run], call, watch, install)


def _paged_proposal(
    what: str,
    layer: nn.Module,
    own: Function,
    candidates: Sequence[Callable[[Tensor, AttentionInputs], Tensor]],
    call: AttentionCall,
    watch: _Watch,
    install: Callable[[Function], Mapping[nn.Module, Function]],
) -> Proposal:
    """Of what takes hidden states and a paged step, and gives hidden states, or those first."""
    keywords, form, step = watch.keywords[layer], watch.form(layer), _trial_step(call)
    hidden = keywords[HIDDEN]

    def try_own(hidden: Tensor) -> Any:
        return form.hidden(own(**{**keywords, HIDDEN: hidden, "paged": step}))

    def try_candidate(hidden: Tensor, run: Function) -> Tensor:
        return run(hidden, attention_inputs({**keywords, "paged": step}, call.layer))

    return Proposal(
        what=f"prepared {what}",
        own=try_own,
        candidates=[partial(try_candidate, run=each) for each in candidates],
        samples=[(torch.randn(hidden.shape).to(hidden.dtype),)],
        install=install,
    )


class _Chain:
    """Layers that follow one another. The first computes all, and each of the others gives on what
    it is given."""

    def __init__(self, layers: Sequence[Any], watch: _Watch, parts: Parts) -> None:
        self._layers = [(each, each.forward, watch.form(each)) for each in layers]
        self._indices = [each.self_attn.layer_idx for each in layers]
        self._prepared = PreparedLayers([parts[each] for each in layers])
        self._result: Tensor | None = None

    def forwards(self) -> Iterator[tuple[nn.Module, Function]]:
        (first, own, form), *others = self._layers
        yield first, partial(self._compute, own, form)
        for layer, own, form in others:
            yield layer, partial(self._give_on, own, form)

    def _compute(self, own: Function, form: CallForm, *arguments: Any, **keywords: Any) -> Any:
        self._result = None
        given = form.plain(arguments, keywords, self._prepared.dtype)
        if given is None:
            return own(*arguments, **keywords)
        inputs = [attention_inputs(given, index) for index in self._indices]
        rows = given["paged"].rows_after(self._indices[-1])
        self._result = self._prepared(given[HIDDEN], inputs, rows)
        return form.returned(self._result)

    def _give_on(self, own: Function, form: CallForm, *arguments: Any, **keywords: Any) -> Any:
        hidden = by_name(arguments, keywords).get(HIDDEN)
        if hidden is None or hidden is not self._result:
            return own(*arguments, **keywords)
        return form.returned(hidden)


def _chains(layers: Sequence[nn.Module], watch: _Watch, parts: Parts) -> Iterator[_Chain]:
    """Of layers in their order, as long as can be."""
    chain: list[nn.Module] = []
    for layer in layers:
        if chain and not watch.follows(layer, chain[-1]):
            yield _Chain(chain, watch, parts)
            chain = []
        chain.append(layer)
    if chain:
        yield _Chain(chain, watch, parts)


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
