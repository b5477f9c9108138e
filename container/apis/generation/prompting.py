"""Converts texts and conversations to token ids and back, without blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from container.apis.generation.conversation import Conversation
from container.http.off_loop import in_thread_if_long
from container.isolation.helper import Helper
from container.isolation.jobs import Render
from core.configuration.limits import TEXT_CHARACTERS
from core.errors import RequestError
from core.images import EncodedPrompt, ReadImages
from core.request_check import too_long
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer

ISOLATED_BYTES = 2**18
"""Longer conversations are rendered in the helper process. Shorter ones take some 20 ms at most,
and do not wait for the long ones."""


class Prompting:
    """Encodes and decodes prompts with the model's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: Callable[[], int],
        helper: Helper,
    ) -> None:
        """max_model_len: returns the maximum tokens of a sequence, once the engine is ready.

        helper: renders long conversations and reads images. It has the source of the same template.
        """
        self.tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len
        self._helper = helper

    @property
    def template_text(self) -> str:
        """The source of the chat template; '' if the model has none."""
        return self._template.source.source if self._template else ""

    def check_length(self, text: str, field: str) -> None:
        """Raise RequestError, naming `field`, if the text has too many characters.

        That is so if the model could not take it however long its tokens are, or if it is longer
        than TEXT_CHARACTERS allows.
        """
        max_model_len = self._max_model_len()
        if len(text) <= max_model_len:
            return
        longest = self.tokenizer.max_token_characters
        if len(text) > max_model_len * longest:
            raise RequestError(
                field,
                f"{too_long(max_model_len)}, and a token has at most {longest} characters, so a "
                f"text of {len(text):,} characters does not fit",
            )
        TEXT_CHARACTERS.check(field, len(text))

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Return each text's token ids, cut to its last `max_tokens` if that is given.

        Pass only texts that `check_length` accepts.
        """

        def encode_all() -> list[list[int]]:
            return [
                self.tokenizer.encode(
                    text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
                )
                for text in texts
            ]

        return in_thread_if_long(encode_all, size=sum(map(len, texts)))

    def encode_chat(self, conversation: Conversation, *, size: int) -> EncodedPrompt:
        """Return a conversation's tokens. `size` is the approximate length of its JSON.

        Raises RequestError if the model has no chat template, if the template rejects the
        conversation, if the text is too long, or if an image cannot be read.
        """
        template = self._template
        if template is None:
            raise RequestError(
                "messages",
                "the model has no chat template; set option.chat_template, or send a prompt",
            )
        if conversation.images:
            return self._helper.read_images(
                ReadImages(
                    self._render_in_helper(conversation),
                    conversation.images,
                    conversation.add_special_tokens,
                )
            )
        if size > ISOLATED_BYTES:
            prompt = self._render_in_helper(conversation)
            (token_ids,) = self.encode([prompt], add_special_tokens=conversation.add_special_tokens)
            return EncodedPrompt(token_ids)

        def encode() -> list[int]:
            prompt = template.render(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                variables=conversation.variables,
            )
            self.check_length(prompt, "messages")
            return self.tokenizer.encode(prompt, add_special_tokens=conversation.add_special_tokens)

        return EncodedPrompt(in_thread_if_long(encode, size=size))

    def _render_in_helper(self, conversation: Conversation) -> str:
        """Render a conversation in the helper process, and check its length."""
        prompt = self._helper.render(
            Render(
                messages=conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                variables=conversation.variables,
            )
        )
        self.check_length(prompt, "messages")
        return prompt

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""

        def decode() -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return in_thread_if_long(decode, size=len(token_ids))
