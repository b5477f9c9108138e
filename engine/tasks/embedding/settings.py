"""Embedding settings, from the options and the sentence-transformers files beside the model."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from core.configuration.options import Options, Pooling
from core.errors import ConfigurationError

T = TypeVar("T")

_POOLING_NAMES: Sequence[Pooling] = [each for each in typing.get_args(Pooling) if each != "splade"]

_MODULES = ("Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Dense", "Normalize")
"""The modules of sentence-transformers that can be served, in the order that they must have."""


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """Resolved settings; `reason` says where they come from."""

    pooling: tuple[Pooling, ...]
    dense: tuple[Path, ...]
    """The folders of the linear layers after the pooling, in their order."""
    is_normalized: bool
    """Whether vectors are scaled to unit L2 norm."""
    max_tokens: int | None
    """The length limit in the model's files, if they set one."""
    is_lower_case: bool
    prefix: str
    """Prepended to every text, unless a request names another prompt."""
    prompts: Mapping[str, str]
    """The prompts that a request may name."""
    reason: str


class _Module(msgspec.Struct):
    """An entry of modules.json: one module of the sentence-transformers pipeline."""

    type: str
    path: str = ""


class _PoolingConfig(msgspec.Struct):
    """1_Pooling/config.json, in its old format (flags) and its new one (`pooling_mode`)."""

    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True

    def names(self) -> list[str]:
        if self.pooling_mode is not None:
            return [self.pooling_mode] if isinstance(self.pooling_mode, str) else self.pooling_mode
        flags = {  # in the order in which several are concatenated
            "cls": self.pooling_mode_cls_token,
            "max": self.pooling_mode_max_tokens,
            "mean": self.pooling_mode_mean_tokens,
            "mean_sqrt_len_tokens": self.pooling_mode_mean_sqrt_len_tokens,
            "weightedmean": self.pooling_mode_weightedmean_tokens,
            "lasttoken": self.pooling_mode_lasttoken,
        }
        return [name for name, is_set in flags.items() if is_set]


class _SpladeConfig(msgspec.Struct):
    """config.json of SpladePooling."""

    pooling_strategy: str = "max"
    activation_function: str = "relu"


class _TransformerConfig(msgspec.Struct):
    """sentence_bert_config.json."""

    max_seq_length: int | None = None
    do_lower_case: bool = False


class _PromptConfig(msgspec.Struct):
    """config_sentence_transformers.json."""

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


def read_embedding_settings(model_dir: Path, options: Options) -> EmbeddingSettings:
    """Read the settings of the model in `model_dir`; options override its files.

    Raises ConfigurationError if the model has a sentence-transformers module that is not supported.
    """
    modules = _read(model_dir / "modules.json", list[_Module]) or []
    names = [_class_name(module) for module in modules]
    unknown = sorted(set(names) - set(_MODULES))
    if unknown or names != sorted(names, key=_MODULES.index):
        what = ", ".join(unknown) if unknown else f"the order {', '.join(names)}"
        raise ConfigurationError(
            f"{model_dir / 'modules.json'} names {what}, which this version does not support; "
            "serve the model with a model.py that uses sentence-transformers"
        )
    folders = [model_dir / module.path for module in modules]
    steps = dict(zip(names, folders, strict=True))
    transformer = _transformer(model_dir)
    pooling = _PoolingConfig(pooling_mode="mean")
    if "Pooling" in steps:
        pooling = _read(steps["Pooling"] / "config.json", _PoolingConfig) or pooling
    chosen: tuple[Pooling, ...]
    if options.model.pooling:
        chosen = (options.model.pooling,)
    elif "SpladePooling" in steps:
        chosen = _splade(steps["SpladePooling"] / "config.json")
    else:
        chosen = _check_pooling(pooling.names(), steps)
    prefix, prompts = _prompts(model_dir)
    if prefix and not pooling.include_prompt:
        raise ConfigurationError(
            f"{model_dir}: this version cannot leave the default prompt out of the pooling "
            "(include_prompt=false)"
        )
    is_normalized = "Normalize" in steps or not (steps or "splade" in chosen)
    return EmbeddingSettings(
        pooling=chosen,
        dense=tuple(folder for name, folder in zip(names, folders, strict=True) if name == "Dense"),
        is_normalized=is_normalized if options.model.normalize is None else options.model.normalize,
        max_tokens=transformer.max_seq_length,
        is_lower_case=transformer.do_lower_case,
        prefix=prefix,
        prompts=prompts if pooling.include_prompt else {},
        reason="modules.json" if steps else "no modules.json",
    )


def _class_name(module: _Module) -> str:
    """Return the class name alone: its module differs between sentence-transformers versions."""
    return module.type.rpartition(".")[2]


def _check_pooling(names: list[str], steps: dict[str, Path]) -> tuple[Pooling, ...]:
    known: list[Pooling] = [kind for name in names for kind in _POOLING_NAMES if kind == name]
    if not names or len(known) < len(names):
        raise ConfigurationError(
            f"{steps['Pooling'] / 'config.json'}: pooling is {', '.join(names) or 'not set'}; "
            f"supported are {', '.join(_POOLING_NAMES)}; set option.pooling to one of them"
        )
    return tuple(known)


def _splade(path: Path) -> tuple[Pooling, ...]:
    config = _read(path, _SpladeConfig) or _SpladeConfig()
    found = config.pooling_strategy, config.activation_function
    if found != ("max", "relu"):
        raise ConfigurationError(
            f"{path}: pooling_strategy and activation_function are {' and '.join(found)}; "
            "supported are max and relu"
        )
    return ("splade",)


def _transformer(model_dir: Path) -> _TransformerConfig:
    return (
        _read(model_dir / "sentence_bert_config.json", _TransformerConfig) or _TransformerConfig()
    )


def _prompts(model_dir: Path) -> tuple[str, dict[str, str]]:
    """Return the prompt of texts that name none, and all prompts by name."""
    config = _read(model_dir / "config_sentence_transformers.json", _PromptConfig)
    if config is None:
        return "", {}
    return config.prompts.get(config.default_prompt_name or "", ""), config.prompts


def _read(path: Path, kind: type[T]) -> T | None:
    """Return the decoded file, or None if it does not exist."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{path}: {error}") from None
