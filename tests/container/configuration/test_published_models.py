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
from tests.container.configuration.published_models import LONG_CONTEXTS, PUBLISHED
from tests.container.processes import ROOT

MILLIONS = {"gpt-oss-20b": 20_913, "Gemma 3 27B": 27_009, "Ministral 8B": 8_020,
            "DeepSeek V3": 671_026, "Kimi K2": 1_026_408, "Qwen3-8B": 8_191, "Qwen3.5-9B": 8_954,
            "LFM2-8B-A1B": 8_340, "Granite 4.0 H Small": 32_207}  # fmt: skip
"""Parameters that the model cards say, or that their weight files hold, without images."""
BUDGET = 40 * 2**30


def planned(directory: Path, config: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(config))
    return decoder_from_directory(directory, Options())


@pytest.mark.parametrize("name", MILLIONS)
def test_parameters_are_computed_with_all_experts(name: str, tmp_path: Path) -> None:
    decoder = planned(tmp_path, (PUBLISHED | LONG_CONTEXTS)[name])
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
    assert decoder.activation_width == (6 + 1 + 3 * 8) * 7168 + 2 * 8 * 2048
    assert decoder.activations[0].divided == 128 * (192 + 576 + 512 + 128)
    options = make_options({"tensor_parallel_degree": 8})
    part = place(decoder, find_instance("ml.p5.48xlarge"), options).part
    assert part.activation_width == (6 + 1 + 3 * 8) * 7168 + 2 * 2048


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
    drafts = make_options({"speculative_method": "ngram", "num_speculative_tokens": 8})
    lines = [*plan_lines(decoder, instance, drafts, request)]
    assert any("beside its KV, 2.5 MiB for drafts; with paged, " in line for line in lines)
    ranks = make_options({"tensor_parallel_degree": 4})
    placement = place(decoder, find_instance("ml.g5.12xlarge"), ranks)
    assert placement.part.state_bytes == decoder.state_bytes // 4


def test_checkpoints_without_room_on_the_device_are_counted_on_the_host(tmp_path: Path) -> None:
    decoder = planned(tmp_path, LONG_CONTEXTS["Granite 4.0 H Small"])
    instance, request = find_instance("ml.p5en.48xlarge"), TypicalRequest(512, 128)

    def counts(**options: Any) -> list[int]:
        given = make_options({"state_checkpoints": 400, "max_model_len": 4096, **options})
        [line] = (n for n in plan_lines(decoder, instance, given, request) if "  state: " in n)
        return [int(number) for number in re.findall(r"for (\d+)", line)]

    for gib, num_found in ((4, 19), (20, 97)):  # of 145.7 MiB beside 64 MiB of K and V
        assert counts(swap_space_gib=gib)[1] == num_found
    on_device, on_host = counts(swap_space_gib=200)
    assert on_device + on_host == 400
    assert counts(preemption_mode="recompute") == [on_device]


def test_narrow_sums_take_half(tmp_path: Path) -> None:
    """Granite's convolutions keep three inputs of 8,448 channels, in bf16 in any case."""
    config = LONG_CONTEXTS["Granite 4.0 H Small"]
    tails, sums = 36 * 3 * 8448 * 2, 36 * 128 * 128 * 64 * 4
    assert planned(tmp_path, config).state_bytes == tails + sums
    narrow = make_options({"state_dtype": "bf16"})
    assert decoder_from_directory(tmp_path, narrow).state_bytes == tails + sums // 2
    planned(tmp_path, LONG_CONTEXTS["LFM2-8B-A1B"])
    with pytest.raises(ConfigurationError, match=r"lfm2_moe is not among .* leave it out"):
        decoder_from_directory(tmp_path, narrow)


def test_ranks_that_cannot_divide_the_heads_of_all_layers_are_refused(tmp_path: Path) -> None:
    decoder = planned(tmp_path, PUBLISHED["Gemma 4 31B"] | {"vocab_size": 9})
    error = "degree=3: .* numbers of KV heads, .* set it to one of 1, 2, 4, 8, 16, 32$"
    with pytest.raises(ConfigurationError, match=error):
        place(decoder, find_instance("ml.g5.12xlarge"), make_options({"tensor_parallel_degree": 3}))


def test_the_documented_table_is_the_plans(tmp_path: Path) -> None:
    """docs/models.md has a row for each model. Left of each arrow is what was kept before."""
    rows = documented()
    for name, config in PUBLISHED.items():
        lines = by_length(planned(tmp_path, config))
        assert rows[name] == " | ".join(cell(lines[length]) for length in (4096, 32768, 131072))


def test_the_documented_costs_of_long_contexts_are_the_plans(tmp_path: Path) -> None:
    rows = documented()
    for name, config in LONG_CONTEXTS.items():
        text = config.get("text_config", config) | {"max_position_embeddings": 262144}
        lines = by_length(planned(tmp_path, text))
        costs = [mib(lines[length]) / 1024 for length in (1024, 32768, 262144)]
        assert rows[name] == " | ".join(f"{cost:.2f}" for cost in costs)


def documented() -> dict[str, str]:
    """Return the rows of the tables of docs/models.md, by their first cells."""
    page = (ROOT / "docs" / "models.md").read_text()
    return dict(re.findall(r"^\| ([^|]+) \| (.*) \|$", page, re.MULTILINE))


def by_length(decoder: Any) -> dict[int, str]:
    """Return the lines of a plan that say what a sequence of each length holds."""
    _, *lines = length_lines(decoder, Options(), BUDGET)
    return {int(line.split()[0]): line for line in lines}


def mib(line: str) -> float:
    """Return what a sequence holds of K, V and state."""
    sizes = re.findall(r"([\d,.]+) (MiB|KiB) (?:each|of state)", line)
    values = (float(size.replace(",", "")) / (1 if unit == "MiB" else 1024) for size, unit in sizes)
    return sum(values)


def cell(line: str) -> str:
    """Return `GiB of a sequence; tokens that fit`, each after its value if all were kept."""
    values = re.findall(r"([\d,.]+) MiB each, [\d,]+ of them, ([\d,]+) tokens", line)
    (held, fit), (before, fit_before) = values[0], values[-1]
    sizes = "→".join(f"{float(size.replace(',', '')) / 1024:.2f}" for size in (before, held))
    counts = "→".join(f"{int(n.replace(',', '')) / 1000:,.0f}k" for n in (fit_before, fit))
    return f"{sizes}; {counts}"
