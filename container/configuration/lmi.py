"""What DJL Serving's LMI container knows and this one does not, with what to use instead.

A key of this table is a warning at start-up: the file was right for LMI, and its author should
hear that the key does nothing here. Old values that would change the meaning are errors.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.options import REMOVED_OPTIONS

ALIASES: Mapping[str, str] = {"max_dynamic_batch_size": "batch_size"}

_ONE_COPY = "one engine process runs one copy of the model; scale out with more containers"
_FORMAT = "a request's own fields choose its schema; option.output_formatter the form of a stream"
_HANDLERS = "name the file of your handler with option.entryPoint"
_QUANTIZED = "weights are not quantized; option.dtype chooses the precision"
_SPECULATIVE = "speculative decoding is not part of this container; leave it out"
_FIXED_CODE = "status codes are fixed: 400, 404, 413, 424 and 503"

ADVICE: Mapping[str, str] = {
    **{f"option.{name}": advice for name, advice in REMOVED_OPTIONS.items()},
    "minWorkers": _ONE_COPY,
    "maxWorkers": _ONE_COPY,
    "gpu.minWorkers": _ONE_COPY,
    "gpu.maxWorkers": _ONE_COPY,
    "cpu.minWorkers": _ONE_COPY,
    "cpu.maxWorkers": _ONE_COPY,
    "load_on_devices": "use option.device",
    "max_idle_time": _ONE_COPY,
    "required_memory_mb": "use option.kv_cache_memory_bytes or option.gpu_memory_utilization",
    "reserved_memory_mb": "use option.kv_cache_memory_bytes or option.gpu_memory_utilization",
    "gpu.required_memory_mb": "use option.gpu_memory_utilization",
    "gpu.reserved_memory_mb": "use option.gpu_memory_utilization",
    "log_request_metric": "leave it out",
    "metrics_aggregation": "leave it out",
    "chunked_read_timeout": "use option.predict_timeout",
    "bad_request_http_code": _FIXED_CODE,
    "wlm_error_http_code": _FIXED_CODE,
    "throttle_error_http_code": _FIXED_CODE,
    "timeout_http_code": _FIXED_CODE,
    "server_error_http_code": _FIXED_CODE,
    "wait_model_loading": "/ping answers 503 until the model has answered; leave it out",
    "option.mpi_mode": "the model runs in one process; leave it out",
    "option.async_mode": "use option.batching",
    "option.pipeline_parallel_degree": "the model runs on one device; leave it out",
    "option.parallel_loading": _ONE_COPY,
    "option.quantize": _QUANTIZED,
    "option.quantization": _QUANTIZED,
    "option.load_in_8bit": _QUANTIZED,
    "option.load_in_4bit": _QUANTIZED,
    "option.enable_streaming": 'a request streams where it says "stream": true',
    "option.input_formatter": _FORMAT,
    "option.max_output_size": "use parameters.max_new_tokens of the request",
    "option.waiting_steps": "use option.max_rolling_batch_prefill_tokens",
    "option.handler": "the handler's function is called handle",
    "option.env": "set the variables of the container itself",
    "option.pythonExecutable": "the container's own Python runs",
    "option.enable_venv": "the container's own Python runs",
    "option.enable_chunked_prefill": "long prompts are always computed in chunks, see "
    "option.max_rolling_batch_prefill_tokens",
    "option.max_num_seqs": "use option.max_rolling_batch_size",
    "option.max_num_batched_tokens": "use option.max_rolling_batch_prefill_tokens",
    "option.tokenizer_mode": "tokenizer.json is always used; leave it out",
    "option.decoding_strategy": "a request chooses it: parameters.do_sample and temperature",
    "option.disable_flash_attn": "attention is Longshore's own; leave it out",
    "option.multi_gpu": "the model runs on one device; leave it out",
    "option.max_sparsity": "leave it out",
    "option.max_splits": "leave it out",
    "option.max_cpu_loras": "all loaded adapters lie on the device; use option.max_loras",
    "option.fully_sharded_loras": "the model runs on one device; leave it out",
    "option.lora_dtype": "adapters have the model's type; leave it out",
    "option.lora_extra_vocab_size": "adapters bring no tokens of their own; leave it out",
    "option.draft_model_id": _SPECULATIVE,
    "option.spec_length": _SPECULATIVE,
    "option.speculative_draft_model": _SPECULATIVE,
    "option.speculative_config": _SPECULATIVE,
    "option.chat_template_content_format": "the form follows from the template; leave it out",
    "option.enable_auto_tool_choice": "option.tool_call_parser is enough",
    "option.reasoning_parser": "reasoning is part of the answer's text; leave it out",
    "option.s3url": "use option.model_id",
}

VALUE_ALIASES: Mapping[tuple[str, str], str] = {
    ("option.output_formatter", "json_chat"): "json",
    ("option.output_formatter", "jsonlines_chat"): "jsonlines",
    ("option.output_formatter", "sse_chat"): "sse",
}
"""Values of LMI, by key and value, that have another name here."""

VARIABLE_ADVICE: Mapping[str, str] = {
    "SAGEMAKER_NUM_MODEL_WORKERS": _ONE_COPY,
    "SAGEMAKER_MODEL_SERVER_WORKERS": "use option.http_workers",
    "SAGEMAKER_PROGRAM": _HANDLERS,
    "HF_MODEL_QUANTIZE": _QUANTIZED,
    "PIPELINE_PARALLEL_DEGREE": ADVICE["option.pipeline_parallel_degree"],
    "PYTHON_EXECUTABLE": ADVICE["option.pythonExecutable"],
    "ENABLE_CUDA_GRAPHS": "use option.enforce_eager",
}
"""The same for environment variables that do not spell a key."""

_USE_AUTO = "use option.rolling_batch=auto, or option.batching"
_USE_PYTHON = "use engine=Python"
_AS_FOUND = "use option.load_format=auto, which reads weights in the form in which they lie there"

REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    ("option.rolling_batch", "deepspeed"): _USE_AUTO,
    ("option.rolling_batch", "trtllm"): _USE_AUTO,
    ("option.rolling_batch", "neuronx"): _USE_AUTO,
    ("option.rolling_batch", "tnx"): _USE_AUTO,
    ("option.load_format", "safetensors"): _AS_FOUND,
    ("option.load_format", "pt"): _AS_FOUND,
    ("option.load_format", "npcache"): _AS_FOUND,
    ("engine", "DeepSpeed"): _USE_PYTHON,
    ("engine", "FasterTransformer"): _USE_PYTHON,
}
"""Values of LMI, by key and value, that ask for something this container does not have."""

_BUILT_IN_HANDLERS = (
    "djl_python.huggingface",
    "djl_python.lmi_vllm",
    "djl_python.lmi_dist",
    "djl_python.rolling_batch",
)


def is_built_in_handler(entry_point: str) -> bool:
    """Whether LMI's handler of this name does what Longshore's own engine does."""
    return any(
        entry_point == name or entry_point.startswith(f"{name}.") for name in _BUILT_IN_HANDLERS
    )


def handler_name(entry_point: str | None) -> str:
    """The name of a handler's file; LMI lets users leave its ending out."""
    if entry_point is None:
        return "model.py"
    return entry_point if entry_point.endswith(".py") else f"{entry_point}.py"
