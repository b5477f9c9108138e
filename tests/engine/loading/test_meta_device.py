"""Neither the decoder nor the sampler waits for the device, for any family or sampling parameter.

Tensors on torch's `meta` device have shapes and no memory. Whatever would copy a value to the host
(`.item()`, a boolean index, a shape that depends on data) raises there, and on CUDA would stall the
step and fail a graph's capture. A copy from the host, which `torch.tensor` makes, would do the same
on CUDA but does not raise on `meta`. NoHostData finds it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING

from core.plan import BlockTable, Chunk
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.builders.common import sampling_stages
from engine.loading.own_decoder import make_decoder
from engine.memory.largest_step import NoAttention, NoStates
from engine.model.checkpoint import checkpoint_of
from engine.model.published.settings import read_spec
from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.schemes import QuantizingLoader
from engine.model.quantization.weights import Float4Weight
from engine.sampling.grammars import Grammars
from engine.sampling.rows import Row
from engine.sampling.sampler import Sampler
from engine.scores.column import ScoreColumn
from engine.staging import Staging, Upload
from engine.step.beam_candidates import BeamColumn
from engine.step.places import Places
from kernels import dry_run
from tests.engine.sampling import grammar_models
from tests.engine.sampling.stages import STAGES
from tests.engine.tiny_models import OWN, VOCABULARY, decoder_class

META = torch.device("meta")
NUM_TOKENS, MAX_MODEL_LEN = 9, 64
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "long top-k": {"top_k": 200},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "typical-p": {"typical_p": 0.8},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "logit bias": {"logit_bias": {3: 1.0}},
    "allowed tokens": {"allowed_token_ids": (1, 2, 3)},
    "bad words": {"bad_words": ((4, 5),)},
    "n-grams": {"no_repeat_ngram_size": 2},
    "min tokens": {"min_tokens": 4},
    "logprobs": {"logprobs": 3},
}
EVERYTHING = {name: value for kind in list(KINDS.values())[1:] for name, value in kind.items()}


@pytest.mark.parametrize("family", OWN)
def test_a_decoder_does_not_wait_for_the_device(family):
    decode(decoder_of(family))


MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"]
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 64}


@pytest.mark.matrix
@pytest.mark.parametrize("precision", QUANTIZERS)
@pytest.mark.parametrize("family", MIXTURES)
def test_quantized_experts_do_not_wait_for_the_device(family, precision, monkeypatch):
    """The experts run through the wrapper that launches their kernel on CUDA."""
    monkeypatch.setattr("engine.model.quantization.experts.uses_kernel", lambda *_: True)
    decoder = decoder_of(family, SIZES, precision=precision)
    with dry_run.target(90) as launches:
        decode(decoder)
    num_layers = len(decoder.layers) - (family == "qwen2_moe")  # one is dense
    assert [launch.name for launch in launches] == ["grouped_quantized_linear_kernel"] * (
        2 * num_layers
    )


@pytest.mark.parametrize("kind", [*QUANTIZERS, "mxfp4"])
def test_dequantizing_does_not_wait_for_the_device(kind):
    if kind == "mxfp4":
        codes, exponents = (torch.zeros(4, n, dtype=torch.uint8, device=META) for n in (32, 2))
        weight = Float4Weight(codes, exponents)
    else:
        weight = quantize_weight(torch.empty(4, 64, device=META), kind, META)
    with NoHostData():
        assert weight.dequantized().shape == (4, 64)


class NoHostData(TorchFunctionMode):
    """Fails if a tensor is made from numbers on the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor), "this copies from the host"
        return func(*args, **(kwargs or {}))


def decoder_of(family, changes=None, **options):
    """Return a decoder of tensors without memory."""
    config = CONFIG_MAPPING[family](**{**OWN[family], **(changes or {})})
    with META:
        state = decoder_class(config).from_config(config).state_dict()
    spec = read_spec(config, MAX_MODEL_LEN)
    readers = {name: partial(state.__getitem__, name) for name in state}
    loader = QuantizingLoader(
        checkpoint_of(readers, spec.family, "no weights"),
        META,
        torch.bfloat16,
        is_transposed=spec.family.is_transposed,
        **options,
    )
    return make_decoder(loader, spec, len(spec.layers))


def decode(decoder):
    token_ids = torch.empty(NUM_TOKENS, dtype=torch.int64, device=META)
    rows = torch.empty(2, dtype=torch.int64, device=META)
    with NoHostData():
        logits = decoder(
            token_ids, token_ids, rows, NoAttention(lambda call: 0, NoStates(token_ids))
        )
    assert logits.shape == (2, VOCABULARY)
    assert logits.device == META


BATCHES = {name: [kind] for name, kind in KINDS.items()}
BATCHES |= {"one of each": [*KINDS.values()], "all in one": [EVERYTHING]}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_sampling_does_not_wait_for_the_device(batch):
    rows = []
    for id, kind in enumerate(batch):
        params = SamplingParams(max_tokens=8, seed=id, **kind)
        sequence = Sequence(id, [1, 2, 1], params, eos_token_ids=(0,))
        sequence.token_ids += [1, 2]
        rows.append(Row(sequence, 5))
    logits = torch.empty(len(rows), 256, device=META)
    newest = torch.empty(len(rows), dtype=torch.int64, device=META)
    choices = Sampler(Staging(META), STAGES).sample(logits, rows, lambda: newest)
    assert choices.token_ids.shape == (len(rows),)
    assert choices.token_ids.device == META


def test_grammars_do_not_wait_for_the_device(tmp_path):
    grammars = Grammars(grammar_models.save(tmp_path), {grammar_models.EOS})
    params = SamplingParams(**grammar_models.form(regex="[ab]+"), min_p=0.1, logprobs=2)
    parts = (grammars.part(params, 2),)
    rows = [Row(Sequence(id, [60, 61], params, parts=parts), 2) for id in range(2)]
    logits = torch.empty(len(rows), grammar_models.VOCABULARY, device=META)
    newest = torch.empty(len(rows), dtype=torch.int64, device=META)
    choices = Sampler(Staging(META), sampling_stages(grammars)).sample(logits, rows, lambda: newest)
    assert len(choices._settlers) == 2, "the ranking and the grammar's mask"
    assert choices.token_ids.device == META


def test_beams_and_scores_of_prompts_do_not_wait_for_the_device():
    logits = torch.empty(4, VOCABULARY, device=META)
    params = SamplingParams(n=2, use_beam_search=True, temperature=0.0)
    beams = [
        Chunk(Sequence(id, [1, 2], params), 1, 1, (BlockTable((id,)),), samples_token=True)
        for id in range(4)
    ]
    scored = Sequence(0, [1] * 6, SamplingParams(prompt_logprobs=3))
    chunk = Chunk(scored, 0, 5, (BlockTable((0,)),), samples_token=False, extra_rows=range(1, 5))
    for column, chunks in ((BeamColumn(), beams), (ScoreColumn(META), [chunk])):
        assert column.is_used(chunks)
        upload = Upload(Staging(META))
        applied = column.plan(Places(chunks), np.zeros((3, 5), np.int64), upload)
        upload.send()
        applied.take(logits, logits)


def test_meta_tensors_find_what_waits():
    """Check the method: these operations raise, so the tests above fail if a decoder uses one."""
    tensor = torch.empty(4, device=META)
    for waits in (lambda: tensor.max().item(), lambda: tensor[tensor > 0], tensor.nonzero):
        with pytest.raises(RuntimeError):
            waits()
