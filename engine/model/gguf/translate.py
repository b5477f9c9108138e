"""Translates a GGUF file into a directory that the engine and the front end can read.

`python -m engine.model.gguf.translate DIRECTORY FILE...` writes config.json, the tokenizer and an
index of the tensors, which stay in the file.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core.errors import ConfigurationError
from core.files.gguf import BESIDE, GGUF_INDEX
from core.process.internal_arguments import internal_arguments
from engine.model.gguf.architectures import find_architecture, model_settings
from engine.model.gguf.metadata import Metadata
from engine.model.gguf.names import Naming
from engine.model.gguf.stored import StoredTensor
from engine.model.gguf.tokenizer import TokenizerOf


def translate(files: Sequence[Path], directory: Path) -> None:
    """Write the directory of a GGUF file, which has these parts.

    Raises ConfigurationError, which names the cure, if the model cannot be read.
    """
    metadata = Metadata(files)
    architecture = find_architecture(metadata)
    settings = model_settings(metadata, architecture)
    tensors = Naming(metadata, architecture, settings).tensors()
    names = {tensor.name for tensor in tensors}
    settings["tie_word_embeddings"] = "lm_head.weight" not in names
    settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture.model_type]]
    settings["dtype"] = _dtype(tensors)
    (directory / GGUF_INDEX).write_bytes(msgspec.json.encode(tensors))
    try:
        config = CONFIG_MAPPING[architecture.model_type](**settings).to_dict()
    except (ValueError, TypeError) as error:
        raise metadata.error(
            f"its metadata do not fit {architecture.model_type}: {error}"
        ) from error
    if any(tensor.is_packed for tensor in tensors):
        config["quantization_config"] = {"quant_method": "gguf"}
    _write(directory / "config.json", config)
    for file in files:
        (directory / file.name).symlink_to(file.resolve())
    tokenizer = TokenizerOf(metadata)
    _write(directory / "generation_config.json", {"eos_token_id": tokenizer.end_ids()})
    beside = [file for name in BESIDE if (file := files[0].parent / name).is_file()]
    if any(file.name == "tokenizer.json" for file in beside):
        for file in beside:
            shutil.copy(file, directory)
    else:
        tokenizer.write(directory)


def _dtype(tensors: Sequence[StoredTensor]) -> str:
    """Return the type of activations: fp16 for a file in fp16, as for checkpoints."""
    types = {tensor.type for tensor in tensors if len(tensor.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))


def main() -> int:
    description = "Translates a GGUF file. `longshore serve` starts it."
    directory, *files = internal_arguments(
        "engine.model.gguf.translate", description, "DIRECTORY FILE..."
    )
    try:
        translate([Path(file) for file in files], Path(directory))
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
