"""Inputs as pipelines take them: images, sounds, videos and tables are decoded, never looked up.

Given a text, most pipelines would open the file of that name or fetch the address. So nothing but
what was decoded here is ever handed to them in a file's place.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from core.errors import RequestError
from core.pipeline_tasks import CHAT_TASKS, Content, PipelineTask
from engine.tasks.lengths import check_length
from engine.tasks.pipelines.sound import read_wav
from engine.tasks.pipelines.video import read_video

Parameters = Mapping[str, Any]
MAX_PIXELS, MAX_MAPPED_PIXELS = 2**26, 2**24
"""Of an image, which a file of kilobytes may have; and where each has numbers in the answer."""
_BRACES = re.compile("{}|[{}]")
MAX_SPOKEN = 4096
"""Letters of a text that is spoken: minutes."""


class InputReader:
    """Makes what `core.task_bodies.PipelineBody` carries into what one pipeline takes."""

    def __init__(self, name: str, task: PipelineTask, pipeline: Any) -> None:
        self._task = task
        self._pipeline = pipeline
        self._arrange: Callable[[Any], Any] = {
            "table-question-answering": self._table_question,
            "document-question-answering": self._document_question,
            "keypoint-matching": _pair,
            **dict.fromkeys(CHAT_TASKS, self._conversation),
            "text-to-audio": _spoken,
        }.get(name, lambda read: read)
        self._chooses = name.startswith("zero-shot")
        self._may_split_labels = name == "zero-shot-object-detection"
        self._max_pixels = MAX_MAPPED_PIXELS if task.writes_maps else MAX_PIXELS

    def read(self, given: Any, parameters: Parameters) -> Any:
        """Raises RequestError where it cannot be read, or the model cannot take it."""
        if self._chooses:
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
                return [read_image(each, f"{field}[{at}]") for at, each in enumerate(given)]
            case "audio":
                return read_wav(given, self._pipeline.feature_extractor.sampling_rate)
            case "video":
                return self._video(given, parameters)
            case "messages":
                return [_message(each, f"{field}[{at}]") for at, each in enumerate(given)]
            case "table" | "word boxes" | "text" | "any text":
                return given

    def _video(self, given: Any, parameters: Parameters) -> Any:
        of_model = getattr(self._pipeline.model.config, "num_frames", None)
        wanted = parameters.get("num_frames", of_model)
        if wanted is None:
            raise RequestError("parameters.num_frames", "is needed: the model has none of its own")
        return read_video(given, wanted, parameters.get("frame_sampling_rate", 1))

    def _check_labels(self, parameters: Parameters) -> None:
        """Those of sounds and images go to their model with no limit of the pipeline's own."""
        labels, field = parameters.get("candidate_labels"), "parameters.candidate_labels"
        if not labels:
            raise RequestError(field, "expected the labels to choose from")
        template = parameters.get("hypothesis_template", "{}")
        if not isinstance(template, str) or _BRACES.findall(template) != ["{}"]:  # of any length
            raise RequestError("parameters.hypothesis_template", "expected a text with one {}")
        if self._task.reads == "any text":
            return
        if isinstance(labels, str) and self._may_split_labels:
            labels = labels.split(",")
        if not isinstance(labels, list) or not all(isinstance(each, str) for each in labels):
            raise RequestError(field, "expected a list of texts")
        for each in labels:
            self._check_text(template.format(each), field)

    def _check_text(self, text: str, field: str) -> None:
        check_length({"text": text}, self._pipeline.tokenizer, self._pipeline.model, field)

    def _table_question(self, given: dict[str, Any]) -> dict[str, Any]:
        import pandas as pd  # there, as the start has seen to

        # Rows and columns are looked up in tables of so many, one of which means none.
        _, columns, rows, *_ = self._pipeline.model.config.type_vocab_sizes
        table = pd.DataFrame(given["table"])
        if len(table.columns) >= columns or len(table) >= rows:
            raise RequestError(
                "inputs.table", f"the model takes up to {columns - 1} columns and {rows - 1} rows"
            )
        return given | {"table": table}

    def _document_question(self, given: dict[str, Any]) -> dict[str, Any]:
        """Words on a page are found by Tesseract, unless the client or the model can do it."""
        if self._pipeline.model.config.model_type == "vision-encoder-decoder":
            self._check_text(given["question"], "inputs.question")
        elif "word_boxes" not in given and not has_tesseract():
            raise RequestError(
                "inputs.word_boxes",
                "is needed: this server has no Tesseract to find the words of a page with "
                "(the program tesseract, and the Python package pytesseract)",
            )
        return given

    def _conversation(self, given: dict[str, Any]) -> Any:
        """Messages, or a text with images, or a text alone."""
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


def read_image(data: object, field: str, max_pixels: int | None = None) -> Any:
    """Of the bytes of its file, in RGB. Raises RequestError where it is none, or too large."""
    from PIL import Image, UnidentifiedImageError  # there, as the start has seen to

    if not isinstance(data, bytes):  # a text would be a path
        raise RequestError(field, "expected the bytes of an image")
    max_pixels = max_pixels or MAX_PIXELS
    try:
        image = Image.open(io.BytesIO(data))  # of which only the size is read
        if image.width * image.height <= max_pixels:
            return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError):
        raise RequestError(field, "is no image of a known format, or not a whole one") from None
    raise RequestError(field, f"has more than {max_pixels} pixels; send it smaller")


def _pair(given: dict[str, Any]) -> tuple[Any, ...]:
    if len(given["images"]) != 2:
        raise RequestError("inputs.images", "expected two images")
    return tuple(given["images"])


def _message(given: dict[str, Any], field: str) -> dict[str, Any]:
    parts = [
        part | {"image": read_image(part["image"], f"{field}.content[{at}]")}
        if part["type"] == "image"
        else part
        for at, part in enumerate(given["content"])
    ]
    return given | {"content": parts}


def _spoken(text: str) -> str:
    if len(text) > MAX_SPOKEN:
        raise RequestError("inputs", f"has {len(text)} letters; {MAX_SPOKEN} are taken")
    return text
