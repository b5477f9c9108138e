"""`PackedModel`: our own decoder if the family table has the model, else transformers' code.

"Packed" means that a step computes the tokens of all sequences as one flat batch, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from core.configuration.options import DecoderChoice
from core.errors import ConfigurationError
from engine.attention.call import PagedAttention, UnsupportedModelError
from engine.group import Group
from engine.loading.model_source import ModelSource, has_language_model
from engine.loading.own_decoder import load_own_decoder
from engine.model.decoder import Decoder
from engine.model.linear import Linear
from engine.phases import Phases
from engine.step.column import PerTokenColumn, RepeatableColumn
from engine.step.step_inputs import StepInputs
from engine.stopwatch import Stopwatch
from engine.vision.families import VISION_FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from core.states.layout import LayerState
    from engine.loading.transformers_decoder import HookedLinear, TransformersDecoder


class Encoder(Protocol):
    """Makes the embeddings of inputs that are no text. They take the place of tokens' embeddings.

    It runs before the step that needs them.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        ...

    @property
    def max_kept_bytes(self) -> int:
        """Most bytes of the embeddings that it keeps for later steps."""
        ...

    @property
    def undivided_tokens(self) -> int:
        """Tokens of an input that one step must compute together; 0: steps may end inside one."""
        ...

    @property
    def input(self) -> str:
        """The name of an input, for notes."""
        ...

    def run_largest(self) -> Tensor:
        """Encode the largest input that a request may have."""
        ...

    def column(self, model_time: Stopwatch) -> RepeatableColumn:
        """Return the column that puts the embeddings into steps. model_time: runs meanwhile."""
        ...


class PackedModel:
    """A model as the packed executor and memory sizing use it, made by `load_packed_model`."""

    def __init__(
        self,
        decoder: Decoder | TransformersDecoder,
        source: ModelSource,
        description: str,
        encoder: Encoder | None = None,
    ) -> None:
        self.description = description
        """Which code computes the layers. If it is transformers' code, also the reason."""
        self.config: PreTrainedConfig = source.config
        self.device, self.dtype = source.device, source.dtype
        self.shapes = decoder.shapes
        self.states: Sequence[LayerState] = ()
        """What each layer with a state keeps of a sequence."""
        self.quantization = ""
        """How the weights are quantized: option.quantize, or the checkpoint's quant_method."""
        if isinstance(decoder, Decoder):
            self.quantization = source.precision or source.quantization or ""
            self.states = decoder.states
        self.unavailable: dict[str, str] = {}
        self.columns: list[PerTokenColumn] = []
        """The columns that the layers take part in."""
        self.encoder = encoder
        """None if the model takes only text."""
        self._decoder = decoder

    @property
    def own_decoder(self) -> Decoder | None:
        """Longshore's own layers; None if transformers' code computes them."""
        return self._decoder if isinstance(self._decoder, Decoder) else None

    @property
    def weights_bytes(self) -> int:
        return self._decoder.num_bytes + (self.encoder.num_bytes if self.encoder else 0)

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def num_weights(self) -> int:
        """Elements of the weights of Longshore's own layers; 0 for transformers' code."""
        return self._decoder.num_weights if isinstance(self._decoder, Decoder) else 0

    @property
    def linears(self) -> Sequence[Linear | HookedLinear]:
        """The linear layers that see each token once."""
        return self._decoder.linears

    def shared_columns(self, model_time: Stopwatch) -> list[PerTokenColumn | RepeatableColumn]:
        """Return the columns in which all processes of the group take part.

        model_time: runs while the first process encodes inputs.
        """
        encoder = [] if self.encoder is None else [self.encoder.column(model_time)]
        return [*self.columns, *encoder]

    def forward(self, inputs: StepInputs, paged: PagedAttention) -> Tensor:
        """Return logits [S + R, vocab_size]: S rows to sample from, then those of the columns."""
        columns = inputs.columns
        for column in columns:
            column.begin()
        try:
            return self._decoder(
                inputs.token_ids, inputs.positions, inputs.logit_rows, paged, columns
            )
        finally:
            for column in columns:
                column.end()


def load_packed_model(
    source: ModelSource,
    max_length: int,
    choice: DecoderChoice,
    phases: Phases,
    group: Group | None = None,
) -> PackedModel:
    """Load a model to run packed. max_length: maximum tokens of a sequence.

    group: the processes that share the model; None: this one has all of it.

    Raises UnsupportedModelError if no decoder reproduces the logits of transformers' own code.
    Raises ConfigurationError if the model's files are broken, or if `choice` is "own" and our own
    decoder cannot run the model.
    """
    model_type = source.config.model_type
    addition = ""
    if has_language_model(source.config):
        addition = f", the language model of {model_type}; images are refused"
        if model_type in VISION_FAMILIES:
            # Imported only here, so that other models need no processors and no Pillow.
            from engine.loading.image_encoder import load_vision_model

            try:
                decoder, description, encoder = load_vision_model(
                    source, max_length, choice, phases, group
                )
            except UnsupportedModelError as error:
                addition += f" ({error})"
            else:
                return _packed(decoder, source, description, encoder)
        source = source.of_language_model()
        model_type = source.config.model_type
    reason = "option.decoder=transformers"
    if choice != "transformers":
        try:
            decoder = load_own_decoder(source, max_length, phases, group)
        except UnsupportedModelError as error:
            reason = str(error)
        else:
            return _packed(decoder, source, f"own ({model_type}){addition}")
        if choice == "own":
            raise ConfigurationError(
                f"option.decoder=own cannot run {model_type}: {reason}; use option.decoder=auto"
            )
    source.reject_own_options(reason)
    if group is not None:
        group.require_one(f"transformers' code ({model_type}, {reason})")
    # Imported only here, since it imports transformers' models, which takes over a second.
    from engine.loading.transformers_decoder import load_transformers_decoder

    decoder = load_transformers_decoder(source, max_length, phases)
    description = f"transformers' code ({model_type}){addition}: {reason}"
    return _packed(decoder, source, description)


def _packed(
    decoder: Decoder | TransformersDecoder,
    source: ModelSource,
    description: str,
    encoder: Encoder | None = None,
) -> PackedModel:
    if source.device.type == "cuda":
        torch.cuda.empty_cache()  # so that the device reports all memory that is free for KV
    if source.is_pinned:  # the digest of an answer includes the description
        description += ", batch-invariant"
    return PackedModel(decoder, source, description, encoder)
