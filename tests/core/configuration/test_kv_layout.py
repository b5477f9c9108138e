"""Cache groups of published models: what sequences hold, in blocks of one size."""

from __future__ import annotations

import pytest

from core.configuration.kv_layout import LayerShape, bytes_per_block, even_divisions, plan_layout


def shapes(num_layers, every, heads, dim, window):
    """Every `every`-th layer has full attention."""
    windows = [None if (index + 1) % every == 0 else window for index in range(num_layers)]
    return [LayerShape(heads, dim, dim, window) for window in windows]


GPT_OSS = shapes(24, 2, 8, 64, 128)
GEMMA3_27B = shapes(62, 6, 16, 128, 1024)


def test_gpt_oss_holds_what_its_windows_need():
    layout = plan_layout(GPT_OSS, 16, 2, 131072, step_tokens=1)
    assert [(len(g.layers), g.block_size, g.window) for g in layout.groups] == [
        (12, 16, 128), (12, 16, None),
    ]  # fmt: skip
    assert layout.blocks_for(32768) == 2048 + 9
    share = layout.blocks_for(32768) * layout.block_bytes / bytes_per_block(GPT_OSS, 32768, 2)
    assert share == pytest.approx(0.502, abs=0.001)


@pytest.mark.parametrize(("model", "least"), [(GPT_OSS, 0.51), (GEMMA3_27B, 0.2)])
def test_blocks_waste_little(model, least):
    layout = plan_layout(model, 16, 2, 131072, step_tokens=1)
    held = layout.blocks_for(32768) * layout.block_bytes
    ideal = sum(bytes_per_block([s], min(32768, s.window or 32768), 2) for s in model)
    assert held < 1.04 * ideal
    assert held < least * bytes_per_block(model, 32768, 2)
    assert sorted(layer for g in layout.groups for layer in g.layers) == list(range(len(model)))


def test_layers_of_one_kind_have_one_group():
    alike = [LayerShape(2, 64, 64)] * 5
    layout = plan_layout(alike, 16, 2, 4096, step_tokens=1)
    assert len(layout.groups) == 1
    assert layout.block_bytes == bytes_per_block(alike, 16, 2)
    assert plan_layout(GPT_OSS, 16, 2, 128, step_tokens=1).groups[0].window is None
    assert len(plan_layout(GPT_OSS, 16, 2, 128, step_tokens=1).groups) == 1


def test_a_layer_keeps_as_long_as_its_readers_read():
    own, reader = LayerShape(2, 64, 64, window=8), LayerShape(2, 64, 64, source=0)
    layout = plan_layout([own, reader], 16, 2, 4096, step_tokens=1)
    assert [(group.window, group.layers) for group in layout.groups] == [(None, (0,))]


FULL = LayerShape(4, 512, 128, shared_dim=384)
WINDOW = LayerShape(16, 256, 256, window=1024)
GEMMA4_31B = [FULL if index % 6 == 5 else WINDOW for index in range(60)]


def test_dims_that_k_and_v_share_are_kept_once():
    """128 of 512 dims rotate, so that K has them beside V: 640 numbers instead of 1,024."""
    assert FULL.numel == 4 * 640
    layout = plan_layout(GEMMA4_31B, 16, 2, 131072, step_tokens=1)
    assert [(len(g.layers), g.block_size, g.window) for g in layout.groups] == [
        (25, 16, 1024), (25, 16, 1024), (10, 128, None),
    ]  # fmt: skip
    gib = layout.blocks_for(131072) * layout.block_bytes / 2**30
    assert gib == pytest.approx(7.0, abs=0.05)


def test_divisions_have_the_heads_of_all_layers_in_one_proportion():
    assert even_divisions(32, [16, 4]) == [1, 2, 4, 8, *range(16, 33)]
    assert even_divisions(8, [2, 2]) == list(range(1, 9))
