"""Choosing the task of a container."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.configuration.options import Options, make_options
from core.configuration.task import choose_task
from core.errors import ConfigurationError


@pytest.fixture
def model(tmp_path: Path):
    """Return a function that writes a config.json and returns its directory."""

    def make(*architectures: str) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("architecture", "kind", "name"),
    [
        ("LlamaForCausalLM", "generation", "text-generation"),
        ("T5ForConditionalGeneration", "generation", "text-generation"),
        ("GPT2LMHeadModel", "generation", "text-generation"),
        ("EncoderDecoderModel", "generation", "text-generation"),
        ("BertForSequenceClassification", "pipeline", "text-classification"),
        ("BertForTokenClassification", "pipeline", "token-classification"),
        ("BertForQuestionAnswering", "pipeline", "question-answering"),
        ("BertForMaskedLM", "pipeline", "fill-mask"),
        ("ViTForImageClassification", "pipeline", "image-classification"),
        ("Wav2Vec2ForCTC", "pipeline", "automatic-speech-recognition"),
        ("WhisperForConditionalGeneration", "pipeline", "automatic-speech-recognition"),
        ("ASTForAudioClassification", "pipeline", "audio-classification"),
        ("HubertForSequenceClassification", "pipeline", "audio-classification"),
        ("SegformerForSemanticSegmentation", "pipeline", "image-segmentation"),
        ("Mask2FormerForUniversalSegmentation", "pipeline", "image-segmentation"),
        ("MaskFormerForInstanceSegmentation", "pipeline", "image-segmentation"),
        ("DetrForSegmentation", "pipeline", "image-segmentation"),
        ("DPTForDepthEstimation", "pipeline", "depth-estimation"),
        ("SamModel", "pipeline", "mask-generation"),
        ("SuperGlueForKeypointMatching", "pipeline", "keypoint-matching"),
        ("VideoMAEForVideoClassification", "pipeline", "video-classification"),
        ("LayoutLMv3ForQuestionAnswering", "pipeline", "document-question-answering"),
        ("TapasForQuestionAnswering", "pipeline", "table-question-answering"),
        ("VitsModel", "pipeline", "text-to-audio"),
        ("BertModel", "embedding", "text-embedding"),
    ],
)
def test_the_task_follows_from_the_model(model, architecture, kind, name):
    task = choose_task(model(architecture, "Other"), Options())
    assert (task.kind, task.name) == (kind, name)
    assert architecture in task.reason


def test_the_default_task_is_generation(model, tmp_path):
    assert choose_task(model(), Options()).kind == "generation"
    assert choose_task(tmp_path / "nothing", Options()).kind == "generation"


def test_sentence_transformers_files_come_before_the_architecture(model):
    path = model("Qwen3ForCausalLM")
    (path / "modules.json").write_text("[]")
    task = choose_task(path, Options())
    assert (task.kind, task.reason) == (
        "embedding",
        "the model has sentence-transformers' modules.json",
    )


@pytest.mark.parametrize(
    ("value", "kind", "name"),
    [
        ("text-generation", "generation", "text-generation"),
        ("generate", "generation", "text-generation"),
        ("text2text-generation", "generation", "text2text-generation"),
        ("embed", "embedding", "text-embedding"),
        ("text_embedding", "embedding", "text-embedding"),
        ("feature-extraction", "pipeline", "feature-extraction"),
        ("ner", "pipeline", "token-classification"),
        ("text-to-speech", "pipeline", "text-to-audio"),
        ("anything", "pipeline", "anything"),
    ],
)
def test_an_option_comes_first(model, value, kind, name):
    task = choose_task(model("BertForMaskedLM"), make_options({"task": value}))
    assert (task.kind, task.name, task.reason) == (kind, name, f"option.task={value}")


@pytest.mark.parametrize(
    "options",
    [{"batching": "paged"}, {"rolling_batch": "auto"}, {"executor": "packed"},
     {"enable_lora": True}],
)  # fmt: skip
def test_generation_options_are_rejected_for_other_tasks(model, options):
    choose_task(model("LlamaForCausalLM"), make_options(options))
    with pytest.raises(ConfigurationError, match="for token-classification"):
        choose_task(model("BertForTokenClassification"), make_options(options))


def test_a_broken_config_is_reported(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": "Llama"}')
    with pytest.raises(ConfigurationError, match="Expected `array"):
        choose_task(tmp_path, Options())
