"""Tiny random models that take images, with their processors, and pictures for them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Glm4vImageProcessorPil,
    Glm46VImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PixtralImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

EOS = 256
TILE = 16
"""Width and height of a tile in pixels. Pictures are scaled to two tiles on the longer side."""
SPECIAL = (
    "<eos>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
TOKENS = {
    "gemma3": {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"},
    "internvl": {"start_image_token": "<begin>", "end_image_token": "<end>"},
    "mistral3": {"image_break_token": "<break>", "image_end_token": "<end>"},
}
"""Names of further tokens by model type."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def save_vision_model(folder: Path, model_type: str, *, is_wide: bool = False) -> Path:
    """Write the model, its processor and its chat template unless they exist; return the folder.

    is_wide: with head sizes that the C++ kernels support.
    """
    path = folder / (f"{model_type}-wide" if is_wide else model_type)
    if path.exists():
        return path
    tokenizer = _tokenizer(TOKENS.get(model_type, {}))
    head_dim = 32 if is_wide else 8
    settings = {"vocab_size": len(tokenizer), "hidden_size": 4 * head_dim, "intermediate_size": 48,
                "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 1024, "head_dim": head_dim, "eos_token_id": EOS,
                "bos_token_id": None, "pad_token_id": 0}  # fmt: skip
    make = MAKERS.get(model_type, _idefics)
    changes, processor = make(model_type, settings, tokenizer)
    config = CONFIG_MAPPING[model_type](
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
        **changes,
    )
    torch.manual_seed(11)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "norm" not in name:
                weight.normal_(0, 1.4 / weight[0].numel() ** 0.5)
            elif name.endswith("proj.bias"):
                weight.normal_(0, 0.2)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    processor.save_pretrained(path)
    if model_type == "mistral3":
        (path / "processor_config.json").write_text(json.dumps(TOKENS[model_type]))
    if model_type == "qwen3_vl_moe":  # as published, which transformers reads but does not write
        file = path / "model.safetensors"
        tensors = load_file(file)
        for name in tensors:
            if ".experts." in name:
                tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, file, {"format": "pt"})
    (path / "chat_template.jinja").write_text(in_text(model_type, TEMPLATE))
    return path


def in_text(model_type: str, text: str) -> str:
    """Return a text in which the token that the model's processor expects replaces `<image>`."""
    return text.replace("<image>", "<begin>") if model_type == "gemma3" else text


def _idefics(model_type: str, settings: dict[str, object], tokenizer: PreTrainedTokenizerFast):
    kind = SmolVLMImageProcessorPil if model_type == "smolvlm" else Idefics3ImageProcessorPil
    images = kind(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": TILE, "patch_size": 4}  # fmt: skip
    text = {"model_type": "llama", **settings}
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    return {"text_config": text, "vision_config": vision, "scale_factor": 2}, processor


def _gemma(model_type: str, settings: dict[str, object], tokenizer: PreTrainedTokenizerFast):
    """Sliding windows have 6 tokens: fewer than the prompts have, but more than an image's 4."""
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE}),
        tokenizer,
        in_text(model_type, TEMPLATE),
        4,
    )
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": TILE, "patch_size": 4}  # fmt: skip
    text = {
        "model_type": "gemma3_text",
        **settings,
        "vocab_size": len(tokenizer),
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    text["layer_types"] = text["layer_types"][:3]
    changes = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    return changes, processor


def _qwen(model_type: str, settings: dict[str, object], tokenizer: PreTrainedTokenizerFast):
    half = settings.pop("head_dim") // 2
    sections = [half // 4, half // 4, half // 2]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2}
    if model_type == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": settings["hidden_size"], "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 16, "intermediate_size": 24, "window_size": 16}
        vision |= {"fullatt_block_indexes": [1], "out_hidden_size": settings["hidden_size"]}
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 32 * 32}, patch_size=4
    )
    text = {**settings, "rope_parameters": rope}
    return {"text_config": text, "vision_config": vision}, images


def _qwen3(model_type: str, settings: dict[str, object], tokenizer: PreTrainedTokenizerFast):
    """The encoder's first and last layers are added after the language model's first two."""
    third = settings["head_dim"] // 2 // 3
    sections = [settings["head_dim"] // 2 - 2 * third, third, third]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    vision = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
              "patch_size": 4, "out_hidden_size": settings["hidden_size"],
              "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text = {**settings, "rope_parameters": rope} | (experts if model_type.endswith("moe") else {})
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 32 * 32}, patch_size=4
    )
    return {"text_config": text, "vision_config": vision}, images


def _glm(model_type: str, settings: dict[str, object], tokenizer: PreTrainedTokenizerFast):
    """Half of each head rotates: by row and column."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [0, 1, 1]}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
              "image_size": 32, "patch_size": 4,
              "out_hidden_size": settings["hidden_size"]}  # fmt: skip
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
               "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
    text = {**settings, "rope_parameters": rope} | (experts if model_type.endswith("moe") else {})
    kind = Glm46VImageProcessorPil if model_type == "glm46v" else Glm4vImageProcessorPil
    images = kind(size={"shortest_edge": 64, "longest_edge": 2 * 32 * 32}, patch_size=4)
    return {"text_config": text, "vision_config": vision}, images


def _mistral(model_type: str, settings: dict[str, object], tokenizer: PreTrainedTokenizerFast):
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 2, "patch_size": 4, "image_size": 32}  # fmt: skip
    text = {"model_type": "mistral", **settings, "sliding_window": None}
    images = PixtralImageProcessorPil(size={"longest_edge": 2 * TILE})
    return {"text_config": text, "vision_config": vision}, images


def _intern(model_type: str, settings: dict[str, object], tokenizer: PreTrainedTokenizerFast):
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 2, "patch_size": 4, "image_size": TILE}  # fmt: skip
    del settings["head_dim"]
    text = {"model_type": "qwen2", **settings}
    images = GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE})
    return {"text_config": text, "vision_config": vision, "image_seq_length": 4}, images


MAKERS = {
    "gemma3": _gemma,
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "glm46v": _glm,
    "internvl": _intern,
    "mistral3": _mistral,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
}


def _tokenizer(names: dict[str, str]) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_special_tokens([name for name in names.values() if name not in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", extra_special_tokens=names
    )


def picture(seed: int, width: int = 32, height: int = 32, kind: str = "PNG") -> bytes:
    """Return an image file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
