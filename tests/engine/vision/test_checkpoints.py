"""Which files of models that take images can be read, and what of them is served."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlavaConfig

from core.errors import ConfigurationError, RequestError
from engine import LLM
from tests.engine.quantized_checkpoints import FORMATS, write_quantized
from tests.engine.vision.conversations import CONVERSATIONS, SMALL, answers, generate, prompts


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize(
    ("model_type", "name"), [("mistral3", "fp8 whole, static"), ("qwen3_vl", "awq")]
)
def test_quantized_checkpoints(vision_model, tmp_path, model_type, name):
    """Of Mistral 3's, the image encoder is quantized as well."""
    quantized, plain = write_quantized(vision_model(model_type), tmp_path, FORMATS[name])
    llm = LLM(quantized, num_kv_blocks=400, **SMALL)
    assert llm.facts.quantization == FORMATS[name].config["quant_method"]
    expected = [generate(plain, text, seeds) for text, seeds in CONVERSATIONS.items()]
    assert answers(llm, prompts(quantized)) == expected


def test_both_names_of_the_language_models_tensors(vision_model, expected, tmp_path):
    """Some versions of transformers save tensors under other names: the paths of its modules."""
    path = shutil.copytree(vision_model("qwen2_5_vl"), tmp_path / "renamed")
    tensors = load_file(path / "model.safetensors")
    assert any(name.startswith("model.layers.") for name in tensors)
    renamed = {_module_name(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    assert answers(LLM(path, num_kv_blocks=400, **SMALL), prompts(path)) == expected("qwen2_5_vl")


def _module_name(name):
    if name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return f"model.{name}" if name.startswith("visual.") else name


def test_without_images_the_language_model_is_served(vision_model, expected):
    path = vision_model("qwen3_vl")
    llm = LLM(path, decoder="transformers", num_kv_blocks=400, **SMALL)
    why = "images are refused (option.decoder=transformers cannot embed them)"
    assert f"the language model of qwen3_vl; {why}" in llm.facts.decoder
    given, answered = prompts(path), expected("qwen3_vl")
    assert answers(llm, [given[1], given[3]]) == [answered[1], answered[3]]
    with pytest.raises(RequestError, match="unless the start says that images are refused"):
        answers(llm, given[:1])


def test_images_exclude_the_library(vision_model):
    with pytest.raises(ConfigurationError, match="takes images and only runs packed"):
        LLM(vision_model(), dtype="fp32", executor="library")


def test_the_error_for_another_image_model_names_those_that_work(tmp_path):
    size = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config={"model_type": "persimmon", "vocab_size": 50, "num_hidden_layers": 1, **size},
        vision_config={"num_hidden_layers": 1, "image_size": 16, "patch_size": 4, **size},
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigurationError, match="supports only gemma3, idefics3, smolvlm, qwen2_vl"
    ):
        LLM(tmp_path, dtype="fp32")
