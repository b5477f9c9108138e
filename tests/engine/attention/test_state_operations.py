"""Which operations the layers with a state run on which device."""

from __future__ import annotations

import pytest
import torch

from core.states.layout import StateShape
from engine.attention import states
from engine.attention.states import choose_operations

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TAILS, MATRICES = StateShape((3, 512), is_sum=False), StateShape((4, 128, 64), is_sum=True)


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        ((TAILS,), "kernels.state.conv_rows"),
        ((TAILS, MATRICES), "kernels.state.conv_rows"),
        ((StateShape((4, 512), is_sum=False),), "kernels.state.reference"),
        ((StateShape((3, 500), is_sum=False),), "kernels.state.reference"),
        ((TAILS, StateShape((4, 96, 64), is_sum=True)), "kernels.state.reference"),
    ],
)
def test_gpus_run_triton_where_it_supports_the_states(layer, module):
    assert choose_operations(CUDA, [layer]).conv_rows.__module__ == module


def test_cpus_without_a_compiler_run_torch(monkeypatch):
    monkeypatch.setattr(states, "unavailable_reason", lambda: "no compiler")
    assert choose_operations(CPU, [(TAILS,)]).advance.__module__ == "kernels.state.reference"
    monkeypatch.setattr(states, "unavailable_reason", lambda: None)
    assert choose_operations(CPU, [(TAILS,)]).advance.__module__ == "kernels.cpu.state"
