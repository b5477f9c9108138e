"""transformers' pipelines for texts, images and sounds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from core.errors import ConfigurationError, RequestError
from core.suggest import did_you_mean
from core.task import IMAGE_TASKS, QUESTION_ANSWERING, SOUND_TASKS, SPEECH_RECOGNITION
from engine.model_source import ModelSource
from engine.tasks.loading import (
    load_feature_extractor,
    load_tokenizer,
    load_with_head,
    longest_text,
)
from engine.tasks.sound import read_wav

_CUT_BY_REQUEST = ("text-classification", "fill-mask", "feature-extraction")
"""Pipelines that take a text as long as it is, unless they are asked to cut it."""
_WITHOUT_TEXT = (*IMAGE_TASKS, "audio-classification")
_NEVER_PADDED = ("feature-extraction", *SOUND_TASKS)
"""What pads a batch would be among the vectors of all tokens, and many models of sounds hear it."""

Parameters = Mapping[str, Any]


class TaskModel(Protocol):
    """A model for one task. All may raise whatever transformers raises."""

    @property
    def model(self) -> Any:
        """transformers' own."""
        ...

    def prepare(self, given: Any, parameters: Parameters) -> Any:
        """An input as `run` wants it. Raises RequestError where it is wrong."""
        ...

    def run(self, inputs: list[Any], parameters: Parameters) -> list[Any]:
        """A result for each prepared input, all with the same parameters."""
        ...

    def alone(self, result: Any, given: Any, parameters: Parameters) -> Any:
        """The result in the form in which it answers an input that was not in a list."""
        ...


class PipelineModel:
    """Raises ConfigurationError where the task or the model cannot be served."""

    def __init__(self, task: str, source: ModelSource) -> None:
        self._task = task
        parts: dict[str, Any] = {}
        if task in IMAGE_TASKS:
            _require_pillow(task)
            parts["image_processor"] = str(source.model_dir)
        if task in SOUND_TASKS:
            parts["feature_extractor"] = load_feature_extractor(source, task)
        if task not in _WITHOUT_TEXT or task.startswith("zero-shot"):
            parts["tokenizer"] = load_tokenizer(source, task)
        self.model = load_with_head(source, _model_class(task, source), task)
        try:
            make: Any = pipeline  # its types know every task by name
            self._pipeline = make(task, model=self.model, device=source.device, **parts)
        except Exception as error:  # of several libraries
            raise ConfigurationError(f"transformers cannot make a {task} pipeline: {error}") from (
                error
            )
        self._make_paddable()

    def prepare(self, given: Any, parameters: Parameters) -> Any:
        if self._task.startswith("zero-shot") and not parameters.get("candidate_labels"):
            raise RequestError("parameters.candidate_labels", "expected the labels to choose from")
        if self._task in IMAGE_TASKS:
            return _image(given)
        if self._task in SOUND_TASKS:
            return read_wav(given, self._pipeline.feature_extractor.sampling_rate)
        if self._task in _CUT_BY_REQUEST:
            self._check_length(_texts(given), parameters)
        return given

    def run(self, inputs: list[Any], parameters: Parameters) -> list[Any]:
        if len(inputs) == 1 and self._task != "text-classification":
            return [self._pipeline(inputs[0], **parameters)]  # some unpack a list of one
        batch_size = 1 if self._task in _NEVER_PADDED else len(inputs)
        return self._pipeline(inputs, batch_size=batch_size, **parameters)

    def alone(self, result: Any, given: Any, parameters: Parameters) -> Any:
        is_text_classification = self._task == "text-classification"
        is_listed = is_text_classification and isinstance(given, str) and "top_k" not in parameters
        return [result] if is_listed else result

    def _check_length(self, texts: Mapping[str, str], parameters: Parameters) -> None:
        """On a GPU a text that is too long would take the whole process with it."""
        if {"truncation", "tokenizer_kwargs", "tokenize_kwargs"} & parameters.keys():
            return
        tokenizer = self._pipeline.tokenizer
        num_tokens = len(tokenizer(**texts, verbose=False)["input_ids"])
        limit = longest_text(tokenizer, self.model)
        if num_tokens > limit:
            raise RequestError(
                "inputs",
                f"has {num_tokens} tokens; the model takes {limit}, unless "
                "parameters.truncation=true cuts it",
            )

    def _make_paddable(self) -> None:
        """A decoder without a token for padding gets its last one, so that it can be batched."""
        tokenizer = self._pipeline.tokenizer
        if tokenizer is None:
            return
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if self.model.config.get_text_config().pad_token_id is None:
            self.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _model_class(task: str, source: ModelSource) -> Any:
    """The Auto class of a task. Raises ConfigurationError for one that is not served."""
    names = [*PIPELINE_REGISTRY.get_supported_tasks(), QUESTION_ANSWERING]
    if task not in names:
        raise ConfigurationError(
            f"option.task={task}: transformers has no such pipeline{did_you_mean(task, names)}"
        )
    entry = PIPELINE_REGISTRY.check_task(task)[1]
    if task == SPEECH_RECOGNITION:
        return _speech_class(entry["pt"], source)
    is_text = entry["type"] == "text" and len(entry["pt"]) == 1
    if task not in IMAGE_TASKS and task not in SOUND_TASKS and not is_text:
        raise ConfigurationError(
            f"option.task={task}: requests carry texts, single images or sounds, and answers are "
            "JSON, which is not what it works on; serve it by a model.py of your own"
        )
    return entry["pt"][0]


def _speech_class(kinds: Sequence[Any], source: ModelSource) -> Any:
    """The one that ends as the model does: AutoModelForCTC, ..., else encoder and decoder."""
    (architecture, *_) = source.config.architectures or [""]
    endings = {kind.__name__.removeprefix("AutoModel"): kind for kind in kinds}
    found = (kind for ending, kind in endings.items() if architecture.endswith(ending))
    return next(found, endings["ForSpeechSeq2Seq"])


def _texts(given: Any) -> dict[str, str]:
    match given:
        case str():
            return {"text": given}
        case {"text": str(), **others} if others.keys() <= {"text_pair"}:
            return given
        case _:
            raise RequestError("inputs", 'expected a text, or {"text": "...", "text_pair": "..."}')


def _image(data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError  # there, says _require_pillow

    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError):
        raise RequestError("inputs", "is no image of a known format, or not a whole one") from None


def _require_pillow(task: str) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            f"option.task={task}: reading images needs Pillow; pip install 'longshore[images]'"
        ) from None
