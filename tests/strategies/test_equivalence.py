"""All strategies give the same tokens for any arrivals, aborts and memory sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.configuration.strategy_table import BATCHING_NAMES
from tests.strategies.fakes import Arrival, drive, strategy_of

ARRIVALS = st.lists(
    st.builds(
        Arrival,
        time=st.integers(0, 30),
        num_prompt_tokens=st.integers(1, 24),
        max_tokens=st.integers(1, 24),
        abort_after=st.none() | st.integers(0, 20),
        abort_in_step=st.booleans(),
        abort_index=st.sampled_from([None, None, 0, 1]),
        prompt_seed=st.none() | st.integers(0, 1),
        params=st.sampled_from(
            [
                {},
                {},
                {"n": 2},
                {"n": 5},
                {"n": 2, "best_of": 3},
                {"priority": -1},
                {"num_beams": 2},
                {"num_beams": 3, "n": 2},
            ]
        ),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(12, 30),
    max_step_tokens=st.integers(1, 40),
    max_sequences=st.integers(1, 6),
    enable_prefix_caching=st.booleans(),
    kv_reservation=st.sampled_from(["max", "pow2", "oracle"]),
    preemption_mode=st.sampled_from(["recompute", "swap", "auto"]),
    num_swap_blocks=st.sampled_from([0, 5, 40]),
    overlaps=st.booleans(),
)
def test_same_tokens_from_all_strategies(
    arrivals,
    num_blocks,
    max_step_tokens,
    max_sequences,
    enable_prefix_caching,
    kv_reservation,
    preemption_mode,
    num_swap_blocks,
    overlaps,
):
    limits = {"max_step_tokens": max_step_tokens, "max_sequences": max_sequences}
    records = [
        drive(
            strategy_of(
                name,
                num_blocks=num_blocks,
                kv_reservation=kv_reservation,
                enable_prefix_caching=enable_prefix_caching,
                preemption_mode=preemption_mode,
                num_swap_blocks=num_swap_blocks,
                **limits,
            ),
            arrivals,
            overlaps=overlaps,
        )
        for name in BATCHING_NAMES
    ]
    reference = drive(strategy_of("none"), [_unaborted(arrival) for arrival in arrivals])
    for record in records:
        for id, tokens in record.tokens.items():
            assert tokens == reference.tokens[id][: len(tokens)]
            if id in record.finish:
                assert tokens == reference.tokens[id]
                assert record.finish[id] == reference.finish[id]


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_a_single_request(batching):
    record = drive(strategy_of(batching), [Arrival(0, 5, 3)])
    assert len(record.tokens[0]) <= 3


def _unaborted(arrival: Arrival) -> Arrival:
    return replace(arrival, abort_after=None)
