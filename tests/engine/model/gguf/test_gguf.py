"""GGUF files give the tokens of their dequantized weights, and say what they cannot give."""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from gguf import quants

from benchmarks.gguf.writer import ARCHITECTURES
from core.errors import ConfigurationError
from core.files.gguf import find_gguf
from core.text.template_files import load_chat_template
from core.text.tokenizer import Tokenizer
from engine import LLM
from engine.model.gguf.architectures import find_architecture, model_settings
from engine.model.gguf.metadata import Metadata
from engine.model.gguf.packed import PACKED, coded_weight
from engine.model.gguf.stored import FLOATS, OFFSET
from engine.model.gguf.tokenizer import TokenizerOf
from engine.model.gguf.translate import translate
from engine.model.quantization.formats import quantized_format
from engine.model.quantization.integers import Integers
from engine.model.quantization.weights import OffsetWeight
from kernels.cpu.linear import is_faster
from tests.engine.greedy_answers import STRATEGIES, generate, tokens
from tests.engine.model.gguf.gguf_files import random_blocks
from tests.engine.model.gguf.gguf_files import write as write_files

pytestmark = pytest.mark.usefixtures("exact_rows")
NO_WINDOW = {"qwen2": {"use_sliding_window": False}, "mistral": {"sliding_window": None}}
PIECES = ["▁he", "he", "▁h", "h", "e", "▁"]
"""Tokens of SentencePiece, the best first."""
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def write(tiny_model, tmp_path_factory):
    """Return a function (architecture, kind) → a GGUF file and its model in the usual form."""

    def make(architecture, kind="F32", **changes):
        source = tiny_model(architecture, changes={**NO_WINDOW.get(architecture, {}), **changes})
        file = tmp_path_factory.mktemp("gguf") / "model.gguf"
        return file, write_files(source, file, kind)

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
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_0", "Q4_0", "Q6_K", "Q5_K", "Q4_1", "Q3_K"])
def test_quantized_types(write, kind):
    sizes = WIDE if kind.endswith("_K") else {}
    file, dequantized = write("llama", kind, tie_word_embeddings=True, **sizes)
    llm = LLM(file, dtype="fp32", decoder="own", num_kv_blocks=40)
    assert tokens(llm, ignore_eos=True) == generate(dequantized, eos_token_id=None)
    assert llm.facts.quantization == ("gguf" if kind in PACKED else "")
    assert _says_how_it_is_stored(llm, kind)


def _says_how_it_is_stored(llm, kind):
    keeps = kind in PACKED and kind not in (FLOATS if is_faster() else OFFSET)
    said = f"{kind} weights " + ("stay quantized" if keeps else "are unpacked")
    return any(said in note for note in llm.facts.notes)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("mixtral", "Q4_K"), ("qwen3_moe", "Q8_0"), ("granitemoe", "Q4_0"), ("gpt_oss", "MXFP4")],
)
def test_mixtures(write, architecture, kind, strategy):
    file, dequantized = write(architecture, kind, **(WIDE if kind == "Q4_K" else {}))
    options = {"batching": strategy, "dtype": "fp32", "decoder": "own", "num_kv_blocks": 40}
    llm = LLM(file, **options, **STRATEGIES[strategy])
    assert tokens(llm, ignore_eos=True) == generate(dequantized, eos_token_id=None)
    assert _says_how_it_is_stored(llm, kind)


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("options", [{"decoder": "transformers"}, {"executor": "library"}])
def test_transformers_code(write, options):
    file, dequantized = write("qwen3", "Q8_0")
    llm = LLM(file, dtype="fp32", batching="dynamic", **options)
    assert tokens(llm) == generate(dequantized)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_types_are_not_rounded(kind):
    type = gguf.GGMLQuantizationType[kind]
    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(3))
    rows = (
        random_blocks(weight.shape, type)
        if kind in OFFSET
        else quants.quantize(weight.numpy(), type)
    )
    found = coded_weight(kind, torch.from_numpy(rows)).dequantized()
    assert torch.equal(found, torch.from_numpy(quants.dequantize(rows, type)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_with_minimums(dtype):
    """Also of some inputs, as a rank has them."""
    rows = random_blocks((70, 512), gguf.GGMLQuantizationType.Q4_K)
    weight = coded_weight("Q4_K", torch.from_numpy(rows))
    assert isinstance(weight, OffsetWeight)
    part = weight.of_columns(range(64, 256))
    assert torch.equal(part.dequantized(), weight.dequantized()[:, 64:256])
    limit = 1e-5 if dtype == torch.float32 else 0.01
    for given in (part, weight):
        format = quantized_format(given, torch.device("cpu"), dtype, is_exact=True)
        assert isinstance(format, Integers) == (is_faster() and dtype != torch.float16)
        inputs = torch.randn(9, given.shape[1]).to(dtype)
        expected = inputs.float() @ given.dequantized().T
        assert _error(format.multiply(inputs, None), expected) < limit
        if isinstance(format, Integers):
            assert _error(Integers.of(given).multiply(inputs, None), expected) < 0.02


def _error(found, expected):
    return (found.float() - expected).norm() / expected.norm()


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


def test_parts_and_alignment(write, monkeypatch):
    def in_parts(*arguments):
        return gguf_writer(*arguments, split_max_tensors=9)

    def aligned(*arguments):
        writer = gguf_writer(*arguments)
        writer.add_custom_alignment(256)
        return writer

    gguf_writer = gguf.GGUFWriter
    for make, name in ((in_parts, "model-00001-of-00004.gguf"), (aligned, "model.gguf")):
        monkeypatch.setattr(gguf, "GGUFWriter", make)
        file, dequantized = write("llama", "Q8_0")
        assert not file.with_name("model-00005-of-00004.gguf").exists()
        llm = LLM(file.with_name(name), dtype="fp32", decoder="own", num_kv_blocks=40)
        assert tokens(llm, ignore_eos=True) == generate(dequantized, eos_token_id=None)


class Fields(Metadata):
    """A file's metadata, with other values of some keys."""

    def __init__(self, file, **values):
        self._values = values
        super().__init__([file])

    def get(self, key, default=None):
        last = key.rpartition("}.")[2].removeprefix("tokenizer.ggml.").replace(".", "_")
        if last not in self._values:
            return super().get(key, default)
        return default if self._values[last] is None else self._values[last]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope_scaling_factor": 0.0}, {"rope_type": "default"}),
        ({"rope_scaling_type": "none", "rope_scaling_factor": 4.0}, {"rope_type": "default"}),
        ({"rope_scaling_factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0,
             "rope_scaling_original_context_length": 32, "rope_scaling_yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
             "beta_fast": 16.0},
        ),
    ],
)  # fmt: skip
def test_scaled_rotations(write, values, expected):
    file, _ = write("llama")
    metadata = Fields(file, **values)
    settings = model_settings(metadata, find_architecture(metadata))
    assert settings["rope_parameters"] == {"rope_theta": 10_000.0, **expected}
    metadata = Fields(file, rope_scaling_type="dynamic")
    with pytest.raises(ConfigurationError, match="type=dynamic is unknown; none, linear and yarn"):
        model_settings(metadata, find_architecture(metadata))


def test_layers_that_do_not_rotate(write):
    file, _ = write("granite")
    metadata = Fields(file, rope_scaling_finetuned=False)
    with pytest.raises(ConfigurationError, match="no rotary embedding"):
        model_settings(metadata, find_architecture(metadata))


def test_gemma_3_without_a_window(write):
    file, _ = write("gemma3_text")
    metadata = Fields(file, attention_sliding_window=0)
    settings = model_settings(metadata, find_architecture(metadata))
    assert settings["sliding_window"] is None
    assert set(settings["layer_types"]) == {"full_attention"}


@pytest.mark.parametrize(
    ("split", "expected"), [("tekken", True), ("llama-bpe", True), ("gpt-2", False)]
)
def test_whole_words_and_the_token_of_the_beginning(write, split, expected, tmp_path):
    """A file need not say that the token of the beginning is added."""
    file, _ = write("llama")
    TokenizerOf(Fields(file, pre=split, bos_token_id=1, add_bos_token=None)).write(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    assert content["model"]["ignore_merges"] is expected
    assert Tokenizer(tmp_path).encode("a") == [*[1] * expected, 2]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("adds_space", [None, True, False])
def test_sentencepiece(write, tmp_path, architecture, adds_space):
    """Merges follow from scores. Letters that are no token are bytes."""
    file, _ = write("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [2, 3, 3] + [6] * 256 + [1] * len(PIECES)
    scores = [0.0] * 259 + [-float(index) for index in range(len(PIECES))]
    metadata = Fields(
        file, model="llama", pre=None, tokens=tokens, token_type=types, scores=scores, merges=None,
        bos_token_id=1, eos_token_id=2, add_bos_token=None, add_space_prefix=adds_space,
        context_length=64,
    )  # fmt: skip
    metadata.architecture = architecture
    TokenizerOf(metadata).write(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    has_space = architecture != "gemma2" and adds_space is not False
    first = ["▁he"] if has_space else ["he"]
    found = [tokens[id] for id in tokenizer.encode("he he</s>")]
    assert found == ["<s>", *first, "▁he", "</s>"]
    found = [tokens[id] for id in tokenizer.encode("eé")]
    assert found == ["<s>", *["▁"] * has_space, "e", "<0xC3>", "<0xA9>"]
    for text in ("he he", "eé h", *[" he"] * (not has_space)):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_for_themselves(write, tmp_path):
    file, _ = write("llama")
    tokens = ["<s>", "1", "2", "12", "a", "1a"]
    metadata = Fields(file, pre="starcoder", tokens=tokens, token_type=None, merges=["1 2", "1 a"])
    TokenizerOf(metadata).write(tmp_path)
    assert Tokenizer(tmp_path).encode("12a") == [1, 2, 4]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], [2, 3]),
        (["<|end|>", "<|return|>", "x"], [1, 2]),
        (["<|im_end|>", "x", "<EOT>"], [1, 3]),
    ],
)
def test_tokens_that_end_an_answer(write, given, expected):
    file, _ = write("llama")
    assert TokenizerOf(Fields(file, tokens=["x", *given], eos_token_id=None)).end_ids() == expected


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
    for name in ("a-mmproj-f16.gguf", "imatrix_a.gguf"):
        (tmp_path / name).touch()
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
