"""Environment variables that set options. Those of LMI have the same precedence as in LMI.

All sources of options, with the highest precedence first:

```
flags  >  SAGEMAKER_*  >  serving.properties  >  OPTION_*  >  HF_*, TENSOR_PARALLEL_DEGREE, ...
       >  SERVING_*  >  SM_VLLM_*  >  names from text-generation-inference (TGI)
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from container.configuration.lmi import (
    ADVICE,
    ALIASES,
    INVOCATION_HANDLER_ADVICE,
    VARIABLE_ADVICE,
)
from container.configuration.properties import Setting
from core.configuration.options import option_table, vllm_names
from core.configuration.suggest import did_you_mean

_PAYLOAD = "SAGEMAKER_MAX_PAYLOAD_IN_MB"
_SAGEMAKER = {
    "SAGEMAKER_NUM_MODEL_WORKERS": "option.copies",
    "SAGEMAKER_STARTUP_TIMEOUT": "option.model_loading_timeout",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "option.predict_timeout",
    "SAGEMAKER_MAX_REQUEST_SIZE": "max_request_size",
    "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "option.enable_stateful_sessions",
    "SAGEMAKER_SESSIONS_EXPIRATION": "option.sessions_expiration",
    "SAGEMAKER_SESSIONS_PATH": "option.sessions_path",
}
_FALLBACKS = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "HF_MODEL_REVISION": "option.revision",
    "HF_TASK": "option.task",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "PREDICT_TIMEOUT": "option.predict_timeout",
    "MODEL_LOADING_TIMEOUT": "option.model_loading_timeout",
    "DJL_ENTRY_POINT": "option.entryPoint",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "option.otlp_traces_endpoint",
    "CUSTOM_FASTAPI_PING_HANDLER": "option.ping_hook",
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "option.throttle_hook",
    "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS": "option.pre_post_process_hook",
    "CUSTOM_PRE_PROCESS": "option.pre_process_hook",
    "CUSTOM_POST_PROCESS": "option.post_process_hook",
}
_VLLM_PREFIX = "SM_VLLM_"
"""AWS's vLLM image passes each variable with this prefix to vLLM as an argument."""
_VLLM_API_KEY = f"{_VLLM_PREFIX}API_KEY"
_REFUSED = {
    # If the key were ignored, the server would need no key at all.
    _VLLM_API_KEY: "put the key into a file and name that in "  # pragma: allowlist secret
    "option.api_keys_file (OPTION_API_KEYS_FILE)",
    "CUSTOM_FASTAPI_INVOCATION_HANDLER": INVOCATION_HANDLER_ADVICE,
}
"""Variables of AWS's images that make start-up fail, with what to do instead."""
_TGI = {
    "SM_NUM_GPUS": "option.tensor_parallel_degree",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "HF_MODEL_QUANTIZE": "option.quantize",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
    "MAX_BATCH_PREFILL_TOKENS": "option.max_rolling_batch_prefill_tokens",
    "MAX_BATCH_SIZE": "option.max_rolling_batch_size",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """Settings from environment variables, and the errors and warnings about the variables."""

    above_file: tuple[Setting, ...]
    """Settings that override serving.properties."""
    below_file: tuple[Setting, ...]
    """Settings that serving.properties overrides. If a key occurs twice, the first one wins."""
    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Read the variables that set options. Empty variables count as unset."""
    given = {name: text for name, text in sorted(variables.items()) if text.strip()}
    option_variables = _option_variables()
    serving_variables = _serving_variables()
    vllm_variables = _vllm_variables()
    return Environment(
        above_file=(*_settings(given, _SAGEMAKER), *_payload_limit(given)),
        below_file=(
            *_settings(given, option_variables),
            *_settings(given, _FALLBACKS),
            *_settings(given, serving_variables),
            *_settings(given, vllm_variables),
            *_settings(given, _TGI),
        ),
        errors=(
            *_unknown_options(given, {**option_variables, **serving_variables}),
            *_bad_payload_limit(given),
            *_refused(given),
        ),
        warnings=tuple(_ineffective(given, {**serving_variables, **vllm_variables})),
    )


def sets_model_id(variables: Mapping[str, str]) -> bool:
    """Return whether a variable names the model to serve."""
    settings = read_environment(variables).below_file
    return any(setting.key == "option.model_id" for setting in settings)


def _settings(given: Mapping[str, str], names: Mapping[str, str]) -> Iterator[Setting]:
    for name, key in names.items():
        if name in given:
            yield Setting(key, given[name].strip(), f"environment variable {name}")


def _payload_limit(given: Mapping[str, str]) -> Iterator[Setting]:
    """Convert SAGEMAKER_MAX_PAYLOAD_IN_MB to bytes, the unit of max_request_size."""
    text = given.get(_PAYLOAD, "").strip()
    if text.isdecimal():
        yield Setting(
            "max_request_size", str(int(text) * 2**20), f"environment variable {_PAYLOAD}"
        )


def _bad_payload_limit(given: Mapping[str, str]) -> Iterator[str]:
    text = given.get(_PAYLOAD, "0").strip()
    if not text.isdecimal():
        yield f"environment variable {_PAYLOAD}={text}: expected an integer"


def _refused(given: Mapping[str, str]) -> Iterator[str]:
    for name, instead in _REFUSED.items():
        if name in given:
            yield f"environment variable {name} is not supported: {instead}"


def _option_variables() -> dict[str, str]:
    keys = [option.key for option in option_table().values() if option.key.startswith("option.")]
    aliases = {name: key for name, key in ALIASES.items() if name.startswith("option.")}
    names = {key: key for key in ["engine", *keys]} | aliases
    return {_option_variable(name): key for name, key in names.items()}


def _option_variable(key: str) -> str:
    return f"OPTION_{key.removeprefix('option.').upper()}"


def _serving_variables() -> dict[str, str]:
    keys = [
        option.key for option in option_table().values() if not option.key.startswith("option.")
    ]
    names = {f"SERVING_{key.upper()}": key for key in keys if key != "engine"}
    return {**names, "SERVING_MAX_WORKERS": "option.copies"}


def _vllm_variables() -> dict[str, str]:
    """Return the variables of vLLM's arguments; most arguments have our options' names."""
    keys = [option.key for option in option_table().values() if option.key.startswith("option.")]
    names = {key.removeprefix("option."): key for key in keys}
    names |= {name: f"option.{ours}" for name, ours in vllm_names().items()}
    return {f"{_VLLM_PREFIX}{name.upper()}": key for name, key in names.items()}


def _unknown_options(given: Mapping[str, str], known: Mapping[str, str]) -> Iterator[str]:
    advised = {_option_variable(key) for key in ADVICE}
    for name in given:
        if name.startswith("OPTION_") and name not in known and name not in advised:
            yield f"environment variable {name}: no such option{did_you_mean(name, known)}"


def _ineffective(given: Mapping[str, str], known: Mapping[str, str]) -> Iterator[str]:
    bare = {key.removeprefix("option."): text for key, text in ADVICE.items()}
    advice = {
        **VARIABLE_ADVICE,
        **{_option_variable(key): text for key, text in ADVICE.items()},
        **{f"SERVING_{key.upper()}": text for key, text in ADVICE.items() if "." not in key},
        **{f"{_VLLM_PREFIX}{name.upper()}": text for name, text in bare.items()},
    }
    for name in given:
        if name in known or name == _VLLM_API_KEY:
            continue
        if name in advice:
            yield f"environment variable {name} has no effect here: {advice[name]}"
        elif name.startswith(("ARGS_", "SERVING_", _VLLM_PREFIX)):
            yield f"environment variable {name} has no effect here{did_you_mean(name, known)}"
