"""Measures OpenVINO GenAI's continuous batching offline.

Usage: `PEER_PYTHON -m benchmarks.cpu.openvino_peer MODEL WORK`. PEER_PYTHON is the interpreter of
an environment with openvino_genai and optimum-intel and without this project's dependencies. The
first run converts the model. OpenVINO gets all requests at once and runs as many at a time as there
are users. Prints the results as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]

CACHE_GIB = 4
TYPES = {"float32": ("fp32", "f32"), "bfloat16": ("fp16", "bf16")}
"""By dtype: the weight format of the conversion, which option.quantize overrides, and the precision
of inference. optimum-intel's default decides how quantized weights are stored, and OpenVINO's
default how products with them are computed."""


def main(model_dir: str, work_file: str) -> None:
    work = json.loads(Path(work_file).read_text())
    weights, precision = TYPES[work["dtype"]]
    weights = work["quantize"] or weights
    converted = Path(f"{model_dir}-openvino-{weights}")
    if not (converted / "openvino_model.xml").exists():
        _convert(model_dir, converted, weights)
    started = time.perf_counter()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = work["users"]
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    pipeline = genai.ContinuousBatchingPipeline(
        str(converted), scheduler, "CPU", properties=properties
    )
    _rate(pipeline, [[[0] * 8, 4]])
    start_s = time.perf_counter() - started
    many = _rate(pipeline, work["requests"])
    one_by_one = work["requests"][: work["requests_of_one"]]
    seconds = sum(length / _rate(pipeline, [[prompt, length]]) for prompt, length in one_by_one)
    one_user = sum(length for _, length in one_by_one) / seconds
    print(json.dumps({"tokens_per_s": many, "tokens_per_s_of_one": one_user, "start_s": start_s}))


def _convert(model_dir: str, to: Path, weights: str) -> None:
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", model_dir, "--task", "text-generation-with-past"]
    subprocess.run([*command, "--weight-format", weights, str(to)], check=True, stdout=sys.stderr)


def _rate(pipeline: genai.ContinuousBatchingPipeline, requests: list) -> float:
    """Return the output tokens per second. requests: prompt token ids and output lengths."""
    prompts = [ov.Tensor(np.array([prompt])) for prompt, _ in requests]
    started = time.perf_counter()
    results = pipeline.generate(prompts, [_greedy(length) for _, length in requests])
    seconds = time.perf_counter() - started
    lengths = [len(result.m_generation_ids[0]) for result in results]
    if lengths != [length for _, length in requests]:
        raise RuntimeError(f"output lengths differ from the requested ones: {lengths}")
    return sum(lengths) / seconds


def _greedy(length: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = length
    config.ignore_eos = True
    return config


if __name__ == "__main__":
    main(*sys.argv[1:])
