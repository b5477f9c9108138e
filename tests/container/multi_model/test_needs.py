"""What models of a shared port need, before they are loaded."""

from __future__ import annotations

from pathlib import Path

from container.configuration.properties import Setting
from container.multi_model.needs import estimate_needs
from container.multi_model.overrides import Overrides

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"


def test_a_fixed_number_of_blocks_counts() -> None:
    def min_bytes(**options: str) -> int:
        flags = tuple(Setting(f"option.{key}", value, "flag") for key, value in options.items())
        return estimate_needs(DEMO, {}, Overrides(flags=flags)).min_bytes

    loaded, block_bytes = min_bytes(), min_bytes(num_kv_blocks="1") - min_bytes()
    assert 0 < block_bytes < loaded
    assert min_bytes(num_kv_blocks="5") == loaded + 5 * block_bytes
