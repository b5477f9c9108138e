"""The helper process that reads the images of conversations."""

from __future__ import annotations

from pathlib import Path

from container.isolation.child import Child
from core.images import ReaderSetup
from core.process.frames import Refused
from core.protocol.messages import EncodedPrompt

MAX_READER_WAIT_S = 120.0
"""Importing transformers takes long on a busy machine, and so do the images of several requests."""


def media_reader(model_dir: Path) -> Child[EncodedPrompt]:
    """Return the process. Its jobs are `core.images.ReadImages`."""
    setup = ReaderSetup(str(model_dir))
    return Child("engine.vision.reader", setup, EncodedPrompt | Refused, MAX_READER_WAIT_S)
