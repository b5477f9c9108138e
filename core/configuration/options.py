"""The table of options: key, type, default, values and description of each.

The properties reader, `longshore serve --help`, `longshore explain`,
docs/reference/configuration.md and the keyword arguments of `engine.LLM` all come from the fields
of the records in `Options`. Keys are those of DJL Serving's LMI containers if LMI has the option.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal

import msgspec

from core.configuration.record import Option, Record, Reserved, Value, option, rows_of
from core.configuration.step_size import DEFAULT_PROMPT_SIZES
from core.configuration.strategy_table import (
    PAGED_NAMES,
    ROLLING_NAMES,
    Batching,
    KVReservation,
    PreemptionMode,
)
from core.configuration.suggest import did_you_mean
from core.errors import ConfigurationError

RollingBatch = Literal["auto", "vllm", "lmi-dist", "scheduler", "disable"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
StateDType = Literal["fp32", "bf16"]
LoadFormat = Literal["auto", "dummy"]
DecoderChoice = Literal["auto", "own", "transformers"]
Quantize = Literal["fp8", "int8", "int4", "awq", "gptq", "compressed-tensors"]
DType = Literal["auto", "fp32", "fp16", "bf16", "float32", "float16", "bfloat16"]
Pooling = Literal[
    "cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", "splade"
]
OverloadStatus = Literal["503", "429"]
ToolCallParser = Literal[
    "hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic", "llama4_pythonic",
    "deepseek_v3", "deepseek_v31", "openai", "granite", "phi4_mini_json", "glm45", "minimax_m2",
    "kimi_k2", "ernie45", "hunyuan_a13b",
]  # fmt: skip
ReasoningParserName = Literal[
    "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "minimax_m2", "olmo3", "seed_oss", "mistral",
    "openai_gptoss",
]  # fmt: skip
SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "mtp", "eagle3"]
FamilyMtp = Literal["deepseek_mtp", "ernie_mtp", "glm4_moe_mtp", "qwen3_next_mtp"]
"""vLLM's older names of mtp."""
MOST_DRAFTS = 16
"""The highest `num_speculative_tokens`."""
ReasoningParserChoice = Literal["auto", "none", ReasoningParserName]
_PAGED = ", ".join(PAGED_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(Record):
    """Which model to serve, and under which name."""

    model_id: str | None = option(
        None,
        "Directory, .tar.gz or .gguf of the model, its s3:// address or Hugging Face id. "
        "Default: the model directory.",
        vllm="model",
    )
    revision: str | None = option(None, "Revision of a Hugging Face id.")
    served_model_name: str | None = option(
        None,
        "The model's name in responses, in /v1/models and in metrics. Default: the last part of "
        "its path or id. If several models are served, each has the name that it was loaded under.",
    )
    engine: Literal["Python", "MPI"] = option(
        "Python", "LMI's name of the engine. Both values run Longshore's own engine.", key="engine"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Record):
    """What the model computes, and which code computes it."""

    trust_remote_code: bool = option(False, "Run Python code from the model's directory.")
    allow_pickle_weights: bool = option(
        False,
        "Also load weights in *.bin files, which are pickle files. Only what is needed for tensors "
        "is unpickled (torch.load with weights_only).",
    )
    load_format: LoadFormat = option(
        "auto",
        "auto: load the weights beside config.json. dummy: create random weights on the device, "
        "to measure speed without a checkpoint.",
    )
    task: str | None = option(
        None,
        "The container's task: text-generation, text2text-generation, text-embedding, "
        "question-answering, or a task of transformers' pipelines (for text, tables, images, "
        "audio, video), such as text-classification. Default: the task that the model is for.",
    )
    pooling: Pooling | None = option(
        None,
        "text-embedding: how to pool the vectors of the tokens. The values have their names from "
        "sentence-transformers; splade makes sparse vectors of a masked-LM head. Default: as in "
        "the model's modules.json, else mean.",
    )
    normalize: bool | None = option(
        None,
        "text-embedding: scale every vector to length 1. Default: as in the model's modules.json, "
        "or true if the model has no such file.",
    )
    executor: Literal["auto", "packed", "library"] = option(
        "auto",
        "packed: run a decoder with Longshore's KV cache and attention. library: call "
        "transformers' generate on padded batches (only with the strategies none and dynamic). "
        "auto: packed if the architecture allows it, else library.",
    )
    decoder: DecoderChoice = option(
        "auto",
        "packed: which code computes the layers. own: Longshore's code, for the families in "
        "docs/models.md. transformers: transformers' code, with attention replaced by Longshore's. "
        "auto: own if it supports the model and computes the same logits as transformers, else "
        "transformers.",
    )
    chat_template: str | None = option(
        None,
        "File with the chat template. The path is relative to the model's directory, or absolute. "
        "Default: the model's own template.",
    )

    @property
    def restricted(self) -> str:
        return "option.executor=packed" if self.executor == "packed" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCodeOptions(Record):
    """The user's own handler and hooks."""

    entryPoint: str | None = option(
        None,
        "File with the user's own handler. The path is relative to serving.properties, or "
        "absolute. LMI's built-in handlers (djl_python.*) select Longshore's own engine. Default: "
        "model.py, if it exists.",
    )
    install_requirements: bool = option(
        True,
        "Install the missing packages of the requirements.txt that is beside a handler. They are "
        "installed under TMPDIR.",
    )
    ping_hook: str | None = option(
        None,
        "FILE.py:FUNCTION, the function that answers /ping while the engine is healthy. The file "
        "is beside serving.properties or in the model directory (docs/tasks.md).",
    )
    throttle_hook: str | None = option(
        None,
        "FILE.py:FUNCTION, an async function of (request, call_next) that answers a request or "
        "passes it on. It runs around the other hooks.",
    )
    pre_post_process_hook: str | None = option(
        None,
        "FILE.py:FUNCTION, an async function of (request, call_next) that may change every request "
        "and response.",
    )
    pre_process_hook: str | None = option(
        None, "FILE.py:FUNCTION, a function that gets every request and may replace its body."
    )
    post_process_hook: str | None = option(
        None, "FILE.py:FUNCTION, a function that gets every response and may change it."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions(Record):
    """The batching strategy and its limits."""

    batching: Batching | None = option(
        None,
        "The batching strategy. Default: the strategy that LMI's keys below select, if they are "
        "set. Otherwise paged for a decoder on the packed executor, dynamic for other models that "
        "generate text, none for a handler, and continuous for other tasks.",
    )
    rolling_batch: RollingBatch | None = option(
        None,
        "LMI's key. scheduler selects continuous, disable selects none, and the other values "
        "select paged.",
    )
    paged_attention: bool | None = option(
        None,
        "LMI's key. false: continuous where option.rolling_batch selects paged or is not set. "
        "true: paged if option.rolling_batch is not set.",
    )
    batch_size: int | None = option(
        None, "dynamic: maximum requests per batch. A value above 1 selects dynamic. Default: 32.",
        key="batch_size", minimum=1,
    )  # fmt: skip
    max_batch_delay: int = option(
        100,
        "dynamic: maximum time, in ms, to wait for a full batch.",
        key="max_batch_delay",
        minimum=0,
    )
    max_rolling_batch_size: int = option(
        256,
        f"{', '.join(ROLLING_NAMES)}: maximum sequences that run at once.",
        minimum=1,
        vllm="max_num_seqs",
    )
    max_rolling_batch_prefill_tokens: int | None = option(
        None,
        "Maximum tokens in one step. Longer prompts are computed in chunks. "
        "Default: 8192 on CUDA, 512 on the CPU.",
        minimum=1,
        vllm="max_num_batched_tokens",
    )
    kv_reservation: KVReservation = option(
        "max",
        "continuous: how many tokens to reserve for a sequence when it is admitted. max: "
        "max_model_len. pow2: the prompt, plus max_new_tokens rounded up to a power of two. "
        "oracle: the prompt plus max_new_tokens.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions(Record):
    """LoRA adapters."""

    kinds = ("generation", "embedding", "text-classification")

    enable_lora: bool = option(
        False,
        "Serve LoRA adapters beside a model that generates text (with the packed executor), embeds "
        "or classifies it. A request names the adapter to use.",
    )
    max_loras: int = option(
        4,
        "enable_lora: maximum adapters loaded at once. All of them stay in device memory.",
        minimum=1,
    )
    max_lora_rank: int = option(
        16, "enable_lora: maximum rank of an adapter. Memory is reserved for it.", minimum=1
    )
    adapters: str | None = option(
        None,
        "enable_lora: directory of the adapters to load at start. The path is relative to the "
        "model's directory, or absolute. Each adapter is a subdirectory in PEFT's format, and "
        "requests use the subdirectory's name. Default: adapters in the model's directory, if it "
        "exists.",
    )

    @property
    def restricted(self) -> str:
        return "option.enable_lora" if self.enable_lora else ""

    def reserved(self, linear_width: int) -> Reserved | None:
        num_elements = self.max_loras * self.max_lora_rank * linear_width
        return Reserved("adapters", "option.max_loras", num_elements) if self.enable_lora else None


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `speculative_config`, as far as it is supported."""

    method: SpeculativeMethod | FamilyMtp | None = None
    model: str | None = None
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_DRAFTS)] = 5
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1)] = 2
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1)] = 16
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(ge=0)] | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_min_token_prob: float | None = None
    draft_tensor_parallel_size: int | None = None

    @property
    def without_effect(self) -> list[str]:
        """The settings in it that nothing here is like."""
        names = ("max_tree_depth", "max_cached_requests", "min_token_prob")
        fields = (*(f"suffix_decoding_{name}" for name in names), "draft_tensor_parallel_size")
        return [field for field in fields if getattr(self, field) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions(Record):
    """Several tokens of a sequence in one step (docs/speculation.md)."""

    speculative_method: SpeculativeMethod | None = option(
        None,
        "packed: where to look for the tokens that may come next, so that one step can verify "
        "several of them. docs/speculation.md says how far the answers stay the same. ngram: where "
        "the newest tokens occur in the prompt and the answer before. suffix: also in recent "
        "answers to others with the same adapter and cache_salt. draft_model: what a smaller model "
        "says. mtp: what the checkpoint's own layer of multi-token prediction says. eagle3: what "
        "an EAGLE-3 head says (option.speculative_draft_model). Default: nowhere.",
    )
    speculative_draft_model: str | None = option(
        None,
        "Directory or Hugging Face id of a smaller model with the same vocabulary, which proposes "
        "the tokens; with option.speculative_method=eagle3, of a head of this model. A relative "
        "path may begin in the model's directory. Alone, it sets "
        "option.speculative_method=draft_model.",
    )
    speculation: Literal["auto", "measure", "always", "off"] = option(
        "auto",
        "speculative_method: when to verify proposed tokens. auto: where that gives more tokens "
        "per second, by what steps took when they were measured at the first start and by how many "
        "proposals were right before. measure: as auto, but steps are measured anew at this start "
        "(`longshore explain` shows when they were). always: all of them. off: none.",
    )
    num_speculative_tokens: int = option(
        5,
        "speculative_method: the most tokens to verify of a sequence in one step.",
        minimum=1,
        maximum=MOST_DRAFTS,
    )
    speculative_config: str | None = option(
        None,
        'vLLM\'s form of these options: a JSON object such as {"method": "ngram", '
        '"num_speculative_tokens": 4} or {"model": "DIR"}. Of the settings of '
        "methods, prompt_lookup_min and _max and suffix_decoding_max_spec_factor have an effect; "
        "a note at start names others that are set.",
    )

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        _ = self.chosen  # raises if it is no such object

    @property
    def chosen(self) -> tuple[SpeculativeMethod | None, int]:
        """The method and the most tokens, in whichever form they are set. None: it is off."""
        config = self.config
        is_older_name = config.method in typing.get_args(FamilyMtp)
        method = typing.cast(SpeculativeMethod | None, "mtp" if is_older_name else config.method)
        if method is None and config.model is not None:
            method = "draft_model"
        elif method is None and self.speculative_config is not None:
            method = "ngram"
        if (method in ("draft_model", "eagle3")) != (config.model is not None):
            key = "speculative_method" if self.speculative_config is None else "speculative_config"
            raise ConfigurationError(
                f"option.{key}: the method {method} and {config.model or 'no'} model; set "
                "option.speculative_draft_model with the methods draft_model and eagle3, and with "
                "no other"
            )
        return None if self.speculation == "off" else method, config.num_speculative_tokens

    @property
    def has_head(self) -> bool:
        """Whether what drafts reads the model's states, and is not another model."""
        return self.chosen[0] in ("mtp", "eagle3")

    @property
    def has_weights(self) -> bool:
        """Whether what drafts has weights of its own."""
        return self.has_head or self.draft_model is not None

    @property
    def draft_model(self) -> str | None:
        """The draft model, as it is given; None if there is none, or it is off."""
        return None if self.speculation == "off" else self.config.model

    @property
    def config(self) -> SpeculativeConfig:
        """All settings, in whichever form they are set."""
        if self.speculative_config is None:
            return SpeculativeConfig(
                method=self.speculative_method,
                model=self.speculative_draft_model,
                num_speculative_tokens=self.num_speculative_tokens,
            )
        try:
            return msgspec.json.decode(self.speculative_config, type=SpeculativeConfig)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"option.speculative_config: {error}; expected a JSON object with a method (ngram, "
                "suffix, draft_model, mtp or eagle3), or a model; its keys may be "
                f"{', '.join(SpeculativeConfig.__struct_fields__)}"
            ) from None

    @property
    def restricted(self) -> str:
        return "option.speculative_method" if self.chosen[0] else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions(Record):
    """The KV cache and its memory."""

    max_model_len: int | None = option(
        None, "Maximum tokens of a prompt and its answer together. Default: the model's limit.",
        minimum=2,
    )  # fmt: skip
    block_size: int = option(
        16,
        "Tokens in one KV block. On CUDA, the kernels need 16, 32 or 64. With another size, "
        "attention runs on torch's SDPA, which is slow.",
        minimum=1,
    )
    num_kv_blocks: int | None = option(
        None,
        "Number of KV blocks. It replaces the number that the memory budget gives.",
        minimum=1,
        vllm="num_gpu_blocks_override",
    )
    enable_prefix_caching: bool = option(
        True,
        f"{_PAGED}: keep K and V of full blocks, so that later prompts reuse cached prefixes.",
    )
    state_checkpoints: int | None = option(
        None,
        f"{_PAGED}, models whose layers keep a state: how many states to keep of cached prefixes, "
        "beside those of running sequences. A prefix is found where one was kept: at the end of a "
        "prompt, of an answer, or where earlier prompts parted. Default: as many as sequences may "
        "run at once, but all states take at most half of the memory for K and V, or what the K "
        "and V of as many of the longest sequences leave, if that is more. Of a number that is "
        "set, those without room there are kept in host memory, in as large a part of "
        "option.swap_space_gib, unless option.preemption_mode=recompute. 0: no prefix is found.",
        minimum=0,
    )
    preemption_mode: PreemptionMode = option(
        "auto",
        f"{_PAGED}: what to do with the K and V of the newest requests when blocks run out. "
        "recompute: drop them, and compute them again later. swap: move them to host memory. auto: "
        "swap if recomputing takes more than one step, or if several answers share blocks; else "
        "recompute.",
    )
    swap_space_gib: float | None = option(
        None,
        f"{_PAGED}: host memory in GiB for the swapped blocks of a copy, divided among the copy's "
        "ranks on a machine. Default: 4, but at most a quarter of the copy's equal part of the "
        "available memory. 0: always recompute.",
        minimum=0,
        vllm="swap_space",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Bytes of memory for KV blocks. On CUDA, each GPU gets this many. On a CPU, each copy gets "
        "this many, which its ranks on a machine divide equally. Default on CUDA: the part of "
        "option.gpu_memory_utilization that the weights and the largest step leave free. Default "
        "on a CPU: for each copy, 4 GiB, but at most a quarter of its equal part of the available "
        "memory. Of this default, a rank uses at most the largest of three amounts: 16 times the "
        "size of its weights, 128 MiB, and the memory of one sequence of the maximum length.",
        minimum=1,
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        "Type of K and V in memory. auto: the type of the weights. fp8, fp8_e4m3: e4m3, which "
        "takes half the memory of bf16.",
    )
    state_dtype: StateDType = option(
        "fp32",
        "Type of the states of delta nets and Mamba-2 layers (Qwen3.5, Granite 4). bf16: half the "
        "memory, but states are rounded after each step, so the chunks in which a prompt was "
        "computed may change an answer.",
    )
    gpu_memory_utilization: float = option(
        0.9, "CUDA: fraction of the device's memory to use.", minimum=0.05, maximum=1.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions(Record):
    """Precision, devices, and how steps run on them."""

    dtype: DType = option(
        "auto",
        "Type of the weights. auto on CUDA: fp16 for an fp16 checkpoint, else bf16. auto on a CPU: "
        "bf16 if the hardware has it, else fp32.",
    )
    quantize: Quantize | None = option(
        None,
        "packed: quantize linear layers and experts while they are loaded. Embeddings, router and "
        "norms keep option.dtype. fp8, int8: one scale for each output. int4: one scale for each "
        "group of 128 inputs. With int8 and int4 the head is int8; with fp8 it keeps option.dtype. "
        "awq, gptq, compressed-tensors: not needed, but accepted, as in LMI, if the checkpoint's "
        "config.json names the same format.",
        vllm="quantization",
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "auto: CUDA if it is available, else the CPU."
    )
    batch_invariant: bool = option(
        False,
        "CUDA: the bits of an answer do not depend on what else the engine computes (docs/"
        "same-bits.md). Slower. Needs one of Longshore's own decoders. On a CPU it is always so; "
        "if a note says that this model is an exception, true is an error.",
    )
    enforce_eager: bool = option(False, "packed, CUDA: run all steps without CUDA graphs.")
    cuda_graph_sizes: str | None = option(
        None,
        "packed, CUDA: sizes of the CUDA graphs for steps with prompts, in prompt tokens and in "
        "ascending order, such as 64,128,256. A step is padded to the next size. A step that is "
        "larger than all sizes runs without a graph. 0: no graphs for steps with prompts. Default: "
        f"{','.join(map(str, DEFAULT_PROMPT_SIZES))}, but a size is left out if a measurement at "
        "start shows that a graph would not make its steps faster.",
    )
    async_scheduling: bool | None = option(
        None,
        "packed: schedule a step while the device still computes the previous step. Default: true "
        "on CUDA, where this hides the host's work, and false on a CPU.",
    )
    tensor_parallel_degree: str | None = option(
        None,
        "Ranks that share one copy of the model. Each rank is a process with a GPU of its own or, "
        "on a CPU, with a share of the cores. max: one rank for each GPU, with the GPUs divided "
        "among the copies; one rank for a copy on a CPU. Default: 1. Only text generation with "
        "Longshore's own decoders can use several ranks.",
        vllm="tensor_parallel_size",
    )
    model_loading_timeout: int = option(
        1800, "Seconds after which a model that is not ready counts as failed.", minimum=1
    )

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        _ = self.graph_prompt_sizes  # raises if it is not a list of sizes

    @property
    def graph_prompt_sizes(self) -> tuple[int, ...]:
        """`cuda_graph_sizes` as numbers; empty if only steps without prompts run as graphs."""
        text = self.cuda_graph_sizes
        if text is None:
            return DEFAULT_PROMPT_SIZES
        parts = [part.strip() for part in text.split(",")]
        sizes = tuple(int(part) for part in parts if part.isdecimal())
        if sizes == (0,) and len(parts) == 1:
            return ()
        if len(sizes) < len(parts) or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ConfigurationError(
                f"option.cuda_graph_sizes={text}: expected positive integers in ascending order, "
                "such as 64,128,256, or 0"
            )
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverOptions(Record):
    """What watches the engine's steps."""

    record: str | None = option(
        None,
        "Folder for a recording of what the scheduler sees and does, without any text, which "
        "longshore replay reads. Each copy has a folder in it. Default: no recording.",
    )
    record_max_mib: int = option(
        1024,
        "record: MiB of all recordings in the folder. The oldest files are deleted.",
        minimum=16,
    )
    record_max_hours: int = option(
        168, "record: hours after which a file of a recording is deleted.", minimum=1
    )
    receipts: bool = option(
        False,
        "Account for all of the engine's time, so that requests may ask with receipt=true what "
        "they have cost, and option.log_requests says it (docs/recordings.md).",
    )

    @property
    def restricted(self) -> str:
        if self.record is not None:
            return "option.record"
        return "option.receipts" if self.receipts else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions(Record):
    """Machines and copies. A server or a fleet places them."""

    nodes: int = option(
        1,
        "Machines that share one copy of the model. Each machine has an equal part of the ranks. "
        "Needs a fleet, which by itself uses several machines if one has fewer GPUs than "
        "option.tensor_parallel_degree.",
        minimum=1,
    )
    copies: int = option(
        1,
        "Copies of the model behind the port. Each copy has its own engine with "
        "option.tensor_parallel_degree ranks, and its own GPUs or share of the cores. Limits and "
        "memory budgets apply to each copy. LMI's maxWorkers sets the same option.",
        minimum=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(Record):
    """The service around the engine."""

    output_formatter: Literal["json", "jsonlines", "sse"] = option(
        "jsonlines",
        "Format of a streamed answer if the request's Accept header names no format. json has the "
        "same effect as jsonlines on a streamed answer.",
    )
    async_mode: bool | None = option(
        None,
        "LMI's key for the format of the answers to `inputs`. true: the format of LMI's "
        "asynchronous mode, whose tokens have the field logprob, and whose streams have the field "
        "index. false: the format of LMI's rolling batch, whose tokens have the field log_prob. "
        "Default: false if option.rolling_batch has another value than auto, else true.",
    )
    tgi_compat: bool = option(
        False,
        "Answer in the format of text-generation-inference: the response is a list with one "
        "answer, it has logprob instead of log_prob and always has details, and streams are "
        "server-sent events.",
    )
    tool_call_parser: ToolCallParser | None = option(
        None,
        "Format of the model's tool calls. The values are the names of vLLM's parsers. hermes: "
        "Hermes and Qwen. llama3_json: Llama 3. pythonic: Llama 3.2 and 4. openai: gpt-oss. If "
        "this option is not set, the response_template of tokenizer_config.json decides. Without "
        "one, a request with tools is rejected, unless its tool_choice is none or forces a call.",
    )
    reasoning_parser: ReasoningParserChoice = option(
        "auto",
        "Format of the model's reasoning, which chats return apart from the content. auto: as the "
        "response_template of tokenizer_config.json says if option.tool_call_parser is not set, "
        "else detect the format from the chat template. none: leave the reasoning in the content. "
        "The other values are the names of vLLM's parsers.",
    )
    job_queue_size: int = option(
        1000,
        "Maximum waiting requests. A further request gets the status of option.overload_status.",
        key="job_queue_size",
        minimum=1,
    )
    job_queue_tokens: int = option(
        2**22,
        "Maximum prompt tokens of all waiting requests. A request's prompt counts once for each of "
        "its answers. A request that would exceed the maximum gets the status of "
        "option.overload_status, unless no other request waits.",
        minimum=1,
    )
    overload_status: OverloadStatus = option(
        "503",
        "Status of a request that is refused because the server is busy, such as when its queue is "
        "full.",
    )
    max_request_size: int = option(
        16 * 2**20,
        "Maximum bytes of a request's body. A request with a larger body gets status 413.",
        key="max_request_size",
        minimum=1,
    )
    max_body_memory: int = option(
        2**30,
        "Maximum bytes of the bodies that a front-end process holds for all its requests "
        "together. A request that would exceed the maximum gets the status of "
        "option.overload_status, unless the process holds no other body.",
        minimum=1,
    )
    max_connections: int = option(
        4096,
        "Maximum open connections of a front-end process. To accept one more connection, the "
        "process closes the one that has been idle longest. If no connection is idle, the new one "
        "gets status 503.",
        minimum=1,
    )
    header_timeout: int = option(
        10,
        "Seconds within which the head of a request must arrive, counted from its first byte.",
        minimum=1,
    )
    body_timeout: int = option(
        60, "Seconds within which the body of a request must arrive.", minimum=1
    )
    write_timeout: int = option(
        5,
        "Seconds for which a client may leave a full send buffer (256 KiB) unread. After that, the "
        "connection is closed and the request is aborted.",
        minimum=1,
    )
    cors_allowed_origin: str | None = option(
        None,
        "Origin whose pages may call this server from a browser, such as https://example.com. *: "
        "all origins. Default: none.",
        key="cors_allowed_origin",
    )
    predict_timeout: int = option(
        240, "Seconds after which an unfinished request fails with an error.", minimum=1
    )
    heartbeat_timeout: int = option(
        60,
        "Seconds without a finished step after which /ping reports that the engine is stuck.",
        minimum=2,
    )
    retry_threshold: int = option(
        0, "How often to restart a dead engine before the container exits.",
        key="retry_threshold", minimum=0,
    )  # fmt: skip
    enable_stateful_sessions: bool = option(
        False, "Support SageMaker's stateful sessions, for sticky routing."
    )
    sessions_path: str = option(
        "/dev/shm/longshore-sessions",
        "Directory of the open sessions. All front-end processes use it.",
    )
    sessions_expiration: int = option(
        1200, "Seconds after which an unused session expires.", minimum=1
    )
    local_runtime_api: bool = option(
        False,
        "Also serve SageMaker's runtime routes (/endpoints/NAME/invocations and "
        "...-response-stream), so that boto3's sagemaker-runtime client works without AWS.",
    )
    api_keys_file: str | None = option(
        None,
        "File with one API key per line: KEY [name=NAME] [requests_per_minute=N] "
        "[tokens_per_minute=N]. Requests without a valid key get status 401, except for health "
        "checks, OPTIONS requests and the files of the live page. The path is relative to the "
        "working directory, or absolute.",
    )
    ssl_certfile: str | None = option(
        None,
        "PEM file with the server's certificate and its chain. With option.ssl_keyfile, the port "
        "speaks only HTTPS (TLS 1.2 or newer).",
    )
    ssl_keyfile: str | None = option(None, "PEM file with the certificate's private key.")
    cloudwatch_metrics_period: int | None = option(
        None,
        "Write a line of metrics to stdout every so many seconds, in CloudWatch's embedded metric "
        "format. Default: no such lines.",
        minimum=1,
    )
    source_roots: str | None = option(
        None,
        "Directories, separated by colons, from which POST /adapters and POST /models may load. "
        "The model's directory and the directory in option.adapters are always allowed. Default: "
        "/opt/ml.",
    )
    ui: Literal["auto", "true", "false"] = option(
        "auto",
        "Serve a live page at /, which shows the batch and the KV blocks (text generation only). "
        "auto: only to clients on the same machine that use the name localhost or a loopback "
        "address.",
    )
    http_workers: int | None = option(
        None,
        "Number of front-end processes. Default: one, and another, up to one for every four "
        "cores, when one has used 70 % of a core for ten seconds.",
        minimum=1,
    )
    stream_delay: int = option(
        0,
        "Milliseconds for which tokens may wait for others, so that a chunk of a stream has "
        "several and costs the front end less. Each token, also the first, comes up to so much "
        "later.",
        minimum=0,
        maximum=1000,
    )
    log_format: Literal["text", "json"] = option(
        "text",
        "Format of the log lines. json: every line is one JSON object, also while the container "
        "starts.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info",
        "Lowest level of the messages that are logged. The lines of option.log_requests have the "
        "level info.",
    )
    log_requests: Literal["false", "true", "bodies"] = option(
        "false",
        "Log a line for each request, with its id, its status, its numbers of tokens, and its "
        "seconds in the queue, until the first token and in total. bodies: also log the first "
        "2,000 characters of the body, which has the prompt.",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of a collector that takes OpenTelemetry's traces over HTTP, such as "
        "http://localhost:4318/v1/traces. The collector then gets spans for each request. This "
        "needs the extra otel. Default: no traces.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options as the user set them, by owner. Those that are None are decided at start-up.

    The constructor of a record raises ConfigurationError if a value is out of range.
    """

    source: SourceOptions = field(default_factory=SourceOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    user_code: UserCodeOptions = field(default_factory=UserCodeOptions)
    strategy: BatchingOptions = field(default_factory=BatchingOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    execution: ExecutionOptions = field(default_factory=ExecutionOptions)
    observers: ObserverOptions = field(default_factory=ObserverOptions)
    layout: LayoutOptions = field(default_factory=LayoutOptions)
    server: ServerOptions = field(default_factory=ServerOptions)

    def records(self) -> Iterator[Record]:
        return (getattr(self, name) for name in _records())

    def reserved(self, linear_width: int) -> list[Reserved]:
        """Return what the records reserve, as `Record.reserved` describes it."""
        found = (record.reserved(linear_width) for record in self.records())
        return [item for item in found if item is not None]

    def of(self, name: str) -> Value:
        """Return the value of an option, whatever record has it."""
        return getattr(getattr(self, owners()[name]), name)

    def changed(self, **values: Value) -> Options:
        """Return a copy with other values. Raises what `make_options` raises."""
        records = {
            name: dataclasses.replace(getattr(self, name), **given)
            for name, given in _by_record(values).items()
        }
        return dataclasses.replace(self, **records)


@cache
def _records() -> Mapping[str, type[Record]]:
    """Return the class of each record by its name in `Options`."""
    return typing.get_type_hints(Options)


@cache
def option_table() -> Mapping[str, Option]:
    """Return every option by its name: those of one record after those of another."""
    rows: dict[str, Option] = {}
    for record in _records().values():
        rows |= rows_of(record)
    return rows


@cache
def owners() -> Mapping[str, str]:
    """Return the name of the record that has each option."""
    return {name: owner for owner, record in _records().items() for name in rows_of(record)}


@cache
def vllm_names() -> Mapping[str, str]:
    """Return the options' names by vLLM's, where the two differ."""
    return {row.vllm: name for name, row in option_table().items() if row.vllm}


def make_options(values: Mapping[str, Value]) -> Options:
    """Create options from a mapping of names to values.

    Raises ConfigurationError for an unknown name, with a suggestion.
    """
    return Options().changed(**values)


def _by_record(values: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Group values by the record that has them. Numbers of options that are texts become texts."""
    grouped: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        if name not in option_table():
            raise ConfigurationError(f"unknown option '{name}'{did_you_mean(name, option_table())}")
        is_text = option_table()[name].kind is str and type(value) is int
        grouped.setdefault(owners()[name], {})[name] = str(value) if is_text else value
    return grouped
