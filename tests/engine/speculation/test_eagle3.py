"""EAGLE-3 heads: they draft what a reference in plain torch drafts from the same files."""

from __future__ import annotations

import json
import shutil
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ConfigurationError
from engine import LLM
from kernels.cpu.shared_library import unavailable_reason
from tests.engine.speculation.eagle_heads import write_head
from tests.engine.speculation.heads import (
    PAGED,
    RESERVING,
    check,
    check_strategy,
    proposer_of,
    recorded,
)
from tests.engine.speculation.test_same_answers import ALWAYS, SMALL, answers

if unavailable_reason() is not None:
    pytest.skip("torch's products depend on the batch", allow_module_level=True)

SEVEN_LAYERS = {"num_hidden_layers": 7}
DEFAULT = (2, 3, 4)
"""Of seven layers: the third, the middle one, and the third from the end."""


@pytest.fixture(scope="module")
def heads(tiny_model, tmp_path_factory):
    """Return a function (architecture) → model, head, reference, and the plain answers."""

    @cache
    def of(architecture: str) -> Any:
        name = f"{architecture}-seven"
        path = tiny_model(architecture, is_wide=True, changes=SEVEN_LAYERS, name=name)
        head, reference = write_head(path, tmp_path_factory.mktemp("eagle3") / "head", DEFAULT)
        plain = answers(LLM(path, batching="none", num_kv_blocks=90, **SMALL))
        return path, head, reference, plain

    return of


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize(
    ("architecture", "batching", "overlaps"),
    [
        *(("llama", *how) for how in (*PAGED, *RESERVING)),
        *((architecture, *how) for architecture in ("gpt_oss", "qwen3") for how in PAGED),
        ("qwen3_moe", "paged", False),
    ],
)
def test_drafts_are_those_of_the_reference(heads, architecture, batching, overlaps):
    model, head, reference, plain = heads(architecture)
    # Blocks out of a window are freed.
    fewer = {"num_kv_blocks": 15 if overlaps else 13} if architecture == "gpt_oss" else {}
    check_strategy(
        model,
        reference,
        plain,
        batching,
        **fewer,
        overlaps=overlaps,
        speculative_method="eagle3",
        speculative_draft_model=str(head),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
    ],
    ids=["ModelOpt", "speculators"],
)
def test_a_config_may_name_the_layers(heads, changes, tmp_path):
    """With tables of its own embedding, and as vLLM configures it."""
    model = heads("llama")[0]
    own = shutil.copytree(model, tmp_path / "model")
    head, reference = write_head(own, tmp_path / "head", (1, 3, 5), **changes)
    weights = load_file(head / "model.safetensors")
    torch.manual_seed(1)
    embedding = load_file(own / "model.safetensors")["model.embed_tokens.weight"]
    weights["embed_tokens.weight"] = embedding + 0.3 * torch.randn_like(embedding)
    named = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    save_file(named, head / "model.safetensors", metadata={"format": "pt"})
    reference.weights = weights
    config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    llm = LLM(own, speculative_config=config, **ALWAYS, **SMALL)
    found = recorded(proposer_of(llm))
    answers(llm)
    check(reference, found)


def test_a_head_that_does_not_fit_is_an_error(heads, tiny_model, tmp_path):
    model, head, _, _ = heads("llama")
    qwen2 = tiny_model("qwen2", is_wide=True)
    pickled = shutil.copytree(head, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    foreign = shutil.copytree(head, tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    cases = [
        (model, model, "has 7 layers, but an EAGLE-3 head has one"),
        (model, foreign, "its vocabulary has 96 tokens"),
        (model, pickled, "neither model.safetensors nor"),
        (qwen2, head, "runs with models of type llama, qwen3, qwen3_moe, gpt_oss, not qwen2"),
    ]
    for target, draft, problem in cases:
        with pytest.raises(ConfigurationError, match=r"option\.speculative_") as raised:
            LLM(
                target,
                speculative_draft_model=str(draft),
                speculative_method="eagle3",
                **SMALL,
            )
        assert problem in str(raised.value)
