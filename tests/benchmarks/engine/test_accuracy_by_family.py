"""The benchmark of logits by family. Each family has a model; fewer bits give a larger error."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.engine.accuracy_by_family import Change, family_config, main
from engine.model.families import FAMILIES
from engine.model.spec import read_spec


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_of_every_family_has_whole_groups_of_128_inputs(family):
    spec = read_spec(family_config(family), 512)
    assert spec.family == FAMILIES[family]
    assert spec.hidden_size % 128 == 0
    assert spec.mlp_width % 128 == 0
    assert len(spec.layers) == 4


def test_a_constant_added_to_all_logits_does_not_count():
    logits = torch.tensor([[0.0, 1.0, 3.0], [5.0, 1.0, 0.0]])
    assert Change.between(logits + 7, logits).error < 1e-6
    assert Change.between(logits + 7, logits).same_best == 1
    swapped = logits[:, [0, 2, 1]]
    assert Change.between(swapped, logits).error > 0.5
    assert Change.between(swapped, logits).same_best == 0.5


def test_a_row_has_the_figures_of_every_precision(capsys):
    assert main(["opt"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].count("error") == rows[0].count("same best") == 3
    cells = [float(cell) for cell in re.findall(r"([\d.]+)%", rows[2])]
    fp8, int8, int4 = cells[::2]
    assert 0 < int8 < fp8 < int4 < 100
    assert cells[3] > cells[5], "int8 keeps more of the best tokens than int4"


def test_unknown_families_are_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["bloom"])
    assert "bloom is not one of the families llama, " in capsys.readouterr().err
