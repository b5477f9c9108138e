"""Builds whole engines with random weights, as the server builds them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.shapes import DRY_SHAPE, SHAPES, Config, write_config
from core.configuration.options import Options, make_options
from core.configuration.record import Value
from engine.build import build_engine
from engine.device import DTYPES
from engine.engine import Engine
from engine.loading.model_source import ModelSource
from engine.loading.random_weights import load_random_reference


def shape_config(bench: Bench) -> Config:
    return DRY_SHAPE if bench.is_dry else SHAPES[bench.shape]


def dtype(bench: Bench) -> torch.dtype:
    """Return the dtype of weights and KV cache."""
    return DTYPES[_dtype_name(bench)]


def make_engine(bench: Bench, **options: Value) -> Engine:
    """Build an engine with the bench's shape, dtype and device, and `options` of
    core.configuration.options."""
    chosen: Options = make_options(
        {
            "load_format": "dummy",
            "dtype": _dtype_name(bench),
            "device": bench.device.type,
            **options,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape_config(bench), Path(folder))
        engine = build_engine(Path(folder), chosen)
    _note_model(bench)
    for note in engine.facts.notes:
        bench.note(note)
    return engine


def make_model(bench: Bench) -> Any:
    """Return the model of `make_engine`, with the same weights, as a plain transformers model."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape_config(bench), Path(folder))
        source = ModelSource(
            model_dir=Path(folder),
            config=AutoConfig.from_pretrained(folder),
            dtype=dtype(bench),
            device=bench.device,
            is_dummy=True,
        )
        _note_model(bench)
        return load_random_reference(source, "sdpa")


def _note_model(bench: Bench) -> None:
    shape = "a tiny model" if bench.is_dry else bench.shape
    bench.note(f"{shape} in {_dtype_name(bench)} on {bench.device}")


def _dtype_name(bench: Bench) -> str:
    return "fp32" if bench.is_dry else "bf16"
