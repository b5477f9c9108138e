"""Gemma 4 beside transformers' `generate`: its sizes, and the features that meet cache groups."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from core.errors import ConfigurationError
from core.sampling import SamplingParams
from engine import LLM
from engine.loading.dequantized import round_weights
from engine.model.families import FAMILIES
from tests.engine.greedy_answers import NUM_NEW, STRATEGIES, generate, prompts, tokens
from tests.engine.ranks.engines import answers, ranked_engine
from tests.engine.tiny_models import BESIDE_MLP, INPUTS, OWN, save_tiny_model

DENSE = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
HELD_OUT = {
    "31B": DENSE
    | {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 13,
       "num_key_value_heads": 4, "num_global_key_value_heads": 1, "hidden_size": 64,
       "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
    "26B-A4B": DENSE
    | BESIDE_MLP
    | {"num_hidden_layers": 4, "num_experts": 6, "top_k_experts": 3, "global_head_dim": 16,
       "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "E2B": DENSE
    | INPUTS
    | {"attention_k_eq_v": False, "num_key_value_heads": 1, "num_hidden_layers": 8,
       "num_kv_shared_layers": 4, "use_double_wide_mlp": True, "sliding_window": 11,
       "layer_types": ["sliding_attention", "full_attention"] * 4},
    "one size": DENSE
    | {"num_hidden_layers": 3, "global_head_dim": 8, "num_global_key_value_heads": None,
       "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
}  # fmt: skip
POOLS = {"31B": 10, "26B-A4B": 8, "E2B": 10, "one size": 9}
"""Blocks with which `paged` has to preempt."""
SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 7}


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Return a function (name) → the folder of a tiny model."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gemma4")
    return lambda name: save_tiny_model("gemma4_text", folder, changes=HELD_OUT[name], name=name)


@pytest.fixture(scope="module")
def expected(held_out):
    """Return a function (name) → the answers of transformers' `generate`."""
    known = {}

    def answers_of(name):
        if name not in known:
            known[name] = generate(held_out(name), eos_token_id=None)
        return known[name]

    return answers_of


@pytest.mark.matrix
@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("name", HELD_OUT)
def test_tokens_equal_those_of_generate(held_out, expected, name, batching):
    llm = LLM(
        held_out(name), batching=batching,
        num_kv_blocks=POOLS[name] if batching == "paged" else 40, **SMALL, **STRATEGIES[batching],
    )  # fmt: skip
    assert llm.facts.decoder == "own (gemma4_text)"
    assert tokens(llm, ignore_eos=True) == expected(name)
    strategy = llm.llm_engine.strategy
    assert len(strategy.memory.layout.groups) > 1
    assert (batching == "paged") == (strategy.num_preemptions > 0)
    assert strategy.memory.num_held_blocks == 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", HELD_OUT)
def test_prefixes_are_found_and_blocks_are_swapped(held_out, expected, name):
    """The third time, prompts find their first blocks, and windows as they were then."""
    llm = LLM(held_out(name), num_kv_blocks=40, **SMALL)
    for _ in range(3):
        assert tokens(llm, ignore_eos=True) == expected(name)
    assert llm.llm_engine.strategy.num_prefix_hits > 0
    llm = LLM(
        held_out(name), num_kv_blocks=POOLS[name], preemption_mode="swap", swap_space_gib=0.01,
        **SMALL,
    )  # fmt: skip
    assert tokens(llm, ignore_eos=True) == expected(name)
    assert llm.llm_engine.strategy.num_swaps > 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", HELD_OUT)
def test_two_ranks(held_out, expected, name):
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with ranked_engine(held_out(name), 2, num_kv_blocks=16) as (engine, _):
        assert answers(engine, prompts(), params) == expected(name)


@pytest.mark.matrix
@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize("name", HELD_OUT)
def test_int8(held_out, name):
    folder = held_out(name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    round_weights(model, FAMILIES["gemma4_text"].experts, "int8")
    llm = LLM(folder, quantize="int8", num_kv_blocks=POOLS[name], **SMALL)
    assert llm.facts.decoder == "own (gemma4_text)"
    assert tokens(llm, ignore_eos=True) == generate(folder, model, eos_token_id=None)


def test_files_may_have_k_and_v_of_layers_that_read_those_of_others(tiny_model, tmp_path):
    """Published files have them."""
    folder = tiny_model("gemma4_text")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.{}.self_attn.k_proj.weight"
    tensors[name.format(5)] = tensors[name.format(1)].clone()
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert AutoConfig.from_pretrained(tmp_path).num_kv_shared_layers == 4
    assert tokens(LLM(tmp_path, **SMALL)) == tokens(LLM(folder, **SMALL))


@pytest.mark.matrix
def test_the_published_form_answers_text(tmp_path):
    """Gemma 4 is published with encoders of images and sound, under other names of tensors."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
              "num_attention_heads": 2, "num_key_value_heads": 2,
              "position_embedding_size": 16}  # fmt: skip
    names = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id",
             "boa_token_id", "eoa_token_index")  # fmt: skip
    text = CONFIG_MAPPING["gemma4_text"](**OWN["gemma4_text"])
    config = CONFIG_MAPPING["gemma4"](
        text_config=text.to_dict(), vision_config=vision,
        **{name: 90 + number for number, name in enumerate(names)},
    )  # fmt: skip
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() >= 2:
                tensor.normal_(0, 1.4 / tensor.shape[-1] ** 0.5)
            elif tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, num_kv_blocks=14, **SMALL)
    rest = "the language model of gemma4; images are refused"
    assert llm.facts.decoder == f"own (gemma4_text), {rest}"
    expected = generate(tmp_path, model, eos_token_id=None)
    assert tokens(llm, ignore_eos=True) == expected
    assert len({token for answer in expected for token in answer}) > 5


def test_ranks_that_cannot_divide_the_heads_say_what_can(held_out):
    error = "degree=3: layers have different numbers of KV heads, .* one of 1, 2, 4$"
    with pytest.raises(ConfigurationError, match=error), ranked_engine(held_out("31B"), 3):
        pass
