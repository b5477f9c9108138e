"""What is sent: one request, before it has the form of any API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a request, in tokens, as a workload draws them."""

    prompt: int
    answer: int
    prefix: tuple[int, int] | None = None
    """Number and length of the common beginning that it has with others; part of `prompt`."""
    kind: str = ""
    """Which sort of request it is, where a workload mixes several."""
    samples: int = 1
    beams: int = 1

    def scaled(self, factor: float) -> Shape:
        """With all lengths times `factor`, none below one token."""

        def times(tokens: int) -> int:
            return max(1, round(tokens * factor))

        prefix = self.prefix and (self.prefix[0], times(self.prefix[1]))
        return Shape(
            times(self.prompt), times(self.answer), prefix, self.kind, self.samples, self.beams
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be sent."""

    index: int
    shape: Shape
    prompt: str
    due_s: float | None
    """Seconds after the start when it is to be sent; None: when its user is free."""
    seed: int
