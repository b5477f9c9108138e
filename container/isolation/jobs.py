"""The jobs of the helper process, as msgpack structs in frames (`core.process.frames`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from core.process.frames import Refused
from core.structured_outputs import StructuredOutputsParams
from core.text.chat_template import ChatTemplateSource


class Setup(msgspec.Struct, frozen=True):
    """The first message: what the process needs for its jobs."""

    model_dir: str
    template: ChatTemplateSource | None


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Convert a constraint to a grammar, and compile it as the engine does."""

    form: StructuredOutputsParams
    eos_token_ids: tuple[int, ...]


class Render(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Render a conversation with the chat template. It has the fields of `Conversation`."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]


Job = Compile | Render


class Done(msgspec.Struct, frozen=True, tag=True):
    """The result of a job: the grammar in llguidance's format, or the prompt."""

    text: str


Reply = Done | Refused
