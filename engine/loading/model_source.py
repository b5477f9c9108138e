"""Where a model's weights come from: the files of its directory, or a random number generator.

Random weights make speed measurable without a checkpoint: how long a step takes does not depend
on the numbers that are multiplied.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from core.errors import ConfigurationError

SEED = 0
"""Of random weights, so that two builds on one kind of device are equal."""
WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Everything that loading a model needs, whichever executor it is for.

    Raises ConfigurationError from the constructor where weights are wanted and absent.
    """

    model_dir: Path
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    is_dummy: bool = False
    """Random weights; no file of weights is looked at."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.is_dummy and not any(
            any(self.model_dir.glob(pattern)) for pattern in WEIGHT_FILES
        ):
            raise ConfigurationError(
                f"{self.model_dir} has a config.json but no weights ({', '.join(WEIGHT_FILES)}); "
                "option.load_format=dummy runs it with random ones"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        random = "the weights are random, and so are the answers: option.load_format=dummy"
        return (random,) if self.is_dummy else ()

    def with_config(self, config: PreTrainedConfig) -> ModelSource:
        return replace(self, config=config)

    def in_fp32(self) -> ModelSource:
        return replace(self, dtype=torch.float32)

    def load_whole(self, kind: Any, attention: str) -> tuple[Any, list[str]]:
        """As `load`, and the names of parameters that no file has."""
        keywords: dict[str, object] = {"attn_implementation": attention}
        if self.is_dummy:
            return self.load(kind, **keywords), []
        model, told = self.load(kind, output_loading_info=True, **keywords)
        return model, sorted(told["missing_keys"])

    def load(self, kind: Any, **keywords: object) -> Any:
        """A model of one of transformers' Auto classes; raises what transformers raises.

        It lies on the device already if the weights are random, else still on the CPU.
        """
        keywords |= {"dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
        # Copies, because transformers writes its keywords into the configuration.
        if not self.is_dummy:
            config = deepcopy(self.config)
            return kind.from_pretrained(self.model_dir, config=config, **keywords)
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), self.device:
            torch.manual_seed(SEED)
            model = kind.from_config(deepcopy(self.config), **keywords)
        if (self.model_dir / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.model_dir)
        return model
