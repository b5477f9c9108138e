"""`longshore plan` and the engine agree on how wide layers are, those with a state too."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from container.capacity.decoder import decoder_from_directory
from core.configuration.options import Options
from core.states.layout import KINDS
from engine.loading.own_decoder import make_decoder
from engine.memory.largest_step import NoAttention, NoStates
from engine.model.checkpoint import checkpoint_of
from engine.model.elementwise import make_elementwise
from engine.model.loader import Loader
from engine.model.published.settings import read_spec
from tests.engine.tiny_models import OWN, decoder_class
from tests.kernels.host.launched import kernels

META = torch.device("meta")
NUM_TOKENS = 64
WIDE = {
    "hidden_size": 256, "head_dim": 64,
    "mamba_n_heads": 32, "mamba_d_ssm": 1024, "mamba_d_state": 128,
    "mamba_num_heads": 32, "mamba_head_dim": 32, "ssm_state_size": 128,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layers_block_type": ["mlp", "linear_attention", "moe", "full_attention"],
}  # fmt: skip
"""Sizes with which a layer with a state is the widest part."""


class LiveBytes(TorchDispatchMode):
    """Finds the most bytes of tensors that are alive after an operation, of those made by one."""

    def __init__(self):
        super().__init__()
        self._alive = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        given = {part.untyped_storage()._cdata for part in tree_leaves((args, kwargs))
                 if isinstance(part, torch.Tensor)}  # fmt: skip
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return outputs


def decoder_of(model):
    """Return a decoder of tensors without memory, which launches the kernels of a GPU."""
    state, spec = model.state_dict(), read_spec(model.config, 64)
    readers = {name: partial(state.__getitem__, name) for name in state}
    loader = Loader(checkpoint_of(readers, spec.family, "no weights"), META, torch.bfloat16)
    loader.elementwise = make_elementwise(torch.device("cuda"))
    return make_decoder(loader, spec, len(spec.layers))


@pytest.mark.parametrize("architecture", ["llama", *KINDS])
def test_plans_know_how_wide_layers_are(architecture, tmp_path):
    given = OWN[architecture] | {"conv_bias": False, "use_bias": False}
    settings = given | {name: size for name, size in WIDE.items() if name in given}
    config = AutoConfig.for_model(architecture, **settings)
    with META:
        model = decoder_class(config).from_config(config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture, **settings}))
    planned = decoder_from_directory(tmp_path, Options())
    assert planned.num_parameters == sum(part.numel() for part in model.parameters())
    decoder = decoder_of(model)
    parts = [(linear, part) for linear in decoder.linears for part in linear.parts.values()]
    width = sum(linear.in_features + part.rows.stop - part.rows.start for linear, part in parts)
    assert planned.linear_width == width
    peak = NUM_TOKENS * planned.activation_width * torch.bfloat16.itemsize
    assert peak == pytest.approx(peak_of(decoder), rel=0.1)


def peak_of(decoder):
    """Return the peak of the bytes that a step takes on a GPU."""
    token_ids = torch.zeros(NUM_TOKENS, dtype=torch.int64, device=META)
    paged = NoAttention(lambda call: 0, NoStates(token_ids))
    live = LiveBytes()

    def step():
        with torch.inference_mode(), live:
            decoder(token_ids, token_ids, token_ids, paged)

    kernels(step, arch=90)
    return live.peak
