"""Models of transformers for tasks, and what they say of themselves."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from transformers import AutoFeatureExtractor, AutoProcessor, AutoTokenizer, ProcessorMixin

# By its module: transformers 5.17 has the short name only where torchvision is installed.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from core.errors import ConfigurationError
from engine.loading.model_source import ModelSource
from engine.tasks.performer import Description

logger = logging.getLogger(__name__)


def load_with_head(source: ModelSource, kind: Any, task: str) -> Any:
    """A model of one of transformers' Auto classes, on its device.

    Raises ConfigurationError where it cannot be loaded, or where the weights were not trained for
    the task: transformers makes the head that is missing of random numbers, and only logs it.
    """
    try:
        if source.is_dummy:
            return source.load(kind).to(source.device).eval()
        model, info = source.load(kind, output_loading_info=True)
    except Exception as error:  # whatever a library for files of weights may raise
        raise _cannot_load(source, task, error) from error
    body = f"{model.base_model_prefix}."
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(body))
    if missing:
        raise ConfigurationError(
            f"{source.model_dir} was not trained for {task}: it has no weights for "
            f"{', '.join(missing)}"
        )
    return model.to(source.device).eval()


def load_tokenizer(source: ModelSource, task: str) -> Any:
    """Raises ConfigurationError where there is none."""
    return _load_part(AutoTokenizer, source, task)


def load_feature_extractor(source: ModelSource, task: str) -> Any:
    """What makes a sound a model's input. Raises ConfigurationError where there is none."""
    extractor = _load_part(AutoFeatureExtractor, source, task)
    settings, _ = extractor.get_feature_extractor_dict(source.model_dir)
    if str(settings.get("processor_class")).endswith("WithLM"):
        logger.warning(
            "%s has a language model to choose words with, which is not used: each letter is the "
            "likeliest one",
            source.model_dir,
        )
    return extractor


def load_image_processor(source: ModelSource, task: str) -> Any:
    """What makes an image a model's input. Raises ConfigurationError where there is none."""
    return _load_part(AutoImageProcessor, source, task)


def load_processor(source: ModelSource, task: str) -> Any:
    """What makes several kinds of inputs a model's; None where its tokenizer is all it has.

    Raises ConfigurationError where it cannot be loaded.
    """
    processor = _load_part(AutoProcessor, source, task)
    return processor if isinstance(processor, ProcessorMixin) else None


def require(package: str, task: str, cure: str) -> None:
    """Raises ConfigurationError where a package is missing that the task needs."""
    if find_spec(package) is None:
        raise ConfigurationError(f"option.task={task} needs the package {package}: {cure}")


def describe(model: Any, *, max_model_len: int = 0, notes: tuple[str, ...] = ()) -> Description:
    """What start-up prints of a model."""
    return Description(
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        weights_bytes=model.get_memory_footprint(),
        max_model_len=max_model_len,
        notes=notes,
    )


def _load_part(kind: Any, source: ModelSource, task: str) -> Any:
    """What one of transformers' Auto classes reads beside the weights."""
    try:
        return kind.from_pretrained(source.model_dir, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # of several libraries
        raise _cannot_load(source, task, error) from error


def _cannot_load(source: ModelSource, task: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"transformers cannot load {source.config.model_type} for {task}: {error}"
    )
