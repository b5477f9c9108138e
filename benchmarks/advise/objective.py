"""What an answer has to meet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.replay.figures import Answer

_UNITS = {"ms": 1e-3, "s": 1.0}
_TERM = re.compile(r"(ttft|itl|e2e)=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Objective:
    """Bounds on the times of an answer, as `longshore load sweep --slo` counts them.

    ttft: from arrival to the first token. itl: between two tokens, the mean of the answer. e2e:
    from arrival to the last token.
    """

    text: str
    bounds: Mapping[str, float]
    """In seconds."""

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse bounds such as `ttft=500ms,itl=60ms`. Raises ValueError for another text."""
        bounds: dict[str, float] = {}
        for term in text.split(","):
            match = _TERM.fullmatch(term.strip())
            if match is None:
                raise ValueError(
                    f"invalid bound '{term}': expected ttft, itl or e2e, and a time in s or ms, "
                    "such as ttft=500ms"
                )
            bounds[match[1]] = float(match[2]) * _UNITS[match[3]]
        return cls(text, bounds)

    def is_met(self, answer: Answer) -> bool:
        """Whether an answer meets all bounds. One without tokens meets none."""
        if answer.first_token is None or answer.last_token is None:
            return False
        times = {
            "ttft": answer.first_token - answer.arrived,
            "itl": (answer.last_token - answer.first_token) / max(1, answer.num_tokens - 1),
            "e2e": answer.last_token - answer.arrived,
        }
        return all(times[kind] <= bound for kind, bound in self.bounds.items())
