"""What a container does: generate text, embed it, run a pipeline, or the user's own code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from core.batching import Choice, choose_batching
from core.errors import ConfigurationError
from core.options import Options
from core.pipeline_tasks import QUESTION_ANSWERING, SPEECH_RECOGNITION, VIDEO_CLASSIFICATION

Kind = Literal["generation", "embedding", "pipeline", "handler"]

EMBEDDING = "text-embedding"
GENERATION = ("text-generation", "text2text-generation")

_ALIASES = {
    "generate": "text-generation",  # vLLM
    "embed": EMBEDDING,
    "embedding": EMBEDDING,
    "text_embedding": EMBEDDING,  # DJL
    "sentence-similarity": EMBEDDING,  # the Hugging Face hub's label of such models
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
"""Endings of classes that are called models, but are more than their layers."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The one thing that the processes of a container are started for."""

    kind: Kind = "generation"
    name: str = GENERATION[0]
    """As transformers calls it; for a handler, the path of its file."""
    reason: str = "nothing said"
    properties: Mapping[str, str] = {}
    """For a handler: what `inputs.get_properties()` gives it."""


def choose_task(model_dir: Path, options: Options) -> Task:
    """The task that the options name, or that the model's files are for.

    Raises ConfigurationError where the strategy or the executor asked for cannot serve it.
    """
    task = _found(model_dir) if options.task is None else _named(options.task)
    check_options(task, options)
    return task


def check_options(task: Task, options: Options) -> None:
    """Raises ConfigurationError where the options ask for what only token engines have."""
    if task.kind == "generation":
        return
    choice = choose_batching(options)
    if choice.name in ("continuous", "paged"):
        raise ConfigurationError(
            f"{choice.reason} chooses {choice.name}, which schedules the tokens of a generation; "
            f"{task.name} ({task.reason}) is served by option.batching=none or dynamic"
        )
    if options.enable_lora:
        raise ConfigurationError(
            f"option.enable_lora adapts a model that generates text; leave it out for {task.name} "
            f"({task.reason})"
        )
    if options.executor == "packed":
        raise ConfigurationError(
            f"option.executor=packed generates text; leave it out for {task.name} ({task.reason})"
        )


def choose_batching_of(task: Task, options: Options) -> Choice:
    """The strategy of a task. Nothing said: one at a time for a handler, as in LMI."""
    choice = choose_batching(options)
    if choice.name is not None or task.kind == "generation":
        return choice
    if task.kind == "handler":
        return Choice("none", "nothing said: a handler gets one request at a time, as in LMI")
    return Choice("dynamic", f"nothing said: dynamic for {task.name}")


def _named(name: str) -> Task:
    canonical = _ALIASES.get(name, name)
    reason = f"option.task={name}"
    if canonical in GENERATION:
        return Task(kind="generation", name=canonical, reason=reason)
    kind: Kind = "embedding" if canonical == EMBEDDING else "pipeline"
    return Task(kind=kind, name=canonical, reason=reason)


def _found(model_dir: Path) -> Task:
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
    """The part of config.json that says what a model is for."""

    architectures: list[str] | None = None


def _architecture(path: Path) -> str:
    """The first one named; '' where there is none, which is for the loader to judge."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError:
        return ""
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None
    return (config.architectures or [""])[0]
