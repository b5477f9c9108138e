"""The benchmark of the host's time per step: its counts and its report, not its times."""

from __future__ import annotations

import pytest
from triton.runtime import driver

from tests.kernels.host import host_step

IN_EVERY_LAYER = {
    "rotary_write_kv_kernel",
    "gated_activation_kernel",
}
DECODE = {"paged_decode_kernel", "combine_splits_kernel"}
PREFILL = {"paged_prefill_kernel"}


@pytest.mark.parametrize(
    ("decodes", "prompt_tokens", "attention"),
    [(2, 3, DECODE | PREFILL), (2, 0, DECODE), (0, 3, PREFILL)],
)
def test_launches_per_layer_are_counted(decodes, prompt_tokens, attention):
    found = host_step.measure(2, decodes, prompt_tokens, repeats=2)
    expected = dict.fromkeys(IN_EVERY_LAYER | attention, 2)
    # Only the first norm has no residual add before it. Layers share a work list.
    once = {"rms_norm_kernel": 1} | ({"work_list_kernel": 1} if decodes else {})
    once |= {"prefill_work_kernel": 1} if prompt_tokens else {}
    assert found.launches == expected | once | {"add_rms_norm_kernel": 2 * 2}
    assert len(found.times) == 2
    assert all(0 < times.products < times.step for times in found.times)


def test_the_driver_is_put_back():
    before = driver._active
    host_step.measure(1, 1, 0, repeats=1)
    assert driver._active is before


def test_the_report_has_figures_per_step_and_per_layer(capsys):
    arguments = ["--layers", "2", "--decodes", "2", "--prompt-tokens", "3", "--repeats", "2"]
    assert host_step.main(arguments) == 0
    text = capsys.readouterr().out
    for line in (
        "matrix products",
        "without products, per layer",
        "kernel launches: 8.50 per layer",
    ):
        assert line in text
