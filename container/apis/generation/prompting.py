"""From texts and conversations to tokens, without keeping the event loop from its work."""

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
"""Longer text is handled in a thread, so that /ping and the streams need not wait."""


class Prompting:
    """Makes the tokens that the engine is asked to go on from."""

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
        """The tokens of each text, `max_tokens` of its last ones."""

        def encode_all() -> list[list[int]]:
            return [
                self.tokenizer.encode(
                    text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
                )
                for text in texts
            ]

        return beside_the_loop(encode_all, size=sum(map(len, texts)))

    def encode_chat(self, conversation: Conversation, *, size: int) -> list[int]:
        """The tokens of a conversation. `size`: characters of its JSON, roughly.

        Raises RequestError where the template refuses it, or where there is none.
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
            return self.tokenizer.encode(prompt, add_special_tokens=False)

        return beside_the_loop(encode, size=size)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""

        def decode() -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return beside_the_loop(decode, size=len(token_ids))


def beside_the_loop(work: Callable[[], T], *, size: int) -> T:
    if size <= LONG_TEXT_CHARACTERS:
        return work()
    return gevent.get_hub().threadpool.apply(work)
