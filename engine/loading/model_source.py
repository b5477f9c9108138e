"""Where a model's weights come from: the files of its directory, or a random number generator.

Random weights allow benchmarks without a checkpoint, because the time of a step does not depend on
the values of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.configuration.hub import PICKLE_CURE
from core.errors import ConfigurationError
from engine.model.checkpoint import Nested, find_nested
from engine.model.families import FAMILIES, TEXT_ALONE
from engine.model.published.settings import quantization_config, quantization_method

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SEED = 0
"""Seed of the random weights that transformers makes, so that two builds on the same kind of device
have equal weights. Our own decoder's random weights come from `random_weights` instead."""


class NotKeptError(Exception):
    """The config has to be read again, because transformers' own class of it is needed."""


class KeptConfig:
    """The settings of a model of text alone, as attributes, in place of transformers' class."""

    def __init__(self, settings: Mapping[str, Any], as_json: str) -> None:
        """settings: those that JSON can hold; as_json: what `to_json_string` is to return."""
        self._as_json = as_json
        vars(self).update(settings)
        if settings["dtype"] is not None:
            self.dtype = getattr(torch, settings["dtype"])

    def get_text_config(self) -> KeptConfig:
        """Return the config itself, as transformers' class does where there is text alone."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all settings."""
        return {name: value for name, value in vars(self).items() if name != "_as_json"}

    def to_json_string(self) -> str:
        """Return what transformers' class returned, which tells models apart."""
        return self._as_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Everything needed to load a model, for any executor.

    The constructor raises ConfigurationError if the directory has no weight files that may be
    loaded, unless the weights are random.
    """

    model_dir: Path
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    is_dummy: bool = False
    """Use random weights and ignore weight files."""
    trust_remote_code: bool = False
    allow_pickle: bool = False
    """Also load *.bin files."""
    precision: str | None = None
    """Quantize linear layers to this while they are loaded; see `quantization.at_load`."""
    is_exact: bool = False
    """Multiply rows as they are, even where rounding them first is faster."""
    is_batch_invariant: bool = False
    """Give a token the same bits in any batch (option.batch_invariant)."""

    nested: Nested | None = None
    """The tensors' names, if `config` describes the language model inside another model."""

    def __post_init__(self) -> None:
        if self.is_dummy or self.is_gguf or any(self.model_dir.glob("*.safetensors")):
            return
        if not any(self.model_dir.glob("*.bin")):
            raise ConfigurationError(
                f"{self.model_dir} has a config.json but no weights (*.safetensors); "
                "option.load_format=dummy uses random weights"
            )
        if not self.allow_pickle:
            raise ConfigurationError(f"{self.model_dir} has no *.safetensors; {PICKLE_CURE}")

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are in a GGUF file, which was translated into this directory."""
        from core.files.gguf import GGUF_INDEX

        return (self.model_dir / GGUF_INDEX).is_file()

    @property
    def quantization(self) -> str | None:
        """The `quant_method` of the checkpoint; None if its weights are not quantized."""
        return quantization_method(self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether the weights of linear layers are quantized, in the checkpoint or at load."""
        return self.precision is not None or self.quantization is not None

    @property
    def is_keepable(self) -> bool:
        """Whether later starts may rely on what transformers computed of these files.

        Of other models, this project's code makes the weights, or code of the model's directory
        computes the logits. Either may change.
        """
        is_plain = not (self.is_quantized or self.is_gguf or self.is_dummy)
        return is_plain and not self.trust_remote_code

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the start-up output."""
        random = "the weights are random, and so are the answers: option.load_format=dummy"
        fp8 = "option.quantize=fp8 saves nothing on a CPU, which has no kernel for it; int8 does"
        is_vain = self.precision == "fp8" and self.device.type == "cpu"
        notes = (*[random] * self.is_dummy, *[fp8] * is_vain)
        if not self.is_gguf or self.is_dummy:
            return notes
        from engine.model.gguf.stored import storage_note
        from engine.model.linear import uses_panels

        has_panels = uses_panels(self.device, self.dtype)
        return (*notes, storage_note(self.model_dir, has_panels=has_panels))

    @property
    def is_pinned(self) -> bool:
        """Whether that needs other kernels than the fastest. On CPUs, it does not."""
        return self.is_batch_invariant and self.device.type == "cuda"

    def reject_own_options(self, reason: str) -> None:
        """Raise ConfigurationError if an option is set that only our own decoders implement.

        reason: why transformers' code runs.
        """
        if self.is_batch_invariant:
            raise ConfigurationError(
                f"option.batch_invariant=true needs Longshore's own decoder, but {reason}; leave "
                "the option out"
            )
        if self.precision is not None:
            raise ConfigurationError(
                f"option.quantize={self.precision} needs Longshore's own decoder, but {reason}; "
                "leave the option out"
            )

    def require_class(self) -> None:
        """Raise NotKeptError if there are only the settings, without transformers' class of them.

        Call it before what transformers does with the config.
        """
        if isinstance(self.config, KeptConfig):
            raise NotKeptError

    def with_config(self, config: PreTrainedConfig) -> ModelSource:
        return replace(self, config=config)

    def of_language_model(self) -> ModelSource:
        """Return the source of the language model inside a model that has other parts, too.

        Raises as `find_nested` does.
        """
        given: Any = self.config
        config: Any = deepcopy(given.get_text_config())
        if config.model_type in TEXT_ALONE:
            config = _as_model_type(config, TEXT_ALONE[config.model_type])
        quantization = quantization_config(given)
        if quantization is not None:
            config.quantization_config = quantization
        if self.is_dummy:
            config.tie_word_embeddings = getattr(given, "tie_word_embeddings", False)
            return self.with_config(config)
        nested = find_nested(self.model_dir, FAMILIES[config.model_type])
        config.tie_word_embeddings = nested.head is None  # both configs may say something else
        return replace(self, config=config, nested=nested)

    def for_comparison(self) -> ModelSource:
        """Return a source whose model is as exact as it can be."""
        return replace(self, dtype=torch.float32, is_exact=True)

    def without_quantization(self) -> ModelSource:
        """Return a source whose config does not mention quantized weights."""
        config: Any = deepcopy(self.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return self.with_config(config)

    def load_with_missing(
        self, kind: Any, attention: str, state: Mapping[str, Tensor] | None = None
    ) -> tuple[Any, list[str]]:
        """Load a model as `load` does; return it and the names of parameters that no file has.

        state: tensors to use instead of the files' tensors.
        """
        keywords: dict[str, object] = {"attn_implementation": attention}
        if state is not None:
            keywords["state_dict"] = dict(state)
        if self.is_dummy:
            return self.load(kind, **keywords), []
        model, info = self.load(kind, output_loading_info=True, **keywords)
        return model, sorted(info["missing_keys"])

    def load(self, kind: Any, **keywords: object) -> Any:
        """Load a model with one of transformers' Auto classes; raises what transformers raises.

        Random weights are created on the device; loaded weights are still on the CPU.
        """
        if self.is_gguf and not self.is_dummy and "state_dict" not in keywords:
            from engine.model.gguf.dense import dense_state

            config = self.config.get_text_config()
            state = dense_state(self.model_dir, config.num_hidden_layers, config.model_type)
            return self.without_quantization().load(kind, state_dict=state, **keywords)
        keywords |= {"dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
        # Copy the config, because transformers writes keywords into it.
        if not self.is_dummy:
            keywords |= {"config": deepcopy(self.config), "weights_only": True}
            if self.nested is not None:
                family = FAMILIES[self.config.model_type]
                keywords["key_mapping"] = {
                    f"^{re.escape(self.nested.prefix)}": family.prefix,
                    f"^{re.escape(self.nested.head or '')}{family.head}": family.head,
                }
            # Without this argument, transformers falls back to *.bin files.
            keywords |= {} if self.allow_pickle else {"use_safetensors": True}
            if "state_dict" in keywords:  # an Auto class would need a directory
                model_class = kind._model_mapping[type(self.config)]
                return model_class.from_pretrained(None, **keywords)
            return kind.from_pretrained(self.model_dir, **keywords)
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), self.device:
            torch.manual_seed(SEED)
            model = kind.from_config(deepcopy(self.config), **keywords)
        if (self.model_dir / "generation_config.json").is_file():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(self.model_dir)
        return model


def has_language_model(config: PreTrainedConfig) -> bool:
    """Whether a model has other parts than a language model of a family of our own decoder."""
    text = config.get_text_config()
    return text is not config and TEXT_ALONE.get(text.model_type, text.model_type) in FAMILIES


def _as_model_type(config: PreTrainedConfig, model_type: str) -> PreTrainedConfig:
    """Return a config of another model type with the same settings."""
    settings = config.to_dict()
    # The other type may have another default.
    settings.setdefault("norm_topk_prob", True)
    settings.setdefault("head_dim", settings["hidden_size"] // settings["num_attention_heads"])
    del settings["model_type"]
    ropes = settings.pop("rope_parameters")
    from transformers import AutoConfig

    other: Any = AutoConfig.for_model(model_type, **settings)
    other.rope_parameters = ropes  # transformers warns of unknown keys (mrope_section) in settings
    return other
