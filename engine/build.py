"""From options to a running engine: every «auto» is decided here, once, and said."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from core.batching import choose_batching
from core.errors import ConfigurationError
from core.messages import Facts
from core.options import Batching, Options
from core.plan import Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.attention import UnsupportedModelError
from engine.attention_backend import make_backend
from engine.device import (
    check_tensor_parallel,
    choose_device,
    choose_dtype,
    choose_fusion,
    choose_kv_dtype,
)
from engine.engine import Engine
from engine.executor import Executor
from engine.kv_cache import KVCache, bytes_per_block
from engine.library import LibraryExecutor, LibraryModel, load_library_model
from engine.packed import PackedExecutor
from engine.packed_model import PackedModel, load_packed_model
from engine.sizing import choose_sizes
from strategies.base import Limits
from strategies.factory import StrategySettings, make_strategy


def build_engine(model_dir: Path, options: Options) -> Engine:
    """Loads the model and sizes everything.

    Raises ConfigurationError where the options and the model do not fit together.
    """
    started = time.monotonic()
    device = choose_device(options)
    notes = check_tensor_parallel(options, device)
    config = _read_config(model_dir, options)
    dtype = choose_dtype(options, config, device)
    model, executor_reason = _load(model_dir, config, options, dtype, device)
    batching, batching_reason = _batching(options, model, executor_reason)
    sizes = choose_sizes(options, batching, model)
    executor, kv_bytes, backend_notes = _executor(model, options, sizes.num_blocks)
    _check_forward(executor)
    strategy = make_strategy(
        StrategySettings(
            batching=batching,
            num_blocks=sizes.num_blocks,
            block_size=options.block_size,
            max_model_len=sizes.max_model_len,
            limits=Limits(max_sequences=sizes.max_sequences, max_step_tokens=sizes.max_step_tokens),
            max_delay_s=options.max_batch_delay / 1000,
            kv_reservation=options.kv_reservation,
        )
    )
    facts = Facts(
        model=str(model_dir),
        architecture=(config.architectures or [config.model_type])[0],
        batching=batching,
        batching_reason=batching_reason,
        executor="packed" if isinstance(model, PackedModel) else "library",
        executor_reason=executor_reason,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=_kv_dtype_name(options, model),
        max_model_len=sizes.max_model_len,
        max_sequences=sizes.max_sequences,
        max_step_tokens=sizes.max_step_tokens,
        block_size=options.block_size,
        num_kv_blocks=sizes.num_blocks,
        weights_bytes=model.weights_bytes,
        kv_bytes=kv_bytes,
        vocab_size=config.get_text_config().vocab_size,
        eos_token_ids=_eos_token_ids(model_dir, config),
        load_seconds=time.monotonic() - started,
        notes=notes + sizes.notes + backend_notes,
    )
    return Engine(strategy, executor, facts)


def _read_config(model_dir: Path, options: Options) -> PreTrainedConfig:
    if not (model_dir / "config.json").is_file():
        raise ConfigurationError(
            f"{model_dir} has no config.json; a model directory in Hugging Face form is needed"
        )
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"transformers cannot read {model_dir}: {error}") from error


def _load(
    model_dir: Path,
    config: PreTrainedConfig,
    options: Options,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PackedModel | LibraryModel, str]:
    """The model for the executor the options and the architecture allow, and the reason."""
    trust = options.trust_remote_code
    reason = "option.executor=library"
    if options.executor != "library":
        try:
            if config.is_encoder_decoder:
                raise UnsupportedModelError("it is an encoder-decoder model")
            is_fused = choose_fusion(options, device)
            model = load_packed_model(
                model_dir, dtype, device, is_fused=is_fused, trust_remote_code=trust
            )
        except UnsupportedModelError as error:
            reason = f"{config.model_type} cannot run packed: {error}"
            if options.executor == "packed":
                raise ConfigurationError(
                    f"option.executor=packed: {reason}; say option.executor=auto"
                ) from error
        else:
            return model, "a decoder whose paged logits equal transformers' own"
    try:
        library = load_library_model(model_dir, config, dtype, device, trust_remote_code=trust)
    except Exception as error:  # whatever a library for files of weights may raise
        raise ConfigurationError(
            f"transformers cannot load {config.model_type} for text generation: {error}"
        ) from error
    return library, reason


def _batching(
    options: Options, model: PackedModel | LibraryModel, executor_reason: str
) -> tuple[Batching, str]:
    """Raises ConfigurationError for a strategy that the executor cannot follow."""
    choice = choose_batching(options)
    if isinstance(model, PackedModel):
        return choice.name or "paged", choice.reason
    if choice.name in ("continuous", "paged"):
        raise ConfigurationError(
            f"{choice.reason} chooses {choice.name}, but {executor_reason}; "
            "none and dynamic work with this model"
        )
    return choice.name or "dynamic", choice.reason


def _executor(
    model: PackedModel | LibraryModel, options: Options, num_blocks: int
) -> tuple[Executor, int, tuple[str, ...]]:
    """The executor, the bytes of its KV blocks (what `generate` takes is its own), and notes."""
    if isinstance(model, LibraryModel):
        return LibraryExecutor(model), 0, ()
    kv_dtype = choose_kv_dtype(options, model.dtype, model.device)
    backend, notes = make_backend(model.device, model.shapes, options.block_size)
    cache = KVCache(model.shapes, num_blocks, options.block_size, kv_dtype, model.device)
    kv_bytes = num_blocks * bytes_per_block(model.shapes, options.block_size, kv_dtype)
    return PackedExecutor(model, cache, backend), kv_bytes, model.notes + notes


def _kv_dtype_name(options: Options, model: PackedModel | LibraryModel) -> str:
    if options.kv_cache_dtype == "auto" or isinstance(model, LibraryModel):
        return str(model.dtype).removeprefix("torch.")
    return "fp8 e4m3"


def _check_forward(executor: Executor) -> None:
    """Computes one token, so that «ready» means that the model answers."""
    sequence = Sequence(0, [0], SamplingParams(temperature=0, max_tokens=1))
    try:
        executor.run(StepPlan((Chunk(sequence, 0, 1, (0,)),)), lambda: None)
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
