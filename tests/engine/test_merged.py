"""Several linear layers as one product, and nothing of it left behind."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from engine.merged import MergedLinear, MergedPart, can_merge

SIZES = (6, 4, 2)


def make(bias=True):
    """The layers themselves, and the same ones merged."""
    torch.manual_seed(0)
    linears = [nn.Linear(5, size, bias=bias) for size in SIZES]
    merged = MergedLinear(linears)
    parts = [MergedPart(merged, index) for index in range(len(SIZES))]
    return linears, merged, parts


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def products(monkeypatch):
    """Widths of the products that were computed, in order."""
    widths, linear = [], torch.nn.functional.linear

    def watch(x, weight, bias=None):
        widths.append(weight.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", watch)
    return widths


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_one_product_for_all_in_any_order(products, order, bias):
    linears, _, parts = make(bias)
    x = torch.randn(1, 3, 5)
    expected = [each(x) for each in linears]
    products.clear()
    for _ in range(2):
        for index in order:
            torch.testing.assert_close(parts[index].take(x), expected[index])
    assert products == [12, 12]


def test_nothing_is_kept_after_the_last_part():
    _, merged, parts = make()
    x = torch.randn(3, 5)
    outputs = [part.take(x) for part in parts]
    assert all(each._base is outputs[0]._base for each in outputs)
    kept = [weakref.ref(x), weakref.ref(outputs[0]._base)]
    del x, outputs
    assert [ref() for ref in kept] == [None, None]
    assert (merged._input, merged._waiting) == (None, {})


def test_other_inputs_are_computed_by_themselves(products):
    """As in cross attention, where keys and values are of another sequence; equal is not enough."""
    linears, merged, parts = make()
    x, y = torch.randn(3, 5), torch.randn(7, 5)
    expected = [linears[0](x), linears[1](y), linears[2](x.clone())]
    products.clear()
    got = [parts[0].take(x), parts[1].take(y), parts[2].take(x.clone())]
    for each, other in zip(got, expected, strict=True):
        torch.testing.assert_close(each, other)
    assert products == [12, 4, 2]
    assert merged._input is None


def test_a_part_that_comes_twice_begins_anew():
    linears, _, parts = make()
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    for part, linear, each in ((0, 0, x), (0, 0, y), (1, 1, y), (1, 1, y), (2, 2, y), (2, 2, x)):
        torch.testing.assert_close(parts[part].take(each), linears[linear](each))


def test_a_part_looks_and_computes_as_the_layer_did(products):
    linears, merged, parts = make()
    x = torch.randn(3, 5)
    for linear, part in zip(linears, parts, strict=True):
        assert torch.equal(part.weight, linear.weight)
        assert torch.equal(part.bias, linear.bias)
        assert repr(part).startswith(f"MergedPart(\n  in_features=5, out_features={len(part.bias)}")
        torch.testing.assert_close(part(x), linear(x))
    assert 12 not in products
    parameters = nn.ModuleList(parts).parameters()
    assert [id(each) for each in parameters] == [id(merged.weight), id(merged.bias)]


def test_the_whole_can_be_traced():
    linears, merged, parts = make()
    x = torch.randn(3, 5)

    @torch.compile(fullgraph=True, backend="eager")
    def call(x):
        return [part.take(x) for part in parts]

    for _ in range(2):
        torch.testing.assert_close(call(x), [each(x) for each in linears])
        assert merged._input is None


class Quantized(nn.Linear):
    """Whose weight may mean something else."""


@pytest.mark.parametrize(
    "others",
    [
        [nn.Linear(5, 4), None],
        [nn.Linear(5, 4), Quantized(5, 4)],
        [nn.Linear(5, 4), nn.Linear(6, 4)],
        [nn.Linear(5, 4), nn.Linear(5, 4, bias=False)],
        [nn.Linear(5, 4), nn.Linear(5, 4).half()],
        [nn.Linear(5, 4), nn.Linear(5, 4, device="meta")],
    ],
)
def test_what_is_not_merged(others):
    assert can_merge(others[:1] * 2)
    assert not can_merge(others)
