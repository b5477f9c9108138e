"""Builds an engine from options. Every `auto` is resolved here and reported in Facts."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig

from core.configuration.options import Options
from core.configuration.strategy_table import Batching
from core.errors import ConfigurationError, LongshoreError
from core.foreign_code import contained, reason_of
from core.plan import BlockMoves, Chunk, StepPlan
from core.protocol.messages import Facts
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.device import choose_device, tensor_parallel_degree
from engine.engine import Engine
from engine.executor import Executor
from engine.loading.packed_model import PackedModel
from engine.memory.sizing import Sizes
from engine.parts import Parts, build_parts
from engine.phases import Phases
from engine.ranks.followers import Followers, threads_for_ranks
from engine.ranks.group import Group, ProcessGroup, SingleRank
from engine.ranks.shard import Shard
from engine.sampling.grammars import Grammars
from engine.step.leader import Leader
from engine.step.library_executor import LibraryExecutor, LibraryModel
from engine.step.packed_executor import PackedExecutor
from strategies.base import Limits
from strategies.factory import StrategySettings, make_strategy


def build_engine(
    model_dir: Path,
    options: Options,
    phases: Phases | None = None,
    on_lost: Callable[[LongshoreError], None] = lambda error: None,
    rank_address: str = "",
) -> Engine:
    """Load the model, choose the limits and check that a step runs.

    phases: the times of the start so far. on_lost: called with the error, in another thread, if
    one of several ranks is lost. The engine's next step then fails. On CUDA the step in flight may
    never end, because NCCL's kernels wait for the lost rank. rank_address: HOST:PORT at which ranks
    on other nodes (option.nodes) find rank 0.

    Raises ConfigurationError if the options and the model do not fit together.
    """
    phases = phases or Phases()
    device = choose_device(options.execution)
    degree = tensor_parallel_degree(options, device)
    if degree == 1:
        return build_rank_0(model_dir, options, device, phases, SingleRank(device), None)
    closing = ExitStack()
    try:
        closing.enter_context(threads_for_ranks(degree // options.layout.nodes, device))
        followers = Followers(model_dir, options, degree, device, on_lost, rank_address)
        closing.callback(followers.close)
        followers.wait()
        timeout_s = options.execution.model_loading_timeout
        group = ProcessGroup(Shard(0, degree), device, followers.address, timeout_s)
        closing.callback(group.close)
        phases.end(f"{degree} ranks")
        leader = Leader(followers.send, followers.raising_cause, group)
        with followers.raising_cause():
            engine = build_rank_0(model_dir, options, device, phases, group, leader)
    except BaseException:
        closing.close()
        raise
    engine.close = closing.close
    atexit.register(closing.close)
    return engine


def build_rank_0(
    model_dir: Path,
    options: Options,
    device: torch.device,
    phases: Phases,
    group: Group,
    leader: Leader | None,
) -> Engine:
    """Build the engine, with this rank's part of the model. leader: None if there is one rank."""
    parts = build_parts(model_dir, options, device, phases, group)
    config, model, sizes = parts.config, parts.model, parts.sizes
    eos_token_ids = _eos_token_ids(model_dir, config)
    grammars = Grammars(model_dir, eos_token_ids)
    executor = _executor(parts, grammars, leader)
    if leader is not None and parts.adapters is not None:
        parts.adapters.on_install = leader.install
    _check_forward(executor, options.memory.block_size, sizes)
    phases.end("first steps")
    facts = Facts(
        model=str(model_dir),
        architecture=(config.architectures or [config.model_type])[0],
        batching=parts.batching,
        batching_reason=parts.batching_reason,
        executor="packed" if isinstance(model, PackedModel) else "library",
        executor_reason=parts.executor_reason,
        decoder=model.description if isinstance(model, PackedModel) else "",
        device=str(device),
        num_ranks=group.size,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=_kv_dtype_name(options, model),
        max_model_len=sizes.max_model_len,
        max_sequences=sizes.max_sequences,
        max_step_tokens=sizes.max_step_tokens,
        block_size=options.memory.block_size,
        num_kv_blocks=sizes.num_blocks,
        num_swap_blocks=sizes.num_swap_blocks,
        weights_bytes=model.weights_bytes,
        num_weights=model.num_weights if isinstance(model, PackedModel) else 0,
        quantization=model.quantization if isinstance(model, PackedModel) else "",
        kv_bytes=0 if parts.packed is None else parts.packed.kv_bytes,
        activation_bytes=sizes.activation_bytes,
        vocab_size=config.get_text_config().vocab_size,
        eos_token_ids=eos_token_ids,
        load_seconds=sum(phases.seconds.values()),
        phases=phases.seconds,
        takes_images=isinstance(model, PackedModel) and model.encoder is not None,
        scores_prompts=not config.is_encoder_decoder,
        notes=parts.notes,
    )
    return Engine(
        make_strategy(_strategy_settings(options, parts.batching, sizes)),
        executor,
        facts,
        overlaps=overlaps_steps(options, model),
        grammars=grammars,
        adapters=parts.adapters,
        model_time=executor.model_time,
    )


def _executor(
    parts: Parts, grammars: Grammars, leader: Leader | None
) -> PackedExecutor | LibraryExecutor:
    model = parts.model
    if isinstance(model, LibraryModel):
        return LibraryExecutor(model, grammars)
    packed = parts.packed
    assert packed is not None, "a packed model has a KV cache"
    return PackedExecutor(model, packed.kv_cache, packed.backend, packed.graphs, grammars, leader)


def _strategy_settings(options: Options, batching: Batching, sizes: Sizes) -> StrategySettings:
    return StrategySettings(
        batching=batching,
        num_blocks=sizes.num_blocks,
        block_size=options.memory.block_size,
        max_model_len=sizes.max_model_len,
        limits=Limits(max_sequences=sizes.max_sequences, max_step_tokens=sizes.max_step_tokens),
        max_delay_s=options.strategy.max_batch_delay / 1000,
        kv_reservation=options.strategy.kv_reservation,
        enable_prefix_caching=options.memory.enable_prefix_caching,
        preemption_mode=options.memory.preemption_mode,
        num_swap_blocks=sizes.num_swap_blocks,
    )


def overlaps_steps(options: Options, model: PackedModel | LibraryModel) -> bool:
    """Whether a step is scheduled before the one in flight is done.

    The library executor cannot do that.
    """
    if isinstance(model, LibraryModel):
        return False
    if options.execution.async_scheduling is None:
        return model.device.type == "cuda"
    return options.execution.async_scheduling


def _kv_dtype_name(options: Options, model: PackedModel | LibraryModel) -> str:
    if options.memory.kv_cache_dtype == "auto" or isinstance(model, LibraryModel):
        return str(model.dtype).removeprefix("torch.")
    return "fp8 e4m3"


def _check_forward(executor: Executor, block_size: int, sizes: Sizes) -> None:
    """Run a prompt and, with the packed executor, a decode step with block moves before it.

    So a model that cannot run fails at start, and on CUDA no request waits for a kernel to compile.
    """
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=1, seed=0)
    sequence = Sequence(0, [0, 0], params)
    blocks = tuple(range(-(-2 // block_size)))
    plans = [StepPlan((Chunk(sequence, 0, 2, blocks, samples_token=True),))]
    if isinstance(executor, PackedExecutor):
        swaps = ((0, 0),) if sizes.num_swap_blocks else ()
        copies = ((0, 1),) if sizes.num_blocks > 1 else ()
        moves = BlockMoves(swaps, swaps, copies)
        plans.append(StepPlan((Chunk(sequence, 1, 1, blocks, samples_token=True),), moves))
    try:
        for plan in plans:
            with contained:
                executor.submit(plan, lambda: None).wait()
    except LongshoreError:  # another rank is lost; the error says why
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the model was loaded but cannot answer: {reason_of(error)}"
        ) from error


def _eos_token_ids(model_dir: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    if (model_dir / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(model_dir).eos_token_id
    else:
        eos = config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
