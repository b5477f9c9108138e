"""`longshore plan` against EC2's figures and against sums that each test writes out."""

from __future__ import annotations

import gzip
import json
import socket
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from container.__main__ import main
from container.capacity.decoder import decoder_from_directory
from container.capacity.estimate import CONTEXT_BYTES
from container.capacity.instances import instances
from core.configuration.options import Options, make_options
from core.configuration.strategy_table import BATCHING_NAMES, Batching
from core.errors import ConfigurationError
from tests.container.capacity.planned import LLAMA_8B, planned, write_header
from tests.container.processes import ROOT


def test_gpus_match_ec2s_descriptions() -> None:
    path = files("moto.ec2") / "resources" / "instance_types.json.gz"
    described = json.loads(gzip.decompress(path.read_bytes()))
    for name, instance in instances().items():
        (gpu,) = described[name.removeprefix("ml.")]["GpuInfo"]["Gpus"]
        memory = gpu["MemoryInfo"]["SizeInMiB"]
        assert (instance.gpu, instance.num_gpus, instance.gpu_mib) == (
            gpu["Name"],
            gpu["Count"],
            memory,
        )


def test_parameters_are_counted_or_computed(model: Path) -> None:
    computed = decoder_from_directory(model, Options())
    assert (computed.num_parameters, computed.is_counted) == (8_030_261_248, False)
    demo = ROOT / "models" / "demo"
    counted = decoder_from_directory(demo, Options())
    assert counted.is_counted
    data_bytes = (demo / "model.safetensors").stat().st_size
    assert 0 < data_bytes - counted.weights_bytes < 20_000, "the header is not counted"


LLAMA_70B = {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192,
             "intermediate_size": 28672}  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "bytes_per_weight", "head_bytes"),
    [(None, 2, 2), ("fp8", 1, 2), ("int8", 1, 1), ("int4", 0.5 + 5 / 128, 1)],
)
def test_what_a_model_of_70b_parameters_needs(
    model: Path, precision: str | None, bytes_per_weight: float, head_bytes: int
) -> None:
    """Embeddings stay in 16 bits. int4 takes 5 bytes more for each group of 128 weights.

    The quantized model fits into one H100.
    """
    (model / "config.json").write_text(json.dumps({**LLAMA_8B, **LLAMA_70B}))
    decoder = decoder_from_directory(model, make_options({"quantize": cast(Any, precision)}))
    assert decoder.num_parameters == 70_553_706_496
    embedding = 128256 * 8192
    layers = int((70_553_706_496 - 2 * embedding) * bytes_per_weight)
    assert decoder.weights_bytes == (2 + head_bytes) * embedding + layers
    assert decoder.weights_format == (precision or "bf16")
    if precision is None:
        with pytest.raises(ConfigurationError, match="does not fit"):
            planned(model, "paged", "ml.p5.4xlarge")
    else:
        assert planned(model, "paged", "ml.p5.4xlarge", quantize=precision).max_concurrent >= 5


@pytest.mark.parametrize(("precision", "more"), [("fp8", 0), ("int8", 1), ("int4", 1)])
def test_a_tied_head_in_int8_stands_beside_the_embedding(
    model: Path, precision: str, more: int
) -> None:
    """int8 and int4 store the head in int8. A tied head is then a copy of the embedding."""
    (model / "config.json").write_text(json.dumps({**LLAMA_8B, "tie_word_embeddings": True}))
    decoder = decoder_from_directory(model, make_options({"quantize": cast(Any, precision)}))
    embedding = 128256 * 4096
    layers = decoder.num_parameters - embedding
    bytes_per_weight = 0.5 + 5 / 128 if precision == "int4" else 1
    assert decoder.weights_bytes == (2 + more) * embedding + int(layers * bytes_per_weight)


@pytest.mark.parametrize(
    ("quantization", "bytes_per_weight"),
    [
        ({"quant_method": "awq"}, 0.5 + 5 / 128),
        ({"quant_method": "gptq", "bits": 8}, 1),
        ({"quant_method": "fp8"}, 1),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            0.5 + 5 / 128,
        ),
    ],
)
def test_quantized_checkpoints(
    model: Path, quantization: dict[str, Any], bytes_per_weight: float
) -> None:
    """Without files, the size of the weights is computed from the config.

    With files, it is the sum of the bytes of their tensors.
    """
    (model / "config.json").write_text(
        json.dumps({**LLAMA_8B, "quantization_config": quantization})
    )
    decoder = decoder_from_directory(model, Options())
    kept = 2 * 128256 * 4096
    linear = int((8_030_261_248 - kept) * bytes_per_weight)
    assert decoder.weights_bytes == 2 * kept + linear
    assert decoder.weights_format == quantization["quant_method"]
    header = {
        "w": {"dtype": "I32", "shape": [10, 3], "data_offsets": [0, 120]},
        "s": {"dtype": "F8_E4M3", "shape": [5], "data_offsets": [120, 125]},
    }
    write_header(model, header)
    assert decoder_from_directory(model, Options()).weights_bytes == 125


def test_gguf_files_are_counted_as_they_are_served(model: Path) -> None:
    config = {**LLAMA_8B, "quantization_config": {"quant_method": "gguf"}}
    (model / "config.json").write_text(json.dumps(config))
    sizes = [
        ("Q8_0", [10, 32], True),
        ("Q4_0", [10, 64], True),
        ("Q4_K", [2, 256], True),  # not on a GPU
        ("Q8_0", [4, 32], False),
    ]
    index = [
        {"name": f"model.layers.{place}.w", "type": kind, "shape": shape, "is_packed": is_packed}
        for place, (kind, shape, is_packed) in enumerate(sizes)
    ]
    (model / "gguf_tensors.json").write_text(json.dumps(index))
    decoder = decoder_from_directory(model, Options())
    assert decoder.weights_bytes == 320 + 50 + 320 + 100 + 2 * (512 + 128)
    assert decoder.weights_format == "gguf"


def test_the_computed_parameter_count_equals_the_counted_one(tmp_path: Path) -> None:
    config = json.loads((ROOT / "models" / "demo" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    counted = decoder_from_directory(ROOT / "models" / "demo", Options())
    assert decoder_from_directory(tmp_path, Options()).num_parameters == counted.num_parameters


def test_memory_budget(model: Path) -> None:
    plan = planned(model, "paged")
    assert plan.block_bytes == 32 * 2 * 8 * 128 * 2 * 16
    usable = int(45_776 * 2**20 * 0.9)
    free = usable - 2 * 8_030_261_248 - CONTEXT_BYTES - plan.activation_bytes
    assert plan.num_blocks == free // plan.block_bytes
    assert plan.max_concurrent == min(256, plan.num_blocks // 45)
    # An adapter adds two matrices to each of the 7 linear layers of a decoder layer: [inputs, 64]
    # and [outputs, 64]. 64 is option.max_loras=4 times option.max_lora_rank=16.
    adapters = 32 * 64 * (2 * 8192 + 2 * 5120 + 3 * 18432) * 2
    with_lora = planned(model, "paged", enable_lora=True)
    assert with_lora.num_blocks == (free - adapters) // plan.block_bytes
    half = planned(model, "paged", gpu_memory_utilization=0.5)
    assert half.num_blocks < plan.num_blocks
    assert planned(model, "paged", kv_cache_dtype="fp8").block_bytes == plan.block_bytes // 2
    assert planned(model, "paged", num_kv_blocks=600).num_blocks == 600
    assert planned(model, "paged", kv_cache_memory_bytes=2**30).num_blocks == 2**30 // 2**21


def test_the_memory_of_graphs_includes_logits_but_no_sampling(model: Path) -> None:
    """The largest graph runs 255 decodes and 16 prompts. The prompts have 1,024 tokens in all."""
    eager = planned(model, "paged", enforce_eager=True).activation_bytes
    layer_bytes = (255 + 1024) * (6 * 4096 + 3 * 14336) * 2
    logits_bytes = (255 + 16) * 128256 * 4
    assert planned(model, "paged").activation_bytes - eager == layer_bytes + logits_bytes


@pytest.mark.parametrize(
    ("batching", "options", "max_concurrent"),
    [
        ("none", {}, 1),
        ("dynamic", {"batch_size": 8}, 8),
        ("dynamic", {"num_kv_blocks": 600}, 600 // 45),
        ("continuous", {"num_kv_blocks": 1024}, 2),
        ("continuous", {"num_kv_blocks": 600, "kv_reservation": "pow2"}, 600 // 48),
        ("continuous", {"num_kv_blocks": 600, "kv_reservation": "oracle"}, 600 // 45),
        ("paged", {"num_kv_blocks": 600}, 600 // 45),
        ("paged", {"num_kv_blocks": 6000, "max_rolling_batch_size": 10}, 10),
    ],
)
def test_concurrent_requests(
    model: Path, batching: Batching, options: dict[str, Any], max_concurrent: int
) -> None:
    """A request of 512 + 200 tokens takes 45 blocks of 16.

    With `pow2`, `continuous` reserves 512 + 256 tokens, which take 48 blocks. By default, it
    reserves max_model_len, which is 8,192 and takes 512 blocks.
    """
    assert planned(model, batching, **options).max_concurrent == max_concurrent


def test_models_that_do_not_fit(model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"does not fit: the weights \(30,633.* A10G"):
        planned(model, "paged", "ml.g5.xlarge", dtype="fp32")
    with pytest.raises(ConfigurationError, match="less than one sequence of max_model_len 8192"):
        planned(model, "paged", num_kv_blocks=5, max_model_len=8192)
    lowered = planned(model, "paged", num_kv_blocks=5)
    assert lowered.max_model_len == 80
    assert "max_model_len lowered from 8192 to 80" in lowered.notes[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"kv_lora_rank": 512}, "cache K and V, or the latents of deepseek_v2, "),
        ({"layer_types": ["full_attention", "linear_attention"]}, "cache K and V"),
    ],
)
def test_models_that_cannot_be_planned(model: Path, change: dict[str, Any], reason: str) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA_8B, **change}))
    with pytest.raises(ConfigurationError, match=reason):
        decoder_from_directory(model, Options())


def test_plan_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model-dir", str(model), "--instance-type"]
    assert main([*command, "ml.p5.48xlarge", "--new-tokens", "128"]) == 0
    text = capsys.readouterr().out
    assert "8 x H100 (the model uses 1 of them)" in text
    assert "weights: 15,316.5 MiB, 8,030 million parameters in bf16, computed from" in text
    assert "concurrent requests of 512 + 128 tokens:" in text
    rows = text.splitlines()[-len(BATCHING_NAMES) :]
    assert tuple(row.split()[0] for row in rows) == BATCHING_NAMES
    assert main([*command, "ml.g5.3xlarge"]) == 2
    assert "did you mean 'ml.g5." in capsys.readouterr().err
    assert main([*command, "ml.g4dn.xlarge"]) == 2
    assert "its T4 has compute capability 7.5" in capsys.readouterr().err
    (model / "serving.properties").write_text("option.max_rolling_batch_size=5\n")
    assert main([*command, "ml.g6e.xlarge"]) == 0
    assert "paged          5  (" in capsys.readouterr().out


def test_hub_model(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only config.json and the headers of the weights are downloaded."""
    downloads: list[str] = []

    def tensor(count: int, num_bytes: int) -> SimpleNamespace:
        return SimpleNamespace(shape=[count], data_offsets=(100, 100 + num_bytes))

    file = SimpleNamespace(tensors={"a": tensor(7_999_999_999, 15_999_999_998), "b": tensor(1, 4)})
    metadata = SimpleNamespace(files_metadata={"model.safetensors": file})

    def download(model_id: str, file: str, **_: Any) -> str:
        downloads.append(f"{model_id}/{file}")
        return str(model / file)

    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda *_, **__: metadata)
    command = ["plan", "org/model", "--instance-type", "ml.g6e.xlarge"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "org/model on ml.g6e.xlarge: L40S" in text
    assert "weights: 15,258.8 MiB, 8,000 million parameters in bf16\n" in text
    assert downloads == ["org/model/config.json"]

    def fail(*_: Any, **__: Any) -> str:
        raise OSError("no network\nmore")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    assert main(command) == 2
    assert "org/model: cannot be read from the hub: no network" in capsys.readouterr().err

    def resolve(*_: Any) -> list[Any]:
        raise socket.gaierror("Name or service not known")

    monkeypatch.delattr("huggingface_hub.hf_hub_download")
    monkeypatch.setattr("socket.getaddrinfo", resolve)
    assert main(command) == 2
    assert "has no address; is there a network?" in capsys.readouterr().err
