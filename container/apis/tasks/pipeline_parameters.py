"""The parameters of requests to pipelines, with the values that each may have.

A table lists every parameter. Other parameters of transformers, and other values of these, could
choose files or code to load, or let one request use any amount of memory or time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from container.schema.kinds import (
    BOOLEAN,
    OBJECT,
    STRING,
    STRING_OR_STRINGS,
    STRINGS,
    Kind,
    integer,
    is_list,
    number,
)
from core.configuration.limits import (
    LABELED_INPUTS,
    LABELS,
    STOP_CHARACTERS,
    STOP_STRINGS,
    TASK_TEXTS,
)
from core.configuration.suggest import did_you_mean
from core.errors import RequestError

MAX_WINDOW = 2**17
"""The longest context of any model, in tokens."""
MAX_SECONDS = 600
"""The longest sound that is accepted (engine/tasks/pipelines/sound.py)."""
MAX_OVERLAP = 0.75
"""The share of a window of sound that may also belong to its neighbours."""
_LABELS = ("candidate_labels", "targets", "ignore_labels")
"""Parameters that are lists of texts. Some pipelines split a single text at its commas."""
_KEPT_NULL = "top_k"
"""The one parameter that may be null: all labels."""


def _one_of(*values: object) -> Kind:
    expected = " or ".join(str(value).lower() for value in values)
    accepts = [(type(value), value) for value in values]
    return Kind(expected, lambda value: (type(value), value) in accepts, {"enum": list(values)})


def _pair_of_seconds(value: object) -> bool:
    numbers = value if is_list(value) else [value, value]
    return len(numbers) == 2 and all(map(number(0, MAX_SECONDS).accepts, numbers))


_COUNT = integer(1, 1024)
_TOKENS = integer(1, 8192)
_SHARE = number(0, 1)
_SCORE = number(-1e6, 1e6)
_TRUNCATION = _one_of(True, False, "longest_first", "do_not_truncate")
_LENGTH = integer(1, MAX_WINDOW)
_TOKENIZER: Mapping[str, Kind] = {"truncation": _TRUNCATION, "max_length": _LENGTH}
_GENERATION: Mapping[str, Kind] = {
    "max_new_tokens": _TOKENS,
    "min_new_tokens": integer(0, 8192),
    "do_sample": BOOLEAN,
    "temperature": number(0, 100),
    "top_k": integer(0, MAX_WINDOW),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "num_beams": integer(1, 16),
    "length_penalty": number(-10, 10),
    "early_stopping": _one_of(True, False, "never"),
    "repetition_penalty": number(0.01, 100),
    "no_repeat_ngram_size": integer(0, 8192),
}

NESTED: Mapping[str, Mapping[str, Kind]] = {
    "generate_kwargs": _GENERATION,
    "forward_params": {"speaker_id": integer(0, 2**31 - 1)},
    "tokenizer_kwargs": _TOKENIZER,
    "tokenize_kwargs": _TOKENIZER,
}
"""Parameters that are objects, with their fields."""
PARAMETERS: Mapping[str, Kind] = {
    "top_k": _COUNT,
    "function_to_apply": _one_of("sigmoid", "softmax", "none"),
    "truncation": _TRUNCATION,
    "max_length": _LENGTH,
    "aggregation_strategy": _one_of("none", "simple", "first", "average", "max"),
    "ignore_labels": STRINGS,
    "stride": integer(0, MAX_WINDOW),
    "targets": STRING_OR_STRINGS,
    "candidate_labels": STRING_OR_STRINGS,
    "hypothesis_template": STRING,
    "multi_label": BOOLEAN,
    "doc_stride": integer(0, MAX_WINDOW),
    "max_answer_len": _LENGTH,
    "max_seq_len": integer(32, MAX_WINDOW),
    "handle_impossible_answer": BOOLEAN,
    "sequential": BOOLEAN,
    "pool": BOOLEAN,
    "threshold": _SCORE,
    "subtask": _one_of("panoptic", "instance", "semantic"),
    "mask_threshold": _SCORE,
    "overlap_mask_area_threshold": _SHARE,
    "points_per_batch": _COUNT,
    "points_per_crop": integer(1, 64),
    "crops_n_layers": integer(0, 3),
    "crop_overlap_ratio": _SHARE,
    "crop_n_points_downscale_factor": integer(1, 64),
    "crops_nms_thresh": _SHARE,
    "pred_iou_thresh": _SHARE,
    "stability_score_thresh": _SHARE,
    "stability_score_offset": _SCORE,
    "max_hole_area": number(0, 1e6),
    "max_sprinkle_area": number(0, 1e6),
    "output_rle_mask": BOOLEAN,
    "output_bboxes_mask": BOOLEAN,
    "max_new_tokens": _TOKENS,
    "return_full_text": BOOLEAN,
    "stop_sequence": STRING_OR_STRINGS,
    "continue_final_message": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "num_frames": integer(1, 128),
    "frame_sampling_rate": integer(1, 128),
    "return_timestamps": _one_of(True, False, "word", "char"),
    "return_language": BOOLEAN,
    "chunk_length_s": number(1, MAX_SECONDS),
    "stride_length_s": Kind(
        f"a number from 0 to {MAX_SECONDS}, or a list of two", _pair_of_seconds, {}
    ),
    **dict.fromkeys(NESTED, OBJECT),
}


def read_parameters(
    given: Mapping[str, object], known: Sequence[str], num_inputs: int
) -> dict[str, object]:
    """Return the checked parameters of a pipeline that takes the `known` ones.

    A parameter that is null is not set, except for top_k. Raises RequestError that names the first
    bad parameter.
    """
    parameters = _read(given, {name: PARAMETERS[name] for name in known}, "parameters.")
    for name, fields in NESTED.items():
        if name in parameters:
            nested = cast(Mapping[str, object], parameters[name])
            parameters[name] = _read(nested, fields, f"parameters.{name}.")
    for name in _LABELS:
        LABELS.check(f"parameters.{name}", len(_texts(parameters, name, ",")))
    _check_labels(parameters, num_inputs)
    _check_stop_sequence(parameters)
    _check_overlap(parameters)
    return parameters


def _read(given: Mapping[str, object], kinds: Mapping[str, Kind], prefix: str) -> dict[str, object]:
    checked: dict[str, object] = {}
    for name, value in given.items():
        if name not in kinds:
            raise RequestError(f"{prefix}{name}", f"no such field{did_you_mean(name, kinds)}")
        if value is None and name != _KEPT_NULL:
            continue
        if value is not None and not kinds[name].accepts(value):
            raise RequestError(f"{prefix}{name}", f"expected {kinds[name].expected}")
        checked[name] = value
    return checked


def _texts(parameters: Mapping[str, object], name: str, separator: str = "") -> list[str]:
    """Return the texts of a parameter, which may also be one text that some pipelines split."""
    value = parameters.get(name, [])
    if isinstance(value, str):
        return value.split(separator) if separator else [value]
    return cast(list[str], value)


def _check_labels(parameters: Mapping[str, object], num_inputs: int) -> None:
    """Check how many pairs the model reads, and how long the texts are that it makes of labels."""
    field, labels = "parameters.candidate_labels", _texts(parameters, "candidate_labels", ",")
    LABELED_INPUTS.check(field, len(labels) * num_inputs)
    template = cast(str, parameters.get("hypothesis_template", ""))
    length = sum(map(len, labels)) + len(template) * len(labels)
    TASK_TEXTS.check(field, length * num_inputs)


def _check_stop_sequence(parameters: Mapping[str, object]) -> None:
    field, texts = "parameters.stop_sequence", _texts(parameters, "stop_sequence")
    STOP_STRINGS.check(field, len(texts))
    for text in texts:
        STOP_CHARACTERS.check(field, len(text))


def _check_overlap(parameters: Mapping[str, object]) -> None:
    """Check how much the windows of a sound overlap, which bounds their number."""
    length, stride = parameters.get("chunk_length_s"), parameters.get("stride_length_s")
    if length is None or stride is None:
        return
    strides = cast(list[float], stride if is_list(stride) else [stride, stride])
    longest = cast(float, length) * MAX_OVERLAP
    if sum(strides) > longest:
        raise RequestError(
            "parameters.stride_length_s",
            f"both sides together have more than {longest:g} s, three quarters of chunk_length_s",
        )
