"""Ranks that split a model compute what transformers' own code computes."""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers import AutoConfig

from core.errors import ConfigurationError
from core.sampling import SamplingParams
from engine.loading import random_weights
from engine.loading.gate import relative_error
from engine.loading.model_source import ModelSource
from engine.loading.own_decoder import load_own_decoder
from engine.loading.random_weights import random_tensor
from engine.model.families import FAMILIES
from engine.phases import Phases
from tests.engine.model.conftest import expected_logits, logits
from tests.engine.ranks.engines import answers, ranked_engine
from tests.engine.ranks.threads import run_ranks
from tests.engine.tiny_models import OWN

UNEVEN = {
    "llama": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
              "intermediate_size": 50},
    "olmo2": {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 6},
    "gpt_neox": {"hidden_size": 40, "num_attention_heads": 5},
    "gpt_oss": {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 20},
}  # fmt: skip
"""Heads and widths that two, three and four ranks cannot share evenly."""
FOUR_KEY_HEADS = {"linear_num_key_heads": 4}


def split_logits(folder, size, **changes):
    """Return each rank's bytes of weights, and the logits that it gets."""
    settings = {"dtype": torch.float32, "device": torch.device("cpu")} | changes
    config = AutoConfig.from_pretrained(folder)
    source = ModelSource(model_dir=folder, config=config, **settings)

    def work(group):
        decoder = load_own_decoder(source, 128, Phases(), group)
        return decoder.num_bytes, logits(decoder, source.dtype)

    return run_ranks(size, work)


@pytest.mark.matrix(cases=8)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", OWN)
def test_every_family(tiny_model, architecture, size):
    is_delta_net = size == 4 and FAMILIES[architecture].state == "linear_attn"
    folder = tiny_model(architecture, changes=FOUR_KEY_HEADS if is_delta_net else {})
    expected = expected_logits(folder)
    for _, split in split_logits(folder, size):
        torch.testing.assert_close(split, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("architecture", UNEVEN)
def test_heads_and_widths_that_do_not_divide(tiny_model, architecture, size):
    folder = tiny_model(architecture, changes=UNEVEN[architecture])
    expected = expected_logits(folder)
    for _, split in split_logits(folder, size):
        torch.testing.assert_close(split, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("vocabulary", "size"), [(7, 2), (5, 3), (5, 4), (101, 4)])
def test_vocabularies_that_do_not_divide(tiny_model, vocabulary, size, is_tied):
    """With 5 tokens and 4 ranks, the last rank has none, and with 3 ranks one of its two."""
    changes = {"vocab_size": vocabulary, "tie_word_embeddings": is_tied}
    changes |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    folder = tiny_model("llama", changes=changes)
    expected = expected_logits(folder)
    for _, split in split_logits(folder, size):
        torch.testing.assert_close(split, expected, atol=2e-5, rtol=1e-4)
    params = SamplingParams(temperature=1000, seed=3, max_tokens=20, ignore_eos=True, logprobs=4)
    with ranked_engine(folder, 1) as (whole, _), ranked_engine(folder, size) as (split, _):
        [sampled] = answers(split, [[0, 2, 3]], params)
        assert [sampled] == answers(whole, [[0, 2, 3]], params)
    assert set(sampled) <= {*range(vocabulary)}


def test_a_tied_head_shares_the_split_embedding(tiny_model, monkeypatch):
    """Panels, which a CPU uses, are a second copy."""
    monkeypatch.setattr("engine.model.loader.uses_panels", lambda *_: False)
    folder = tiny_model("llama", changes={"tie_word_embeddings": True})
    [(tied, split), _] = split_logits(folder, 2)
    torch.testing.assert_close(split, expected_logits(folder), atol=2e-5, rtol=1e-4)
    [(untied, _), _] = split_logits(tiny_model("llama"), 2)
    assert untied - tied >= 49 * 32 * 4, "half of 97 tokens, rounded up, in fp32"


def test_each_rank_holds_its_share_only(tiny_model):
    folder = tiny_model("llama")
    [(whole, _)] = split_logits(folder, 1)
    halves = [num_bytes for num_bytes, _ in split_logits(folder, 2)]
    assert sum(halves) < 1.03 * whole, "norms are on both ranks, and panels may be padded"
    assert max(halves) < 0.6 * whole, "the MLP's 48 columns are split into 16 and 32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(tiny_model, dtype):
    folder = tiny_model("llama")
    [(_, split), _] = split_logits(folder, 2, dtype=dtype)
    expected = expected_logits(folder)
    assert relative_error(split.float(), expected) < 0.05


def test_random_weights_are_the_same_on_every_rank(tiny_model):
    """Each rank makes the weights itself. The trial of the first layers would find a difference."""
    folder = tiny_model("llama")
    [(_, whole)] = split_logits(folder, 1, is_dummy=True)
    for _, split in split_logits(folder, 2, is_dummy=True):
        torch.testing.assert_close(split, whole, atol=2e-5, rtol=1e-4)


def test_random_weights_are_made_tensor_by_tensor(tiny_model, monkeypatch):
    """A rank frees each whole tensor before it makes many more."""
    made, alive = [], []

    def watch(name, like, deviation, device):
        tensor = random_tensor(name, like, deviation, device)
        made.append(weakref.ref(tensor))
        tensors = [reference() for reference in tuple(made)]  # the other rank adds to `made`, too
        alive.append(sum(other.nbytes for other in tensors if other is not None))
        return tensor

    monkeypatch.setattr(random_weights, "random_tensor", watch)
    folder = tiny_model("llama", changes={"num_hidden_layers": 12, "layer_types": None})
    (shard_bytes, _), _ = split_logits(folder, 2, is_dummy=True)
    assert len(alive) > 2 * 12 * 9, "each of the two ranks makes all tensors"
    assert max(alive) < shard_bytes, "the whole tensors take less than one rank's weights"


def test_more_ranks_than_heads_are_refused(tiny_model):
    with pytest.raises(ConfigurationError, match="4 attention heads, so at most 4 ranks"):
        split_logits(tiny_model("llama"), 5)
