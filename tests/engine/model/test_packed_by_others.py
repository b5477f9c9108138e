"""GPTQ and AWQ read what the formats' own libraries packed.

The words below were packed once by GPTQModel 7.7.0 and AutoAWQ 0.2.9, from the codes, zeros and
scales of `layer`. Larger layers were compared as well, in all settings (docs/quantization.md).
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.checkpoint import open_published
from engine.model.quantization.awq import Awq
from engine.model.quantization.gptq import Gptq

GPTQ_GROUPS = [1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 0]
GPTQ_CODES = [
    [1392285232, -916255321, 819622942, -1488852091,
     515396348, -2060465821, -57265958, 1661839169],
    [-629924168, 1105954095, -1202520938, 801727245,
     -1775183244, 229065195, 1948170322, -343593015],
]  # fmt: skip
GPTQ_ZEROS = {"gptq": [[763619647], [-1239649576]], "gptq_v2": [[1049950800], [-953318423]]}
"""The words of each format.

The first zero point is 0. gptq subtracts 1 from it, which borrows from the next field of the word.
"""
AWQ_CODES = [
    [324512992, -1679874968, 324512992, -1679874968],
    [1183506195, -838707301, 1183506195, -838707301],
    [2042430022, -248149298, 2042430022, -248149298],
    [-1394592391, 610844145, -1394592391, 610844145],
]
AWQ_ZEROS = [
    [972416160, -1317180376, 972416160, -1317180376],
    [-1030849223, 1241970097, -1030849223, 1241970097],
]


def layer(outputs: int, groups: list[int]) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] whose inputs are in these groups, and its scales [out, groups]."""
    output, group = torch.arange(outputs)[:, None], torch.arange(max(groups) + 1)
    codes = (7 * output + 3 * torch.arange(len(groups))) % 16
    zeros = (5 * output + 9 * group) % 16
    scales = 2.0 ** -((output + group) % 4)
    return (codes - zeros[:, groups]) * scales[:, groups], scales


@pytest.mark.parametrize("checkpoint_format", GPTQ_ZEROS)
def test_gptq_in_act_order(tmp_path, checkpoint_format):
    expected, scales = layer(8, GPTQ_GROUPS)
    tensors = {
        "q.qweight": torch.tensor(GPTQ_CODES, dtype=torch.int32),
        "q.qzeros": torch.tensor(GPTQ_ZEROS[checkpoint_format], dtype=torch.int32),
        "q.scales": scales.T.half().contiguous(),
        "q.g_idx": torch.tensor(GPTQ_GROUPS, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    reader = Gptq({"bits": 4, "checkpoint_format": checkpoint_format})
    read = reader.read(open_published(tmp_path), "q")
    assert torch.equal(read.dequantized(), expected)


def test_awq(tmp_path):
    expected, scales = layer(32, [0, 0, 1, 1])
    tensors = {
        "q.qweight": torch.tensor(AWQ_CODES, dtype=torch.int32),
        "q.qzeros": torch.tensor(AWQ_ZEROS, dtype=torch.int32),
        "q.scales": scales.T.half().contiguous(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    read = Awq({"bits": 4}).read(open_published(tmp_path), "q")
    assert torch.equal(read.dequantized(), expected)
