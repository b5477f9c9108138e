"""What tests of heads share: the drafts that were proposed, beside those of a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from engine import LLM
from engine.speculation.heads.proposer import HeadProposer
from strategies.speculation.proposer import Wanted
from strategies.speculation.speculation import Speculation
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.speculation.test_same_answers import ALWAYS, SMALL, answers, counts

MOST_COMPARED = 60
LIKELY = slice(4, 8)
"""The tokens that answers mostly have, so that some drafts are right."""

PAGED = [("paged", False), ("paged", True)]
"""Strategies, and whether steps overlap, for every model."""
RESERVING = [("none", False), ("dynamic", True), ("continuous", False)]
"""Those for one model."""

Found = list[tuple[list[int], int, tuple[int, ...]]]
"""The known tokens of a sequence, how many are in flight, and the drafts after those."""


class Reference(Protocol):
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the most likely tokens after these, computed anew in plain torch."""
        ...


def favour(head: Tensor) -> Tensor:
    """Return an output projection [vocabulary, hidden] that prefers likely tokens."""
    head = head * 0.3
    head[LIKELY] *= 5
    return head


def proposer_of(llm: LLM) -> HeadProposer:
    extension = llm.llm_engine.strategy.extension
    assert isinstance(extension, Speculation)
    assert isinstance(extension.proposer, HeadProposer)
    return extension.proposer


def recorded(proposer: HeadProposer) -> Found:
    """Return a list that gets the drafts of greedy answers that nothing else changes."""
    found: Found = []
    complete = proposer.completed

    def completed(wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        results = complete(wanted)
        for one, drafts in zip(wanted, results, strict=True):
            lookup: Any = one.lookup
            params = lookup.sequence.params
            is_plain = not (params.min_tokens or params.logit_bias or params.allowed_token_ids)
            if params.is_greedy and is_plain and drafts:
                found.append(([*lookup._known], one.num_in_flight, drafts))
        return results

    proposer.completed = completed
    return found


def check(reference: Reference, found: Found) -> None:
    assert len(found) > 20
    check_each(reference, found[:: -(-len(found) // MOST_COMPARED)])


def check_each(reference: Reference, found: Found) -> None:
    for tokens, num_in_flight, drafts in found:
        expected = reference.drafts(tokens, num_in_flight + len(drafts))
        assert (tokens, list(drafts)) == (tokens, expected[num_in_flight:])


def check_strategy(
    model: Any,
    reference: Reference,
    plain: list[Any],
    batching: str,
    *,
    overlaps: bool,
    **options: Any,
) -> None:
    """Answer with chunks, preemption, prefix hits and drafts that are taken back.

    plain: the answers without drafts.
    """
    settings: Mapping[str, Any] = {
        "batching": batching,
        "async_scheduling": overlaps,
        "num_speculative_tokens": 3,
        "num_kv_blocks": 40 if batching == "paged" else 120,
        **ALWAYS,
        **SMALL,
        **STRATEGIES[batching],
        **options,
    }
    llm = LLM(model, **settings)
    proposer = proposer_of(llm)
    found = recorded(proposer)
    assert answers(llm) == plain
    assert answers(llm) == plain, "with cached prefixes"
    assert 20 < counts(llm).num_accepted < 0.95 * counts(llm).num_draft_tokens
    check(reference, found)
    proposer.memory.check_integrity()
    assert proposer.memory.num_held_blocks == 0
    if batching == "paged":
        assert llm.llm_engine.strategy.num_preemptions > 0
