"""The transformers pipelines that Longshore serves, and the request format of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

QUESTION_ANSWERING = "question-answering"
SPEECH_RECOGNITION = "automatic-speech-recognition"
VIDEO_CLASSIFICATION = "video-classification"
CHAT_TASKS = ("image-text-to-text", "any-to-any")
"""Tasks that take texts and images, and generate text."""

Content = Literal[
    "any text", "text", "image", "audio", "video", "images", "table", "word boxes", "messages"
]
"""The type of an input, or of one of its fields. "any text" may also be an object in the form that
its pipeline takes; "images" is a list of images; "word boxes" are words with their positions;
"messages" is a conversation in OpenAI's form that may contain images."""
FILES: Mapping[Content, str] = {"image": "image", "audio": "audio", "video": "video"}
"""The types that are files, with the top-level type of their Content-Type."""


class PipelineTask(msgspec.Struct, frozen=True):
    """The inputs and parameters of one task, which the front end reads and passes to a pipeline."""

    reads: Content | Mapping[str, Content] = "any text"
    """The type of an input, or the types of its fields if it is an object."""
    parameters: tuple[str, ...] = ()
    """The parameters that a request may set. Parameters that choose how to compute, or that load
    files or code, are left out."""
    optional: tuple[str, ...] = ()
    """Fields of the object that may be left out."""
    can_batch: bool = False
    """Whether inputs may be batched: each then gets the same result as on its own."""
    writes_maps: bool = False
    """Whether an answer has numbers for each pixel, so its memory grows with the image."""
    writes_sound: bool = False
    """Whether an answer is a sound, which may be sent as an audio file."""

    @property
    def contents(self) -> tuple[Content, ...]:
        """The types of everything in an input."""
        return (self.reads,) if isinstance(self.reads, str) else tuple(self.reads.values())


_LABELS = ("candidate_labels", "hypothesis_template")
_TOP = ("top_k", "function_to_apply")
_CHAT = PipelineTask(
    {"text": "text", "image": "image", "images": "images", "messages": "messages"},
    ("max_new_tokens", "generate_kwargs", "return_full_text", "stop_sequence",
     "continue_final_message", "skip_special_tokens"),
    optional=("text", "image", "images", "messages"),
)  # fmt: skip

PIPELINE_TASKS: Mapping[str, PipelineTask] = {
    "text-classification": PipelineTask(
        parameters=(*_TOP, "truncation", "max_length"), can_batch=True
    ),
    "token-classification": PipelineTask(
        parameters=("aggregation_strategy", "ignore_labels", "stride"), can_batch=True
    ),
    "fill-mask": PipelineTask(parameters=("top_k", "targets", "tokenizer_kwargs"), can_batch=True),
    "feature-extraction": PipelineTask(parameters=("truncation", "tokenize_kwargs")),
    "zero-shot-classification": PipelineTask(parameters=(*_LABELS, "multi_label"), can_batch=True),
    QUESTION_ANSWERING: PipelineTask(
        parameters=("top_k", "doc_stride", "max_answer_len", "max_seq_len",
                    "handle_impossible_answer"),
        can_batch=True,
    ),
    "table-question-answering": PipelineTask(
        {"table": "table", "query": "text"}, ("sequential",)
    ),
    "document-question-answering": PipelineTask(
        {"image": "image", "question": "text", "word_boxes": "word boxes"},
        ("top_k", "doc_stride", "max_answer_len", "max_seq_len", "handle_impossible_answer"),
        optional=("word_boxes",),
    ),
    "image-classification": PipelineTask("image", _TOP, can_batch=True),
    "image-feature-extraction": PipelineTask("image", ("pool",), can_batch=True),
    "object-detection": PipelineTask("image", ("threshold",), can_batch=True),
    "zero-shot-image-classification": PipelineTask("image", _LABELS, can_batch=True),
    "zero-shot-object-detection": PipelineTask(
        "image", ("candidate_labels", "threshold", "top_k"), can_batch=True
    ),
    "image-segmentation": PipelineTask(
        "image",
        ("subtask", "threshold", "mask_threshold", "overlap_mask_area_threshold"),
        writes_maps=True,
    ),
    "depth-estimation": PipelineTask("image", writes_maps=True),
    "mask-generation": PipelineTask(
        "image",
        ("points_per_batch", "points_per_crop", "crops_n_layers", "crop_overlap_ratio",
         "crop_n_points_downscale_factor", "crops_nms_thresh", "pred_iou_thresh",
         "stability_score_thresh", "stability_score_offset", "mask_threshold", "max_hole_area",
         "max_sprinkle_area", "output_rle_mask", "output_bboxes_mask"),
        writes_maps=True,
    ),
    "keypoint-matching": PipelineTask({"images": "images"}, ("threshold",)),
    **dict.fromkeys(CHAT_TASKS, _CHAT),
    VIDEO_CLASSIFICATION: PipelineTask(
        "video", (*_TOP, "num_frames", "frame_sampling_rate"), can_batch=True
    ),
    "audio-classification": PipelineTask("audio", _TOP),
    SPEECH_RECOGNITION: PipelineTask(
        "audio", ("return_timestamps", "return_language", "chunk_length_s", "stride_length_s")
    ),
    "zero-shot-audio-classification": PipelineTask("audio", _LABELS),
    "text-to-audio": PipelineTask(
        "text", ("forward_params", "generate_kwargs"), writes_sound=True
    ),
}  # fmt: skip
