"""Renders messages to a prompt with the model's chat template, as `apply_chat_template` does.

Templates are programs that come with a model, so they run in jinja2's sandbox and see only the JSON
of the request.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from core.errors import ConfigurationError, RequestError
from core.foreign_code import contained
from core.text.tools.response_template.template import ResponseTemplate

ChatMessage = Mapping[str, object]

_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_HERE "


class ChatTemplateSource(msgspec.Struct, frozen=True):
    """The arguments of ChatTemplate, with which another process can make an equal template."""

    source: str
    with_tools: str
    special_tokens: dict[str, str]


class ChatTemplate:
    """Renders conversations. Safe to share between threads."""

    def __init__(
        self,
        source: str,
        *,
        with_tools: str = "",
        special_tokens: Mapping[str, str] | None = None,
        response: ResponseTemplate | None = None,
    ) -> None:
        """with_tools: the template for requests with tools, if the model has a separate one.

        response: how the model writes its answers, if its tokenizer says so.

        Raises ConfigurationError if a template is not valid jinja2.
        """
        environment = _environment()
        self._special_tokens = dict(special_tokens or {})
        self.response = response
        self.source = ChatTemplateSource(source, with_tools, self._special_tokens)
        try:
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools or source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigurationError(f"chat template, line {error.lineno}: {error}") from None
        asts = [environment.parse(text) for text in (source, with_tools)]
        self._variables = set[str]().union(*map(jinja2.meta.find_undeclared_variables, asts))
        """The variables that the templates read. They exclude the environment's functions."""
        self._takes_text = self._renders_text()

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt, which includes special tokens as text.

        Raises RequestError if the template rejects the conversation.
        """
        converted = [self._converted(message) for message in messages]
        if continue_final_message:
            _mark_end(converted)
        template = self._with_tools if tools else self._plain
        prompt = self._render(
            template,
            {
                **self._special_tokens,
                **{
                    name: value
                    for name, value in (variables or {}).items()
                    if name in self._variables
                },
                "messages": converted,
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _until_mark(prompt) if continue_final_message else prompt

    def _render(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        try:
            with contained:
                return template.render(variables)
        except Exception as error:  # a template may raise anything on unexpected input
            reason = str(error) or type(error).__name__
            raise RequestError("messages", f"the chat template rejects them: {reason}") from None

    def _renders_text(self) -> bool:
        """Whether the template renders a content that is a string.

        If it does not, the content must be a list of parts.
        """
        try:
            return "probe" in self._render(self._plain, self._probe())
        except RequestError:
            return True

    def _probe(self) -> Mapping[str, object]:
        messages = [{"role": "user", "content": "probe"}]
        return {**self._special_tokens, "messages": messages, "add_generation_prompt": True}

    def _converted(self, message: ChatMessage) -> dict[str, object]:
        content = message.get("content")
        if isinstance(content, list) and self._takes_text:
            parts = cast(list[Mapping[str, str]], content)
            if all(part["type"] == "text" for part in parts):
                return {**message, "content": "\n".join(part["text"] for part in parts)}
        if isinstance(content, str) and not self._takes_text:
            return {**message, "content": [{"type": "text", "text": content}]}
        return dict(message)


def _mark_end(messages: list[dict[str, object]]) -> None:
    """Mark the end of the last message's text, to find it in the prompt."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_HERE
    elif isinstance(content, list) and content and "text" in content[-1]:
        parts = cast(list[dict[str, str]], content)
        last = {**parts[-1], "text": parts[-1]["text"] + _CONTINUE_HERE}
        messages[-1]["content"] = [*parts[:-1], last]
    else:
        raise RequestError("continue_final_message", "the last message has no text to continue")


def _until_mark(prompt: str) -> str:
    at = prompt.rfind(_CONTINUE_HERE.strip())
    if at < 0:
        raise RequestError(
            "continue_final_message", "the chat template does not render the message"
        )
    # The mark ends with a space. If the template has stripped it, strip the text before it too.
    keeps_spaces = prompt[at:].startswith(_CONTINUE_HERE)
    return prompt[:at] if keeps_spaces else prompt[:at].rstrip()


def _environment() -> jinja2.Environment:
    """Return the jinja2 environment for templates, as transformers sets it up."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters.update(tojson=_to_json)  # pyright: ignore[reportUnknownMemberType]
    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)  # pyright: ignore[reportUnknownMemberType]
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """Renders the contents of `{% generation %}`, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parse the block; jinja2 calls this at the opening tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON. Unlike jinja2's own filter, this does not escape <, > and &."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
