"""A decoder that runs packed: ours where the table of families has it, else transformers' code."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from core.errors import ConfigurationError
from core.options import DecoderChoice
from engine.attention.call import AttendsPaged, UnsupportedModelError
from engine.inputs import StepInputs
from engine.loading.foreign import ForeignDecoder, load_foreign
from engine.loading.model_source import ModelSource
from engine.loading.own import load_own
from engine.lora.memory import AdapterMemory
from engine.model.decoder import Decoder
from engine.phases import Phases


class PackedModel:
    """What the executor and the sizing ask of a model. Make it with `load_packed_model`."""

    def __init__(
        self, decoder: Decoder | ForeignDecoder, source: ModelSource, description: str
    ) -> None:
        self.description = description
        """Whose layers they are, and why not ours."""
        self.config: PreTrainedConfig = source.config
        self.device, self.dtype = source.device, source.dtype
        self.shapes = decoder.shapes
        self.adapter_memory: AdapterMemory | None = None
        """Once `adapt` was called."""
        self._decoder = decoder

    @property
    def weights_bytes(self) -> int:
        return self._decoder.num_bytes

    @torch.inference_mode()
    def adapt(self, num_slots: int, max_rank: int) -> AdapterMemory:
        """Gives the linear layers room for adapters; to be called once.

        Raises UnsupportedModelError where the model has no such layers.
        """
        if not self._decoder.linears:
            raise UnsupportedModelError("it has no linear layers that see each token once")
        memory = AdapterMemory(self._decoder.linears, num_slots, max_rank, self.device)
        self.adapter_memory = memory
        return memory

    def forward(self, inputs: StepInputs, paged: AttendsPaged) -> Tensor:
        """Logits [S + R, vocabulary] of the rows to sample after and of those that score."""
        slots = inputs.adapter_slots
        if self.adapter_memory is not None:
            self.adapter_memory.choose(slots)
        return self._decoder(
            inputs.tokens[0],
            inputs.tokens[1],
            inputs.logit_rows,
            paged,
            has_adapters=slots is not None,
        )


def load_packed_model(
    source: ModelSource, max_length: int, choice: DecoderChoice, phases: Phases
) -> PackedModel:
    """max_length: most tokens of a sequence.

    Raises UnsupportedModelError where neither way gives the logits of transformers' own code,
    ConfigurationError where the files are at fault, or the model has no decoder of that choice.
    """
    model_type = source.config.model_type
    reason = "option.decoder=transformers"
    if choice != "transformers":
        try:
            decoder = load_own(source, max_length, phases)
        except UnsupportedModelError as error:
            reason = str(error)
        else:
            return _packed(decoder, source, f"own ({model_type})")
        if choice == "own":
            raise ConfigurationError(
                f"option.decoder=own: {model_type} has none: {reason}; say option.decoder=auto"
            )
    decoder = load_foreign(source, max_length, phases)
    return _packed(decoder, source, f"transformers' code ({model_type}): {reason}")


def _packed(
    decoder: Decoder | ForeignDecoder, source: ModelSource, description: str
) -> PackedModel:
    if source.device.type == "cuda":
        torch.cuda.empty_cache()  # the memory that is left for K and V is asked of the device
    return PackedModel(decoder, source, description)
