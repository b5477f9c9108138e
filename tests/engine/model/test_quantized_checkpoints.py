"""Quantized checkpoints: each format gives the logits and tokens of its dequantized weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ConfigurationError
from engine import LLM, LoRARequest, SamplingParams
from engine.model.checkpoint import open_published
from engine.model.quantization.gptq import Gptq
from tests.engine.greedy_answers import NUM_NEW, STRATEGIES, generate, prompts, tokens
from tests.engine.lora.adapter_files import adapted_llm, merged, write_adapter
from tests.engine.model.conftest import expected_logits, logits
from tests.engine.quantized_checkpoints import FILE, FORMATS, MXFP4, gptq, write_quantized

pytestmark = pytest.mark.usefixtures("exact_rows")


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory):
    """Return a function (format, architecture) → folders of the model quantized and dequantized."""
    known = {}

    def make(name, architecture="llama"):
        key = name, architecture
        if key not in known:
            stored = MXFP4 if name == "mxfp4" else FORMATS[name]
            folder = tmp_path_factory.mktemp("quantized")
            known[key] = write_quantized(tiny_model(architecture), folder, stored)
        return known[key]

    return make


def assert_same(found, expected):
    """Compare logits from -5 to 5. How far sums in another order lie apart depends on the CPU."""
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)


@pytest.mark.matrix(cases=6)
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_serves_with_the_tokens_of_its_dequantized_weights(written, name):
    """All strategies give the same tokens. One layer is stored unquantized."""
    quantized, dequantized = written(name)
    expected = generate(dequantized, eos_token_id=None)
    for batching, options in STRATEGIES.items():
        llm = LLM(quantized, batching=batching, dtype="fp32", decoder="own", **options)
        assert tokens(llm, ignore_eos=True) == expected, batching
        assert llm.facts.quantization == FORMATS[name].config["quant_method"]


def test_mxfp4_experts_of_gpt_oss(written):
    quantized, dequantized = written("mxfp4", "gpt_oss")
    llm = LLM(quantized, dtype="fp32", decoder="own")
    assert tokens(llm, ignore_eos=True) == generate(dequantized, eos_token_id=None)


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", ["awq", "fp8 blocks", "gptq act-order"])
def test_quantized_experts(written, load, architecture, name):
    """Experts are stored one by one. The router and the shared expert's gate are not quantized."""
    quantized, dequantized = written(name, architecture)
    assert_same(logits(load(quantized)), expected_logits(dequantized))


@pytest.mark.parametrize("architecture", ["gpt_neox", "ernie4_5", "phi3", "cohere"])
def test_families_that_reorder_or_merge_outputs(written, load, architecture):
    quantized, dequantized = written("gptq", architecture)
    assert_same(logits(load(quantized)), expected_logits(dequantized))


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_groups(tmp_path, group_size, bits):
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(1))
    tensors, expected = gptq(bits=bits, group_size=group_size, has_zeros=True)(weight)
    save_file(
        {f"q{suffix}": part.contiguous() for suffix, part in tensors.items()}, tmp_path / FILE
    )
    read = Gptq({"bits": bits}).read(open_published(tmp_path), "q")
    torch.testing.assert_close(read.dequantized(), expected)


@pytest.mark.parametrize(
    ("name", "smaller"), [("fp8 blocks", 1.4), ("ct int8", 1.4), ("mxfp4", 1.5)]
)
def test_quantized_weights_are_smaller(written, load, name, smaller, monkeypatch):
    """Weights take a byte or half a byte instead of fp32's four bytes. Embeddings are unchanged.

    Where CPUs have panels but no kernel for the codes, weights are unpacked at load.
    """
    architecture = "gpt_oss" if name == "mxfp4" else "llama"
    folders = written(name, architecture)
    if name != "ct int8":
        unpacked, dequantized = map(load, folders)
        assert unpacked.num_bytes == dequantized.num_bytes
        monkeypatch.setattr("kernels.cpu.linear.is_faster", lambda: False)
    quantized, dequantized = map(load, folders)
    assert quantized.num_bytes * smaller < dequantized.num_bytes
    assert quantized.num_weights == dequantized.num_weights


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method=bitsandbytes, which cannot be read; fp8, ",
        ),
        ({"quant_method": "gptq", "bits": 3}, "quant_method=gptq with bits=3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format=marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "quant_method=awq with version=gemv"),
        ({"quant_method": "awq", "bits": 8}, "quant_method=awq with bits=8"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt=ue8m0"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "format=nvfp4-pack-quantized of 4-bit float weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparsity_config.format=sparse-24-bitmask",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
            "a transform_config",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_alternative(copied, config, message):
    folder = with_config(copied("llama"), config)
    with pytest.raises(ConfigurationError, match=message) as caught:
        LLM(folder, dtype="fp32")
    assert "option.quantize=fp8, int8 or int4" in str(caught.value)


def edit_tensors(folder, edit):
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})


def with_config(folder, quantization):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "suffix", "replacement", "message"),
    [
        ("fp8 blocks", "weight_scale_inv", torch.ones(5, 5), "fits no layer of 32 x 32"),
        (
            "fp8 blocks",
            "weight",
            torch.ones(32, 32),
            "is torch.float32, but .* torch.float8_e4m3fn",
        ),
        ("ct int8", "weight_scale", torch.ones(7, 1), "fits no layer of 32 x 32"),
        ("awq", "scales", torch.ones(2, 8), "does not fit"),
        ("gptq act-order", "g_idx", torch.zeros(32).int(), "does not give each group 16 inputs"),
    ],
)
def test_tensors_that_do_not_fit_together_are_an_error(
    written, tmp_path, name, suffix, replacement, message
):
    folder = shutil.copytree(written(name)[0], tmp_path / "broken")
    layer = "model.layers.0.self_attn.q_proj"
    edit_tensors(folder, lambda tensors: tensors.update({f"{layer}.{suffix}": replacement}))
    with pytest.raises(ConfigurationError, match=rf"{layer}.*{message}"):
        LLM(folder, dtype="fp32")


def test_fp8_tensors_without_scales_are_an_error(copied):
    folder = copied("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_tensors(
        folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )
    with pytest.raises(ConfigurationError, match="not a float of 16 or 32 bits; quantized weights"):
        LLM(folder, dtype="fp32")


def test_the_option_may_name_the_checkpoints_method(written):
    """LMI's users set option.quantize=awq for such a checkpoint. Another method is an error."""
    folder, _ = written("awq")
    assert LLM(folder, dtype="fp32", quantize="awq").facts.quantization == "awq"
    for other in ("gptq", "int4"):
        with pytest.raises(ConfigurationError, match=r"already quantized \(quant_method=awq"):
            LLM(folder, dtype="fp32", quantize=other)


def test_random_weights_cannot_be_of_a_checkpoints_format(written):
    with pytest.raises(ConfigurationError, match="random weights cannot have quant_method=awq"):
        LLM(written("awq")[0], dtype="fp32", load_format="dummy")


@pytest.mark.parametrize("name", ["awq", "gptq act-order", "fp8 blocks"])
def test_adapters_add_to_quantized_layers(written, tmp_path, name):
    """The tokens equal those of the adapter merged into the dequantized weights."""
    quantized, dequantized = written(name)
    adapter = write_adapter(dequantized, tmp_path / "adapter")
    expected = generate(merged(dequantized, adapter, tmp_path / "merged"))
    llm = adapted_llm(quantized)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    lora = LoRARequest("a", 1, str(adapter))
    answers = llm.generate(prompts(), params, use_tqdm=False, lora_request=lora)
    assert [answer.outputs[0].token_ids for answer in answers] == expected
    assert expected != generate(dequantized)


def test_bf16_activations(written):
    """The low-precision trial of the gate passes."""
    folder, _ = written("ct int4 zeros")
    assert LLM(folder, dtype="bf16").facts.decoder == "own (llama)"


@pytest.mark.parametrize("name", ["awq", "ct fp8 blocks"])
def test_fp8_keys_and_values(written, name):
    settings = {"dtype": "fp32", "kv_cache_dtype": "fp8"}
    quantized, dequantized = (tokens(LLM(folder, **settings)) for folder in written(name))
    assert quantized == dequantized
