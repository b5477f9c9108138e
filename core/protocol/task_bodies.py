"""The bodies of `core.protocol.messages.Perform` and `Performed`, as msgpack, for Longshore's own
tasks.

For a user's handler, the body is that of the HTTP request, unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class PipelineBody(msgspec.Struct, frozen=True):
    """The inputs of a request to a pipeline. The answer is the output of transformers' pipeline."""

    inputs: list[object]
    """Checked inputs, as `core.configuration.pipeline_tasks` describes them. A file is passed as
    bytes."""
    is_batch: bool
    """Whether the client sent a list. If so, the answer is a list too."""
    parameters: Mapping[str, object]
    wants_sound: bool = False
    """Whether to answer with an audio file instead of JSON."""


class EmbeddingBody(msgspec.Struct, frozen=True):
    """The texts of one request, or their token ids. The answer is an `EmbeddingAnswer`."""

    inputs: list[str | list[int]]
    field: str
    """The client's name for the inputs, for error messages."""
    max_tokens: int | None = None
    """Truncate each input to this many tokens, or to the model's limit if that is less. None:
    reject inputs that are too long."""
    dimensions: int | None = None
    """Keep only this many numbers from the start of each vector. None: keep all."""
    normalize: bool | None = None
    """Whether to scale vectors to length 1. None: as the model's settings say."""
    prompt_name: str | None = None
    """The prompt of the model's that precedes each text. None: its default one, if any."""
    is_sparse: bool | None = False
    """Whether vectors must be sparse; None: they may be or not."""


class EmbeddingAnswer(msgspec.Struct, frozen=True):
    """One vector per input."""

    vectors: list[bytes]
    """Little-endian fp32; of sparse vectors, only the numbers that are not 0."""
    num_tokens: list[int]
    """Tokens of each input, including special tokens."""
    places: list[bytes] | None = None
    """Of sparse vectors: the place of each of their numbers, as little-endian int32."""


TRANSCRIPTION = "transcription"
"""The parameter of a `PipelineBody` that holds a `Transcription`."""


class Transcription(msgspec.Struct, frozen=True):
    """What to do with the sound of a request. The answer is a `Transcript`, as JSON."""

    translates: bool = False
    """Whether to write English, whatever is spoken."""
    language: str | None = None
    """The code or the name of the spoken language. None: the model detects it."""
    prompt: str | None = None
    """Text that the model takes as preceding the speech. The transcript follows its style."""
    temperature: float = 0.0
    segments: bool = False
    words: bool = False
    """Whether to return the times of segments, and of words."""
    names_language: bool = False
    """Whether to return the language."""


class Passage(msgspec.Struct, frozen=True):
    """A part of a transcript, with its times in seconds."""

    text: str
    start: float
    end: float


class Transcript(msgspec.Struct, frozen=True):
    """The speech in a sound, as text."""

    text: str
    duration: float
    """Seconds of the sound."""
    language: str | None = None
    """The language's English name, in lower case; None if it is not known."""
    segments: list[Passage] | None = None
    words: list[Passage] | None = None
    """Segments and words are None if the request did not ask for them."""
