"""Adds speculation to an engine."""

from __future__ import annotations

from core.configuration.options import SpeculationOptions, SpeculativeMethod
from core.part import Feature
from engine.sampling.sampler import Sampler
from engine.speculation.column import DraftColumn
from engine.step.column import Column
from strategies.base import Strategy
from strategies.speculation.proposer import Proposer
from strategies.speculation.speculation import Speculation


class Speculative(Feature):
    """Requests use it without asking for it."""

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation


def start_speculation(
    strategy: Strategy, options: SpeculationOptions, sampler: Sampler
) -> tuple[Speculative, Column]:
    """Let a strategy add drafts to its steps. Return the column that verifies them.

    sampler: as in `DraftColumn`.
    """
    method, num_draft_tokens = options.chosen
    assert method is not None, "speculation is on"
    speculation = Speculation(
        strategy.memory,
        strategy.limits,
        _make_proposer(method),
        num_draft_tokens,
    )
    strategy.extension = speculation
    return Speculative(speculation), DraftColumn(sampler)


def _make_proposer(method: SpeculativeMethod) -> Proposer:
    if method == "ngram":
        from strategies.speculation.ngram import NgramProposer

        return NgramProposer()
    from strategies.speculation.suffix import SuffixProposer

    return SuffixProposer()
