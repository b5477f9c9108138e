"""Tiny random models for tasks, written to folders with a tokenizer of a few words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    GenerationConfig,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
    WhisperTokenizer,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from tests.engine.tasks.media_models import MEDIA_MODELS
from tests.engine.tasks.words import BERT, WORDS, tokenizer

RATE = 8000
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", "A", "B", "C"]
_SOUND = {"vocab_size": len(LETTERS), "hidden_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "intermediate_size": 16, "conv_dim": (8, 8),
          "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 3,
          "classifier_proj_size": 8}  # fmt: skip
_WHISPER = {"vocab_size": 17, "num_mel_bins": 8, "d_model": 16, "encoder_layers": 1,
            "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 50,
            "max_target_positions": 300, "decoder_start_token_id": 9, "pad_token_id": 8,
            "eos_token_id": 8, "bos_token_id": 8}  # fmt: skip
_NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
_MODELS = {
    "classifier": (AutoModelForSequenceClassification, "bert", BERT | {"num_labels": 3}),
    "reranker": (AutoModelForSequenceClassification, "bert", BERT | {"num_labels": 1}),
    "roberta-classifier": (
        AutoModelForSequenceClassification,
        "roberta",
        BERT | {"num_labels": 3, "max_position_embeddings": 20},
    ),
    "score": (
        AutoModelForSequenceClassification,
        "llama",
        BERT | {"num_labels": 3, "num_key_value_heads": 1},
    ),
    "mpnet": (AutoModelForSequenceClassification, "mpnet", BERT | {"num_labels": 1}),
    "tagger": (AutoModelForTokenClassification, "bert", BERT | {"num_labels": 3}),
    "reader": (AutoModelForQuestionAnswering, "bert", BERT),
    "filler": (AutoModelForMaskedLM, "bert", BERT),
    "entailer": (
        AutoModelForSequenceClassification,
        "bert",
        BERT | {"id2label": _NLI, "label2id": {name: id for id, name in _NLI.items()}},
    ),
    "encoder": (AutoModel, "bert", BERT),
    "roberta": (AutoModel, "roberta", BERT | {"max_position_embeddings": 20}),
    "t5": (AutoModel, "t5", {"vocab_size": len(WORDS), "d_model": 16, "d_kv": 8, "d_ff": 32,
                             "num_layers": 2, "num_heads": 2, "pad_token_id": 0}),
    "llama": (AutoModel, "llama", BERT | {"num_key_value_heads": 1}),
    "viewer": (
        AutoModelForImageClassification,
        "vit",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 16, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
    "hearer": (AutoModelForAudioClassification, "wav2vec2", _SOUND),
    "listener": (AutoModelForCTC, "wav2vec2", _SOUND),
    "whisper": (AutoModelForSpeechSeq2Seq, "whisper", _WHISPER),
    "interpreter": (AutoModelForSpeechSeq2Seq, "whisper", _WHISPER | {"vocab_size": 69}),
}  # fmt: skip
_ENGLISH = ("endoftext", "startoftranscript", "en", "translate", "transcribe", "startoflm",
            "startofprev", "nospeech", "notimestamps")  # fmt: skip
_MULTILINGUAL = (*_ENGLISH[:-1], "de", _ENGLISH[-1], *(f"{n / 50:.2f}" for n in range(51)))
"""Whisper's control tokens. The model hears one second, so timestamps end at one second."""


def _multilingual(tokenizer: WhisperTokenizer) -> GenerationConfig:
    """Return what a multilingual Whisper's files say of its tokens."""
    id = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _MULTILINGUAL}
    return GenerationConfig(
        max_new_tokens=8,
        decoder_start_token_id=id["startoftranscript"],
        bos_token_id=id["endoftext"],
        eos_token_id=id["endoftext"],
        pad_token_id=id["endoftext"],
        is_multilingual=True,
        lang_to_id={f"<|{name}|>": id[name] for name in ("en", "de")},
        task_to_id={name: id[name] for name in ("translate", "transcribe")},
        no_timestamps_token_id=id["notimestamps"],
        prev_sot_token_id=id["startofprev"],
        alignment_heads=[[0, 0], [0, 1]],
        suppress_tokens=[id[name] for name in (*_ENGLISH[1:-1], "de")],
        begin_suppress_tokens=[id["endoftext"]],
    )


def save_task_model(name: str, folder: Path) -> Path:
    """Write the model unless it exists, with larger weights so that answers differ."""
    path = folder / name
    if path.exists():
        return path
    if name in MEDIA_MODELS:
        torch.manual_seed(3)
        MEDIA_MODELS[name](path)
        return path
    kind, architecture, settings = _MODELS[name]
    torch.manual_seed(3)
    model = kind.from_config(CONFIG_MAPPING[architecture](**settings), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    match architecture:
        case "vit":
            ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(path)
        case "wav2vec2":
            Wav2Vec2FeatureExtractor(sampling_rate=RATE).save_pretrained(path)
            letters = {letter: id for id, letter in enumerate(LETTERS)}
            (path / "vocab.json").write_text(json.dumps(letters))
            Wav2Vec2CTCTokenizer(str(path / "vocab.json")).save_pretrained(path)
        case "whisper":
            WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(path)
            is_multilingual = name == "interpreter"
            speech = _whisper_tokenizer(_MULTILINGUAL if is_multilingual else _ENGLISH)
            speech.save_pretrained(path)
            model.generation_config.max_new_tokens = 8
            config = _multilingual(speech) if is_multilingual else model.generation_config
            config.save_pretrained(path)
        case _:
            tokenizer().save_pretrained(path)
    return path


def _whisper_tokenizer(names: Sequence[str]) -> WhisperTokenizer:
    """A tokenizer of eight letters and of control tokens."""
    letters = {letter: id for id, letter in enumerate("abcdefgh")}
    tokenizer = WhisperTokenizer(vocab=letters, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{entry}|>" for entry in names]})
    return tokenizer
