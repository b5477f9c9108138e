"""Reads a model's config, and decides in which precision its weights are loaded."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.configuration.options import ExecutionOptions, ModelOptions
from core.errors import ConfigurationError
from engine.device import choose_dtype
from engine.loading.model_source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SAME_CONFIG = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not know, by those of equal models that it does."""


def read_config(model_dir: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the model's config.json. Raises ConfigurationError if it is missing or unreadable."""
    if not (model_dir / "config.json").is_file():
        raise ConfigurationError(
            f"{model_dir} has no config.json; a model directory in Hugging Face format is needed"
        )
    # Imported only here, since a later start of most models needs none of it.
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    share_log()
    _import_validators()
    try:
        settings, _ = PreTrainedConfig.get_config_dict(model_dir)
        same = SAME_CONFIG.get(settings.get("model_type", ""))
        if same is not None:
            settings.pop("model_type")
            return CONFIG_MAPPING[same].from_dict(settings)
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"transformers cannot read {model_dir}: {error}") from error


def share_log() -> None:
    """Let transformers write to this process's log, if that is JSON: all its lines shall be."""
    from core.process.logs import writes_json

    if writes_json():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_default_handler()
        transformers_logging.enable_propagation()


def _import_validators() -> None:
    """Import the validators of transformers' configs, without a table of activations.

    The table's module imports most of transformers and of torch's compiler, which takes longer than
    all other imports of a small model's start. Only configs of speech models are checked by it, and
    where torch is missing, transformers itself leaves this check out.
    """
    from transformers.utils import import_utils

    for other in ("tokenization_utils_base", "video_utils"):  # must find torch
        importlib.import_module(f"transformers.{other}")
    is_torch_available = import_utils.is_torch_available
    import_utils.is_torch_available = lambda: False
    try:
        validators: Any = importlib.import_module("transformers.utils.type_validators")
    finally:
        import_utils.is_torch_available = is_torch_available
    validators.torch, validators.is_torch_available = torch, is_torch_available


def make_source(
    model_dir: Path,
    config: PreTrainedConfig,
    model: ModelOptions,
    execution: ExecutionOptions,
    device: torch.device,
) -> ModelSource:
    """Return where the weights come from.

    Raises ConfigurationError if there are none, or if they contradict option.quantize.
    """
    return ModelSource(
        model_dir=model_dir,
        config=config,
        dtype=choose_dtype(execution, config, device),
        device=device,
        is_dummy=model.load_format == "dummy",
        trust_remote_code=model.trust_remote_code,
        allow_pickle=model.allow_pickle_weights,
        precision=_precision(execution.quantize, config),
        is_batch_invariant=execution.batch_invariant,
    )


def _precision(quantize: str | None, config: PreTrainedConfig) -> str | None:
    """Return the precision to quantize to at load; None: none. quantize: the option's value."""
    if quantize is None:
        return None
    from engine.model.quantization.schemes import choose_precision

    return choose_precision(quantize, config)
