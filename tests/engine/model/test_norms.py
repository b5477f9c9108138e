"""Norms of queries and keys in one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.model import loader
from engine.model.elementwise import Elementwise
from engine.model.families import FAMILIES
from kernels.elementwise import torch_elementwise
from tests.engine.model.conftest import expected_logits, logits
from tests.engine.tiny_models import OWN

APART = Elementwise(
    torch_elementwise.rms_norm,
    torch_elementwise.add_rms_norm,
    torch_elementwise.gated_activation,
    torch_elementwise.rotary,
)
BY_HEAD = [name for name in OWN if FAMILIES[name].qk_norm in ("head", "after rotary")]


@pytest.mark.parametrize("architecture", BY_HEAD)
def test_norms_of_all_heads(tiny_model, load, monkeypatch, architecture):
    folder = tiny_model(architecture)
    expected, weight_dims = expected_logits(folder), set()

    def rms_norm(rows, weight, *args, **options):
        weight_dims.add(weight.ndim)
        return torch_elementwise.rms_norm(rows, weight, *args, **options)

    for together in (False, True):
        elementwise = replace(APART, rms_norm=rms_norm, norms_all_heads=together)
        monkeypatch.setattr(loader, "make_elementwise", lambda device, e=elementwise: e)
        decoder = load(folder)
        decoder.one_call = None
        weight_dims.clear()
        torch.testing.assert_close(logits(decoder), expected, atol=1e-3, rtol=1e-3)
        has_kernel = together and not FAMILIES[architecture].norm.subtracts_mean
        assert (2 in weight_dims) == has_kernel
