"""The one table of options: every key, its type, default, values and meaning.

`Options` is that table: the properties reader, `serve --help`, `container explain`,
docs/configuration.md and the keyword arguments of `engine.LLM` all come from its fields.
Keys are those of DJL Serving's LMI containers where LMI has one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeVar

from core.errors import ConfigurationError
from core.suggest import did_you_mean

T = TypeVar("T")
Value = str | int | float | bool | None

Batching = Literal["none", "dynamic", "continuous", "paged"]
RollingBatch = Literal["auto", "vllm", "lmi-dist", "scheduler", "disable"]
KVReservation = Literal["max", "pow2", "oracle"]
PreemptionMode = Literal["auto", "swap", "recompute"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
LoadFormat = Literal["auto", "dummy"]
DecoderChoice = Literal["auto", "own", "transformers"]
DType = Literal["auto", "fp32", "fp16", "bf16", "float32", "float16", "bfloat16"]
Pooling = Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
ToolCallParser = Literal["hermes", "llama3_json", "mistral"]
REMOVED_OPTIONS = {
    "fuse": "Longshore's own layers are fused by construction; option.decoder=transformers has "
    "layers that are not",
    "torch_compile": "Longshore's own layers are faster than torch.compile made transformers'",
}
"""Options of earlier versions, and what became of them; they are warned of and ignored."""
BATCHING_NAMES: tuple[Batching, ...] = typing.get_args(Batching)


def _option(
    default: T,
    doc: str,
    *,
    key: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> T:
    """A dataclass field that carries its documentation; `key` unless it is `option.<name>`."""
    metadata = {"doc": doc, "key": key, "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option, as given; None means «decided at start-up», and the engine says how.

    Raises ConfigurationError from the constructor where a value is out of range.
    """

    # What to serve
    model_id: str | None = _option(
        None,
        "Directory or .tar.gz of the model, its s3:// address or Hugging Face id. "
        "Default: the model directory.",
    )
    revision: str | None = _option(None, "Revision of a Hugging Face id.")
    trust_remote_code: bool = _option(False, "Run model code that lies in the model's directory.")
    load_format: LoadFormat = _option(
        "auto",
        "auto: the weights that lie beside config.json. dummy: random weights, made on the device, "
        "to measure speed without a checkpoint.",
    )
    engine: Literal["Python", "MPI"] = _option(
        "Python", "LMI's engine name. Both run Longshore's own engine.", key="engine"
    )
    task: str | None = _option(
        None,
        "What the container does: text-generation, text2text-generation, text-embedding, "
        "question-answering, or a task of transformers' pipelines (of texts, tables, images, "
        "sounds, videos), such as text-classification. Default: what the model is for.",
    )
    pooling: Pooling | None = _option(
        None,
        "text-embedding: how the vectors of tokens become that of the text, by "
        "sentence-transformers' names. Default: as the model's modules.json says, else mean.",
    )
    normalize: bool | None = _option(
        None,
        "text-embedding: make every vector 1 long. Default: as the model's modules.json says; "
        "true where it has none.",
    )
    entryPoint: str | None = _option(
        None,
        "File of the user's own handler, beside serving.properties or absolute. LMI's built-in "
        "handlers (djl_python.*) mean Longshore's own engine. Default: model.py, where there is "
        "one.",
    )
    install_requirements: bool = _option(
        True,
        "Install what requirements.txt beside a handler names and the environment lacks, below "
        "TMPDIR.",
    )
    executor: Literal["auto", "packed", "library"] = _option(
        "auto",
        "packed: decoders, with our KV memory and attention. library: transformers' generate on "
        "padded batches (none and dynamic only). auto: packed where the architecture allows it.",
    )
    decoder: DecoderChoice = _option(
        "auto",
        "packed: whose code computes the layers. own: Longshore's, for the families in "
        "docs/models.md. transformers: transformers', with attention replaced. auto: own where "
        "there is one that gives the same logits.",
    )

    # Which batching strategy, and how much at once
    batching: Batching | None = _option(
        None, "The strategy. Default: what LMI's keys below imply, else paged for a decoder."
    )
    rolling_batch: RollingBatch | None = _option(
        None, "LMI's key: scheduler means continuous, disable means none, the others paged."
    )
    paged_attention: bool | None = _option(
        None, "LMI's key: false turns what rolling_batch chose from paged into continuous."
    )
    batch_size: int | None = _option(
        None, "dynamic: most requests in one batch. Above 1 it implies dynamic. Default: 32.",
        key="batch_size", minimum=1,
    )  # fmt: skip
    max_batch_delay: int = _option(
        100, "dynamic: longest wait, in ms, to fill a batch.", key="max_batch_delay", minimum=0
    )
    max_rolling_batch_size: int = _option(
        256, "continuous, paged: most sequences that run at once.", minimum=1
    )
    max_rolling_batch_prefill_tokens: int | None = _option(
        None,
        "Token budget of one step; longer prompts are computed in chunks. "
        "Default: 8192 on CUDA, 512 on the CPU.",
        minimum=1,
    )
    kv_reservation: KVReservation = _option(
        "max",
        "continuous: tokens reserved per sequence on admission. max: max_model_len; pow2: the "
        "prompt and the next power of two of max_new_tokens; oracle: exactly what it may use.",
    )

    # LoRA adapters
    enable_lora: bool = _option(
        False,
        "Serve LoRA adapters beside the model, each request with the one that it names. Packed "
        "executor.",
    )
    max_loras: int = _option(
        4, "enable_lora: most adapters that are loaded at once; all lie on the device.", minimum=1
    )
    max_lora_rank: int = _option(
        16, "enable_lora: highest rank of an adapter; memory is reserved for it.", minimum=1
    )
    adapters: str | None = _option(
        None,
        "enable_lora: directory, in the model's or absolute, of the adapters to load at start, "
        "each a directory in PEFT's form, by whose name requests choose it. Default: adapters, "
        "where there is one.",
    )

    # Memory, precision, device
    max_model_len: int | None = _option(
        None, "Most tokens of a prompt and its answer together. Default: the model's own.",
        minimum=2,
    )  # fmt: skip
    block_size: int = _option(16, "Tokens in a block of KV memory.", minimum=1)
    num_kv_blocks: int | None = _option(
        None, "Blocks of KV memory, whatever the memory budget.", minimum=1
    )
    enable_prefix_caching: bool = _option(
        True, "paged: keep K and V of full blocks, and compute no prompt's known beginning again."
    )
    preemption_mode: PreemptionMode = _option(
        "auto",
        "paged, when blocks run out: recompute what the newest requests had computed, or swap it "
        "to the host. auto: swap what would take more than a step, or several answers that share.",
    )
    swap_space_gib: float | None = _option(
        None,
        "paged: host memory for swapped blocks. Default: 4, at most a quarter of the memory "
        "available. 0: recompute.",
        minimum=0,
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "Memory budget of the KV blocks. Default: on CUDA from gpu_memory_utilization, "
        "on the CPU a quarter of the memory available, 4 GiB at most.",
        minimum=1,
    )
    kv_cache_dtype: KVCacheDType = _option(
        "auto", "Type of K and V in memory. auto: that of the weights; fp8: e4m3, half of bf16."
    )
    gpu_memory_utilization: float = _option(
        0.9, "CUDA: share of the device's memory to use.", minimum=0.05, maximum=1.0
    )
    dtype: DType = _option(
        "auto", "auto: the model's own; on the CPU bf16 where the hardware has it, else fp32."
    )
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "auto: CUDA where there is one.")
    enforce_eager: bool = _option(
        False, "packed, CUDA: launch each kernel of a decode step by itself, without CUDA graphs."
    )
    async_scheduling: bool | None = _option(
        None,
        "packed: schedule a step while the device computes the one before. Default: on CUDA, where "
        "it hides the host's work; a CPU has none to hide it behind.",
    )
    tensor_parallel_degree: str | None = _option(
        None,
        "Devices that share one copy of the model. This version runs it on one: on the CPU any "
        "number means one rank; on CUDA more than 1 is refused, and max means one device.",
    )

    # The service around it
    output_formatter: Literal["json", "jsonlines", "sse"] = _option(
        "jsonlines",
        "Form of a streamed answer when the request's Accept header names none. "
        "json means jsonlines when a request streams.",
    )
    tgi_compat: bool = _option(
        False,
        "Answers to inputs as text-generation-inference gives them: a list of one, logprob for "
        "log_prob, details always, streams as server-sent events.",
    )
    chat_template: str | None = _option(
        None,
        "File of the chat template, in the model's directory or absolute. Default: its own.",
    )
    tool_call_parser: ToolCallParser | None = _option(
        None,
        "How the model writes tool calls. hermes: Hermes, Qwen; llama3_json: Llama 3; mistral: "
        "Mistral. Without it requests with tools are refused.",
    )
    job_queue_size: int = _option(
        1000, "Requests that may wait; more are answered 503.", key="job_queue_size", minimum=1
    )
    max_request_size: int = _option(
        25 * 2**20, "Most bytes of a request's body; a larger one is answered 413.",
        key="max_request_size", minimum=1,
    )  # fmt: skip
    predict_timeout: int = _option(
        240, "Seconds until an unfinished request is ended with an error.", minimum=1
    )
    model_loading_timeout: int = _option(
        1800, "Seconds until a model that is not ready counts as failed.", minimum=1
    )
    heartbeat_timeout: int = _option(
        60, "Seconds without a finished step after which /ping reports the engine stuck.", minimum=2
    )
    retry_threshold: int = _option(
        0, "How often a dead engine is started again before the container ends.",
        key="retry_threshold", minimum=0,
    )  # fmt: skip
    enable_stateful_sessions: bool = _option(
        False, "Open, use and close SageMaker's sessions, for sticky routing."
    )
    sessions_path: str = _option(
        "/dev/shm/longshore-sessions", "Directory of the open sessions; the workers share it."
    )
    sessions_expiration: int = _option(
        1200, "Seconds until a session that is not used ends.", minimum=1
    )
    local_runtime_api: bool = _option(
        False,
        "Also serve SageMaker's runtime routes (/endpoints/NAME/invocations and "
        "...-response-stream), so that boto3's sagemaker-runtime client works without AWS.",
    )
    http_workers: int | None = _option(
        None, "Front-end processes. Default: one per four cores, at least one.", minimum=1
    )

    def __post_init__(self) -> None:
        for item in option_table().values():
            item.check(getattr(self, item.name))


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: a field of `Options`."""

    name: str
    key: str
    kind: type[str] | type[int] | type[float] | type[bool]
    values: tuple[str, ...]
    optional: bool
    default: Value
    minimum: float | None
    maximum: float | None
    doc: str

    @property
    def kind_text(self) -> str:
        """The type as a user reads it: the values themselves where they are few."""
        names = {str: "text", int: "integer", float: "number", bool: "true, false"}
        return ", ".join(self.values) if self.values else names[self.kind]

    def parse(self, text: str) -> Value:
        """The value that `text` of a properties file or a variable spells; '' is None."""
        stripped = text.strip()
        if not stripped and self.optional:
            return None
        if self.kind is bool:
            return self._parse_bool(stripped)
        try:
            return self.kind(stripped)
        except ValueError:
            raise ConfigurationError(
                f"{self.key}={text}: expected {_article(self.kind_text)}"
            ) from None

    def check(self, value: object) -> None:
        """Raises ConfigurationError where `value` has the wrong type or is out of range."""
        if value is None and self.optional:
            return
        accepted = (int, float) if self.kind is float else (self.kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigurationError(f"{self.key}={value}: expected {_article(self.kind_text)}")
        if self.values and value not in self.values:
            raise ConfigurationError(
                f"{self.key}={value}: expected one of {', '.join(self.values)}"
                f"{did_you_mean(str(value), self.values)}"
            )
        if isinstance(value, int | float):
            self._check_range(value)

    def _parse_bool(self, text: str) -> bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigurationError(f"{self.key}={text}: expected true or false")

    def _check_range(self, value: float) -> None:
        if self.minimum is not None and not value >= self.minimum:
            raise ConfigurationError(f"{self.key}={value}: must be at least {self.minimum}")
        if self.maximum is not None and not value <= self.maximum:
            raise ConfigurationError(f"{self.key}={value}: must be at most {self.maximum}")


@cache
def option_table() -> Mapping[str, Option]:
    """Every option by its name, in the order of `Options`."""
    hints = typing.get_type_hints(Options)
    return {item.name: _row(item, hints[item.name]) for item in dataclasses.fields(Options)}


def make_options(values: Mapping[str, Value]) -> Options:
    """Options from keyword-style names.

    Warns of those that were options once. Raises ConfigurationError for a name that is not an
    option, with the nearest one.
    """
    for name in values.keys() & REMOVED_OPTIONS.keys():
        warnings.warn(f"option.{name} has no effect: {REMOVED_OPTIONS[name]}", stacklevel=2)
    values = {name: value for name, value in values.items() if name not in REMOVED_OPTIONS}
    for name in values:
        if name not in option_table():
            raise ConfigurationError(f"unknown option '{name}'{did_you_mean(name, option_table())}")
    as_text = {
        name: str(value)
        for name, value in values.items()
        if option_table()[name].kind is str and type(value) is int
    }
    return Options(**{**values, **as_text})  # pyright: ignore[reportArgumentType] - checked by __post_init__


def _row(item: dataclasses.Field[Value], hint: object) -> Option:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    alternatives: tuple[object, ...] = typing.get_args(hint) if is_union else (hint,)
    bare = [each for each in alternatives if each is not type(None)]
    choices = bare[0] if typing.get_origin(bare[0]) is Literal else None
    metadata = typing.cast(dict[str, typing.Any], item.metadata)
    return Option(
        name=item.name,
        key=metadata["key"] or f"option.{item.name}",
        kind=str if choices else typing.cast(type[str], bare[0]),
        values=typing.get_args(choices) if choices else (),
        optional=len(bare) < len(alternatives),
        default=typing.cast(Value, item.default),
        minimum=metadata["minimum"],
        maximum=metadata["maximum"],
        doc=metadata["doc"],
    )


def _article(kind: str) -> str:
    return f"one of {kind}" if "," in kind else f"a{'n' * (kind[0] in 'aeiou')} {kind}"
