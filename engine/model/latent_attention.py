"""Multi-head latent attention (DeepSeek-V2): a token leaves one row per layer for all heads.

```
row of the KV cache            | latent, normed (rank)  | rotated key (rope) |    one KV head
query of a head, as a row      | query @ key_up of head | rotated query      |
K of every head is the row, V its latent; value_up of a head maps what it attended to its output
```

K and V of a head would be `key_up @ latent` and `value_up @ latent`. As a rule they are not
computed: `key_up` is applied to the query instead ("absorbed"), so that all heads share the rows as
they lie in the cache. On GPUs, steps that are not CUDA graphs expand the rows of prompts for which
that takes less; see `is_expanded`.

| of a head, in multiply-adds | absorbed       | expanded              | DeepSeek V3      |
| --------------------------- | -------------- | --------------------- | ---------------- |
| a query with a row          | 2 rank + rope  | nope + rope + value   | 1,088 or 320     |
| a query                     | rank * (nope + value) | 0              | 131,072 or 0     |
| a row of the context        | 0              | rank * (nope + value) | 0 or 131,072     |
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.attention.call import AttentionCall, PagedAttention
from engine.model.heads import elements_of, halves_of_pairs
from engine.model.linear import Format, Stored, uses_panels
from engine.model.loader import Loader, Source
from engine.model.norms import Norm
from engine.model.rotary import Rotary, StepAngles
from engine.model.spec import DecoderSpec, LatentSizes
from kernels.attention.latents import expand_latents
from kernels.cpu.calls import NoKernelError
from kernels.cpu.step_calls import StepCalls

NORM_EPS = 1e-6
"""Of the norms inside the attention, whatever the config's rms_norm_eps is."""


class LatentAttention:
    """Self-attention over rows that all heads share; a process has some of the heads."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, index: int, name: str, rotary: Rotary
    ) -> None:
        assert spec.latent is not None
        self._sizes = sizes = spec.latent
        self.index, self.layer = index, spec.layers[index]
        heads = loader.shard.heads(spec.num_heads, 1).queries
        query_dim, row_dim = sizes.nope + sizes.rope, sizes.rank + sizes.rope
        halves = torch.arange(sizes.rope)
        if spec.rotates_pairs:
            halves = halves_of_pairs(sizes.rope, sizes.rope)
        in_head = torch.cat([torch.arange(sizes.nope), sizes.nope + halves])
        firsts = torch.arange(heads.start, heads.stop) * query_dim
        rows = (firsts[:, None] + in_head).flatten()
        in_row = torch.cat([torch.arange(sizes.rank), sizes.rank + halves])
        key = Source(f"{name}.kv_a_proj_with_mqa", row_dim, in_row)
        self._query_norm: Norm | None = None
        if sizes.query_rank is None:
            query = Source(f"{name}.q_proj", spec.num_heads * query_dim, rows)
        else:
            query = Source(f"{name}.q_a_proj", sizes.query_rank)
            width = (sizes.query_rank,)
            self._query_norm = loader.norm(
                f"{name}.q_a_layernorm", width, spec.family.norm, NORM_EPS
            )
            up = Source(f"{name}.q_b_proj", spec.num_heads * query_dim, rows)
            self.query_up = loader.linear([up], sizes.query_rank)
        self.down = loader.linear([query, key], spec.hidden_size)
        self._parts = (query.num_outputs, row_dim)
        self.norm = loader.norm(f"{name}.kv_a_layernorm", (sizes.rank,), spec.family.norm, NORM_EPS)
        height = sizes.nope + sizes.value
        up = _dense(loader.stored(f"{name}.kv_b_proj", spec.num_heads * height, sizes.rank))
        up = up.unflatten(0, (-1, height))[heads.start : heads.stop]
        self.key_up = HeadLinear(loader, up[:, : sizes.nope].transpose(1, 2))
        self.value_up = HeadLinear(loader, up[:, sizes.nope :])
        self.out = loader.linear(
            [Source(f"{name}.{spec.family.out}", spec.hidden_size)],
            spec.num_heads * sizes.value,
            columns=elements_of(heads, sizes.value),
        )
        self._rotate = loader.elementwise.rotary

    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [T, hidden], or only its `rows`, [R, hidden]."""
        sizes = self._sizes
        query, key = self.down(hidden).split_with_sizes(self._parts, -1)
        if self._query_norm is not None:
            query = self.query_up(self._query_norm(query))
        query = query.unflatten(-1, (-1, sizes.nope + sizes.rope))
        latent, rotated = key.split_with_sizes((sizes.rank, sizes.rope), -1)
        key = torch.cat([self.norm(latent), rotated], -1)[:, None]
        if self.layer.rope is not None:
            parts = query[..., sizes.nope :], key[..., sizes.rank :]
            self._rotate(*parts, *angles.by_rope[self.layer.rope], sizes.rope)
        heads = self._attend(query, key, angles.query_scale, paged, rows)
        return self.out(heads.flatten(1))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        scale: Tensor | None,
        paged: PagedAttention,
        rows: Tensor | None,
    ) -> Tensor:
        """Return the outputs of the heads, [T, heads, value], or only their `rows`.

        query: [T, heads, nope + rope]. key: [T, 1, rank + rope]. scale: a factor for each query.
        """
        sizes, num_heads = self._sizes, query.shape[1]
        dims = (sizes.nope + sizes.rope, sizes.value)
        expansion = paged.expansion(self.index, dims, partial(is_expanded, sizes, num_heads))
        if expansion is None:
            attended = paged.attend(self._call(self._absorbed(query, scale), key))
            return self.value_up(attended if rows is None else attended.index_select(0, rows))
        tokens = expansion.others
        others = None if tokens is None else query.index_select(0, tokens)
        out = expansion.attend(
            self._call(query if scale is None else query.mul_(scale), key), self._expanded
        )
        if tokens is not None and others is not None:
            scale = None if scale is None else scale.index_select(0, tokens)
            attended = expansion.attend_others(self._call(self._absorbed(others, scale), key))
            out.index_copy_(0, tokens, self.value_up(attended))
        return out if rows is None else out.index_select(0, rows)

    def _absorbed(self, query: Tensor, scale: Tensor | None) -> Tensor:
        """Return queries of rows, [N, heads, rank + rope]."""
        sizes = self._sizes
        plain, rotated = query.split_with_sizes((sizes.nope, sizes.rope), -1)
        query = torch.cat([self.key_up(plain), rotated], -1)
        return query if scale is None else query * scale

    def _expanded(self, rows: Tensor) -> Tensor:
        return expand_latents(rows, self.key_up.weights, self.value_up.weights)

    def _call(self, query: Tensor, key: Tensor) -> AttentionCall:
        return AttentionCall(
            layer=self.index,
            query=query,
            key=key,
            value=key[..., :0],
            scale=self.layer.scale,
            window=self.layer.window,
            softcap=None,
            sinks=None,
            shared_dim=self._sizes.rank,
        )

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Raise NoKernelError: the layers run one after another."""
        raise NoKernelError("its attention is latent")


def is_expanded(
    sizes: LatentSizes, num_heads: int, num_new: int, context_len: int, num_rows: int
) -> bool:
    """Return whether a sequence takes fewer FLOPs expanded than absorbed, and no more memory.

    num_new: its new tokens, which are the last of its context. num_rows: tokens that the blocks of
    its context hold, all of which are expanded. As memory does not grow, the memory of the largest
    step may be measured with absorbed queries.
    """
    rank, row, plain = sizes.rank, sizes.rank + sizes.rope, sizes.nope + sizes.value
    num_cached = context_len - num_new
    num_pairs = num_new * num_cached + num_new * (num_new + 1) // 2
    if num_pairs * (2 * rank - plain) <= num_cached * rank * plain:
        return False
    expanded = num_rows * (row + num_heads * (plain + sizes.rope))
    return expanded + num_new * num_heads * sizes.value <= num_new * num_heads * (row + rank)


class HeadLinear:
    """A linear layer for each head: rows [T, heads, in] to [T, heads, out].

    On CPUs each head has a format of its own, because the bits of torch's batched product depend on
    the number of rows.
    """

    def __init__(self, loader: Loader, weights: Tensor) -> None:
        """weights: [heads, out, in]."""
        self._formats: list[Format] | None = None
        if uses_panels(loader.device, loader.dtype):
            self._formats = [loader.format([weight.contiguous()]) for weight in weights]
            num_bytes = sum(format.num_bytes for format in self._formats)
            loader.count(num_bytes, weights.numel())
        else:
            self.weights = loader.place(weights.transpose(1, 2))
            """[heads, in, out]; only on GPUs."""

    def __call__(self, rows: Tensor) -> Tensor:
        if self._formats is None:
            return torch.bmm(rows.transpose(0, 1), self.weights).transpose(0, 1)
        outputs = [
            format.multiply(rows[:, head], None) for head, format in enumerate(self._formats)
        ]
        return torch.stack(outputs, 1)


def _dense(weight: Stored) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantized()
