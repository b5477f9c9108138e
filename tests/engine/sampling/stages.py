"""The stages of a sampler, for sequences without a grammar."""

from __future__ import annotations

from pathlib import Path

from engine.builders.common import sampling_stages
from engine.sampling.grammars import Grammars

STAGES = sampling_stages(Grammars(Path(), ()))
