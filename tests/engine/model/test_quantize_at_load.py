"""option.quantize: weights are quantized while they are loaded."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.errors import ConfigurationError
from engine import LLM
from engine.loading import own_decoder
from engine.model.quantization.at_load import HEAD_PRECISIONS, QUANTIZERS, quantize_weight
from engine.model.quantization.schemes import QuantizingLoader
from tests.engine.greedy_answers import STRATEGIES, prompts, tokens
from tests.engine.model.conftest import logits

pytestmark = pytest.mark.usefixtures("exact_rows")
CPU = torch.device("cpu")
MAX_ERRORS = {"fp8": 0.04, "int8": 0.01, "int4": 0.12}
"""Limits for the norm of the error, relative to that of a weight of normal random values."""


def generate_with(model, num_new=14):
    """Return the greedy answers of a transformers model to `prompts`."""
    answers = []
    for prompt in prompts():
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_new, do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_tokens_equal_those_of_the_rounded_weights(tiny_model, precision):
    """All strategies give the tokens of the rounded weights.

    The head is int8 or not rounded; embeddings and norms are never rounded.
    """
    folder = tiny_model("llama")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            own = HEAD_PRECISIONS.get(precision) if name == "lm_head" else precision
            if isinstance(module, torch.nn.Linear) and own is not None:
                module.weight.copy_(quantize_weight(module.weight, own, CPU).dequantized())
    expected = generate_with(model)
    for batching, options in STRATEGIES.items():
        llm = LLM(folder, batching=batching, dtype="fp32", quantize=precision, **options)
        assert tokens(llm, ignore_eos=True) == expected, batching
        assert llm.facts.decoder == "own (llama)"
        assert llm.facts.quantization == precision


@pytest.mark.matrix
@pytest.mark.parametrize(
    "architecture",
    [
        "gpt2",
        "gpt_neox",
        "mixtral",
        "qwen2_moe",
        "granitemoe",
        "gpt_oss",
        "ernie4_5",
        "falcon_h1",
        "nemotron_h",
    ],
)
@pytest.mark.parametrize("precision", QUANTIZERS)
def test_families(tiny_model, load, architecture, precision):
    """Loading compares each family with transformers' layers that have the rounded weights.

    The weights of experts are rounded, too.
    """
    folder = tiny_model(architecture)
    rounded, whole = load(folder, precision=precision), load(folder)
    if precision == "fp8":  # no kernel of CPUs reads it: it is unpacked
        assert rounded.num_bytes == whole.num_bytes
    else:
        assert rounded.num_bytes < whole.num_bytes
    assert rounded.num_weights == whole.num_weights
    assert not torch.equal(logits(rounded), logits(whole))


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_a_tied_head_leaves_the_embedding_as_it_is(tiny_model, load, precision):
    folder = tiny_model("gemma", changes={"tie_word_embeddings": True})
    decoder, whole = load(folder, precision=precision), load(folder)
    assert torch.equal(decoder.embedding, whole.embedding)
    rows = torch.randn(3, decoder.embedding.shape[1])
    own = HEAD_PRECISIONS.get(precision)
    weight = whole.embedding
    if own is not None:
        weight = quantize_weight(weight, own, CPU).dequantized()
    assert torch.allclose(decoder.head(rows), rows @ weight.T, atol=1e-5)
    assert torch.equal(decoder.head(rows), whole.head(rows)) == (own is None)


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_random_weights(tiny_model, load, precision):
    folder = tiny_model("mixtral")
    dummy = load(folder, precision=precision, is_dummy=True)
    assert dummy.num_bytes == load(folder, precision=precision).num_bytes


@pytest.mark.parametrize("precision", QUANTIZERS)
@pytest.mark.parametrize("shape", [(3, 256), (1500, 48), (5, 7)])
def test_rounding_errors(precision, shape):
    """In int4, groups have the usual 128 inputs, only 16, or all inputs of a row.

    One weight has more rows than are quantized at once.
    """
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0.0
    restored = quantize_weight(weight, precision, CPU).dequantized()
    error = (restored - weight).norm() / weight.norm()
    assert error < MAX_ERRORS[precision]
    assert torch.equal(restored[0], weight[0])


def test_int4_groups_adapt_to_the_inputs():
    sizes = {256: 128, 192: 64, 48: 16, 24: 24}
    for inputs, group_size in sizes.items():
        weight = quantize_weight(torch.ones(2, inputs), "int4", CPU)
        assert weight.group_size == group_size
        assert weight.scales.shape == weight.zeros.shape == (2, inputs // group_size)


def test_at_most_one_weight_is_in_memory_unquantized(tiny_model, load, monkeypatch):
    """Each weight is quantized before the next one is read."""
    quantized, rows = QuantizingLoader.quantized, []

    def watch(loader, weight, *, is_head=False):
        if not is_head:
            rows.append(len(weight))
        return quantized(loader, weight, is_head=is_head)

    monkeypatch.setattr(QuantizingLoader, "quantized", watch)
    load(tiny_model("llama"), precision="int8")
    assert max(rows) == 48, "one part of a merged layer"


def test_layers_that_transformers_computes_cannot_be_quantized(tiny_model, monkeypatch):
    with pytest.raises(
        ConfigurationError, match=r"option\.quantize=int8 needs .* biogpt is not in"
    ):
        LLM(tiny_model("biogpt"), dtype="fp32", quantize="int8")
    for options in ({"decoder": "transformers"}, {"executor": "library", "batching": "none"}):
        with pytest.raises(ConfigurationError, match=r"option\.quantize=int8 needs Longshore's"):
            LLM(tiny_model("llama"), dtype="fp32", quantize="int8", **options)
    monkeypatch.setattr(own_decoder, "MAX_RELATIVE_ERROR", {torch.float32: -1.0})
    with pytest.raises(
        ConfigurationError, match=r"option\.quantize=int8 needs .* different logits"
    ):
        LLM(tiny_model("llama"), dtype="fp32", quantize="int8")


def test_other_tasks_of_models_that_transformers_computes_cannot_be_quantized(tiny_model):
    message = r"quantize=int8 needs .* transformers' code computes text-embedding: .* not in"
    with pytest.raises(ConfigurationError, match=message):
        LLM(tiny_model("gpt2"), task="text-embedding", quantize="int8")


def test_the_name_of_a_checkpoints_method_is_an_error_for_other_checkpoints(tiny_model):
    with pytest.raises(ConfigurationError, match=r"option\.quantize=awq: the checkpoint is not"):
        LLM(tiny_model("llama"), dtype="fp32", quantize="awq")
