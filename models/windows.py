"""Writes the demo model with sliding windows, for comparisons and tests of what windows save.

    python -m models.windows build/windows

The weights are the demo model's: only its last layer still reads all tokens. Texts are worse beyond
the windows.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

DEMO = Path(__file__).parent / "demo"
WINDOW = 64


def write(folder: Path, window: int = WINDOW) -> Path:
    """Write the model into a folder, which may exist, and return the folder."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text("utf-8"))
    last = config["num_hidden_layers"] - 1
    config |= {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": window,
        "layer_types": ["sliding_attention"] * last + ["full_attention"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the demo model with sliding windows.")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
