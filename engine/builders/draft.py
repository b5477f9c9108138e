"""Loads a draft model, and builds what proposes its tokens (option.speculative_draft_model)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from core.configuration.hub import from_hub
from core.configuration.kv_layout import bytes_per_block
from core.configuration.options import ModelOptions
from core.errors import ConfigurationError
from core.states.layout import SUM_BYTES, slot_bytes
from core.states.room import num_draft_states
from engine.attention.call import UnsupportedModelError
from engine.attention.states import StatePool
from engine.builders.drafting import Drafting
from engine.loading.model_source import ModelSource
from engine.loading.open_model import read_config
from engine.loading.packed_model import PackedModel, load_packed_model
from engine.phases import Phases
from engine.resolve import Capacity, Resolved, trained_length
from engine.sampling.rows import Stage
from engine.speculation.draft_model import DraftModel
from engine.speculation.draft_states import StateDraftModel
from engine.step.state_column import StateColumn
from strategies.memory.base import KVMemory

KEY = "option.speculative_draft_model"


@dataclass(slots=True)
class LoadedDraft(Drafting):
    model: PackedModel
    longest: int
    """The most tokens of a sequence."""
    max_sequences: int
    num_states: int = 0
    """Rows for the states that its layers keep of sequences, if they keep any."""

    def __post_init__(self) -> None:
        if self.model.states:
            self.num_states = num_draft_states(self.max_sequences, self._state_bytes)

    @property
    def _state_bytes(self) -> int:
        return slot_bytes(self.model.states, self.model.dtype.itemsize, SUM_BYTES["fp32"])

    @property
    def identity(self) -> tuple[object, ...]:
        model = self.model
        return model.config.to_json_string(), model.description, model.dtype

    def take(self, num_bytes: int) -> int:
        if not self.num_states:
            return num_bytes
        self.num_states = num_draft_states(self.max_sequences, self._state_bytes, num_bytes)
        return num_bytes - self.num_states * self._state_bytes

    def build(
        self,
        resolved: Resolved,
        capacity: Capacity,
        memory: KVMemory,
        stages: Sequence[Stage[Any]],
    ) -> DraftModel:
        model, longest = self.model, self.longest
        if not self.num_states:
            return DraftModel(self.allocated(model, longest, resolved, capacity, stages))
        pool = StatePool(model.states, self.num_states, model.dtype, model.device)
        columns = (StateColumn(),)
        settings = self.allocated(model, longest, resolved, capacity, stages, columns, pool)
        return StateDraftModel(settings, self.num_states)


def load_draft(resolved: Resolved, phases: Phases) -> LoadedDraft:
    """Load the draft model. Raises ConfigurationError if it cannot draft for the other one."""
    assert resolved.speculation is not None, "drafts are wanted"
    assert resolved.speculation.draft_model is not None, "the method needs one"
    source = resolved.source
    directory = draft_directory(resolved.speculation.draft_model, source)
    config = read_config(directory, source.trust_remote_code)
    check_vocabulary(source, config, directory)
    length = resolved.limits.max_model_len
    own = ModelSource(
        model_dir=directory,
        config=config,
        dtype=source.dtype,
        device=source.device,
        is_dummy=source.is_dummy,
        trust_remote_code=source.trust_remote_code,
        allow_pickle=source.allow_pickle,
    )
    try:
        model = load_packed_model(own, length, "auto", phases)
    except UnsupportedModelError as error:
        raise ConfigurationError(f"{KEY}={directory}: {error}; choose another model") from error
    block_bytes = bytes_per_block(
        model.shapes, resolved.memory.block_size, resolved.kv_dtype.itemsize
    )
    longest = min(length, trained_length(config) or length)
    return LoadedDraft(
        directory.name,
        model.weights_bytes,
        block_bytes,
        model,
        longest,
        resolved.limits.max_sequences,
    )


def draft_directory(name: str, source: ModelSource) -> Path:
    """Return the directory of a model that is given by a path, or by its id on the hub.

    A relative path may start at the other model's directory.
    """
    path = Path(name).expanduser()
    for directory in (source.model_dir / path, path):
        if directory.is_dir():
            return directory
    options = ModelOptions(allow_pickle_weights=source.allow_pickle)
    return from_hub(name, None, options, given_as=KEY, local=path)


def check_vocabulary(source: ModelSource, config: PreTrainedConfig, directory: Path) -> None:
    """Raise ConfigurationError if a token has another meaning for the draft model."""
    size, own_size = (each.get_text_config().vocab_size for each in (source.config, config))
    if size != own_size:
        problem = f"its vocabulary has {own_size} tokens, that of the model has {size}"
    elif (token := _first_difference(_tokens(source.model_dir), _tokens(directory))) is not None:
        problem = f"token {token} is another one than that of the model"
    else:
        return
    raise ConfigurationError(
        f"{KEY}={directory}: {problem}; choose a model of the same family, with the same tokenizer"
    )


def _first_difference(tokens: Mapping[int, str], others: Mapping[int, str]) -> int | None:
    both = sorted(tokens.keys() & others.keys())
    return next((token for token in both if tokens[token] != others[token]), None)


def _tokens(directory: Path) -> Mapping[int, str]:
    """Return the text of each token in tokenizer.json; nothing if there is no such file."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return {}
    return {id: text for text, id in Tokenizer.from_file(str(path)).get_vocab().items()}
