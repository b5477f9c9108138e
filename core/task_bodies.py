"""What `core.messages.Perform` and `Performed` carry for the tasks that are not the user's code.

A msgpack body; a handler's body is that of the HTTP request, as it came.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class PipelineBody(msgspec.Struct, frozen=True):
    """The inputs of a request; the answer is what transformers' pipelines give."""

    inputs: list[object]
    """As `core.pipeline_tasks` says of the task, checked; a file is its bytes."""
    is_batch: bool
    """Whether the client sent a list, and so wants one."""
    parameters: Mapping[str, object]
    wants_sound: bool = False
    """Whether the answer shall be the sound's file; else it is JSON."""


class EmbeddingBody(msgspec.Struct, frozen=True):
    """Texts, or their token ids, in one request; the answer is an `EmbeddingAnswer`."""

    inputs: list[str | list[int]]
    field: str
    """What the client calls them, for errors."""
    max_tokens: int | None = None
    """Cut each after so many tokens, at most as many as the model takes; None: refuse."""
    dimensions: int | None = None
    """Keep so many numbers of each vector; None: all."""


class EmbeddingAnswer(msgspec.Struct, frozen=True):
    """A vector for each input."""

    vectors: list[bytes]
    """Little-endian fp32."""
    num_tokens: list[int]
    """Of each input, with the special tokens that the model wants."""
