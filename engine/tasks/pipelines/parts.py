"""What a pipeline has beside its model: what makes texts, images and sounds the model's inputs."""

from __future__ import annotations

from typing import Any

from core.errors import ConfigurationError
from core.pipeline_tasks import (
    CHAT_TASKS,
    PIPELINE_TASKS,
    SPEECH_RECOGNITION,
    Content,
)
from engine.loading.model_source import ModelSource
from engine.tasks.loading import (
    load_feature_extractor,
    load_image_processor,
    load_processor,
    load_tokenizer,
    require,
)
from engine.tasks.pipelines.inputs import has_tesseract

_TEXTS: tuple[Content, ...] = ("any text", "text", "table")
_PICTURES: tuple[Content, ...] = ("image", "images", "video", "messages")
_EXTRAS = "pip install 'longshore[{}]'"
_TORCHVISION = "install the torchvision that belongs to this torch"


def check_packages(task: str) -> None:
    """Raises ConfigurationError, which says what to install, where the task lacks a package."""
    contents = PIPELINE_TASKS[task].contents
    if "video" in contents:
        require("av", task, _EXTRAS.format("video"))
    if any(each in _PICTURES for each in contents):
        require("PIL", task, _EXTRAS.format("images"))
    if "table" in contents:
        require("pandas", task, _EXTRAS.format("tables"))
    if task in ("mask-generation", "any-to-any"):  # transformers wants it of them alone
        require("torchvision", task, _TORCHVISION)


def load_parts(task: str, source: ModelSource) -> dict[str, Any]:
    """By the names of `transformers.pipeline`'s arguments.

    Raises ConfigurationError where one is missing or cannot be loaded.
    """
    if task in CHAT_TASKS:
        return {"processor": _processor(task, source)}
    contents = PIPELINE_TASKS[task].contents
    parts: dict[str, Any] = {}
    if "audio" in contents:
        parts["feature_extractor"] = load_feature_extractor(source, task)
    if any(each in _PICTURES for each in contents) and not _sees_words_alone(task, source):
        parts["image_processor"] = load_image_processor(source, task)
        if not has_tesseract() and hasattr(parts["image_processor"], "apply_ocr"):
            parts["image_processor"].apply_ocr = False  # the words are the client's to send
    if _reads_texts(task, source):
        parts["tokenizer"] = load_tokenizer(source, task)
    if task == "text-to-audio":
        parts["processor"] = load_processor(source, task)
    return parts


def _processor(task: str, source: ModelSource) -> Any:
    processor = load_processor(source, task)
    if processor is None:
        raise ConfigurationError(
            f"option.task={task}: {source.model_dir} has no processor for images and texts"
        )
    return processor


def _sees_words_alone(task: str, source: ModelSource) -> bool:
    """LayoutLM knows a page by its words and their places."""
    return task == "document-question-answering" and source.config.model_type == "layoutlm"


def _reads_texts(task: str, source: ModelSource) -> bool:
    return (
        any(each in _TEXTS for each in PIPELINE_TASKS[task].contents)
        or task.startswith("zero-shot")
        or task == SPEECH_RECOGNITION
        or source.config.model_type == "oneformer"  # it is told in words what to look for
    )
