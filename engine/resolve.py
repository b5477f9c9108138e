"""Decides everything that follows from the options, the model's config and the device alone.

Each decision that the start-up output explains has its reason beside it. What depends on memory is
decided by `engine.memory.capacity.measure`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
import torch

from core.configuration.batching import (
    StepLimits,
    choose_batching,
    packed_limits,
    sequence_limit,
)
from core.configuration.kv_layout import KVLayout
from core.configuration.options import (
    DecoderChoice,
    LoraOptions,
    MemoryOptions,
    ModelOptions,
    Options,
    SpeculationOptions,
)
from core.configuration.sizing import LENGTH_NAMES, fit_length, length_limit
from core.configuration.strategy_table import (
    DEFAULT_FOR_OTHERS,
    DEFAULT_FOR_PACKED,
    LIBRARY_NAMES,
    STRATEGIES,
    Batching,
    KVReservation,
)
from core.errors import ConfigurationError
from core.protocol.facts import Facts
from engine.device import choose_kv_dtype
from engine.loading.model_source import ModelSource
from engine.phases import Phases
from engine.vision.families import VISION_FAMILIES
from strategies.base import Limits
from strategies.factory import StrategySettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class MachineShare(NamedTuple):
    """Who else has memory of this machine."""

    num_copies: int
    """Engines on it."""
    num_ranks: int
    """Ranks of an engine on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What the options mean for one model on one device."""

    source: ModelSource
    """Also has the config, the device, the dtype and the precision of quantized weights."""
    executor: Literal["packed", "library"]
    executor_reason: str
    decoder: DecoderChoice
    batching: Batching
    batching_reason: str
    kv_reservation: KVReservation
    max_delay_s: float
    limits: StepLimits
    """Memory may lower the length. An image that a step must not divide may raise the tokens."""
    kv_dtype: torch.dtype
    memory: MemoryOptions
    may_swap: bool
    share: MachineShare
    num_ranks: int = 1
    overlaps: bool = False
    """Whether a step is scheduled before the one in flight is done."""
    graph_prompt_sizes: tuple[int, ...] | None = None
    """Prompt tokens of the CUDA graphs for steps with prompts; None: steps run without graphs."""
    measures_graphs: bool = False
    """Leave out graphs that would not make their steps faster."""
    lora: LoraOptions | None = None
    """None where `option.enable_lora` is false."""
    speculation: SpeculationOptions | None = None
    """None without `option.speculative_method`."""

    @property
    def num_drafts(self) -> int:
        """The most drafts of a sequence in a step."""
        return 0 if self.speculation is None else self.speculation.chosen[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The limits and the memory of an engine, as `core.protocol.facts.Facts` documents them."""

    layout: KVLayout
    max_model_len: int
    max_sequences: int
    max_step_tokens: int
    num_blocks: int
    num_swap_blocks: int = 0
    num_states: int = 0
    """As in `StrategySettings`, as are the next fields of states."""
    num_spare_states: int = 0
    num_checkpoints: int = 0
    answers_differ: bool = False
    num_swap_states: int = 0
    num_host_checkpoints: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    notes: tuple[str, ...] = ()
    """About limits that were changed to fit one another."""


def resolve(
    options: Options, source: ModelSource, num_ranks: int = 1, *, not_packed: str = ""
) -> Resolved:
    """Resolve the options for the packed executor or, if that cannot run the model, the library.

    num_ranks: the ranks that share the model. not_packed: why the packed executor cannot run the
    model, if loading it has shown that it cannot.

    Raises ConfigurationError if the options contradict one another or the model.
    """
    config = source.config
    if options.model.task == "text2text-generation" and not config.is_encoder_decoder:
        raise ConfigurationError(
            f"option.task=text2text-generation: {config.model_type} is not an encoder-decoder "
            "model; set option.task=text-generation, or leave it out"
        )
    if options.lora.adapters is not None and not options.lora.enable_lora:
        raise ConfigurationError("option.adapters needs option.enable_lora=true")
    if config.is_encoder_decoder:
        not_packed = not_packed or "it is an encoder-decoder model"
    if options.model.executor == "library":
        return _for_library(options, source, num_ranks, "option.executor=library")
    if not_packed:
        reason = f"{config.model_type} cannot run packed: {not_packed}"
        return _for_library(options, source, num_ranks, reason)
    return _for_packed(options, source, num_ranks)


def _for_packed(options: Options, source: ModelSource, num_ranks: int) -> Resolved:
    if options.memory.state_dtype != "fp32":
        from core.states.layout import sum_bytes

        sum_bytes(options.memory.state_dtype, source.config.get_text_config().model_type)
    choice, is_cuda = choose_batching(options.strategy), source.device.type == "cuda"
    batching = choice.name or DEFAULT_FOR_PACKED
    execution = options.execution
    overlaps = is_cuda if execution.async_scheduling is None else execution.async_scheduling
    has_graphs = is_cuda and not execution.enforce_eager
    limits = packed_limits(options, batching, source.device.type, trained_length(source.config))
    return replace(
        _resolved(options, source, choice.reason, batching, limits),
        kv_dtype=choose_kv_dtype(options.memory, source.dtype, source.device),
        num_ranks=num_ranks,
        share=MachineShare(options.layout.copies, num_ranks // options.layout.nodes),
        overlaps=overlaps,
        graph_prompt_sizes=execution.graph_prompt_sizes if has_graphs else None,
        measures_graphs=execution.cuda_graph_sizes is None,
        lora=options.lora if options.lora.enable_lora else None,
        speculation=options.speculation if options.speculation.chosen[0] else None,
    )


def _for_library(options: Options, source: ModelSource, num_ranks: int, reason: str) -> Resolved:
    _require_nothing_packed(options, source, num_ranks, reason)
    choice = choose_batching(options.strategy)
    if choice.needs_packed_executor:
        raise ConfigurationError(
            f"the strategy {choice.name} follows from {choice.reason}, but {reason}; "
            f"{' and '.join(LIBRARY_NAMES)} work with this model"
        )
    batching = choice.name or DEFAULT_FOR_OTHERS
    max_model_len = length_limit(options.memory, trained_length(source.config))
    max_sequences = sequence_limit(options.strategy, batching)
    # `generate` does not split prompts.
    limits = StepLimits(max_model_len, max_sequences, max_sequences * max_model_len)
    resolved = _resolved(options, source, choice.reason, batching, limits)
    return replace(resolved, executor="library", executor_reason=reason)


def _resolved(
    options: Options, source: ModelSource, reason: str, batching: Batching, limits: StepLimits
) -> Resolved:
    """Return what both executors have in common. reason: that of `batching`."""
    return Resolved(
        source=source,
        executor="packed",
        executor_reason="a decoder whose paged logits match those of transformers",
        decoder=options.model.decoder,
        batching=batching,
        batching_reason=reason,
        kv_reservation=options.strategy.kv_reservation,
        max_delay_s=options.strategy.max_batch_delay / 1000,
        limits=limits,
        kv_dtype=source.dtype,
        memory=options.memory,
        may_swap=STRATEGIES[batching].is_paged and options.memory.preemption_mode != "recompute",
        share=MachineShare(options.layout.copies, 1),
    )


def _require_nothing_packed(
    options: Options, source: ModelSource, num_ranks: int, reason: str
) -> None:
    """Raise ConfigurationError if an option or the model needs the packed executor."""
    model_type = source.config.model_type
    if options.model.executor == "packed":
        raise ConfigurationError(f"option.executor=packed: {reason}; set option.executor=auto")
    if num_ranks > 1:
        degree = options.execution.tensor_parallel_degree
        raise ConfigurationError(
            f"option.tensor_parallel_degree={degree} needs one of Longshore's own decoders: "
            f"{reason}; set option.tensor_parallel_degree=1"
        )
    if options.model.decoder == "own":
        raise ConfigurationError(f"option.decoder=own: {reason}; set option.decoder=auto")
    if model_type in VISION_FAMILIES:
        raise ConfigurationError(f"{reason}; {model_type} takes images and only runs packed")
    source.reject_own_options(reason)
    if options.speculation.chosen[0]:
        raise ConfigurationError(
            f"option.speculative_method needs the packed executor, but {reason}; leave it out"
        )
    if options.memory.state_dtype != "fp32":
        raise ConfigurationError(
            f"option.state_dtype needs the packed executor, but {reason}; leave it out"
        )
    if options.lora.enable_lora:
        raise ConfigurationError(
            f"option.enable_lora needs the packed executor, but {reason}; merge the adapter into "
            "the model, and leave option.enable_lora out"
        )


def assume(resolved: Resolved) -> Capacity:
    """Return the capacity of a model that has its own KV cache, which is not measured."""
    limits, memory = resolved.limits, resolved.memory
    layout = KVLayout.uniform(memory.block_size)
    usable = limits.max_sequences * layout.blocks_for(limits.max_model_len)
    num_blocks = memory.num_kv_blocks or usable
    longest = layout.longest(num_blocks, limits.max_model_len)
    length, notes = fit_length(memory, limits.max_model_len, longest)
    return Capacity(
        layout=layout,
        max_model_len=length,
        max_sequences=limits.max_sequences,
        max_step_tokens=limits.max_step_tokens,
        num_blocks=num_blocks,
        notes=notes,
    )


def strategy_settings(resolved: Resolved, capacity: Capacity) -> StrategySettings:
    memory = resolved.memory
    limits = Limits(max_sequences=capacity.max_sequences, max_step_tokens=capacity.max_step_tokens)
    return StrategySettings(
        batching=resolved.batching,
        num_blocks=capacity.num_blocks,
        layout=capacity.layout,
        max_model_len=capacity.max_model_len,
        limits=limits,
        max_delay_s=resolved.max_delay_s,
        kv_reservation=resolved.kv_reservation,
        enable_prefix_caching=memory.enable_prefix_caching,
        preemption_mode=memory.preemption_mode,
        num_swap_blocks=capacity.num_swap_blocks,
        num_states=capacity.num_states,
        num_spare_states=capacity.num_spare_states,
        num_checkpoints=capacity.num_checkpoints,
        answers_differ=capacity.answers_differ,
        num_swap_states=capacity.num_swap_states,
        num_host_checkpoints=capacity.num_host_checkpoints,
    )


def kv_dtype_name(kv_dtype: torch.dtype) -> str:
    """Return a KV cache's type for users. A GPU without fp8 stores its values as uint8."""
    return "fp8 e4m3" if kv_dtype.itemsize == 1 else dtype_name(kv_dtype)


class DescribedModel(Protocol):
    """A model that can say what it is; `core.protocol.facts.Facts` documents the fields."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def description(self) -> str: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def num_weights(self) -> int: ...
    @property
    def quantization(self) -> str: ...
    @property
    def unavailable(self) -> dict[str, str]: ...
    @property
    def encoder(self) -> object: ...


def facts_of(
    resolved: Resolved,
    capacity: Capacity,
    model: DescribedModel,
    eos: tuple[int, ...],
    phases: Phases,
    notes: tuple[str, ...],
) -> Facts:
    source, config = resolved.source, resolved.source.config
    return Facts(
        model=str(source.model_dir),
        architecture=(config.architectures or [config.model_type])[0],
        batching=resolved.batching,
        batching_reason=resolved.batching_reason,
        executor=resolved.executor,
        executor_reason=resolved.executor_reason,
        decoder=model.description,
        device=str(source.device),
        num_ranks=resolved.num_ranks,
        dtype=dtype_name(model.dtype),
        kv_dtype=kv_dtype_name(resolved.kv_dtype),
        max_model_len=capacity.max_model_len,
        max_sequences=capacity.max_sequences,
        max_step_tokens=capacity.max_step_tokens,
        block_size=resolved.memory.block_size,
        num_kv_blocks=capacity.num_blocks,
        num_swap_blocks=capacity.num_swap_blocks,
        weights_bytes=model.weights_bytes,
        num_weights=model.num_weights,
        quantization=model.quantization,
        kv_bytes=capacity.kv_bytes,
        activation_bytes=capacity.activation_bytes,
        vocab_size=config.get_text_config().vocab_size,
        eos_token_ids=eos,
        load_seconds=sum(phases.seconds.values()),
        phases=phases.seconds,
        takes_images=model.encoder is not None,
        unavailable=model.unavailable,
        notes=notes,
    )


def with_digest(facts: Facts, model: ModelOptions, memory: MemoryOptions) -> Facts:
    """Return the facts of an engine that generates with its digest, as `Facts` documents it.

    It tells apart what may change the bits of an answer: weights, formats, code and processors.
    Raises OSError if a file of the model cannot be read.
    """
    from engine.digest import digest_model, kernels_digest  # only servers need it

    model_dir = Path(facts.model)
    random = "random" if model.load_format == "dummy" else ""
    processor, kernels = kernels_digest(facts.device)
    code = [version("longshore"), torch.__version__, kernels, facts.executor, facts.decoder]
    if b"longrope" in (model_dir / "config.json").read_bytes():
        code.append(str(memory.max_model_len))  # chooses between its factors
    if memory.state_dtype != "fp32":
        code.append(memory.state_dtype)
    parts = (
        f"{random}{digest_model(model_dir)[:12]}",
        facts.quantization or "plain",
        facts.dtype,
        facts.kv_dtype,
        processor,
        hashlib.sha256("\0".join(code).encode()).hexdigest()[:8],
        str(facts.num_ranks),
    )
    return msgspec.structs.replace(facts, digest=".".join(parts))


def trained_length(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of a sequence that the model was trained for; None if unknown."""
    text_config: Any = config.get_text_config()
    lengths = (getattr(text_config, name, None) or 0 for name in LENGTH_NAMES)
    return next((length for length in lengths if length > 0), None)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
