"""Several prompts in one request, each with answers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from container.apis.generation.generation import Generation
from container.apis.generation.interleaving import interleave
from core.text.answers import Delta


class PromptDeltas:
    """The generations for the prompts, as one that fails if any of them fails.

    The answers to a prompt are numbered after those to the prompts before it.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations

    def deltas(self, *, may_wait: bool = False) -> Iterator[Delta]:
        prompts = range(len(self._generations))
        yield from interleave([self._of(prompt, may_wait=may_wait) for prompt in prompts])

    def divert(self, take: Callable[[Delta], bool]) -> None:
        if len(self._generations) == 1:  # several are interleaved
            self._generations[0].divert(take)

    def abort(self) -> None:
        for generation in self._generations:
            generation.abort()

    def _of(self, prompt: int, *, may_wait: bool) -> Iterator[Delta]:
        generation = self._generations[prompt]
        first = prompt * len(generation.answers)
        for delta in generation.deltas(may_wait=may_wait):
            yield replace(delta, index=first + delta.index) if first else delta
