"""Loads quantized weights: those of a checkpoint, and those that option.quantize asks for.

SCHEMES is the table of quantized checkpoints: which file reads which `quantization_config`. To add
a format, write a class like those of the other files, and add it to the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from core.errors import ConfigurationError
from engine.group import Group
from engine.model.checkpoint import Checkpoint
from engine.model.gguf.packed import Gguf
from engine.model.linear import Format, Quantized, Stored
from engine.model.loader import Loader
from engine.model.published.settings import quantization_config, quantization_method
from engine.model.quantization.at_load import HEAD_PRECISIONS, QUANTIZERS, quantize_weight
from engine.model.quantization.awq import Awq
from engine.model.quantization.compressed_tensors import CompressedTensors
from engine.model.quantization.fine_grained_fp8 import FineGrainedFp8
from engine.model.quantization.formats import make_format
from engine.model.quantization.gptq import Gptq
from engine.model.quantization.mxfp4 import Mxfp4


class Scheme(Protocol):
    """How a checkpoint stores its quantized layers."""

    markers: tuple[str, ...]
    """A layer is quantized if the checkpoint has a tensor named after it with one of these
    suffixes. Modules that the config ignores have no such tensors."""
    unused_suffixes: tuple[str, ...]
    """Suffixes of tensors that serving does not need, such as static activation scales."""

    def read(self, checkpoint: Checkpoint, name: str) -> Quantized:
        """Take the weight of the quantized layer `name`.

        Raises ConfigurationError if its tensors do not fit together.
        """
        ...


SCHEMES: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": FineGrainedFp8,
    "compressed-tensors": CompressedTensors,
    "awq": Awq,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
    "gguf": Gguf,
}
"""Keyed by `quant_method`. A class raises ValueError, with the reason, for a config it cannot
read."""


class QuantizingLoader(Loader):
    """A loader of weights that the checkpoint has quantized, or that it quantizes itself."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_transposed: bool = False,
        scheme: Scheme | None = None,
        precision: str | None = None,
        is_exact: bool = False,
        group: Group | None = None,
    ) -> None:
        """scheme: how the checkpoint is quantized; None: not at all. precision: what to quantize
        linear layers to (option.quantize); None: nothing. is_exact: whether linear layers must
        multiply rows as they are, without rounding them further.
        """
        super().__init__(checkpoint, device, dtype, is_transposed=is_transposed, group=group)
        self._scheme, self._precision, self._is_exact = scheme, precision, is_exact
        self._head_precision = HEAD_PRECISIONS.get(precision or "")
        if scheme is not None:
            unused = scheme.unused_suffixes
            checkpoint.keep(lambda name: not name.endswith(unused))

    def format(self, parts: Sequence[Stored], dtype: torch.dtype | None = None) -> Format:
        return make_format(parts, self.device, dtype or self.dtype, is_exact=self._is_exact)

    def is_quantized(self, name: str) -> bool:
        markers = () if self._scheme is None else self._scheme.markers
        return any(f"{name}{marker}" in self.checkpoint for marker in markers)

    def stored(self, name: str, size: int, in_features: int) -> Stored:
        if self._scheme is None or not self.is_quantized(name):
            return super().stored(name, size, in_features)
        weight = self._scheme.read(self.checkpoint, name)
        if weight.shape != (size, in_features):
            raise self.checkpoint.error(
                name, f"has shape {list(weight.shape)}, not {[size, in_features]}"
            )
        return weight

    def quantized(self, weight: Stored, *, is_head: bool = False) -> Stored:
        precision = self._head_precision if is_head else self._precision
        if precision is None or not isinstance(weight, Tensor):
            return weight
        return quantize_weight(weight, precision, self.device)


def read_scheme(config: PreTrainedConfig) -> Scheme | None:
    """Return how a model's checkpoint is quantized, or None if it is not.

    Raises ConfigurationError, which says what would work, if Longshore cannot read the weights.
    """
    given, method = quantization_config(config), quantization_method(config)
    if given is None or method is None:
        return None
    if method not in SCHEMES:
        raise _unreadable(f"quant_method={method}", f"{', '.join(SCHEMES)} can")
    try:
        return SCHEMES[method](given)
    except ValueError as error:
        raise _unreadable(f"quant_method={method} with {error}", "") from error


def choose_precision(quantize: str, config: PreTrainedConfig) -> str | None:
    """Return the precision to quantize to at load, a key of QUANTIZERS, or None.

    quantize: the option's value. Raises ConfigurationError if it contradicts the checkpoint.
    """
    method = quantization_method(config)
    if quantize == method:
        return None
    if method is not None:
        raise ConfigurationError(
            f"option.quantize={quantize}: the checkpoint is already quantized "
            f"(quant_method={method} in config.json); leave the option out"
        )
    if quantize not in QUANTIZERS:
        raise ConfigurationError(
            f"option.quantize={quantize}: the checkpoint is not quantized (config.json has no "
            "quantization_config); to quantize it while it is loaded, use one of "
            f"{', '.join(QUANTIZERS)}"
        )
    return quantize


def _unreadable(what: str, others: str) -> ConfigurationError:
    return ConfigurationError(
        f"config.json: quantization_config has {what}, which cannot be read{others and '; '}"
        f"{others}; serve the unquantized model with option.quantize=fp8, int8 or int4, or set "
        "option.decoder=transformers if the method's library is installed"
    )
