"""Tiny quantized checkpoints. Their writers follow the published descriptions of the formats.

`FORMATS` lists them. Each writer returns the tensors of a layer as the format stores them, and the
weight that they stand for. The writers of compressed-tensors were compared once with what the
library's version 0.20 decompresses, and MXFP4 with transformers' own conversion; AWQ and GPTQ
follow the packing code of AutoAWQ and GPTQModel. `model/test_packed_by_others.py` has words that
these two libraries packed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Writer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""Takes a weight [out, in]; returns its stored tensors by suffix, and the dequantized weight."""


@dataclass(frozen=True)
class StoredFormat:
    config: Mapping[str, object]
    """The quantization_config of the checkpoint's config.json."""
    write: Writer


def rounded(weight: Tensor, bits: int, group_size: int, *, has_zeros: bool):
    """Return codes [out, in], zeros and scales [out, groups], and the dequantized weight."""
    groups = weight.unflatten(1, (-1, group_size))
    top = 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    if has_zeros:
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(0, top)
    else:
        scales = groups.abs().amax(-1) / (top // 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    scales = scales.half().float()  # checkpoints store them in 16 bits
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    dequantized = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1).int(), zeros.int(), scales, dequantized.flatten(1)


def pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [n, m] along the columns; order: the column that each field of a word holds."""
    count = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % count)).long()
    words = torch.zeros(len(codes), padded.shape[1] // count, dtype=torch.int64)
    for field, column in enumerate(order or range(count)):
        words |= padded[:, column::count] << (bits * field)
    return words.to(torch.uint32).view(torch.int32)


def awq(weight: Tensor):
    codes, zeros, scales, dequantized = rounded(weight, 4, GROUP, has_zeros=True)
    tensors = {
        ".qweight": pack(codes.T, 4, AWQ_ORDER),
        ".qzeros": pack(zeros.T, 4, AWQ_ORDER),
        ".scales": scales.T.half(),
    }
    return tensors, dequantized


def gptq(*, bits=4, group_size=GROUP, offset=1, has_zeros=False, act_order=False) -> Writer:
    """Return a writer of GPTQ.

    offset: how much smaller the stored zeros are than the real ones. It is subtracted from whole
    words, as GPTQModel does.
    """

    def write(weight: Tensor):
        size = group_size if group_size > 0 else weight.shape[1]
        order = torch.arange(weight.shape[1])
        if act_order:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(5))
        codes, zeros, scales, in_order = rounded(weight[:, order], bits, size, has_zeros=has_zeros)
        dequantized = torch.empty_like(weight)
        dequantized[:, order] = in_order
        unsorted = torch.empty_like(codes)
        unsorted[:, order] = codes
        groups = torch.empty_like(order, dtype=torch.int32)
        groups[order] = torch.arange(len(order), dtype=torch.int32) // size
        tensors = {
            ".qweight": pack(unsorted, bits).T.contiguous(),
            ".qzeros": pack(zeros.T, bits) - offset * sum(1 << at for at in range(0, 32, bits)),
            ".scales": scales.T.half(),
            ".g_idx": groups,
        }
        return tensors, dequantized

    return write


def packed(*, bits=4, has_zeros=False, act_order=False) -> Writer:
    """Return a writer of compressed-tensors' pack-quantized. Zeros are packed along the outputs."""
    write_gptq = gptq(bits=bits, has_zeros=has_zeros, act_order=act_order, offset=0)

    def write(weight: Tensor):
        stored, dequantized = write_gptq(weight)
        zeros = stored[".qzeros"]  # [groups, out * bits / 32]
        tensors = {
            ".weight_packed": pack(_unpacked(stored[".qweight"].T, bits), bits),
            ".weight_scale": stored[".scales"].T,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            tensors[".weight_zero_point"] = zeros.T
        if act_order:
            tensors[".weight_g_idx"] = stored[".g_idx"]
        return tensors, dequantized

    return write


def _unpacked(words: Tensor, bits: int) -> Tensor:
    fields = [(words.long() >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    return torch.stack(fields, -1).flatten(1)


def int8(*, has_zeros: bool) -> Writer:
    """Return a writer of compressed-tensors' int-quantized, with a scale for each output."""

    def write(weight: Tensor):
        codes, zeros, scales, dequantized = rounded(weight, 8, weight.shape[1], has_zeros=has_zeros)
        tensors = {".weight": (codes - 128).to(torch.int8), ".weight_scale": scales}
        if has_zeros:
            tensors[".weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, dequantized

    return write


def fp8(suffix: str, shape: str, block: tuple[int, int] = (32, 32)) -> Writer:
    """Return a writer of FP8. shape: what has one scale, "tensor", "channel" or "block"."""

    def write(weight: Tensor):
        rows, columns = weight.shape
        height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": block}[shape]
        scales = torch.empty(-(-rows // height), -(-columns // width))
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                part = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
                scales[i, j] = part.abs().max() / 448
        whole = torch.kron(scales, torch.ones(height, width))[:rows, :columns]
        codes = (weight / whole).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if shape == "tensor" else scales
        tensors = {".weight": codes, suffix: stored, ".input_scale": torch.tensor(0.01)}
        return tensors, codes.float() * whole

    return write


def mxfp4(weight: Tensor):
    """weight: [experts, in, out], as gpt-oss's model has it."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().int()
    scaled = groups / torch.exp2(exponents[..., None].float())
    values = torch.tensor(FP4)
    magnitudes = (scaled.abs()[..., None] - values).abs().argmin(-1)
    codes = magnitudes + 8 * (scaled < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    signed = torch.where(scaled < 0, -1.0, 1.0) * values[magnitudes]
    dequantized = (signed * torch.exp2(exponents[..., None].float())).flatten(2).transpose(1, 2)
    tensors = {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}
    return tensors, dequantized.contiguous()


def _compressed(layout: str, kind: str, bits: int, **weights: object) -> dict[str, object]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": kind, "symmetric": True, **weights},
        "input_activations": None,
    }
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
            "config_groups": {"group_0": group}, "kv_cache_scheme": None}  # fmt: skip


def _gptq(**changes: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False,
            "sym": True, **changes}  # fmt: skip


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
FORMATS: dict[str, StoredFormat] = {
    "fp8 blocks": StoredFormat(FP8, fp8(".weight_scale_inv", "block")),
    "fp8 whole, static": StoredFormat(
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8(".weight_scale", "tensor")
    ),
    "ct fp8 tensor": StoredFormat(
        _compressed("float-quantized", "float", 8), fp8(".weight_scale", "tensor")
    ),
    "ct fp8 channel": StoredFormat(
        _compressed("float-quantized", "float", 8), fp8(".weight_scale", "channel")
    ),
    "ct fp8 blocks": StoredFormat(
        _compressed("float-quantized", "float", 8, block_structure=[32, 32]),
        fp8(".weight_scale", "block"),
    ),
    "ct int8": StoredFormat(_compressed("int-quantized", "int", 8), int8(has_zeros=False)),
    "ct int8 zeros": StoredFormat(_compressed("int-quantized", "int", 8), int8(has_zeros=True)),
    "ct int4": StoredFormat(_compressed("pack-quantized", "int", 4), packed()),
    "ct int4 zeros": StoredFormat(
        _compressed("pack-quantized", "int", 4), packed(has_zeros=True)
    ),
    "ct int4 act-order": StoredFormat(
        _compressed("pack-quantized", "int", 4, actorder="group"), packed(act_order=True)
    ),
    "ct int8 packed": StoredFormat(_compressed("pack-quantized", "int", 8), packed(bits=8)),
    "awq": StoredFormat(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq
    ),
    "gptq": StoredFormat(_gptq(), gptq()),
    "gptq v2 zeros": StoredFormat(
        _gptq(checkpoint_format="gptq_v2", sym=False), gptq(offset=0, has_zeros=True)
    ),
    "gptq act-order": StoredFormat(
        _gptq(desc_act=True, sym=False), gptq(has_zeros=True, act_order=True)
    ),
    "gptq int8 rows": StoredFormat(
        _gptq(bits=8, group_size=-1), gptq(bits=8, group_size=-1)
    ),
}  # fmt: skip
MXFP4 = StoredFormat({"quant_method": "mxfp4"}, mxfp4)


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor of a linear layer or an expert is stored quantized.

    The router is not, and neither is the down projection of layer 1.
    """
    is_matrix = tensor.dim() == 2 and name.endswith(".weight") and ".layers." in name
    kept = ("gate.weight", "norm.weight", "layers.1.mlp.down_proj.weight")
    return is_matrix and not name.endswith(kept)


def is_experts(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 3


def write_quantized(source: Path, folder: Path, stored: StoredFormat) -> tuple[Path, Path]:
    """Write a model quantized, and dequantized as an ordinary checkpoint; return both folders."""
    with safe_open(source / FILE, "pt") as file:
        metadata = file.metadata()
    chosen = is_experts if stored is MXFP4 else is_quantized
    quantized: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, tensor in load_file(source / FILE).items():
        quantized[name] = dequantized[name] = tensor
        if chosen(name, tensor):
            del quantized[name]
            tensors, dequantized[name] = stored.write(tensor)
            layer = name.removesuffix(".weight")
            quantized |= {layer + suffix: part.contiguous() for suffix, part in tensors.items()}
    config = json.loads((source / "config.json").read_text())
    paths = folder / "quantized", folder / "dequantized"
    for path, tensors in zip(paths, (quantized, dequantized), strict=True):
        shutil.copytree(source, path)
        save_file(tensors, path / FILE, metadata)
    with_method = config | {"quantization_config": stored.config}
    (paths[0] / "config.json").write_text(json.dumps(with_method))
    return paths
