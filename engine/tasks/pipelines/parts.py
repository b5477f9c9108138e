"""Load the parts of a pipeline besides its model: tokenizer, processors and feature extractor."""

from __future__ import annotations

from typing import Any

from core.configuration.pipeline_tasks import (
    CHAT_TASKS,
    PIPELINE_TASKS,
    SPEECH_RECOGNITION,
    Content,
)
from core.errors import ConfigurationError
from engine.loading.model_source import ModelSource
from engine.tasks.loading import (
    load_feature_extractor,
    load_image_processor,
    load_processor,
    load_tokenizer,
    require,
)
from engine.tasks.pipelines.inputs import has_tesseract

_TEXT_CONTENTS: tuple[Content, ...] = ("any text", "text", "table")
_IMAGE_CONTENTS: tuple[Content, ...] = ("image", "images", "video", "messages")
_INSTALL_EXTRA = "pip install 'longshore[{}]'"
_INSTALL_TORCHVISION = "install the torchvision that belongs to this torch"


def check_packages(task: str) -> None:
    """Raise ConfigurationError, saying what to install, if a package for the task is missing."""
    contents = PIPELINE_TASKS[task].contents
    if "video" in contents:
        require("av", task, _INSTALL_EXTRA.format("video"))
    if any(content in _IMAGE_CONTENTS for content in contents):
        require("PIL", task, _INSTALL_EXTRA.format("images"))
    if "table" in contents:
        require("pandas", task, _INSTALL_EXTRA.format("tables"))
    if task in ("mask-generation", "any-to-any"):  # the only ones that need it in transformers
        require("torchvision", task, _INSTALL_TORCHVISION)


def load_parts(task: str, source: ModelSource) -> dict[str, Any]:
    """Load the parts that a task needs, keyed by the argument names of `transformers.pipeline`.

    Raises ConfigurationError if one is missing or cannot be loaded.
    """
    if task in CHAT_TASKS:
        return {"processor": _load_chat_processor(task, source)}
    contents = PIPELINE_TASKS[task].contents
    parts: dict[str, Any] = {}
    if "audio" in contents:
        parts["feature_extractor"] = load_feature_extractor(source, task)
    if any(content in _IMAGE_CONTENTS for content in contents) and not _is_layoutlm(task, source):
        parts["image_processor"] = load_image_processor(source, task)
        if not has_tesseract() and hasattr(parts["image_processor"], "apply_ocr"):
            parts["image_processor"].apply_ocr = False  # the client must send the words
    if _reads_texts(task, source):
        parts["tokenizer"] = load_tokenizer(source, task)
    if task == "text-to-audio":
        parts["processor"] = load_processor(source, task)
    return parts


def _load_chat_processor(task: str, source: ModelSource) -> Any:
    processor = load_processor(source, task)
    if processor is None:
        raise ConfigurationError(
            f"option.task={task}: {source.model_dir} has no processor for images and texts"
        )
    return processor


def _is_layoutlm(task: str, source: ModelSource) -> bool:
    """Return whether the model reads pages by their words and boxes alone, without the image."""
    return task == "document-question-answering" and source.config.model_type == "layoutlm"


def _reads_texts(task: str, source: ModelSource) -> bool:
    return (
        any(content in _TEXT_CONTENTS for content in PIPELINE_TASKS[task].contents)
        or task.startswith("zero-shot")
        or task == SPEECH_RECOGNITION
        or source.config.model_type == "oneformer"  # takes its task as text
    )
