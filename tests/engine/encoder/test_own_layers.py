"""Our own layers give the hidden states and the answers of transformers' layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from core.errors import ConfigurationError
from engine.encoder import encoder, own_layers, texts
from engine.encoder.families import FAMILIES
from engine.encoder.own_layers import own_encoder, use_own_layers
from engine.encoder.texts import PackedTexts, Sight
from engine.loading.model_source import ModelSource
from kernels.cpu.shared_library import unavailable_reason

SIZES = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
         "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
DISTIL = {"vocab_size": 60, "dim": 64, "n_layers": 3, "n_heads": 2, "hidden_dim": 48,
          "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
CONFIGS = {
    "bert": SIZES,
    "roberta": SIZES,
    "xlm-roberta": SIZES,
    "camembert": SIZES,
    "distilbert": DISTIL,
    "mpnet": SIZES,
    "modernbert": SIZES | {"local_attention": 8, "num_hidden_layers": 4},
    "nomic_bert": SIZES,
    "gte": SIZES,
    "eurobert": SIZES | {"num_key_value_heads": 1},
    "llama": SIZES | {"num_key_value_heads": 1},
    "mistral": SIZES | {"num_key_value_heads": 1, "sliding_window": None, "head_dim": 32},
    "qwen2": SIZES | {"num_key_value_heads": 1},
    "qwen3": SIZES | {"num_key_value_heads": 1, "head_dim": 32},
}
HEADS = (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
)
LENGTHS = (7, 1, 30, 7, 22)


def make(name, kind: Any = AutoModel, **settings):
    """Return a random model whose texts differ clearly."""
    torch.manual_seed(5)
    model = kind.from_config(CONFIG_MAPPING[name](**CONFIGS[name] | settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    return model


def source_of(model, tmp_path, **settings):
    source = ModelSource(
        model_dir=tmp_path, config=model.config, dtype=torch.float32,
        device=torch.device("cpu"), is_dummy=True,
    )  # fmt: skip
    return replace(source, **settings)


def batch(side="right", has_types=True):
    torch.manual_seed(6)
    ids = torch.randint(0, 60, (len(LENGTHS), max(LENGTHS)))
    columns = torch.arange(max(LENGTHS))
    columns = columns if side == "right" else columns.flip(0)
    mask = (columns < torch.tensor(LENGTHS)[:, None]).long()
    types = {"token_type_ids": (columns % 2).expand_as(ids)} if has_types else {}
    return {"input_ids": ids.where(mask == 1, 1), "attention_mask": mask, **types}


def outputs(model, inputs):
    """Return the first output, of the texts' tokens only if it has one for each token."""
    with torch.inference_mode():
        output = model(**inputs)[0]
    return output[inputs["attention_mask"].bool()] if output.shape[:2] == (5, 30) else output


def check_counts_its_bytes(model):
    own = own_encoder(model)
    assert own is not None
    assert own.num_bytes > 0


@pytest.mark.matrix
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_batch_equals_that_of_transformers(tmp_path, name, side):
    """Padding may be on either side, where heads that read the first token would read padding."""
    config = CONFIG_MAPPING[name]
    heads = HEADS[:1] if side == "left" else HEADS if name == "bert" else HEADS[:2]
    for kind in filter(lambda kind: config in kind._model_mapping, heads):
        model = make(name, kind)
        inputs = batch(side, getattr(model.config, "type_vocab_size", 0) > 1)
        expected = outputs(model, inputs)
        assert use_own_layers(model, source_of(model, tmp_path), "x") == f"own ({name})"
        torch.testing.assert_close(outputs(model, inputs), expected, atol=2e-5, rtol=1e-4)
        check_counts_its_bytes(model)


def forbid_one_call(monkeypatch):
    """Have layers compute one by one, as on a GPU or without a compiler."""
    monkeypatch.setattr(encoder.OneCall, "__call__", lambda *args: None)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"mpnet"}))
def test_one_call_equals_the_layers_one_by_one(tmp_path, monkeypatch, name):
    """And a text has the same bits alone. MPNet's bias has no kernel."""
    if unavailable_reason():
        pytest.skip("no library")
    model = make(name)
    inputs = batch(has_types=False)
    use_own_layers(model, source_of(model, tmp_path), "x")
    got = outputs(model, inputs)
    alone = {"input_ids": inputs["input_ids"][2:3], "attention_mask": torch.ones(1, 30).long()}
    assert torch.equal(outputs(model, alone)[0], got[8:38])
    with monkeypatch.context() as patches:
        forbid_one_call(patches)
        expected = outputs(model, inputs)
    assert not torch.equal(got, expected)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_layers_without_a_kernel_compute_one_by_one(tmp_path):
    model = make("bert", hidden_size=56)
    inputs = batch()
    expected = outputs(model, inputs)
    use_own_layers(model, source_of(model, tmp_path), "x")
    torch.testing.assert_close(outputs(model, inputs), expected, atol=2e-5, rtol=1e-4)


WINDOWS = [
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen2", {"is_causal": False}),
]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("name", "settings"), WINDOWS)
def test_a_decoder_with_windows_or_without_order(tmp_path, monkeypatch, name, settings, side):
    """The windows are longer than some texts, and the comparison at the start has shorter ones."""
    if side == "left":
        forbid_one_call(monkeypatch)
    monkeypatch.setattr(own_layers, "PROBE_WINDOW", 5)
    monkeypatch.setattr(texts, "WINDOW_QUERIES", 4)
    model = make(name, **settings)
    inputs = batch(side, has_types=False)
    expected = outputs(model, inputs)
    if "sliding_window" in settings:
        model.config.sliding_window = 99
        assert not torch.equal(outputs(model, inputs), expected)
        model.config.sliding_window = settings["sliding_window"]
    assert use_own_layers(model, source_of(model, tmp_path), "x") == f"own ({name})"
    torch.testing.assert_close(outputs(model, inputs), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "settings", "least"),
    [
        ("bert", {"dtype": torch.bfloat16}, 0.999),
        ("bert", {"precision": "int8"}, 0.999),
        ("bert", {"precision": "int4"}, 0.9),
        ("bert", {"precision": "fp8"}, 0.99),
        ("modernbert", {"precision": "int8"}, 0.999),
        ("mpnet", {"precision": "int4"}, 0.9),
        ("qwen3", {"precision": "fp8"}, 0.99),
        ("qwen3", {"dtype": torch.bfloat16, "precision": "int8"}, 0.999),
    ],
)
def test_low_precision_and_quantized_layers(tmp_path, name, settings, least):
    model = make(name)
    inputs = batch(has_types=False)
    expected = outputs(model, inputs)
    model = model.to(settings.get("dtype", torch.float32))
    description = use_own_layers(model, source_of(model, tmp_path, **settings), "x")
    assert description == "own (" + ", ".join(filter(None, [name, settings.get("precision")])) + ")"
    similarity = cosine_similarity(outputs(model, inputs).float(), expected)
    assert least < similarity.min() < 1 - 1e-7
    check_counts_its_bytes(model)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("electra", {}, "model type electra is not in the family table"),
        ("bert", {"is_decoder": True}, "different hidden states"),
    ],
)
def test_models_that_compute_something_else_keep_their_layers(
    tmp_path, monkeypatch, name, settings, reason
):
    monkeypatch.setitem(CONFIGS, "electra", SIZES)
    model = make(name, **settings)
    inputs = batch()
    expected = outputs(model, inputs)
    source = source_of(model, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        description = use_own_layers(model, replace(source, dtype=dtype), "x")
        assert description.startswith(f"transformers' code ({name}): ")
        assert reason in description
    assert torch.equal(outputs(model, inputs), expected)
    with pytest.raises(ConfigurationError, match=f"quantize=int8 needs .* computes x: .*{reason}"):
        use_own_layers(model, replace(source, precision="int8"), "x")


def test_a_wrong_kernel_is_found_in_low_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(own_layers, "MAX_KERNEL_ERROR", 0.0)
    model = make("bert").bfloat16()
    source = source_of(model, tmp_path, dtype=torch.bfloat16)
    assert "different hidden states" in use_own_layers(model, source, "x")


def test_arguments_that_would_be_ignored_are_refused(tmp_path):
    model = make("bert")
    use_own_layers(model, source_of(model, tmp_path), "x")
    with pytest.raises(ValueError, match="do not take inputs_embeds"):
        model(torch.ones(1, 3, dtype=torch.long), inputs_embeds=torch.ones(1, 3, 32))


SIGHTS = [
    (Sight(), False),
    (Sight(), True),
    (Sight(window=3), False),
    (Sight(window=3, is_causal=True), False),
    (Sight(is_causal=True), False),
]


@pytest.mark.parametrize(("sight", "has_bias"), SIGHTS)
def test_attention_padded_for_one_call_equals_that_of_each_length(monkeypatch, sight, has_bias):
    """Both equal the attention of each text alone, with a mask of all its tokens."""
    monkeypatch.setattr(texts, "WINDOW_QUERIES", 8)
    torch.manual_seed(7)
    mask = batch()["attention_mask"]
    query, key, value = torch.randn(3, int(mask.sum()), 2, 16)
    bias = torch.randn(2, 40, 40) if has_bias else None
    distances = torch.arange(30)[:, None] - torch.arange(30)
    is_seen = torch.ones(30, 30, dtype=torch.bool)
    if sight.window:
        is_seen = distances.abs() <= sight.window
    if sight.is_causal:
        is_seen = is_seen & (distances >= 0)
    seen = torch.zeros(30, 30).masked_fill(~is_seen, -torch.inf)
    expected, start = [], 0
    for length in sorted(LENGTHS):
        rows = slice(start, start + length)
        scores = seen if bias is None else seen + bias[:, :30, :30]
        alone = [part[rows].transpose(0, 1)[None] for part in (query, key, value)]
        attended = scaled_dot_product_attention(*alone, attn_mask=scores[..., :length, :length])
        expected.append(attended[0].transpose(0, 1))
        start += length
    for pads in (False, True):
        got = PackedTexts(mask, pads=pads).attend(query, key, value, sight, bias)
        torch.testing.assert_close(got, torch.cat(expected))
