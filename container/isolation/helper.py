"""The helper processes of a worker: one for grammars and long conversations, one for media."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import msgspec

from container.isolation.child import Child
from container.isolation.jobs import Compile, Done, Render, Reply, Setup
from container.isolation.media import media_reader
from container.schema.kinds import check_integers
from core.configuration.limits import GRAMMAR
from core.errors import RequestError
from core.protocol.messages import EncodedPrompt
from core.structured_outputs import StructuredOutputsParams
from core.text.chat_template import ChatTemplateSource
from core.text.grammar import FIELD

MAX_KEPT = 64
"""Constraints whose grammars are kept, since most clients send the same few again and again."""


class Helper:
    """Sends jobs to `container.isolation.process`, and those with media to a process of their own.

    All calls must come from greenlets of one thread, and may raise what `Child.perform` raises.
    """

    def __init__(self, model_dir: Path, template: ChatTemplateSource | None) -> None:
        setup = Setup(str(model_dir), template)
        self._child = Child[Done]("container.isolation.process", setup, Reply)
        self._reader = media_reader(model_dir)
        self._kept: OrderedDict[bytes, StructuredOutputsParams] = OrderedDict()

    def grammar(
        self, form: StructuredOutputsParams, eos_token_ids: tuple[int, ...]
    ) -> StructuredOutputsParams:
        """Return the constraint as a grammar that the engine can compile.

        Raises RequestError if it is wrong or too complex.
        """
        key = msgspec.msgpack.encode(form)
        if len(key) > 4 * GRAMMAR.maximum:
            raise RequestError(FIELD, f"is longer than {GRAMMAR.maximum} characters")
        kept = self._kept.get(key)
        if kept is None:
            text = self._child.perform(Compile(form, eos_token_ids), FIELD).text
            kept = self._kept[key] = StructuredOutputsParams(grammar=text)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return kept

    def render(self, job: Render) -> str:
        """Return the prompt of a conversation. Raises RequestError if the template rejects it."""
        try:
            return self._child.perform(job, "messages").text
        except OverflowError:
            check_integers(job.messages, "messages")
            check_integers(job.tools, "tools")
            check_integers(job.variables, "chat_template_kwargs")
            raise

    def read_media(self, job: msgspec.Struct) -> EncodedPrompt:
        """Return the prompt of a conversation with media. Raises RequestError for an invalid file,
        or if the model's processor refuses it."""
        return self._reader.perform(job, "messages")

    def close(self) -> None:
        """End the processes, if there are any."""
        self._child.close()
        self._reader.close()
