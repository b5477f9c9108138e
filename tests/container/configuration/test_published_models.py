"""`longshore plan` from config.json alone: parameters and KV memory of published models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from container.capacity.decoder import decoder_from_directory
from container.capacity.estimate import TypicalRequest, length_lines, plan_lines
from container.capacity.instances import find_instance
from container.capacity.placement import place
from core.configuration.options import Options, make_options
from core.errors import ConfigurationError
from tests.container.configuration.published_models import PUBLISHED
from tests.container.processes import ROOT

MILLIONS = {"gpt-oss-20b": 20_913, "Gemma 3 27B": 27_009, "Ministral 8B": 8_020,
            "DeepSeek V3": 671_026, "Kimi K2": 1_026_408}  # fmt: skip
"""Parameters that the model cards say, or that their weight files hold, without images."""
BUDGET = 40 * 2**30


def planned(directory: Path, config: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(config))
    return decoder_from_directory(directory, Options())


@pytest.mark.parametrize("name", MILLIONS)
def test_parameters_are_computed_with_all_experts(name: str, tmp_path: Path) -> None:
    decoder = planned(tmp_path, PUBLISHED[name])
    assert decoder.num_parameters == pytest.approx(MILLIONS[name] * 10**6, rel=0.002)


def test_experts_and_latents_make_the_memory_of_deepseek_v3(tmp_path: Path) -> None:
    decoder = planned(tmp_path, PUBLISHED["DeepSeek V3"])
    assert decoder.weights_bytes == pytest.approx(671_026e6, rel=0.005), "one byte a weight"
    assert {shape.numel for shape in decoder.shapes} == {512 + 64}
    assert {shape.numel for shape in decoder.unfreed_shapes} == {128 * (192 + 128)}


def test_a_token_takes_what_the_widest_part_of_a_layer_takes(tmp_path: Path) -> None:
    """DeepSeek V3's 8 experts of a token are wider than its latent attention, if few ranks share
    them; then come the heads' queries, keys and values."""
    decoder = planned(tmp_path, PUBLISHED["DeepSeek V3"])
    assert decoder.activation_width == (2 + 1 + 3 * 8) * 7168 + 2 * 8 * 2048
    assert decoder.activations[0].divided == 128 * (192 + 576 + 512 + 128)
    options = make_options({"tensor_parallel_degree": 8})
    part = place(decoder, find_instance("ml.p5.48xlarge"), options).part
    assert part.activation_width == (2 + 1 + 3 * 8) * 7168 + 2 * 2048


def test_windows_need_no_layer_types(tmp_path: Path) -> None:
    def windows(model_type: str, **settings: Any) -> list[int | None]:
        config = {"model_type": model_type, "sliding_window": 512, **settings}
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9}
        decoder = planned(tmp_path, {**sizes, "num_hidden_layers": 6, **config})
        return [shape.window for shape in decoder.shapes]

    full = None
    assert windows("gemma2") == [512, full] * 3
    assert windows("gemma3_text") == [512] * 5 + [full]
    assert windows("gemma3_text", sliding_window_pattern=3) == [512, 512, full] * 2
    assert windows("mistral") == [512] * 6
    assert windows("cohere2_moe", first_k_dense_replace=1) == [full, 512, 512, 512, full, 512]
    assert windows("qwen2") == [full] * 6, "use_sliding_window is false unless it is set"
    assert windows("qwen2", use_sliding_window=True, max_window_layers=4) == [full] * 4 + [512] * 2


def test_states_are_counted_beside_the_layers_with_attention(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
    layers = {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
    decoder = planned(tmp_path, {"model_type": "lfm2", "vocab_size": 65536, **sizes, **layers})
    assert len(decoder.shapes) == 6
    assert decoder.state_bytes == 10 * 2 * 2048 * 2, "two inputs of each channel in bf16"
    instance, request = find_instance("ml.g5.xlarge"), TypicalRequest(512, 128)
    lines = [*plan_lines(decoder, instance, make_options({"state_checkpoints": 100}), request)]
    assert (
        "  state: 80.0 KiB of each running request, beside its KV; with paged, 7.8 MiB more for "
        "100 checkpoints of cached prefixes"
    ) in lines
    ranks = make_options({"tensor_parallel_degree": 4})
    placement = place(decoder, find_instance("ml.g5.12xlarge"), ranks)
    assert placement.part.state_bytes == decoder.state_bytes // 4


def test_ranks_that_cannot_divide_the_heads_of_all_layers_are_refused(tmp_path: Path) -> None:
    decoder = planned(tmp_path, PUBLISHED["Gemma 4 31B"] | {"vocab_size": 9})
    error = "degree=3: .* numbers of KV heads, .* set it to one of 1, 2, 4, 8, 16, 32$"
    with pytest.raises(ConfigurationError, match=error):
        place(decoder, find_instance("ml.g5.12xlarge"), make_options({"tensor_parallel_degree": 3}))


def test_the_documented_table_is_the_plans(tmp_path: Path) -> None:
    """docs/models.md has a row for each model. Left of each arrow is what was kept before."""
    page = (ROOT / "docs" / "models.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| (.*) \|$", page, re.MULTILINE))
    for name, config in PUBLISHED.items():
        _, _, *lines = length_lines(planned(tmp_path, config), Options(), BUDGET)
        assert rows[name] == " | ".join(map(cell, lines))


def cell(line: str) -> str:
    """Return `GiB of a sequence; tokens that fit`, each after its value if all were kept."""
    values = re.findall(r"([\d,.]+) MiB each, [\d,]+ of them, ([\d,]+) tokens", line)
    (held, fit), (before, fit_before) = values[0], values[-1]
    sizes = "→".join(f"{float(size.replace(',', '')) / 1024:.2f}" for size in (before, held))
    counts = "→".join(f"{int(n.replace(',', '')) / 1000:,.0f}k" for n in (fit_before, fit))
    return f"{sizes}; {counts}"
