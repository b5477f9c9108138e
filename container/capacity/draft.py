"""The draft model of option.speculative_draft_model, which the engine loads beside the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from container.capacity.decoder import Decoder, decoder_from_directory, decoder_from_hub
from core.configuration.options import Options


def with_draft(decoder: Decoder, model_dir: Path, options: Options) -> Decoder:
    """Return the decoder, with its draft model if the options name one.

    As in the engine, a relative path may begin in the model's directory, the dtype is the model's
    and option.quantize does not apply. Raises as `decoder_from_directory` and `decoder_from_hub`.
    """
    name = options.speculation.draft_model
    if name is None:
        return decoder
    execution = replace(options.execution, dtype=cast(Any, decoder.dtype), quantize=None)
    source = replace(options.source, revision=None)
    given = replace(options, execution=execution, source=source)
    path = Path(name).expanduser()
    for directory in (model_dir / path, path):
        if directory.is_dir():
            return replace(decoder, draft=decoder_from_directory(directory, given))
    return replace(decoder, draft=decoder_from_hub(name, given))
