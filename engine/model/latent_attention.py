"""Multi-head latent attention (DeepSeek-V2): a token leaves one row per layer for all heads.

```
row of the KV cache            | latent, normed (rank)  | rotated key (rope) |    one KV head
query of a head, as a row      | query @ key_up of head | rotated query      |
K of every head is the row, V its latent; value_up of a head maps what it attended to its output
```

K and V of a head would be `key_up @ latent` and `value_up @ latent`. They are never computed:
`key_up` is applied to the query instead ("absorbed"), so that all heads share the rows as they lie
in the cache. Prompts and decodes are the same sums.

For each head, a query and a row take 2 * (2 * rank + rope) FLOPs, with the sizes of DeepSeek V3
2,176. Expanded they would take 640, and the expansion 262,144 per row of the context in each step:
more in all for chunks of up to 171 tokens, a third for long prompts. But expanded K and V need
80 KiB of scratch a token, and a step's shapes would depend on its contexts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.call import AttentionCall, PagedAttention
from engine.model.heads import elements_of, halves_of_pairs
from engine.model.linear import Format, Stored, uses_panels
from engine.model.loader import Loader, Source
from engine.model.norms import Norm
from engine.model.rotary import Rotary, StepAngles
from engine.model.spec import DecoderSpec
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
        plain, rotated = query.split_with_sizes((sizes.nope, sizes.rope), -1)
        query = torch.cat([self.key_up(plain), rotated], -1)
        if self.layer.rope is not None:
            parts = query[..., sizes.rank :], key[..., sizes.rank :]
            self._rotate(*parts, *angles.by_rope[self.layer.rope], sizes.rope)
        if angles.query_scale is not None:
            query = query * angles.query_scale
        call = AttentionCall(
            layer=self.index,
            query=query,
            key=key,
            value=key[..., :0],
            scale=self.layer.scale,
            window=self.layer.window,
            softcap=None,
            sinks=None,
            shared_dim=sizes.rank,
        )
        attended = paged.attend(call)
        if rows is not None:
            attended = attended.index_select(0, rows)
        return self.out(self.value_up(attended).flatten(1))

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Raise NoKernelError: the layers run one after another."""
        raise NoKernelError("its attention is latent")


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
            self._weights = loader.place(weights.transpose(1, 2))

    def __call__(self, rows: Tensor) -> Tensor:
        if self._formats is None:
            return torch.bmm(rows.transpose(0, 1), self._weights).transpose(0, 1)
        outputs = [
            format.multiply(rows[:, head], None) for head, format in enumerate(self._formats)
        ]
        return torch.stack(outputs, 1)


def _dense(weight: Stored) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantized()
