"""Which part of a model each rank holds."""

from __future__ import annotations

import pytest

from core.errors import ConfigurationError
from engine.shard import Shard


def shards(size):
    return [Shard(rank, size) for rank in range(size)]


@pytest.mark.parametrize(
    ("width", "size", "widths"),
    [
        (48, 2, [16, 32]),
        (48, 4, [8, 16, 8, 16]),
        (11008, 4, [2752] * 4),
        (11008, 8, [1344, 1408, 1344, 1408, 1344, 1408, 1344, 1408]),
        (7, 3, [2, 2, 3]),
        (16, 1, [16]),
    ],
)
def test_shares_of_a_width_cover_it_in_order(width, size, widths):
    shares = [shard.columns(width) for shard in shards(size)]
    assert [len(share) for share in shares] == widths
    assert [column for share in shares for column in share] == list(range(width))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"),
    [(4, 2, 2), (4, 2, 4), (4, 2, 3), (6, 6, 4), (32, 8, 8), (28, 4, 8), (8, 1, 3), (12, 4, 3)],
)
def test_each_query_head_is_with_its_key_head_on_one_rank(num_heads, num_kv_heads, size):
    group = num_heads // num_kv_heads
    parts = [shard.heads(num_heads, num_kv_heads) for shard in shards(size)]
    assert [head for part in parts for head in part.queries] == list(range(num_heads))
    for part in parts:
        assert len(part.queries) % len(part.keys) == 0, "equally many query heads per key head"
        per_key = len(part.queries) // len(part.keys)
        for index, query in enumerate(part.queries):
            assert query // group == part.keys[index // per_key]
        for key in part.keys:
            assert sum(key in other.keys for other in parts) == part.num_holders


def test_a_vocabulary_is_padded_to_equal_shares():
    shares = [shard.vocabulary(97) for shard in shards(4)]
    assert shares == [range(0, 25), range(25, 50), range(50, 75), range(75, 100)]


def test_more_ranks_than_heads_or_features_are_refused():
    with pytest.raises(ConfigurationError, match="4 attention heads, so at most 4 ranks"):
        Shard(0, 5).heads(4, 2)
    with pytest.raises(ConfigurationError, match="8 features can be split over at most 8 ranks"):
        Shard(0, 9).columns(8)
