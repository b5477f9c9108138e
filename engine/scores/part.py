"""The part of a sequence whose prompt is scored."""

from __future__ import annotations

from core.part import Feature, Part
from core.sampling import SamplingParams


class ScoredPrompt(Part):
    """Wants the logits of each position before the prompt's last, once.

    Not again if a position is computed again, and only in the first sequence of a request.
    """

    __slots__ = ("_next", "_stop")

    def __init__(self, num_prompt_tokens: int) -> None:
        self._next, self._stop = 0, num_prompt_tokens - 1

    def extra_rows(self, start: int, end: int) -> range:
        return range(max(start, self._next), min(end, self._stop))

    def seek(self, position: int) -> None:
        self._next = position

    def fork(self) -> Part:
        return Part()


class PromptScores(Feature):
    fields = ("prompt_logprobs",)

    def part(self, params: SamplingParams, num_prompt_tokens: int) -> ScoredPrompt | None:
        return None if params.prompt_logprobs is None else ScoredPrompt(num_prompt_tokens)
