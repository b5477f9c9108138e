"""Options from environment variables: precedence, translations and warnings."""

from __future__ import annotations

import pytest

from tests.container.configurations import Load, refusal


def test_a_variable_counts_if_the_file_lacks_its_key(load: Load) -> None:
    variables = {
        "OPTION_DTYPE": "bf16",
        "OPTION_BATCHING": "paged",
        "OPTION_ENGINE": "MPI",
        "OPTION_ENTRYPOINT": "djl_python.huggingface",
        "OPTION_DEVICE": " ",
        "SERVING_BATCH_SIZE": "4",
        "SERVING_JOB_QUEUE_SIZE": "5",
        "HF_MODEL_ID": "fallback",
        "OPTION_MODEL_ID": "first",
        "HF_REVISION": "main",
        "TENSOR_PARALLEL_DEGREE": "max",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces",
    }
    configuration = load("option.dtype=fp32\nbatch_size=2\n", variables)
    options = configuration.options
    assert (options.execution.dtype, options.strategy.batch_size) == ("fp32", 2)
    assert (options.strategy.batching, options.source.engine, options.execution.device) == (
        "paged",
        "MPI",
        "auto",
    )
    assert (options.source.model_id, options.source.revision) == ("first", "main")
    assert (options.server.job_queue_size, options.execution.tensor_parallel_degree) == (5, "max")
    assert options.server.otlp_traces_endpoint == "http://collector:4318/v1/traces"
    assert configuration.sources["batching"] == "environment variable OPTION_BATCHING"


def test_sagemaker_variables_override_the_file(load: Load) -> None:
    variables = {"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "9"}
    assert load("option.predict_timeout=5", variables).options.server.predict_timeout == 9


def test_sagemakers_payload_limit(load: Load) -> None:
    megabytes = {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6"}
    assert load("max_request_size=5", megabytes).options.server.max_request_size == 6 * 2**20
    both = load("", {**megabytes, "SAGEMAKER_MAX_REQUEST_SIZE": "7"})
    assert both.options.server.max_request_size == 7
    assert "overridden by environment variable SAGEMAKER_MAX_REQUEST_SIZE" in both.warnings[0]
    error = refusal(load, "", {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "six"})
    assert "SAGEMAKER_MAX_PAYLOAD_IN_MB=six: expected an integer" in error


def test_tgi_variables_have_the_lowest_precedence(load: Load) -> None:
    tgi = {"MAX_CONCURRENT_REQUESTS": "7", "SM_NUM_GPUS": "1", "HF_MODEL_REVISION": "v1"}
    options = load("", tgi).options
    assert (options.server.job_queue_size, options.execution.tensor_parallel_degree) == (7, "1")
    assert options.source.revision == "v1"
    assert load("", {**tgi, "SERVING_JOB_QUEUE_SIZE": "9"}).options.server.job_queue_size == 9


def test_lmis_numbers_of_workers_are_copies(load: Load) -> None:
    assert load("maxWorkers=2").options.layout.copies == 2
    assert load("", {"SERVING_MAX_WORKERS": "3"}).options.layout.copies == 3
    assert load("maxWorkers=2", {"SERVING_MAX_WORKERS": "3"}).options.layout.copies == 2
    assert load("maxWorkers=2", {"SAGEMAKER_NUM_MODEL_WORKERS": "4"}).options.layout.copies == 4


def test_a_file_of_the_sagemaker_sdk(load: Load) -> None:
    """DJLModel of SageMaker's Python SDK 2 writes this file for a model on S3 with
    number_of_partitions=4.
    """
    found = load(
        "engine=Python\noption.s3url=s3://bucket/model/\noption.tensor_parallel_degree=4\n"
        "option.task=text-generation\noption.dtype=fp16\nmaxWorkers=1\njob_queue_size=7\n"
        "option.prediction_timeout=90\noption.device_map=auto\noption.low_cpu_mem_usage=True\n"
    )
    options = found.options
    assert options.source.model_id == "s3://bucket/model/"
    assert (options.execution.tensor_parallel_degree, options.server.predict_timeout) == ("4", 90)
    assert len(found.warnings) == 2


@pytest.mark.parametrize("variables", [{}, {"OPTION_NUMBER_OF_PARTITIONS": "max"}])
def test_partitions_are_ranks(load: Load, variables: dict[str, str]) -> None:
    text = "" if variables else "option.number_of_partitions=max"
    assert load(text, variables).options.execution.tensor_parallel_degree == "max"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("SERVING_MIN_WORKERS", "use option.copies"),
        ("SAGEMAKER_PROGRAM", "option.entryPoint"),
        ("PIPELINE_PARALLEL_DEGREE", "use option.tensor_parallel_degree"),
        ("SERVING_CHUNKED_READ_TIMEOUT", "option.predict_timeout"),
        ("CUSTOM_SCRIPT_FILENAME", "CUSTOM_PRE_PROCESS=FILE.py"),
        ("SAGEMAKER_MODEL_PATH", "option.model_id"),
        ("ARGS_ANYTHING", "no effect here"),
    ],
)
def test_unknown_variables_give_warnings(load: Load, name: str, advice: str) -> None:
    (warning,) = load("", {name: "2"}).warnings
    assert warning.startswith(f"environment variable {name} has no effect here")
    assert advice in warning


def test_the_variables_of_awss_sessions(load: Load) -> None:
    """AWS's model-hosting-container-standards package reads these variables, too. They override
    the file.
    """
    variables = {
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true",
        "SAGEMAKER_SESSIONS_EXPIRATION": "60",
        "SAGEMAKER_SESSIONS_PATH": "/dev/shm/mine",
    }
    configuration = load("option.sessions_expiration=5\n", variables)
    options = configuration.options
    assert (options.server.enable_stateful_sessions, options.server.sessions_expiration) == (
        True,
        60,
    )
    assert options.server.sessions_path == "/dev/shm/mine"
    (warning,) = configuration.warnings
    assert "overridden by environment variable SAGEMAKER_SESSIONS_EXPIRATION" in warning


def test_the_variables_of_awss_vllm_image(load: Load) -> None:
    variables = {
        "SM_VLLM_MODEL": "org/model",
        "SM_VLLM_MAX_MODEL_LEN": "2048",
        "SM_VLLM_MAX_NUM_SEQS": "7",
        "SM_VLLM_DTYPE": "half",
        "SM_VLLM_ENABLE_LORA": "true",
        "SM_VLLM_ENABLE_PREFIX_CACHING": "False",
        "SM_VLLM_TENSOR_PARALLEL_SIZE": "1",
        "SM_VLLM_BLOCK_SIZE": "8",
        "SM_VLLM_SPECULATIVE_CONFIG": '{"method": "suffix", "num_speculative_tokens": 8}',
        "OPTION_BLOCK_SIZE": "32",
        "SM_VLLM_QUANTIZATION": "awq_marlin",
        "SM_VLLM_SERVED_MODEL_NAME": "x",
        "SM_VLLM_MAX_MODEL_LENGTH": "1",
    }
    configuration = load("", variables)
    options = configuration.options
    assert (options.source.model_id, options.memory.max_model_len) == ("org/model", 2048)
    assert (options.strategy.max_rolling_batch_size, options.execution.dtype) == (7, "fp16")
    assert (options.lora.enable_lora, options.memory.enable_prefix_caching) == (True, False)
    assert (options.execution.tensor_parallel_degree, options.memory.block_size) == ("1", 32)
    assert options.speculation.chosen == ("suffix", 8)
    assert configuration.sources["enable_lora"] == "environment variable SM_VLLM_ENABLE_LORA"
    text = "\n".join(configuration.warnings)
    assert options.execution.quantize == "awq"
    assert options.source.served_model_name == "x"
    assert "did you mean 'SM_VLLM_MAX_MODEL_LEN'?" in text
    assert "expected an integer" in refusal(load, "", {"SM_VLLM_MAX_MODEL_LEN": "2k"})


def test_vllms_api_key_ends_the_start_and_is_not_shown(load: Load) -> None:
    error = refusal(load, "", {"SM_VLLM_API_KEY": "the-key"})
    assert "SM_VLLM_API_KEY is not supported" in error
    assert "option.api_keys_file" in error
    assert "the-key" not in error


def test_variables_without_effect_give_warnings(load: Load) -> None:
    variables = {"SERVING_BATCHSIZE": "4", "OPTION_LOAD_IN_8BIT": "true"}
    quantize, batch_size = load("", variables).warnings
    assert "OPTION_LOAD_IN_8BIT has no effect here: use option.quantize=int8" in quantize
    assert "did you mean 'SERVING_BATCH_SIZE'?" in batch_size


def test_a_bad_variable_is_named(load: Load) -> None:
    error = refusal(load, "", {"SERVING_BATCH_SIZE": "many"})
    assert error.startswith("environment variable SERVING_BATCH_SIZE: batch_size=many")


def test_a_variable_overridden_by_the_file_gives_a_warning(load: Load) -> None:
    variables = {"OPTION_BATCHING": "paged", "TENSOR_PARALLEL_DEGREE": "1"}
    loaded = load("option.batching=none", variables)
    assert loaded.options.strategy.batching == "none"
    (warning,) = loaded.warnings
    assert warning.startswith("environment variable OPTION_BATCHING: overridden by ")
    assert warning.endswith("serving.properties:1")
