"""How long deciding on drafts rests: where it takes long and finds nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

DECIDING = 0.01
"""The part of the time of steps that deciding may take, as long as it finds nothing."""
DECIDING_MODEL = 0.0025
"""The same, on drafts of a model. See `Proposer.is_model`."""
LONGEST = 64
"""For how many steps it rests at the most."""


@dataclass(slots=True)
class Pauses:
    """Steps with decodes in which nothing is decided."""

    left: int = 0
    """How many are still to come."""
    past: int = 0
    """How many there were since the newest decision."""
    _means: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds in which it is decided that a step has no drafts: a mean, of which the newest counts
    a tenth. Powers of two tell numbers of decodes apart."""

    def count(self) -> None:
        self.left -= 1
        self.past += 1

    def begin(self, num_decodes: int, seconds: float, plain: float, *, is_model: bool) -> None:
        """Rest after a decision that took so long.

        plain: the seconds of a step without drafts.
        """
        key = num_decodes.bit_length()
        mean = self._means.get(key, 0.0)
        self._means[key] = mean = mean + (seconds - mean) / 10
        if mean:
            allowed = plain * (DECIDING_MODEL if is_model else DECIDING)
            self.left = min(LONGEST, int(mean / allowed))
