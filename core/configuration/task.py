"""The task of a container: text generation, embedding, a pipeline, or the user's own code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from core.configuration.batching import Choice, choose_batching
from core.configuration.options import Options
from core.configuration.pipeline_tasks import (
    QUESTION_ANSWERING,
    SPEECH_RECOGNITION,
    VIDEO_CLASSIFICATION,
)
from core.configuration.strategy_table import (
    DEFAULT_FOR_TASKS,
    LIBRARY_NAMES,
    TASK_NAMES,
)
from core.errors import ConfigurationError

Kind = Literal["generation", "embedding", "pipeline", "handler"]

EMBEDDING = "text-embedding"
GENERATION = ("text-generation", "text2text-generation")
_KINDS: Mapping[str, str] = {"generation": "text generation", "embedding": EMBEDDING}

_ALIASES = {
    "generate": "text-generation",  # vLLM
    "embed": EMBEDDING,
    "embedding": EMBEDDING,
    "text_embedding": EMBEDDING,  # DJL
    "sentence-similarity": EMBEDDING,  # the Hugging Face hub's label for such models
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "text-to-speech": "text-to-audio",
}
_SPEECH_ENCODERS = ("Data2VecAudio", "Hubert", "SEW", "UniSpeech", "Wav2Vec2", "WavLM")
_DOCUMENTS = "document-question-answering"
_BY_ARCHITECTURE = {
    "ForCTC": SPEECH_RECOGNITION,
    "WhisperForConditionalGeneration": SPEECH_RECOGNITION,
    "ForAudioClassification": "audio-classification",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "LayoutLMForQuestionAnswering": _DOCUMENTS,
    "LayoutLMv2ForQuestionAnswering": _DOCUMENTS,
    "LayoutLMv3ForQuestionAnswering": _DOCUMENTS,
    "TapasForQuestionAnswering": "table-question-answering",
    "ForQuestionAnswering": QUESTION_ANSWERING,
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSegmentation": "image-segmentation",
    "ForSemanticSegmentation": "image-segmentation",
    "ForInstanceSegmentation": "image-segmentation",
    "ForUniversalSegmentation": "image-segmentation",
    "ForDepthEstimation": "depth-estimation",
    "ForKeypointMatching": "keypoint-matching",
    "ForVideoClassification": VIDEO_CLASSIFICATION,
    "SamModel": "mask-generation",
    "SamHQModel": "mask-generation",
    "Sam2Model": "mask-generation",
    "BarkModel": "text-to-audio",
    "VitsModel": "text-to-audio",
}
_GENERATING_MODELS = ("LMHeadModel", "DoubleHeadsModel", "EncoderDecoderModel")
"""Suffixes of "...Model" classes that have a language-model head, unlike a bare model."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The one task that a container serves."""

    kind: Kind = "generation"
    name: str = GENERATION[0]
    """The task's name in transformers; for a handler, the path of its file."""
    reason: str = "default"
    properties: Mapping[str, str] = {}
    """For a handler: the result of `inputs.get_properties()`."""


def choose_task(model_dir: Path, options: Options) -> Task:
    """Return the task that `option.task` names or, by default, the task of the model's files.

    Raises ConfigurationError if config.json cannot be read, or if another option does not work with
    the task.
    """
    task = _detect_task(model_dir) if options.model.task is None else _named(options.model.task)
    check_options(task, options)
    return task


def check_options(task: Task, options: Options) -> None:
    """Raise ConfigurationError if an option does not work with the task."""
    if task.kind == "generation":
        return
    choice = choose_batching(options.strategy)
    names = LIBRARY_NAMES if task.kind == "handler" else TASK_NAMES
    if choice.name is not None and choice.name not in names:
        raise ConfigurationError(
            f"{choice.reason} chooses {choice.name}, which works only for text generation; "
            f"for {task.name} ({task.reason}), set option.batching={' or '.join(names)}"
        )
    for record in options.records():
        if record.restricted and not {task.kind, task.name} & {*record.kinds}:
            kinds = ", ".join(_KINDS.get(kind, kind) for kind in record.kinds)
            raise ConfigurationError(
                f"{record.restricted} works only for {kinds}; leave it out for {task.name} "
                f"({task.reason})"
            )


def choose_batching_of(task: Task, options: Options) -> Choice:
    """Return the strategy for a task. Default for a handler: one request at a time, as in LMI.

    Raises ConfigurationError if the strategy does not work with `option.executor`.
    """
    choice = choose_batching(options.strategy)
    if options.model.executor == "library" and choice.needs_packed_executor:
        raise ConfigurationError(
            f"the strategy {choice.name} follows from {choice.reason}, but option.executor=library "
            f"cannot run it; it works with {' and '.join(LIBRARY_NAMES)}"
        )
    if choice.name is not None or task.kind == "generation":
        return choice
    if task.kind == "handler":
        return Choice("none", "default: a handler gets one request at a time, as in LMI")
    return Choice(DEFAULT_FOR_TASKS, f"default for {task.name}")


def _named(name: str) -> Task:
    canonical = _ALIASES.get(name, name)
    reason = f"option.task={name}"
    if canonical in GENERATION:
        return Task(kind="generation", name=canonical, reason=reason)
    kind: Kind = "embedding" if canonical == EMBEDDING else "pipeline"
    return Task(kind=kind, name=canonical, reason=reason)


def _detect_task(model_dir: Path) -> Task:
    if (model_dir / "modules.json").is_file():
        reason = "the model has sentence-transformers' modules.json"
        return Task(kind="embedding", name=EMBEDDING, reason=reason)
    architecture = _architecture(model_dir / "config.json")
    reason = f"the model is a {architecture}"
    if architecture.startswith(_SPEECH_ENCODERS):
        architecture = architecture.replace("ForSequence", "ForAudio")
    for ending, name in _BY_ARCHITECTURE.items():
        if architecture.endswith(ending):
            return Task(kind="pipeline", name=name, reason=reason)
    if architecture.endswith("Model") and not architecture.endswith(_GENERATING_MODELS):
        return Task(kind="embedding", name=EMBEDDING, reason=f"{reason}, without a head")
    return Task(reason=reason if architecture else Task().reason)


class _Config(msgspec.Struct):
    """The part of config.json that names the model's classes."""

    architectures: list[str] | None = None


def _architecture(path: Path) -> str:
    """Return the first architecture; '' if there is none, which the loader then reports."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError:
        return ""
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None
    return (config.architectures or [""])[0]
