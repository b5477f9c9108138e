"""Builds an engine that calls transformers' `generate`, for models that cannot run packed."""

from __future__ import annotations

from transformers import AutoModelForImageTextToText

from core.errors import ConfigurationError
from core.foreign_code import contained
from engine.builders.common import (
    BITS_OF_TRANSFORMERS,
    check_steps,
    eos_token_ids,
    prompt_step,
    sampling_stages,
    text_features,
)
from engine.engine import Engine
from engine.loading.library_executor import LibraryExecutor, LibraryModel, load_library_model
from engine.loading.model_source import ModelSource
from engine.phases import Phases
from engine.resolve import Resolved, assume, facts_of, strategy_settings
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from engine.staging import Staging
from engine.vision.families import VISION_FAMILIES
from strategies.factory import make_strategy


def build_library(resolved: Resolved, phases: Phases, notes: tuple[str, ...]) -> Engine:
    """Load the model and check that it answers. notes: those of the start so far.

    Raises ConfigurationError if transformers cannot load the model.
    """
    source = resolved.source
    model = _load_library(source)
    phases.end("weights")
    capacity = assume(resolved)
    eos = eos_token_ids(source)
    grammars = Grammars(source.model_dir, eos)
    stages = sampling_stages(grammars, with_prompt=not model.config.is_encoder_decoder)
    executor = LibraryExecutor(model, Sampler(Staging(model.model.device), stages))
    check_steps(executor, [prompt_step(capacity.layout.groups)])
    phases.end("first steps")
    notes += source.notes + capacity.notes
    if source.device.type == "cpu":
        notes += (BITS_OF_TRANSFORMERS,)
    settings = strategy_settings(resolved, capacity)
    return Engine(
        make_strategy(settings),
        executor,
        facts_of(resolved, capacity, model, eos, phases, notes),
        features=text_features(grammars),
        model_time=executor.model_time,
        settings=settings,
    )


def _load_library(source: ModelSource) -> LibraryModel:
    config = source.config
    try:
        with contained:
            return load_library_model(source)
    except Exception as error:  # loading weights may raise anything
        if type(config) in AutoModelForImageTextToText._model_mapping:
            raise ConfigurationError(
                f"{config.model_type} takes images; of such models, text-generation supports only "
                f"{', '.join(VISION_FAMILIES)}; option.task=image-text-to-text serves others, "
                "one request at a time"
            ) from error
        raise ConfigurationError(
            f"transformers cannot load {config.model_type} for text generation: {error}"
        ) from error
