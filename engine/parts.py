"""Build the parts that each rank has: its part of the model, the KV cache and CUDA graphs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from core.configuration.batching import choose_batching
from core.configuration.options import Options
from core.configuration.sizing import bytes_per_block
from core.configuration.step_size import graph_sizes
from core.configuration.strategy_table import (
    DEFAULT_FOR_OTHERS,
    DEFAULT_FOR_PACKED,
    LIBRARY_NAMES,
    Batching,
)
from core.errors import ConfigurationError, InsufficientMemoryError
from core.foreign_code import contained
from engine.attention.backends import AttentionBackend, TorchBackend, make_backend
from engine.attention.call import UnsupportedModelError
from engine.attention.kv_cache import KVCache
from engine.device import (
    choose_dtype,
    choose_kv_dtype,
    is_out_of_memory,
    use_expandable_segments,
    use_writable_kernel_cache,
)
from engine.loading.model_source import ModelSource
from engine.loading.packed_model import PackedModel, load_packed_model
from engine.loading.precision import choose_precision
from engine.lora.adapter_registry import AdapterRegistry
from engine.memory.sizing import Sizes, choose_sizes, max_model_len
from engine.phases import Phases
from engine.ranks.group import Group
from engine.start_adapters import start_adapters
from engine.step.cuda_recorder import CudaRecorder
from engine.step.library_executor import LibraryModel, load_library_model
from engine.step.step_graphs import MAX_CAPTURE_SECONDS, StepGraphs
from engine.vision.families import VISION_FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedParts:
    """The parts that only a packed model has."""

    kv_cache: KVCache
    backend: AttentionBackend
    graphs: StepGraphs | None
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    config: PreTrainedConfig
    model: PackedModel | LibraryModel
    executor_reason: str
    """Why the model runs packed or with the library."""
    batching: Batching
    batching_reason: str
    adapters: AdapterRegistry | None
    sizes: Sizes
    packed: PackedParts | None
    """None for the library, which has its own KV cache."""
    notes: tuple[str, ...]


def build_parts(
    model_dir: Path, options: Options, device: torch.device, phases: Phases, group: Group
) -> Parts:
    """Load this rank's part of the model and choose the limits, which all ranks share.

    Raises ConfigurationError if the options and the model do not fit together.
    """
    notes: tuple[str, ...] = ()
    if device.type == "cuda":
        use_expandable_segments()
        notes = use_writable_kernel_cache()
    config = read_config(model_dir, options)
    _check_task(options, config)
    source = make_source(model_dir, config, options, device)
    model, executor_reason = _load(source, options, phases, group)
    batching, batching_reason = _batching(options, model, executor_reason)
    adapters, adapter_notes = start_adapters(model_dir, options, model, executor_reason)
    sizes = choose_sizes(options, batching, model, group)
    packed, packed_notes = _packed_parts(model, options, sizes, phases, group)
    return Parts(
        config=config,
        model=model,
        executor_reason=executor_reason,
        batching=batching,
        batching_reason=batching_reason,
        adapters=adapters,
        sizes=sizes,
        packed=packed,
        notes=notes + adapter_notes + source.notes + sizes.notes + packed_notes,
    )


def read_config(model_dir: Path, options: Options) -> PreTrainedConfig:
    """Read the model's config.json. Raises ConfigurationError if it is missing or unreadable."""
    if not (model_dir / "config.json").is_file():
        raise ConfigurationError(
            f"{model_dir} has no config.json; a model directory in Hugging Face format is needed"
        )
    try:
        return AutoConfig.from_pretrained(
            model_dir, trust_remote_code=options.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"transformers cannot read {model_dir}: {error}") from error


def make_source(
    model_dir: Path, config: PreTrainedConfig, options: Options, device: torch.device
) -> ModelSource:
    """Return where the weights come from.

    Raises ConfigurationError if there are none, or if they contradict option.quantize.
    """
    return ModelSource(
        model_dir=model_dir,
        config=config,
        dtype=choose_dtype(options.execution, config, device),
        device=device,
        is_dummy=options.model.load_format == "dummy",
        trust_remote_code=options.model.trust_remote_code,
        allow_pickle=options.model.allow_pickle_weights,
        precision=choose_precision(options.execution.quantize, config),
    )


def _check_task(options: Options, config: PreTrainedConfig) -> None:
    if options.model.task == "text2text-generation" and not config.is_encoder_decoder:
        raise ConfigurationError(
            f"option.task=text2text-generation: {config.model_type} is not an encoder-decoder "
            "model; set option.task=text-generation, or leave it out"
        )


def _load(
    source: ModelSource, options: Options, phases: Phases, group: Group
) -> tuple[PackedModel | LibraryModel, str]:
    """Return the model, for the packed executor if possible, and the reason for the choice."""
    config = source.config
    reason = "option.executor=library"
    if options.model.executor != "library":
        try:
            if config.is_encoder_decoder:
                raise UnsupportedModelError("it is an encoder-decoder model")
            max_length = max_model_len(options, config)
            model = load_packed_model(source, max_length, options.model.decoder, phases, group)
        except UnsupportedModelError as error:
            reason = f"{config.model_type} cannot run packed: {error}"
            if options.model.executor == "packed":
                raise ConfigurationError(
                    f"option.executor=packed: {reason}; set option.executor=auto"
                ) from error
        else:
            return model, "a decoder whose paged logits match those of transformers"
    if group.size > 1:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={options.execution.tensor_parallel_degree} needs one "
            f"of Longshore's own decoders: {reason}; set option.tensor_parallel_degree=1"
        )
    if options.model.decoder == "own":
        raise ConfigurationError(f"option.decoder=own: {reason}; set option.decoder=auto")
    if config.model_type in VISION_FAMILIES:
        raise ConfigurationError(f"{reason}; {config.model_type} takes images and only runs packed")
    source.reject_quantize(reason)
    library = _load_library(source)
    phases.end("weights")
    return library, reason


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


def _batching(
    options: Options, model: PackedModel | LibraryModel, executor_reason: str
) -> tuple[Batching, str]:
    """Return the strategy and the reason for it.

    Raises ConfigurationError if the strategy needs the packed executor and the model cannot use it.
    """
    choice = choose_batching(options)
    if isinstance(model, PackedModel):
        return choice.name or DEFAULT_FOR_PACKED, choice.reason
    if choice.needs_packed_executor:
        raise ConfigurationError(
            f"the strategy {choice.name} follows from {choice.reason}, but {executor_reason}; "
            f"{' and '.join(LIBRARY_NAMES)} work with this model"
        )
    return choice.name or DEFAULT_FOR_OTHERS, choice.reason


def _packed_parts(
    model: PackedModel | LibraryModel,
    options: Options,
    sizes: Sizes,
    phases: Phases,
    group: Group,
) -> tuple[PackedParts | None, tuple[str, ...]]:
    """Allocate the KV cache and capture the graphs; return them and notes."""
    if isinstance(model, LibraryModel):
        return None, ()
    block_size, num_blocks = options.memory.block_size, sizes.num_blocks
    kv_dtype = choose_kv_dtype(options.memory, model.dtype, model.device)
    backend, notes = make_backend(
        model.device, model.shapes, block_size, sizes.max_model_len, kv_dtype
    )
    cache = KVCache(
        model.shapes, num_blocks, block_size, kv_dtype, model.device, sizes.num_swap_blocks
    )
    kv_bytes = num_blocks * bytes_per_block(model.shapes, block_size, kv_dtype.itemsize)
    phases.end("K and V")
    graphs, graph_notes = capture_graphs(model, cache, backend, options, sizes, group)
    if graphs is not None:
        phases.end(f"{len(graphs)} CUDA graphs")
    packed = PackedParts(kv_cache=cache, backend=backend, graphs=graphs, kv_bytes=kv_bytes)
    return packed, notes + graph_notes


def capture_graphs(
    model: PackedModel,
    cache: KVCache,
    backend: AttentionBackend,
    options: Options,
    sizes: Sizes,
    group: Group | None = None,
) -> tuple[StepGraphs | None, tuple[str, ...]]:
    """Capture CUDA graphs. Return them, or None if steps run without graphs, and notes.

    group: the ranks that share the model, which must all have the same graphs; None: one rank.

    Raises InsufficientMemoryError if the graphs do not fit, and ConfigurationError if several ranks
    cannot capture them.
    """
    shows_progress = sys.stderr.isatty() and (group is None or group.rank == 0)
    if (
        options.execution.enforce_eager
        or model.device.type != "cuda"
        or isinstance(backend, TorchBackend)
    ):
        return None, ()
    try:
        graphs = StepGraphs(
            model,
            cache,
            backend,
            CudaRecorder(),
            graph_sizes(
                sizes.max_sequences, sizes.max_step_tokens, options.execution.graph_prompt_sizes
            ),
            max_model_len=sizes.max_model_len,
            skips_device_bound=options.execution.cuda_graph_sizes is None,
            progress=lambda rows: tqdm(rows, desc="CUDA graphs", disable=not shows_progress),
            group=group,
        )
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise InsufficientMemoryError(
                "the CUDA graphs do not fit beside the weights and the KV cache; lower "
                "option.gpu_memory_utilization or option.max_rolling_batch_size, or set "
                "option.enforce_eager=true"
            ) from error
        reason = str(error).partition("\n")[0]
        if group is not None and group.size > 1:
            raise ConfigurationError(
                f"the CUDA graphs cannot be captured: {reason}; set option.enforce_eager=true"
            ) from error
        return None, (f"steps run without CUDA graphs: {reason}",)
    return graphs, _graph_notes(graphs)


def _graph_notes(graphs: StepGraphs) -> tuple[str, ...]:
    """Return why steps with prompts have no graph in some sizes."""
    notes: list[str] = []
    if graphs.num_timed_out:
        notes.append(
            f"{graphs.num_timed_out} sizes of steps with prompts have no CUDA graph: capturing "
            f"stopped after {MAX_CAPTURE_SECONDS:.0f} s; shorten option.cuda_graph_sizes"
        )
    if graphs.num_device_bound:
        notes.append(
            f"{graphs.num_device_bound} sizes of steps with prompts have no CUDA graph, which "
            "would not help: their kernels take longer to run than to launch"
        )
    return tuple(notes)
