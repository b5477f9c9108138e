"""Layers of tiny models with real heads launch the kernels that are precompiled for such layers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.attention.states import StatePool, choose_operations
from engine.attention.triton_backend import TritonBackend
from engine.loading.own_decoder import make_decoder
from engine.model.mixtures.experts import choose_grouped
from engine.model.published.settings import read_spec
from kernels import dry_run, precompile
from kernels.precompiled_layers import (
    GEMMA_NORM,
    QWEN_NORM,
    SHAPES,
    ConvolutionShape,
    DeltaShape,
    FoldedShape,
    LatentShape,
    MambaShape,
    ScanShape,
    Shape,
)
from kernels.state.batch import StateBatch
from kernels.state.rows import STATE_DTYPES
from tests.engine.tiny_models import OWN, decoder_class
from tests.kernels.host import host_step
from tests.kernels.host.host_step import CPU, CUDA, DTYPE, MAX_MODEL_LEN
from tests.kernels.host.launched import ARCH, kernels

HIDDEN = 256
DENSE = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 1}
LATENT = DENSE | {
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
TWO_KINDS = DENSE | {"num_hidden_layers": 2}
WINDOWS = ["sliding_attention", "full_attention"]
GEMMA4 = {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 8, "sliding_window": 1024}
GEMMA4_LAYER = Shape(
    8, 2, 256, HIDDEN, "qkv", GEMMA_NORM, window=1024, activation="gelu_tanh", input_width=64
)
CASES = {
    "qwen3": (DENSE | {"head_dim": 64}, [Shape(4, 2, 64, HIDDEN, "qk")]),
    "deepseek_v2": (
        LATENT | {"num_attention_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None},
        [LatentShape(16, HIDDEN)],
    ),
    "deepseek_v3": (
        LATENT
        | {"num_attention_heads": 20, "kv_lora_rank": 512, "q_lora_rank": 96}
        | {"qk_nope_head_dim": 192, "v_head_dim": 256},
        [LatentShape(20, HIDDEN, 96, expanded=(256, 256))],
    ),
    "mistral4": (
        LATENT
        | {"num_attention_heads": 32, "kv_lora_rank": 256, "q_lora_rank": 128, "head_dim": 128}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "qk_nope_head_dim": 64},
        [LatentShape(32, HIDDEN, 128, (320, 256), (128, 128))],
    ),
    "gemma4_unified_text": (
        TWO_KINDS
        | GEMMA4
        | {"layer_types": WINDOWS, "num_key_value_heads": 2, "num_global_key_value_heads": 1},
        [
            replace(GEMMA4_LAYER, input_width=0),
            FoldedShape(8, 1, HIDDEN),
        ],
    ),
    "gemma4_text": (
        TWO_KINDS
        | GEMMA4
        | {"layer_types": WINDOWS * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        | {"num_key_value_heads": 2, "num_global_key_value_heads": None, "attention_k_eq_v": False}
        | {"hidden_size_per_layer_input": 64, "enable_moe_block": False},
        [
            replace(GEMMA4_LAYER, has_shared=True),
            replace(GEMMA4_LAYER, head_dim=512, window=None, has_shared=True),
        ],
    ),
    "qwen3_5_text": (
        TWO_KINDS
        | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 256}
        | {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        [DeltaShape(8, 16), Shape(4, 2, 256, HIDDEN, "qk", QWEN_NORM, rotary_dim=64)],
    ),
    "bamba": (
        TWO_KINDS
        | {"mamba_n_heads": 16, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_head": 32}
        | {"head_dim": 128},
        [MambaShape(16, 32), Shape(4, 2, 128, HIDDEN, rotary_dim=64)],
    ),
    "granitemoehybrid": (
        TWO_KINDS
        | {"mamba_n_heads": 16, "mamba_n_groups": 2, "mamba_d_state": 64, "mamba_d_head": 32}
        | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 64}
        | {"num_local_experts": 0, "shared_intermediate_size": 64, "residual_multiplier": 1.0},
        [MambaShape(16, 32, 64, 2), Shape(4, 2, 64, HIDDEN, rotary_dim=0)],
    ),
    "mamba": (TWO_KINDS, [ScanShape(2 * HIDDEN, HIDDEN, 16)]),
    "falcon_mamba": (TWO_KINDS, [ScanShape(2 * HIDDEN, HIDDEN, 16, is_normed=True)]),
    "lfm2": (
        TWO_KINDS | {"layer_types": ["conv", "full_attention"], "head_dim": 64, "conv_bias": False},
        [ConvolutionShape(HIDDEN), Shape(4, 2, 64, HIDDEN, "qk")],
    ),
}


class Model:
    """A decoder with random weights, its cache and the pool of its states."""

    def __init__(self, architecture, settings):
        config = AutoConfig.for_model(architecture, **(OWN[architecture] | settings))
        weights = decoder_class(config).from_config(config, dtype=DTYPE).state_dict()
        self.spec = spec = read_spec(config, MAX_MODEL_LEN)
        loader = host_step._Loader(spec, weights, defaultdict(float))
        self._decoder = make_decoder(loader, spec, config.num_hidden_layers)
        self.sum_dtypes = STATE_DTYPES if spec.states else STATE_DTYPES[:1]
        self.keep_sums_in(self.sum_dtypes[0])

    def keep_sums_in(self, dtype):
        """Begin with new states, whose sums are of this type."""
        states = StatePool(self.spec.states, 2, DTYPE, CPU, sum_dtype=dtype)
        states.operations = choose_operations(CUDA, self.spec.states)
        self._cache = KVCache(self.spec.shapes, 8, host_step.LAYOUT, DTYPE, CPU, states=states)

    @torch.inference_mode()
    def step(self, num_decodes, num_prompt_tokens, *, is_captured=True):
        inputs = host_step._inputs(num_decodes, num_prompt_tokens)
        num_tokens = num_decodes + num_prompt_tokens
        starts = [*range(num_decodes + 1)] + [num_tokens] * (num_prompt_tokens > 0)
        states = StateBatch(
            torch.tensor(starts, dtype=torch.int32),
            torch.arange(len(starts) - 1),
            torch.zeros(num_tokens, dtype=torch.int64),
            None,
            num_decodes,
        )
        in_prompt = torch.zeros(num_tokens, dtype=torch.bool)
        batch = replace(inputs.batch, states=states, in_prompt=in_prompt)
        if is_captured:
            batch = replace(batch, spans=None)
        backend = TritonBackend(dry_run.NUM_PROCESSORS[ARCH], MAX_MODEL_LEN)
        self._decoder(
            *inputs.tokens[:2], inputs.logit_rows, PagedStep([batch], self._cache, backend)
        )


@pytest.mark.parametrize("architecture", CASES)
def test_kernels_of_layers_are_precompiled(architecture, monkeypatch):
    monkeypatch.setattr("engine.model.latent_attention.uses_panels", lambda *_: False)
    settings, layers = CASES[architecture]
    model = Model(architecture, settings)

    def serve():
        for dtype in model.sum_dtypes:
            model.keep_sums_in(dtype)
            model.step(1, 0)
            model.step(0, 20)
            model.step(1, 20)
            model.step(0, 32, is_captured=False)

    engine = kernels(serve)
    assert engine
    ours = kernels(lambda: [part.launch() for part in layers])
    assert sorted(ours - engine) == [], "all precompiled kernels are launched by the engine"
    assert sorted(engine - ours) == [], "all kernels of the engine are precompiled"


def test_every_row_launches_attention_or_a_convolution():
    for layers in SHAPES:
        names = {name for name, _ in kernels(layers.launch, arch=90)}
        assert names & {"paged_prefill_kernel", "conv_rows_kernel"}, layers


@pytest.mark.parametrize(("arch", "num_experts"), [(80, 64), (86, 256), (89, 512), (90, 64)])
def test_products_of_experts_are_precompiled(arch, num_experts):
    weights = torch.empty(num_experts, 96, 128, dtype=DTYPE, device="meta")
    ends = torch.empty(num_experts, dtype=torch.int32, device="meta")

    def serve():
        grouped = choose_grouped(CUDA, DTYPE)
        for rows_of_expert in (1, 20, 33, 1000):
            size = (num_experts * rows_of_expert, 128)
            grouped(torch.empty(size, dtype=DTYPE, device="meta"), weights, ends)

    engine, ours = (kernels(f, arch) for f in (serve, lambda: precompile.compile_experts(arch)))
    assert len(engine) == (0 if arch == 90 else 4)
    assert engine <= ours
