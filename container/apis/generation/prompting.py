"""Converts texts and conversations to token ids and back, without blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import gevent

from container.apis.generation.conversation import Conversation
from core.errors import RequestError
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT_CHARACTERS = 4096
"""Longer text is processed in a thread, so that /ping and running streams do not wait for it."""


class Prompting:
    """Encodes and decodes prompts with the model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self._template = template

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Return each text's token ids, cut to its last `max_tokens` if that is given."""

        def encode_all() -> list[list[int]]:
            return [
                self.tokenizer.encode(
                    text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
                )
                for text in texts
            ]

        return in_thread_if_long(encode_all, size=sum(map(len, texts)))

    def encode_chat(self, conversation: Conversation, *, size: int) -> list[int]:
        """Return a conversation's token ids. `size` is the approximate length of its JSON.

        Raises RequestError if the model has no chat template or the template rejects it.
        """
        template = self._template
        if template is None:
            raise RequestError(
                "messages",
                "the model has no chat template; set option.chat_template, or send a prompt",
            )

        def encode() -> list[int]:
            prompt = template.render(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                variables=conversation.variables,
            )
            return self.tokenizer.encode(prompt, add_special_tokens=conversation.add_special_tokens)

        return in_thread_if_long(encode, size=size)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""

        def decode() -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return in_thread_if_long(decode, size=len(token_ids))


def in_thread_if_long(work: Callable[[], T], *, size: int) -> T:
    """Call `work`, in gevent's thread pool if `size` exceeds LONG_TEXT_CHARACTERS."""
    if size <= LONG_TEXT_CHARACTERS:
        return work()
    return gevent.get_hub().threadpool.apply(work)
