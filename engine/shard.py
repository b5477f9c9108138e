"""Which part of each weight a rank holds.

The split is Megatron-LM's (Shoeybi et al., 2019). Layers that widen (q, k, v; gate, up) are split
by outputs, layers that narrow (attention's output, down) by inputs. So each rank computes whole
heads and whole columns of the MLP, and one sum over the ranks follows each narrowing layer. A size
need not be a multiple of the number of ranks: the ranks' shares then differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.configuration.kv_layout import even_divisions
from core.errors import ConfigurationError

UNITS = (64, 32, 16, 8, 4, 2, 1)
"""Shares are multiples of the first of these that divides the size and leaves every rank a share.

Kernels run best on multiples of 16, and quantized weights have groups of 32 or more.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """A rank's attention heads."""

    queries: range
    keys: range
    """Its key and value heads. Each of them serves the same number of the rank's query heads."""
    num_holders: int
    """How many ranks hold each of these key heads."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    def part(self, count: int) -> range:
        """Return the rank's part of `count` things. Parts differ by at most one."""
        return _share(count, self.rank, self.size)

    def columns(self, width: int) -> range:
        """Return the rank's share of `width` features.

        Raises ConfigurationError if there are fewer features than ranks.
        """
        if width < self.size:
            raise ConfigurationError(
                f"option.tensor_parallel_degree={self.size}: a layer of {width} features can be "
                f"split over at most {width} ranks"
            )
        unit = next(unit for unit in UNITS if width % unit == 0 and width // unit >= self.size)
        share = _share(width // unit, self.rank, self.size)
        return range(share.start * unit, share.stop * unit)

    def heads(self, num_heads: int, num_kv_heads: int) -> Heads:
        """Return the rank's heads.

        If there are at least as many key heads as ranks, the ranks divide them. Otherwise several
        ranks hold the same key head and divide its query heads.

        Raises ConfigurationError if there are fewer query heads than ranks.
        """
        if num_heads < self.size:
            raise ConfigurationError(
                f"option.tensor_parallel_degree={self.size}: the model has {num_heads} attention "
                f"heads, so at most {num_heads} ranks can share it"
            )
        group = num_heads // num_kv_heads
        if num_kv_heads >= self.size:
            keys = _share(num_kv_heads, self.rank, self.size)
            return Heads(range(keys.start * group, keys.stop * group), keys, 1)
        key = self._key_of(self.rank, num_kv_heads)
        holders = [rank for rank in range(self.size) if self._key_of(rank, num_kv_heads) == key]
        share = _share(group, holders.index(self.rank), len(holders))
        queries = range(key * group + share.start, key * group + share.stop)
        return Heads(queries, range(key, key + 1), len(holders))

    def check_heads(self, num_heads: int, num_kv_heads: Iterable[int]) -> None:
        """Raise ConfigurationError if ranks would have different layouts of the KV cache."""
        fitting = even_divisions(num_heads, num_kv_heads)
        if self.size not in fitting and self.size <= num_heads:
            raise ConfigurationError(
                f"option.tensor_parallel_degree={self.size}: layers have different numbers of KV "
                "heads, which these ranks cannot divide in the same proportion; set it to one of "
                f"{', '.join(str(number) for number in fitting if num_heads % number == 0)}"
            )

    def vocabulary(self, size: int) -> range:
        """Return the rank's token ids.

        All ranks have equally many, so some of the last rank's may lie beyond `size`.
        """
        share = -(-size // self.size)
        return range(self.rank * share, (self.rank + 1) * share)

    def _key_of(self, rank: int, num_kv_heads: int) -> int:
        return rank * num_kv_heads // self.size


def cannot_split(why: str) -> ConfigurationError:
    """Return the error for weights of which ranks cannot have parts. why: a clause."""
    return ConfigurationError(
        f"the weights cannot be split over ranks, because {why}; "
        "set option.tensor_parallel_degree=1"
    )


def _share(count: int, rank: int, size: int) -> range:
    """Return share `rank` of `count` things. Shares differ by at most one."""
    return range(count * rank // size, count * (rank + 1) // size)
