"""`longshore plan` for models with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from container.__main__ import main
from container.capacity.decoder import decoder_from_directory
from container.capacity.draft import with_draft
from core.configuration.options import Options, make_options
from core.errors import ConfigurationError
from tests.container.capacity.planned import LLAMA_8B, planned, write_header

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("changes", [{}, {"quantize": "int8", "tensor_parallel_degree": "2"}])
def test_a_draft_model_takes_memory(
    model: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    """It has an eighth of the layers, is not quantized, and is whole on the first of two GPUs."""
    draft, instance = model / "small", "ml.g6e.12xlarge"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 4}))
    weights = decoder_from_directory(draft, Options()).weights_bytes
    alone = planned(model, "paged", instance, **changes, speculative_method="ngram")
    both = planned(model, "paged", instance, **changes, speculative_draft_model="small")
    per_block = 16 * 4 * 2 * 8 * 128 * 2
    expected = (alone.num_blocks * alone.block_bytes - weights) / (both.block_bytes + per_block)
    assert both.num_blocks == pytest.approx(expected, abs=1)
    with pytest.raises(
        ConfigurationError, match=r"weights \(.*\), the draft model \(3,668.1 MiB\)"
    ):
        planned(model, "paged", "ml.g5.2xlarge", speculative_draft_model="small")
    off = {"speculative_draft_model": "small", "speculation": "off"}
    without = planned(model, "paged", instance, **changes)
    assert planned(model, "paged", instance, **changes, **off) == without
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in changes.items()]
    command = ["plan", "--model-dir", str(model), "--instance-type", instance, *flags]
    assert main([*command, "--speculative-draft-model", "small"]) == 0
    where = " on the first GPU" if changes else ""
    line = f"  draft model{where}: weights {weights / 2**20:,.1f} MiB, 256.0 KiB of KV beside each"
    assert line in capsys.readouterr().out


def test_a_draft_model_keeps_states(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of each of 16 sequences, whose sums are fp32 whatever those of the model are."""
    draft = model / "small"
    draft.mkdir()
    config = {**QWEN3_NEXT, "vocab_size": LLAMA_8B["vocab_size"]}
    (draft / "config.json").write_text(json.dumps(config))
    found = decoder_from_directory(draft, Options())
    tails, matrices = 3 * (2 * 2 * 128 + 4 * 128) * 2, 4 * 128 * 128 * 4
    assert found.state_bytes == 3 * (tails + matrices)
    alone = planned(model, "paged", speculative_method="ngram")
    both = planned(model, "paged", speculative_draft_model="small")
    assert (alone.num_draft_states, both.num_draft_states) == (0, 32)
    assert planned(model, "none", speculative_draft_model="small").num_draft_states == 4
    num_bytes = alone.num_blocks * alone.block_bytes - found.weights_bytes - 32 * found.state_bytes
    expected = num_bytes / (both.block_bytes + both.draft_block_bytes)
    assert both.num_blocks == pytest.approx(expected, abs=1)
    command = ["plan", "--model-dir", str(model), "--instance-type", "ml.g6e.xlarge"]
    assert main([*command, "--speculative-draft-model", "small"]) == 0
    states = f"beside each block, {32 * found.state_bytes / 2**20:,.1f} MiB for 32 states (/"
    assert states in capsys.readouterr().out
    (model / "config.json").write_text(json.dumps(config))
    narrow = planned(model, "paged", speculative_draft_model="small", state_dtype="bf16")
    assert narrow.num_draft_states == 32


def test_an_eagle3_head_takes_memory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside its weights and its K and V, the model keeps a hidden state of each token."""
    head = model / "head"
    head.mkdir()
    config = {**LLAMA_8B, "num_hidden_layers": 1, "draft_vocab_size": 32000}
    (head / "config.json").write_text(json.dumps(config))
    options = {"speculative_method": "eagle3", "speculative_draft_model": "head"}
    alone = planned(model, "paged", speculative_method="ngram")
    both = planned(model, "paged", **options)
    weights = 3 * 4096 * 4096  # of three layers
    weights += (2 * (32 + 2 * 8) + 32) * 128 * 4096  # q, k and v of states and embeddings; o
    weights += 3 * 14336 * 4096 + (32000 + 4) * 4096
    per_block = 16 * (2 * 8 * 128 + 4096) * 2
    assert both.draft_block_bytes == per_block
    blocks_bytes = alone.num_blocks * alone.block_bytes - 2 * weights
    assert both.num_blocks == pytest.approx(blocks_bytes / (both.block_bytes + per_block), abs=1)
    flags = ["--speculative-method", "eagle3", "--speculative-draft-model", "head"]
    command = ["plan", "--model-dir", str(model), *flags, "--instance-type", "ml.g6e.12xlarge"]
    assert main(command) == 0
    line = (
        f"  head: weights {weights / 2**19:,.1f} MiB, 192.0 KiB of KV and states beside each block"
    )
    assert line in capsys.readouterr().out
    assert main([*command, "--tensor-parallel-degree", "2"]) == 0
    whole = 2 * weights + 2 * 2 * LLAMA_8B["vocab_size"] * 4096
    assert (
        f"  head on the first GPU: weights {whole / 2**20:,.1f} MiB, 192.0 KiB of KV and states"
    ) in capsys.readouterr().out, "with the embedding and the output projection of all ranks"


def test_a_layer_of_multi_token_prediction_takes_memory_if_it_drafts(model: Path) -> None:
    """Without, the files' weights do not count: the engine leaves them out. Of two such layers,
    it reads the first."""
    names = {
        "model.layers.31.mlp.down_proj.weight": 1000, "model.layers.32.eh_proj.weight": 200,
        "model.layers.32.shared_head.head.weight": 5000, "model.layers.33.eh_proj.weight": 60,
    }  # fmt: skip
    header = {
        name: {"dtype": "BF16", "shape": [size], "data_offsets": [0, 2 * size]}
        for name, size in names.items()
    }
    write_header(model, header)
    decoder = decoder_from_directory(model, Options())
    assert (decoder.num_parameters, decoder.draft) == (1000, None)
    given = make_options({"speculative_method": "mtp"})
    draft = with_draft(decoder, model, given).draft
    assert draft is not None
    assert (draft.weights_bytes, draft.state_bytes) == (400, 2 * 4096)
    block_bytes = planned(model, "paged", speculative_method="mtp").draft_block_bytes
    assert block_bytes == 16 * (2 * 8 * 128 + 4096) * 2
    write_header(model, {"model.norm.weight": next(iter(header.values()))})
    with pytest.raises(ConfigurationError, match="has no layer of multi-token prediction; choose"):
        planned(model, "paged", speculative_method="mtp")


def test_graphs_have_rows_for_drafts(model: Path) -> None:
    few: dict[str, Any] = {"max_rolling_batch_size": 8, "num_speculative_tokens": 5}
    rows = {
        method: planned(model, "paged", **few, speculative_method=method).activation_bytes
        for method in (None, "ngram")
    }
    assert rows["ngram"] - rows[None] == (7 + 8 + 8 * 5 - (7 + 8)) * 128256 * 4
