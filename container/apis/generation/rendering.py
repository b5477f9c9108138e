"""Converts conversations to token ids, without blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable

from container.apis.generation.conversation import Conversation
from container.apis.generation.prompting import Prompting
from container.http.off_loop import in_thread_if_long
from container.isolation.helper import Helper
from container.isolation.jobs import Render
from core.errors import RequestError
from core.protocol.facts import Facts
from core.protocol.messages import EncodedPrompt
from core.text.chat_template import ChatTemplate
from core.text.tools.response_template.template import ResponseTemplate

ISOLATED_BYTES = 2**18
"""Longer conversations are rendered in the helper process. Shorter ones take some 20 ms at most,
and do not wait for the long ones."""


class Conversations:
    """Encodes conversations with the model's chat template."""

    def __init__(
        self,
        prompting: Prompting,
        template: ChatTemplate | None,
        helper: Helper,
        facts: Callable[[], Facts],
    ) -> None:
        """helper: renders long conversations and reads media. It has the source of the same
        template. facts: returns those of the engine, once it is ready.
        """
        self._prompting = prompting
        self._template = template
        self._helper = helper
        self._facts = facts

    @property
    def template_text(self) -> str:
        """The source of the chat template; '' if the model has none."""
        return self._template.source.source if self._template else ""

    @property
    def response_template(self) -> ResponseTemplate | None:
        """How the model writes its answers; None if its tokenizer does not say so."""
        return self._template.response if self._template else None

    def encode(self, conversation: Conversation, *, size: int) -> EncodedPrompt:
        """Return a conversation's tokens and media. `size` is the approximate length of its JSON.

        Raises RequestError if the model has no chat template, if the template rejects the
        conversation, if the text is too long, or if the model takes no such media or cannot read
        them.
        """
        template, prompting = self._template, self._prompting
        media, add = conversation.media, conversation.add_special_tokens
        media.check(self._facts)
        if template is None:
            raise RequestError(
                "messages",
                "the model has no chat template; set option.chat_template, or send a prompt",
            )
        if media:
            prompt = self._render_in_helper(conversation)
            return self._helper.read_media(media.job(prompt, add_special_tokens=add))
        if size > ISOLATED_BYTES:
            prompt = self._render_in_helper(conversation)
            return EncodedPrompt(prompting.encode(prompt, add_special_tokens=add))

        def encode() -> list[int]:
            prompt = template.render(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                variables=conversation.variables,
            )
            prompting.check_length(prompt, "messages")
            return prompting.tokenizer.encode(prompt, add_special_tokens=add)

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
        self._prompting.check_length(prompt, "messages")
        return prompt
