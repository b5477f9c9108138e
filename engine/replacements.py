"""What may be replaced in a decoder's layers; see `engine.fusion`.

Each function looks at one layer and returns a proposal, or None where there is nothing to replace.
Names only suggest: whether a class called RMSNorm computes what Llama's does, or Gemma's, or
something else shows when the proposal is verified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engine.elementwise import Elementwise
from engine.merged import MergedLinear, MergedPart, can_merge
from engine.proposal import Function, Proposal, Sample, closest, runs

NORM_FORMS = (
    {"rounds_first": True},  # Llama
    {"rounds_first": False},  # OLMo 2, gpt-oss
    {"rounds_first": False, "offset": 1.0},  # Gemma
)
ACTIVATIONS = ("silu", "gelu_tanh")
ROTARY = "apply_rotary_pos_emb"
"""transformers' name for it, in each of its model files."""
PROBE_HEAD_DIM = 64
COS_PARTS = (1, 2)
"""How many times cos is repeated to cover what is rotated: 2 in gpt-oss."""


def merged_linears(
    layer: nn.Module, elementwise: Elementwise, dtype: torch.dtype, *, names: tuple[str, ...]
) -> Proposal | None:
    linears: list[Any] = [getattr(layer, name, None) for name in names]
    if not can_merge(linears):
        return None
    merged = MergedLinear(linears)
    parts = [MergedPart(merged, index) for index in range(len(names))]

    def install(candidate: Function) -> Mapping[nn.Module, Function]:
        for name, part in zip(names, parts, strict=True):
            setattr(layer, name, part)
        return {part: part.take for part in parts}

    return Proposal(
        what="/".join(names),
        own=lambda x: tuple(linear(x) for linear in linears),
        candidates=[lambda x: tuple(part.take(x) for part in parts)],
        samples=[_sample(merged)],
        install=install,
    )


def rms_norm(layer: nn.Module, elementwise: Elementwise, dtype: torch.dtype) -> Proposal | None:
    weight, eps = getattr(layer, "weight", None), norm_eps(layer)
    if not type(layer).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None

    def normalize(x: Tensor, **form: Any) -> Tensor:
        rows = x.flatten(0, 1) if x.ndim in (3, 4) else x.flatten(0, -2)
        return elementwise.rms_norm(rows, weight, eps, **form).view(x.shape)

    # In fp32 as well, where no rounding hides what differs; small rows tell one eps from another.
    samples = [
        (_rows(len(weight), weight.device, each, smallest=1e-3),) for each in {dtype, torch.float32}
    ]
    return Proposal(
        what="RMSNorm",
        own=layer.forward,
        candidates=[partial(normalize, **form) for form in NORM_FORMS],
        samples=samples,
        install=lambda forward: {layer: forward},
    )


def norm_eps(layer: nn.Module) -> Any:
    """None where there is none, under either of the names it has."""
    return getattr(layer, "variance_epsilon", getattr(layer, "eps", None))


def gated_mlp(layer: nn.Module, elementwise: Elementwise, dtype: torch.dtype) -> Proposal | None:
    gate_up = _gate_up(layer)
    down = getattr(layer, "down_proj", None)
    activation = getattr(layer, "act_fn", getattr(layer, "activation_fn", None))
    if gate_up is None or down is None or activation is None:
        return None

    def compute(x: Tensor, name: str) -> Tensor:
        gates = gate_up(x)
        product = elementwise.gated_activation(gates.flatten(0, -2), name)
        return down(product.view(*gates.shape[:-1], -1))

    name = _activation_name(activation, elementwise, gate_up.weight.device)
    return Proposal(
        what="gated MLP",
        own=layer.forward,
        candidates=[] if name is None else [partial(compute, name=name)],
        samples=[_sample(gate_up)],
        install=lambda forward: {layer: forward},
    )


def rotary(layer: nn.Module, elementwise: Elementwise, dtype: torch.dtype) -> Proposal | None:
    forward: Any = type(layer).forward
    own = getattr(forward, "__globals__", {}).get(ROTARY)
    if own is None or ROTARY not in forward.__code__.co_names or "forward" in vars(layer):
        return None

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, cos_parts: int) -> Any:
        """query, key [1, heads, T, head_dim]; cos, sin [1, T, width]."""
        by_token = query[0].transpose(0, 1), key[0].transpose(0, 1)
        elementwise.rotary(*by_token, cos[0], sin[0], cos_parts * cos.shape[-1])
        return query, key

    def install(candidate: Function) -> Mapping[nn.Module, Function]:
        def rotate_or_not(*arguments: Tensor, **keywords: Any) -> Any:
            fits = not keywords and _rotates_in_place(arguments)
            return (candidate if fits else own)(*arguments, **keywords)

        return {layer: _with_global(layer, ROTARY, rotate_or_not)}

    device = next(layer.parameters()).device
    widths = (PROBE_HEAD_DIM, PROBE_HEAD_DIM // 2)
    samples = [_heads_and_angles(width, device, dtype) for width in widths]
    return Proposal(
        what="rotary",
        own=own,
        candidates=[partial(rotate, cos_parts=parts) for parts in COS_PARTS],
        samples=[sample for sample in samples if runs(own, sample)],
        install=install,
    )


def _gate_up(layer: nn.Module) -> MergedLinear | nn.Linear | None:
    """What leaves gates and ups side by side: merged here, or one layer from the start (Phi-3)."""
    gate, up = getattr(layer, "gate_proj", None), getattr(layer, "up_proj", None)
    if isinstance(gate, MergedPart) and isinstance(up, MergedPart) and gate.merged is up.merged:
        return gate.merged
    own = getattr(layer, "gate_up_proj", None)
    return own if type(own) is nn.Linear else None


def _activation_name(own: Function, elementwise: Elementwise, device: torch.device) -> str | None:
    """Tried in fp32: in bf16 the GELU by tanh would pass for the exact one."""
    gates = torch.linspace(-9, 9, 301, device=device)[None]

    def activate(gates: Tensor, name: str) -> Tensor:
        return elementwise.gated_activation(torch.cat([gates, torch.ones_like(gates)], 1), name)

    candidates = [partial(activate, name=name) for name in ACTIVATIONS]
    same: Any = closest(own, candidates, [(gates,)])
    return None if same is None else same.keywords["name"]


def _rotates_in_place(arguments: tuple[Tensor, ...]) -> bool:
    """Whether the kernel computes such a call; model code has others of the same name."""
    if len(arguments) != 4 or [each.ndim for each in arguments] != [4, 4, 3, 3]:
        return False
    return (
        all(each.shape[0] == 1 and each.stride(-1) == 1 for each in arguments)
        and len({each.dtype for each in arguments}) == 1
        and all(each.shape[1] == 1 or each.stride(1) > 0 for each in arguments[:2])
    )


def _with_global(layer: nn.Module, name: str, value: object) -> MethodType:
    """The layer's own forward, to which alone the global `name` is `value`."""
    own: Any = type(layer).forward
    scope = {**own.__globals__, name: value}
    del scope["__name__"]  # by which torch.compile would look the global up in the real module
    copy = FunctionType(own.__code__, scope, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return MethodType(copy, layer)


def _sample(linear: MergedLinear | nn.Linear) -> Sample:
    weight = linear.weight
    return (_rows(weight.shape[1], weight.device, weight.dtype, smallest=0.1),)


def _rows(width: int, device: torch.device, dtype: torch.dtype, *, smallest: float) -> Tensor:
    """[1, T, width], from small rows to such as saturate what can be saturated."""
    rows = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(math.log10(smallest), 1.5, len(rows))[:, None]
    return rows.to(device, dtype)[None]


def _heads_and_angles(width: int, device: torch.device, dtype: torch.dtype) -> Sample:
    """query, key [1, heads, T, PROBE_HEAD_DIM], laid out as models do; cos, sin [1, T, width]."""
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, 5, num, PROBE_HEAD_DIM, generator=generator) for num in (3, 2)]
    angles = [torch.randn(1, 5, width, generator=generator) for _ in range(2)]
    sample = [*(each.transpose(1, 2) for each in heads), *angles]
    return tuple(each.to(device, dtype) for each in sample)


PROPOSE = (
    partial(merged_linears, names=("q_proj", "k_proj", "v_proj")),
    partial(merged_linears, names=("gate_proj", "up_proj")),
    gated_mlp,  # takes what was merged
    rms_norm,
    rotary,
)
"""In this order, for each layer."""
