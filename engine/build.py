"""Builds an engine from options. Every `auto` is resolved here and reported in Facts."""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from core.batching import choose_batching
from core.errors import ConfigurationError, InsufficientMemoryError
from core.messages import Facts
from core.options import Options
from core.plan import BlockMoves, Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from core.sizing import bytes_per_block
from core.step_size import graph_sizes
from core.strategy_table import (
    DEFAULT_FOR_OTHERS,
    DEFAULT_FOR_PACKED,
    LIBRARY_NAMES,
    Batching,
)
from engine.adapters import start_adapters
from engine.attention.backends import AttentionBackend, TorchBackend, make_backend
from engine.attention.call import UnsupportedModelError
from engine.attention.kv_cache import KVCache
from engine.device import (
    check_tensor_parallel,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    is_out_of_memory,
    use_expandable_segments,
    use_writable_kernel_cache,
)
from engine.engine import Engine
from engine.executor import Executor
from engine.loading.model_source import ModelSource
from engine.loading.packed_model import PackedModel, load_packed_model
from engine.loading.precision import choose_precision
from engine.memory.sizing import Sizes, choose_sizes, max_model_len
from engine.phases import Phases
from engine.sampling.grammars import Grammars
from engine.step.cuda_recorder import CudaRecorder
from engine.step.library_executor import LibraryExecutor, LibraryModel, load_library_model
from engine.step.packed_executor import PackedExecutor
from engine.step.step_graphs import MAX_CAPTURE_SECONDS, StepGraphs
from strategies.base import Limits
from strategies.factory import StrategySettings, make_strategy


def build_engine(model_dir: Path, options: Options, phases: Phases | None = None) -> Engine:
    """Load the model, choose the limits and check that a step runs.

    phases: the times of the start so far.

    Raises ConfigurationError if the options and the model do not fit together.
    """
    phases = phases or Phases()
    device = choose_device(options)
    notes = check_tensor_parallel(options, device)
    if device.type == "cuda":
        use_expandable_segments()
        notes += use_writable_kernel_cache()
    config = read_config(model_dir, options)
    _check_task(options, config)
    dtype = choose_dtype(options, config, device)
    source = ModelSource(
        model_dir=model_dir,
        config=config,
        dtype=dtype,
        device=device,
        is_dummy=options.load_format == "dummy",
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle_weights,
        precision=choose_precision(options.quantize, config),
    )
    model, executor_reason = _load(source, options, phases)
    batching, batching_reason = _batching(options, model, executor_reason)
    adapters, adapter_notes = start_adapters(model_dir, options, model, executor_reason)
    notes += adapter_notes
    sizes = choose_sizes(options, batching, model)
    eos_token_ids = _eos_token_ids(model_dir, config)
    grammars = Grammars(model_dir, eos_token_ids)
    executor, kv_bytes, executor_notes = _executor(model, options, sizes, grammars, phases)
    _check_forward(executor, options.block_size, sizes)
    phases.end("first steps")
    facts = Facts(
        model=str(model_dir),
        architecture=(config.architectures or [config.model_type])[0],
        batching=batching,
        batching_reason=batching_reason,
        executor="packed" if isinstance(model, PackedModel) else "library",
        executor_reason=executor_reason,
        decoder=model.description if isinstance(model, PackedModel) else "",
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=_kv_dtype_name(options, model),
        max_model_len=sizes.max_model_len,
        max_sequences=sizes.max_sequences,
        max_step_tokens=sizes.max_step_tokens,
        block_size=options.block_size,
        num_kv_blocks=sizes.num_blocks,
        num_swap_blocks=sizes.num_swap_blocks,
        weights_bytes=model.weights_bytes,
        num_weights=model.num_weights if isinstance(model, PackedModel) else 0,
        quantization=model.quantization if isinstance(model, PackedModel) else "",
        kv_bytes=kv_bytes,
        activation_bytes=sizes.activation_bytes,
        vocab_size=config.get_text_config().vocab_size,
        eos_token_ids=eos_token_ids,
        load_seconds=sum(phases.seconds.values()),
        phases=phases.seconds,
        scores_prompts=not config.is_encoder_decoder,
        notes=notes + source.notes + sizes.notes + executor_notes,
    )
    return Engine(
        make_strategy(_strategy_settings(options, batching, sizes)),
        executor,
        facts,
        overlaps=overlaps_steps(options, model),
        grammars=grammars,
        adapters=adapters,
    )


def _strategy_settings(options: Options, batching: Batching, sizes: Sizes) -> StrategySettings:
    return StrategySettings(
        batching=batching,
        num_blocks=sizes.num_blocks,
        block_size=options.block_size,
        max_model_len=sizes.max_model_len,
        limits=Limits(max_sequences=sizes.max_sequences, max_step_tokens=sizes.max_step_tokens),
        max_delay_s=options.max_batch_delay / 1000,
        kv_reservation=options.kv_reservation,
        enable_prefix_caching=options.enable_prefix_caching,
        preemption_mode=options.preemption_mode,
        num_swap_blocks=sizes.num_swap_blocks,
    )


def read_config(model_dir: Path, options: Options) -> PreTrainedConfig:
    """Read the model's config.json. Raises ConfigurationError if it is missing or unreadable."""
    if not (model_dir / "config.json").is_file():
        raise ConfigurationError(
            f"{model_dir} has no config.json; a model directory in Hugging Face format is needed"
        )
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"transformers cannot read {model_dir}: {error}") from error


def _check_task(options: Options, config: PreTrainedConfig) -> None:
    if options.task == "text2text-generation" and not config.is_encoder_decoder:
        raise ConfigurationError(
            f"option.task=text2text-generation: {config.model_type} is not an encoder-decoder "
            "model; set it to text-generation, or leave it out"
        )


def _load(
    source: ModelSource, options: Options, phases: Phases
) -> tuple[PackedModel | LibraryModel, str]:
    """Load the model for the packed executor if possible, else for the library executor.

    Return it and the reason for the choice.
    """
    config = source.config
    reason = "option.executor=library"
    if options.executor != "library":
        try:
            if config.is_encoder_decoder:
                raise UnsupportedModelError("it is an encoder-decoder model")
            max_length = max_model_len(options, config)
            model = load_packed_model(source, max_length, options.decoder, phases)
        except UnsupportedModelError as error:
            reason = f"{config.model_type} cannot run packed: {error}"
            if options.executor == "packed":
                raise ConfigurationError(
                    f"option.executor=packed: {reason}; set option.executor=auto"
                ) from error
        else:
            return model, "a decoder whose paged logits match those of transformers"
    if options.decoder == "own":
        raise ConfigurationError(f"option.decoder=own: {reason}; set option.decoder=auto")
    source.require_no_precision(reason)
    try:
        library = load_library_model(source)
    except Exception as error:  # loading weights may raise anything
        raise ConfigurationError(
            f"transformers cannot load {config.model_type} for text generation: {error}"
        ) from error
    phases.end("weights")
    return library, reason


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
            f"{choice.reason} chooses {choice.name}, but {executor_reason}; "
            f"{' and '.join(LIBRARY_NAMES)} work with this model"
        )
    return choice.name or DEFAULT_FOR_OTHERS, choice.reason


def _executor(
    model: PackedModel | LibraryModel,
    options: Options,
    sizes: Sizes,
    grammars: Grammars,
    phases: Phases,
) -> tuple[Executor, int, tuple[str, ...]]:
    """Return the executor, the bytes of its KV blocks and notes for the log.

    The library executor has no KV blocks: `generate` allocates its own cache.
    """
    if isinstance(model, LibraryModel):
        return LibraryExecutor(model, grammars), 0, ()
    block_size, num_blocks = options.block_size, sizes.num_blocks
    kv_dtype = choose_kv_dtype(options, model.dtype, model.device)
    backend, notes = make_backend(
        model.device, model.shapes, block_size, sizes.max_model_len, kv_dtype
    )
    cache = KVCache(
        model.shapes, num_blocks, block_size, kv_dtype, model.device, sizes.num_swap_blocks
    )
    kv_bytes = num_blocks * bytes_per_block(model.shapes, block_size, kv_dtype.itemsize)
    phases.end("K and V")
    graphs, graph_notes = capture_graphs(model, cache, backend, options, sizes)
    if graphs is not None:
        phases.end(f"{len(graphs)} CUDA graphs")
    return (
        PackedExecutor(model, cache, backend, graphs, grammars),
        kv_bytes,
        notes + graph_notes,
    )


def capture_graphs(
    model: PackedModel, cache: KVCache, backend: AttentionBackend, options: Options, sizes: Sizes
) -> tuple[StepGraphs | None, tuple[str, ...]]:
    """Capture CUDA graphs, or return None if there are none to capture. Also return notes.

    Raises InsufficientMemoryError if they do not fit.
    """
    if options.enforce_eager or model.device.type != "cuda" or isinstance(backend, TorchBackend):
        return None, ()
    try:
        graphs = StepGraphs(
            model,
            cache,
            backend,
            CudaRecorder(),
            graph_sizes(sizes.max_sequences, sizes.max_step_tokens, options.graph_prompt_sizes),
            max_model_len=sizes.max_model_len,
            is_selective=options.cuda_graph_sizes is None,
            progress=lambda rows: tqdm(rows, desc="CUDA graphs", disable=not sys.stderr.isatty()),
        )
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise InsufficientMemoryError(
                "the CUDA graphs do not fit beside the weights and the KV cache; lower "
                "option.gpu_memory_utilization or option.max_rolling_batch_size, or set "
                "option.enforce_eager=true"
            ) from error
        reason = str(error).partition("\n")[0]
        return None, (f"steps run without CUDA graphs: {reason}",)
    return graphs, _graph_notes(graphs)


def _graph_notes(graphs: StepGraphs) -> tuple[str, ...]:
    """Return why mixed steps of some sizes have no graph."""
    notes: list[str] = []
    if graphs.num_late:
        notes.append(
            f"{graphs.num_late} sizes of steps with prompts have no CUDA graph: capturing took "
            f"{MAX_CAPTURE_SECONDS:.0f} s; shorten option.cuda_graph_sizes"
        )
    if graphs.num_device_bound:
        notes.append(
            f"{graphs.num_device_bound} sizes of steps with prompts have no CUDA graph: their "
            "kernels take longer to run than to launch"
        )
    return tuple(notes)


def overlaps_steps(options: Options, model: PackedModel | LibraryModel) -> bool:
    """Whether a step is scheduled before the one in flight is done; never with `generate`."""
    if isinstance(model, LibraryModel):
        return False
    if options.async_scheduling is None:
        return model.device.type == "cuda"
    return options.async_scheduling


def _kv_dtype_name(options: Options, model: PackedModel | LibraryModel) -> str:
    if options.kv_cache_dtype == "auto" or isinstance(model, LibraryModel):
        return str(model.dtype).removeprefix("torch.")
    return "fp8 e4m3"


def _check_forward(executor: Executor, block_size: int, sizes: Sizes) -> None:
    """Run a prompt and, with the packed executor, a decode step with block moves before it.

    So a model that cannot run fails at start, and on CUDA no request waits for a kernel to compile.
    """
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=1, seed=0)
    sequence = Sequence(0, [0, 0], params)
    blocks = tuple(range(-(-2 // block_size)))
    plans = [StepPlan((Chunk(sequence, 0, 2, blocks, samples=True),))]
    if isinstance(executor, PackedExecutor):
        swaps = ((0, 0),) if sizes.num_swap_blocks else ()
        copies = ((0, 1),) if sizes.num_blocks > 1 else ()
        moves = BlockMoves(swaps, swaps, copies)
        plans.append(StepPlan((Chunk(sequence, 1, 1, blocks, samples=True),), moves))
    try:
        for plan in plans:
            executor.submit(plan, lambda: None).wait()
    except Exception as error:
        raise ConfigurationError(
            f"the model was loaded but cannot answer: {type(error).__name__}: {error}"
        ) from error


def _eos_token_ids(model_dir: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    if (model_dir / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(model_dir).eos_token_id
    else:
        eos = config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
