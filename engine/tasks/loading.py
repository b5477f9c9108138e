"""Load transformers models, tokenizers and processors for tasks, and describe them."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from transformers import AutoFeatureExtractor, AutoProcessor, AutoTokenizer, ProcessorMixin

# From its own module: transformers 5.17 exports it at top level only if torchvision is installed.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from core.errors import ConfigurationError
from core.foreign_code import contained
from core.part import Feature
from engine.encoder.own_layers import own_encoder, use_own_layers
from engine.loading.model_source import ModelSource
from engine.tasks.performer import Description

logger = logging.getLogger(__name__)


def load_with_head(source: ModelSource, kind: Any, task: str) -> tuple[Any, str]:
    """Load a model with one of transformers' Auto classes, and return whose its layers are.

    Raises ConfigurationError if it cannot be loaded, or if the checkpoint has no weights for the
    task's head: transformers would initialize the head at random and only log it.
    """
    try:
        with contained:
            if source.is_dummy:
                model, info = source.load(kind), {"missing_keys": []}
            else:
                model, info = source.load(kind, output_loading_info=True)
    except Exception as error:  # loading may raise anything, depending on the weight format
        raise _cannot_load(source, task, error) from error
    body = f"{model.base_model_prefix}."
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(body))
    if missing:
        raise ConfigurationError(
            f"{source.model_dir} was not trained for {task}: it has no weights for "
            f"{', '.join(missing)}"
        )
    return place(model, source, task)


def place(model: Any, source: ModelSource, task: str) -> tuple[Any, str]:
    """Return a transformers model on its device, with our own layers if they compute the same.

    Also return whose layers they are. Raises as `use_own_layers` does.
    """
    model = model.to(source.device).eval()
    return model, use_own_layers(model, source, task)


def load_tokenizer(source: ModelSource, task: str) -> Any:
    """Load the tokenizer. Raises ConfigurationError if there is none."""
    return _load_part(AutoTokenizer, source, task)


def load_feature_extractor(source: ModelSource, task: str) -> Any:
    """Load the audio feature extractor. Raises ConfigurationError if there is none."""
    extractor = _load_part(AutoFeatureExtractor, source, task)
    settings, _ = extractor.get_feature_extractor_dict(source.model_dir)
    if str(settings.get("processor_class")).endswith("WithLM"):
        logger.warning(
            "%s has a language model for decoding, which is not used: each character is "
            "decoded greedily",
            source.model_dir,
        )
    return extractor


def load_image_processor(source: ModelSource, task: str) -> Any:
    """Load the image processor. Raises ConfigurationError if there is none."""
    return _load_part(AutoImageProcessor, source, task)


def load_processor(source: ModelSource, task: str) -> Any:
    """Load the multimodal processor; None if the model has only a tokenizer.

    Raises ConfigurationError if it cannot be loaded.
    """
    processor = _load_part(AutoProcessor, source, task)
    return processor if isinstance(processor, ProcessorMixin) else None


def require(package: str, task: str, hint: str) -> None:
    """Raise ConfigurationError, ending with `hint`, if a package that the task needs is missing."""
    if find_spec(package) is None:
        raise ConfigurationError(f"option.task={task} needs the package {package}: {hint}")


def describe(
    model: Any,
    encoder: str,
    *,
    max_model_len: int = 0,
    notes: tuple[str, ...] = (),
    features: tuple[Feature, ...] = (),
) -> Description:
    """Return the description of a model that start-up prints. encoder: as from `place`."""
    own = own_encoder(model)
    return Description(
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        weights_bytes=model.get_memory_footprint() + (own.num_bytes if own else 0),
        encoder=encoder,
        max_model_len=max_model_len,
        notes=notes,
        features=features,
    )


def _load_part(kind: Any, source: ModelSource, task: str) -> Any:
    try:
        with contained:
            return kind.from_pretrained(
                source.model_dir, trust_remote_code=source.trust_remote_code
            )
    except Exception as error:  # several libraries raise here
        raise _cannot_load(source, task, error) from error


def _cannot_load(source: ModelSource, task: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"transformers cannot load {source.config.model_type} for {task}: {error}"
    )
