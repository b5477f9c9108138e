"""Decode requests into the inputs of transformers' pipelines.

NOTE: given a str for an image, sound or video, most pipelines open the file of that name or fetch
the URL. So they only ever get values decoded here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from core.configuration.pipeline_tasks import CHAT_TASKS, Content, PipelineTask
from core.errors import RequestError
from engine.tasks.lengths import check_length
from engine.tasks.pipelines.sound import read_wav
from engine.tasks.pipelines.video import read_video
from engine.vision.image_file import read_image

Parameters = Mapping[str, Any]
MAX_PIXELS, MAX_MAPPED_PIXELS = 2**26, 2**24
"""Limits on the pixels of an image; the second one is for tasks that answer with per-pixel maps.

A file of a few kilobytes may unpack to more.
"""
SPLIT_LABELS = ("zero-shot-object-detection", "zero-shot-classification")
"""Pipelines that take several labels as one text, separated by commas."""
_BRACES = re.compile("{}|[{}]")
MAX_SPOKEN = 4096
"""Longest text to synthesize, in characters. Such a text makes minutes of speech."""


class InputReader:
    """Converts the inputs of a `core.protocol.task_bodies.PipelineBody` into the inputs of one
    pipeline."""

    def __init__(self, name: str, task: PipelineTask, pipeline: Any) -> None:
        self._task = task
        self._pipeline = pipeline
        self._arrange: Callable[[Any], Any] = {
            "table-question-answering": self._table_question,
            "document-question-answering": self._document_question,
            "keypoint-matching": _image_pair,
            **dict.fromkeys(CHAT_TASKS, self._conversation),
            "text-to-audio": _check_spoken_text,
        }.get(name, lambda fields: fields)
        self._takes_labels = name.startswith("zero-shot")
        self._may_split_labels = name in SPLIT_LABELS
        self._max_pixels = MAX_MAPPED_PIXELS if task.writes_maps else MAX_PIXELS

    def read(self, given: Any, parameters: Parameters) -> Any:
        """Decode one input. Raises RequestError if it is malformed or the model cannot take it."""
        if self._takes_labels:
            self._check_labels(parameters)
        reads = self._task.reads
        if isinstance(reads, str):
            return self._arrange(self._read(reads, given, parameters, "inputs"))
        fields = {
            name: self._read(reads[name], value, parameters, f"inputs.{name}")
            for name, value in given.items()
        }
        return self._arrange(fields)

    def _read(self, content: Content, given: Any, parameters: Parameters, field: str) -> Any:
        match content:
            case "image":
                return read_image(given, field, self._max_pixels)
            case "images":
                return [
                    read_image(image, f"{field}[{i}]", MAX_PIXELS) for i, image in enumerate(given)
                ]
            case "audio":
                return read_wav(given, self._pipeline.feature_extractor.sampling_rate)
            case "video":
                return self._read_video(given, parameters)
            case "messages":
                return [_read_message(value, f"{field}[{i}]") for i, value in enumerate(given)]
            case "table" | "word boxes" | "text" | "any text":
                return given

    def _read_video(self, given: Any, parameters: Parameters) -> Any:
        default = getattr(self._pipeline.model.config, "num_frames", None)
        num_frames = parameters.get("num_frames", default)
        if num_frames is None:
            raise RequestError("parameters.num_frames", "is required: the model has no default")
        return read_video(given, num_frames, parameters.get("frame_sampling_rate", 1))

    def _check_labels(self, parameters: Parameters) -> None:
        """Check the candidate labels, because pipelines do not limit their length."""
        labels, field = parameters.get("candidate_labels"), "parameters.candidate_labels"
        if not labels:
            raise RequestError(field, "expected a list of labels")
        template = parameters.get("hypothesis_template", "{}")
        if not isinstance(template, str) or _BRACES.findall(template) != [
            "{}"
        ]:  # a format spec could pad to any length
            raise RequestError("parameters.hypothesis_template", "expected a text with one {}")
        if isinstance(labels, str) and self._may_split_labels:
            labels = labels.split(",")
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise RequestError(field, "expected a list of texts")
        for label in labels:
            text = template.format(label)
            if self._task.reads == "any text":  # the pipeline may truncate the input to one token
                self._check({"text": "a", "text_pair": text}, field)
            else:
                self._check_text(text, field)

    def _check_text(self, text: str, field: str) -> None:
        self._check({"text": text}, field)

    def _check(self, texts: Mapping[str, str], field: str) -> None:
        check_length(texts, self._pipeline.tokenizer, self._pipeline.model, field)

    def _table_question(self, given: dict[str, Any]) -> dict[str, Any]:
        import pandas as pd  # start-up checked that it is installed

        # Row and column ids index embedding tables of these sizes; id 0 means no row or column.
        _, columns, rows, *_ = self._pipeline.model.config.type_vocab_sizes
        table = pd.DataFrame(given["table"])
        if len(table.columns) >= columns or len(table) >= rows:
            raise RequestError(
                "inputs.table", f"the model takes at most {columns - 1} columns and {rows - 1} rows"
            )
        return given | {"table": table}

    def _document_question(self, given: dict[str, Any]) -> dict[str, Any]:
        """Check that the words of the page are sent, or that the model or Tesseract finds them."""
        if self._pipeline.model.config.model_type == "vision-encoder-decoder":
            self._check_text(given["question"], "inputs.question")
        elif "word_boxes" not in given and not has_tesseract():
            raise RequestError(
                "inputs.word_boxes",
                "is required: this server has no Tesseract to find the words of a page "
                "(it needs the program tesseract and the Python package pytesseract)",
            )
        return given

    def _conversation(self, given: dict[str, Any]) -> Any:
        """Return messages, a text with images, or a text alone, whichever was sent."""
        if "messages" in given:
            texts = [
                part["text"]
                for message in given["messages"]
                for part in message["content"]
                if part["type"] == "text"
            ]
            self._check_text(" ".join(texts), "inputs.messages")
            return given["messages"]
        self._check_text(given["text"], "inputs.text")
        images = [given["image"]] if "image" in given else given.get("images")
        return {"text": given["text"], "images": images} if images else given["text"]


def has_tesseract() -> bool:
    return find_spec("pytesseract") is not None and shutil.which("tesseract") is not None


def _image_pair(given: dict[str, Any]) -> tuple[Any, ...]:
    if len(given["images"]) != 2:
        raise RequestError("inputs.images", "expected two images")
    return tuple(given["images"])


def _read_message(given: dict[str, Any], field: str) -> dict[str, Any]:
    parts = [
        part | {"image": read_image(part["image"], f"{field}.content[{index}]", MAX_PIXELS)}
        if part["type"] == "image"
        else part
        for index, part in enumerate(given["content"])
    ]
    return given | {"content": parts}


def _check_spoken_text(text: str) -> str:
    if len(text) > MAX_SPOKEN:
        raise RequestError(
            "inputs", f"has {len(text)} characters; at most {MAX_SPOKEN} are allowed"
        )
    return text
