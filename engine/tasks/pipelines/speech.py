"""Transcriptions and translations of speech, as OpenAI's audio routes ask for them.

Errors name the fields of those routes (`container/apis/tasks/transcription.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from core.errors import RequestError
from core.protocol.task_bodies import Passage, Transcript, Transcription
from engine.tasks.pipelines.sound import Samples

_INITIAL_TOKENS = 4
"""Whisper's tokens before an answer: start, language, task, no timestamps."""
_ENGLISH = "en"


def transcribe(pipeline: Any, samples: Samples, wanted: object) -> Transcript:
    """Run a speech recognition pipeline. `wanted` holds the fields of a `Transcription`.

    With both segments and words, the model runs twice, because one run gives one kind of times.
    Raises RequestError for a request that the model cannot fulfil.
    """
    request = msgspec.convert(wanted, Transcription)
    is_whisper = pipeline.type == "seq2seq_whisper"
    language = _language(pipeline, samples, request) if is_whisper else None
    if is_whisper:
        _check_times(pipeline, samples, request)
        parameters = {"generate_kwargs": _generation(pipeline, request, language)}
    else:
        _check_other(pipeline, request)
        parameters = {}
    kinds = [name for name in ("segments", "words") if getattr(request, name)]
    results = {
        kind: pipeline(samples.copy(), **parameters, **_timestamps(pipeline, samples, kind))
        for kind in kinds or [None]
    }
    duration = len(samples) / pipeline.feature_extractor.sampling_rate
    return Transcript(
        next(iter(results.values()))["text"],
        duration,
        LANGUAGES.get(language or "") if request.names_language else None,
        **{kind: _spans(results[kind], duration) for kind in kinds},
    )


def _timestamps(pipeline: Any, samples: Samples, kind: str | None) -> Mapping[str, object]:
    """Return the parameter for the times of `kind`; Whisper needs it for a long sound too."""
    if pipeline.type != "seq2seq_whisper":
        return {"return_timestamps": "word"} if kind else {}
    if kind == "words":
        return {"return_timestamps": "word"}
    return {"return_timestamps": True} if kind or _is_long(pipeline, samples) else {}


def _spans(result: Mapping[str, Any], duration: float) -> list[Passage]:
    """Return the chunks of a result. A chunk that the model has not ended ends with the sound."""
    spans: list[Passage] = []
    for chunk in result["chunks"]:
        start, end = chunk["timestamp"]
        start = (spans[-1].end if spans else 0.0) if start is None else start
        spans.append(Passage(chunk["text"], float(start), float(duration if end is None else end)))
    return spans


def _check_other(pipeline: Any, request: Transcription) -> None:
    """Check the request for a model other than Whisper. Such a model can only transcribe."""
    model = pipeline.model.config.model_type
    for field in ("language", "prompt", "temperature"):
        if getattr(request, field):
            raise RequestError(field, f"cannot be set for {model}; leave it out")
    if request.translates:
        raise RequestError("model", f"{model} does not translate; a multilingual Whisper does")
    if (request.segments or request.words) and pipeline.type != "ctc":
        raise RequestError("response_format", f"{model} returns no times; use json or text")


def _generation(pipeline: Any, request: Transcription, language: str | None) -> dict[str, object]:
    """Return the arguments of Whisper's `generate`."""
    arguments: dict[str, object] = {}
    if _is_multilingual(pipeline):
        arguments["task"] = "translate" if request.translates else "transcribe"
        if language is not None:
            arguments["language"] = language
    elif request.translates:
        raise RequestError("model", "is for English only, so it does not translate")
    if request.prompt:
        arguments |= _prompted(pipeline, request.prompt)
    if request.temperature:
        arguments["temperature"] = request.temperature
    return arguments


def _language(pipeline: Any, samples: Samples, request: Transcription) -> str | None:
    """Return the code of the spoken language; None if neither model nor client needs it."""
    code = (request.language or "").lower()
    code = TO_LANGUAGE_CODE.get(code, code)
    if not _is_multilingual(pipeline):
        if code not in ("", _ENGLISH):
            raise RequestError("language", "the model is for English only; leave it out")
        return _ENGLISH
    ids: Mapping[str, int] = pipeline.model.generation_config.lang_to_id
    codes = {token.strip("<|>"): id for token, id in ids.items()}
    if not code:
        return _detected(pipeline, samples, codes) if request.names_language else None
    if code not in codes:
        raise RequestError("language", f"expected one of {', '.join(sorted(codes))}")
    return code


def _detected(pipeline: Any, samples: Samples, codes: Mapping[str, int]) -> str:
    """Return the language that is spoken at the beginning of a sound."""
    rate = pipeline.feature_extractor.sampling_rate
    features = pipeline.feature_extractor(samples, sampling_rate=rate, return_tensors="pt")
    model = pipeline.model
    spoken = model.detect_language(features.input_features.to(model.device, model.dtype)).item()
    return next(code for code, id in codes.items() if id == spoken)


def _is_multilingual(pipeline: Any) -> bool:
    config = pipeline.model.generation_config
    return getattr(config, "is_multilingual", True) and hasattr(config, "lang_to_id")


def _check_times(pipeline: Any, samples: Samples, request: Transcription) -> None:
    """Check that the model gives the times that the client wants, or that a long sound needs."""
    settings = vars(pipeline.model.generation_config)
    if request.words and not settings.get("alignment_heads"):
        raise RequestError("timestamp_granularities", "the model returns no times of words")
    if settings.get("no_timestamps_token_id") is not None:
        return
    if request.segments or request.words:
        raise RequestError("response_format", "the model returns no times; use json or text")
    if _is_long(pipeline, samples):
        seconds = pipeline.feature_extractor.chunk_length
        raise RequestError("file", f"the model takes at most {seconds} s; send a shorter recording")


def _is_long(pipeline: Any, samples: Samples) -> bool:
    return len(samples) > pipeline.feature_extractor.n_samples


def _prompted(pipeline: Any, prompt: str) -> Mapping[str, object]:
    """Return the arguments for a prompt: its last tokens and the maximum of new tokens.

    The tokens of the prompt fill at most half of the context.
    """
    try:
        ids = pipeline.tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    except ValueError as error:  # a control token
        raise RequestError("prompt", f"not accepted: {error}") from None
    positions = pipeline.model.config.max_target_positions
    start, text = ids[:1], ids[1:][-(positions // 2 - 2) :]  # as Whisper cuts earlier text
    ids = torch.cat([start, text]).to(pipeline.device)
    usual = pipeline.model.generation_config.max_new_tokens or positions // 2
    room = positions - len(ids) - _INITIAL_TOKENS
    return {"prompt_ids": ids, "max_new_tokens": min(usual, room)}
