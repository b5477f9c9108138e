"""GGUF files give the tokens of their dequantized weights, and say what they cannot give."""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from gguf import quants

from core.errors import ConfigurationError
from core.files.gguf import find_gguf
from core.text.template_files import load_chat_template
from core.text.tokenizer import Tokenizer
from engine import LLM
from engine.model.gguf.metadata import Metadata
from engine.model.gguf.packed import PACKED, integer_weight
from engine.model.gguf.tokenizer import TokenizerOf
from engine.model.gguf.translate import translate
from tests.engine.greedy_answers import generate, tokens
from tests.engine.model.gguf.gguf_files import ARCHITECTURES, write_gguf

pytestmark = pytest.mark.usefixtures("exact_rows")
NO_WINDOW = {"qwen2": {"use_sliding_window": False}, "mistral": {"sliding_window": None}}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def write(tiny_model, tmp_path_factory):
    """Return a function (architecture, kind) → a GGUF file and its model in the usual form."""

    def make(architecture, kind="F32", **changes):
        source = tiny_model(architecture, changes={**NO_WINDOW.get(architecture, {}), **changes})
        file = tmp_path_factory.mktemp("gguf") / "model.gguf"
        return file, write_gguf(source, file, kind, blocks=kind.endswith("_K"))

    return make


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(write, architecture):
    """The types of matrices alternate, so that all are tried."""
    kind = ("F32", "Q8_0", "F16", "BF16")[list(ARCHITECTURES).index(architecture) % 4]
    file, dequantized = write(architecture, kind)
    llm = LLM(file, dtype="fp32", decoder="own", num_kv_blocks=40)
    assert tokens(llm, ignore_eos=True) == generate(dequantized, eos_token_id=None)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0", "Q4_1"])
def test_quantized_types(write, kind):
    file, dequantized = write("llama", kind, tie_word_embeddings=True)
    llm = LLM(file, dtype="fp32", decoder="own", num_kv_blocks=40)
    assert tokens(llm, ignore_eos=True) == generate(dequantized, eos_token_id=None)
    assert llm.facts.quantization == ("gguf" if kind in PACKED else "")
    said = f"{kind} weights " + ("stay in their bits" if kind in PACKED else "are unpacked")
    assert any(said in note for note in llm.facts.notes)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants(write, kind):
    file, dequantized = write("llama", kind, **WIDE)
    llm = LLM(file, dtype="fp32", decoder="own", num_kv_blocks=40)
    assert tokens(llm, ignore_eos=True) == generate(dequantized, eos_token_id=None)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("options", [{"decoder": "transformers"}, {"executor": "library"}])
def test_transformers_code(write, options):
    file, dequantized = write("qwen3", "Q8_0")
    llm = LLM(file, dtype="fp32", batching="dynamic", **options)
    assert tokens(llm) == generate(dequantized)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_types_are_not_rounded(kind):
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(3)).numpy()
    rows = quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    expected = quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    found = integer_weight(kind, torch.from_numpy(rows)).dequantized()
    assert torch.equal(found, torch.from_numpy(expected))


def test_the_tokenizer_and_its_template(write, tmp_path):
    file, _ = write("llama")
    translate([file], tmp_path)
    tokenizer, template = Tokenizer(tmp_path), load_chat_template(tmp_path, None)
    assert tokenizer.encode("a he<|user|>") == [2, 30, 1]
    assert tokenizer.decode([9, 6, 29], skip_special_tokens=False) == "hehe"
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|user|>hi"
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [0]}


def test_a_tokenizer_beside_the_file_replaces_its_own(write, tmp_path):
    file, _ = write("llama")
    (file.parent / "tokenizer.json").write_text("{}")
    translate([file], tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_unknown_things_are_refused_by_name(write, monkeypatch):
    file, _ = write("llama")
    metadata = Metadata([file])
    del metadata._fields["tokenizer.ggml.pre"]
    with pytest.raises(ConfigurationError, match=r"pre=\(missing\).*tokenizer.json"):
        TokenizerOf(metadata)._backend()
    tensor = metadata.tensors["output.weight"]._replace(type="Q8_K")
    metadata.tensors = {**metadata.tensors, "output.weight": tensor}
    monkeypatch.setattr("engine.model.gguf.translate.Metadata", lambda files: metadata)
    with pytest.raises(ConfigurationError, match=r"'output.weight' has the type Q8_K"):
        translate([file], file.parent)
    metadata.architecture = "mamba"
    with pytest.raises(ConfigurationError, match=r"architecture mamba .*qwen3.*safetensors"):
        translate([file], file.parent)


def test_broken_files(tmp_path, write):
    file, _ = write("llama")
    broken = tmp_path / "broken.gguf"
    for content in (b"no", file.read_bytes()[:3000], file.read_bytes()[:-100]):
        broken.write_bytes(content)
        with pytest.raises(ConfigurationError, match="download it again"):
            LLM(broken)


def test_files_of_a_directory(tmp_path):
    names = ["a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf"]
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ConfigurationError, match=r"2 models \(a.gguf, b-00001-of-00002.gguf\)"):
        find_gguf(tmp_path)
    (tmp_path / "a.gguf").unlink()
    parts = [tmp_path / name for name in names[1:3]]
    assert find_gguf(tmp_path) == find_gguf(parts[0]) == parts
    parts[1].unlink()
    with pytest.raises(ConfigurationError, match=r"b-00002-of-00002.gguf is missing"):
        find_gguf(tmp_path)
