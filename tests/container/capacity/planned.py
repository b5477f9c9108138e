"""What `longshore plan` computes for a model of 8B parameters."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from container.capacity.decoder import decoder_from_directory
from container.capacity.draft import with_draft
from container.capacity.estimate import Estimate, TypicalRequest, make_estimate
from container.capacity.instances import find_instance
from core.configuration.options import make_options
from core.configuration.strategy_table import Batching

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
REQUEST = TypicalRequest(prompt=512, answer=200)


def planned(
    model: Path, batching: Batching, instance: str = "ml.g6e.xlarge", **options: Any
) -> Estimate:
    given = make_options(options)
    decoder = with_draft(decoder_from_directory(model, given), model, given)
    return make_estimate(decoder, find_instance(instance), given, batching, REQUEST)


def write_header(folder: Path, header: dict[str, Any]) -> None:
    """Write a file of weights without the weights themselves."""
    data = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
