"""Options of DJL Serving's LMI container that this one lacks, and what to use instead.

A key of `ADVICE` causes a warning at start-up: it is valid for LMI, but has no effect here. A
value in `REMOVED_VALUES` is an error, because ignoring it would change the model's behavior.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "max_dynamic_batch_size": "batch_size",
    "option.quantization": "option.quantize",
    "maxWorkers": "option.copies",
    "option.s3url": "option.model_id",
    "option.number_of_partitions": "option.tensor_parallel_degree",
    "option.speculative_length": "option.num_speculative_tokens",
    "option.spec_length": "option.num_speculative_tokens",
    "option.draft_model_id": "option.speculative_draft_model",
    "option.prediction_timeout": "option.predict_timeout",
}
"""Maps other names of options to the names here. The last ones are names of older containers
and of the SageMaker SDK's `DJLModel`."""

_FIXED_COPIES = (
    "the number of copies does not change while the container runs; use option.copies, which "
    "maxWorkers also sets"
)
_FORMAT = (
    "the fields of a request show which format it has; option.output_formatter sets the format of "
    "streams"
)
_HANDLERS = "set option.entryPoint to your handler's file"
_RANKS = "use option.tensor_parallel_degree to split the model over GPUs"
_FIXED_CODES = (
    "status codes cannot be changed, except that option.overload_status sets the status of a "
    "busy server"
)

ADVICE: Mapping[str, str] = {
    "minWorkers": _FIXED_COPIES,
    "gpu.minWorkers": _FIXED_COPIES,
    "gpu.maxWorkers": _FIXED_COPIES,
    "cpu.minWorkers": _FIXED_COPIES,
    "cpu.maxWorkers": _FIXED_COPIES,
    "load_on_devices": "use option.device",
    "max_idle_time": _FIXED_COPIES,
    "required_memory_mb": "use option.kv_cache_memory_bytes or option.gpu_memory_utilization",
    "reserved_memory_mb": "use option.kv_cache_memory_bytes or option.gpu_memory_utilization",
    "gpu.required_memory_mb": "use option.gpu_memory_utilization",
    "gpu.reserved_memory_mb": "use option.gpu_memory_utilization",
    "log_request_metric": "leave it out; use option.log_requests or GET /metrics",
    "metrics_aggregation": "leave it out; GET /metrics returns the metrics",
    "chunked_read_timeout": "use option.predict_timeout",
    "bad_request_http_code": _FIXED_CODES,
    "wlm_error_http_code": _FIXED_CODES,
    "throttle_error_http_code": _FIXED_CODES,
    "timeout_http_code": _FIXED_CODES,
    "server_error_http_code": _FIXED_CODES,
    "cors_allowed_methods": "all methods that a route has are allowed; leave it out",
    "cors_allowed_headers": "all headers are allowed; leave it out",
    "wait_model_loading": "/ping returns 503 until the model is ready; leave it out",
    "option.mpi_mode": "Longshore itself starts the ranks; set option.tensor_parallel_degree",
    "option.pipeline_parallel_degree": _RANKS,
    "option.parallel_loading": "copies are always loaded at the same time; leave it out",
    "option.load_in_8bit": "use option.quantize=int8",
    "option.load_in_4bit": "use option.quantize=int4",
    "option.enable_streaming": 'a request streams if it sets "stream": true',
    "option.input_formatter": _FORMAT,
    "option.max_output_size": "set parameters.max_new_tokens in the request",
    "option.waiting_steps": "use option.max_rolling_batch_prefill_tokens",
    "option.handler": "the handler function must be named handle",
    "option.env": "set environment variables on the container",
    "option.pythonExecutable": "handlers run in the container's Python",
    "option.enable_venv": "handlers run in the container's Python",
    "option.enable_chunked_prefill": "long prompts are always prefilled in chunks; "
    "option.max_rolling_batch_prefill_tokens limits their size",
    "option.max_num_seqs": "use option.max_rolling_batch_size",
    "option.max_num_batched_tokens": "use option.max_rolling_batch_prefill_tokens",
    "option.tokenizer_mode": "tokenizer.json is always used; leave it out",
    "option.decoding_strategy": "set parameters.do_sample and temperature in the request",
    "option.disable_flash_attn": "Longshore has its own attention kernels; leave it out",
    "option.multi_gpu": _RANKS,
    "option.device_map": _RANKS,
    "option.device_id": "use option.device",
    "option.max_tokens": "use option.max_model_len",
    "option.low_cpu_mem_usage": "weights are always read one tensor at a time; leave it out",
    "option.enable_cuda_graph": "use option.enforce_eager",
    "option.triangular_masking": "attention is always causal; leave it out",
    "option.return_tuple": "leave it out",
    "option.max_sparsity": "leave it out",
    "option.max_splits": "leave it out",
    "option.max_cpu_loras": "all loaded adapters stay on the device; use option.max_loras",
    "option.fully_sharded_loras": "adapters are always split in the same way; leave it out",
    "option.lora_dtype": "adapters use the model's dtype; leave it out",
    "option.lora_extra_vocab_size": "adapters cannot add tokens; leave it out",
    "option.chat_template_content_format": "the chat template shows the format; leave it out",
    "option.enable_auto_tool_choice": "use option.tool_call_parser, which is enough",
}

VALUE_ALIASES: Mapping[tuple[str, str], str] = {
    ("option.output_formatter", "json_chat"): "json",
    ("option.output_formatter", "jsonlines_chat"): "jsonlines",
    ("option.output_formatter", "sse_chat"): "sse",
    ("option.quantize", "bitsandbytes8"): "int8",
    ("option.quantize", "awq_marlin"): "awq",
    ("option.quantize", "gptq_marlin"): "gptq",
    ("option.dtype", "half"): "fp16",
    ("option.dtype", "float"): "fp32",
}
"""Maps a key and its value in LMI or vLLM to the name of this value here."""

INVOCATION_HANDLER_ADVICE = (
    "write handle(inputs) in model.py, which is called instead of the model; or set "
    "option.pre_post_process_hook to a function that changes the model's requests and responses"
)
"""AWS's invocation handlers call vLLM's engine, which Longshore does not have."""

VARIABLE_ADVICE: Mapping[str, str] = {
    "CUSTOM_SCRIPT_FILENAME": "name the file with its function, as in CUSTOM_PRE_PROCESS=FILE.py:F",
    "SAGEMAKER_MODEL_PATH": "give the model's directory as MODEL, or set option.model_id",
    "SAGEMAKER_MODEL_SERVER_WORKERS": "use option.http_workers",
    "SAGEMAKER_PROGRAM": _HANDLERS,
    "SERVING_MIN_WORKERS": _FIXED_COPIES,
    "PIPELINE_PARALLEL_DEGREE": ADVICE["option.pipeline_parallel_degree"],
    "PYTHON_EXECUTABLE": ADVICE["option.pythonExecutable"],
    "ENABLE_CUDA_GRAPHS": "use option.enforce_eager",
}
"""Like `ADVICE`, for environment variables that do not follow from an option's key."""

_USE_AUTO = "use option.rolling_batch=auto, or option.batching"
_USE_PYTHON = "use engine=Python"
_USE_INT4 = "use option.quantize=int4, which has the same number of bits"
_USE_AUTO_FORMAT = "use option.load_format=auto, which detects the format of the weights"

REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    ("option.rolling_batch", "deepspeed"): _USE_AUTO,
    ("option.rolling_batch", "trtllm"): _USE_AUTO,
    ("option.rolling_batch", "neuronx"): _USE_AUTO,
    ("option.rolling_batch", "tnx"): _USE_AUTO,
    ("option.load_format", "safetensors"): _USE_AUTO_FORMAT,
    ("option.load_format", "pt"): _USE_AUTO_FORMAT,
    ("option.load_format", "npcache"): _USE_AUTO_FORMAT,
    ("option.quantize", "bitsandbytes"): _USE_INT4,
    ("option.quantize", "bitsandbytes4"): _USE_INT4,
    ("option.quantize", "smoothquant"): "use option.quantize=int8",
    ("engine", "DeepSpeed"): _USE_PYTHON,
    ("engine", "FasterTransformer"): _USE_PYTHON,
}
"""Maps a key and an LMI value that is not supported here to advice on what to use instead."""

_BUILT_IN_HANDLERS = (
    "djl_python.huggingface",
    "djl_python.lmi_vllm",
    "djl_python.lmi_dist",
    "djl_python.rolling_batch",
)


def is_built_in_handler(entry_point: str) -> bool:
    """Return whether this is a built-in LMI handler, which Longshore's engine replaces."""
    return any(
        entry_point == name or entry_point.startswith(f"{name}.") for name in _BUILT_IN_HANDLERS
    )


def handler_name(entry_point: str | None) -> str:
    """Return the name of a handler's file (None: model.py). As in LMI, users may omit the `.py`."""
    if entry_point is None:
        return "model.py"
    return entry_point if entry_point.endswith(".py") else f"{entry_point}.py"
