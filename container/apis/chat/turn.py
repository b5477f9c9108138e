"""The assistant's next turn of a conversation, for all APIs that have conversations.

Chat completions, OpenAI's responses and Anthropic's messages turn their bodies into a `Turn` and
format what `start_turn` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from container.apis.chat.tool_choice import ForcedCalls
from container.apis.generation.conversation import Conversation
from container.apis.generation.generation import Generation
from container.apis.generation.sampling import Decoding
from container.apis.generation.service import GenerationService
from container.apis.named_model import NamedModel
from container.http.request_context import RequestContext
from core.configuration.options import ReasoningParserName, ToolCallParser
from core.errors import RequestError
from core.text.answer_parser import AnswerParser
from core.text.reasoning.base import ReasoningParser
from core.text.reasoning.factory import find_reasoning_parser, make_reasoning_parser
from core.text.tokenizer import Tokenizer
from core.text.tools.base import ToolParser
from core.text.tools.factory import make_tool_parser
from core.text.tools.response_template.parser import ResponseParser
from core.text.tools.response_template.template import ResponseTemplate

DEFAULT_TOOL_PARSER: ToolCallParser = "llama3_json"
"""The parser of forced calls if option.tool_call_parser is not set, or if it names a format that
does not write arguments as JSON. The model must then write the calls as plain JSON."""
_END_TOKENS = 16
"""The reasoning parser gets this many tokens from the end of the prompt, where its tags may be."""
_MESSAGE_TOKENS = 512
"""A response template's parser gets this many, as they may have the beginning of the answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation, and how the model is to continue it.

    Raises RequestError if both a call and a format of the answer are forced.
    """

    conversation: Conversation
    decoding: Decoding
    forced_calls: ForcedCalls | None
    """The calls that the answer must consist of; None if the model is free to choose."""
    model: NamedModel

    def __post_init__(self) -> None:
        if self.forced_calls is not None and self.decoding.has_form:
            raise RequestError(
                "tool_choice", "a forced call cannot be combined with structured outputs"
            )


@dataclass(frozen=True, slots=True)
class StartedTurn:
    """A turn that the engine works on."""

    generation: Generation
    parsers: Sequence[AnswerParser]
    """A parser for each answer."""
    model: str
    """The name of the variant or the model, for the response."""


def start_turn(service: GenerationService, context: RequestContext, turn: Turn) -> StartedTurn:
    """Render and tokenize the conversation, and submit it to the engine.

    Raises RequestError if the request is too long, or if it asks for something that the model
    cannot do or that the options do not enable.
    """
    tokenizer = service.prompting.tokenizer
    variant = service.generations.choose_variant(context, *turn.model)
    tools = _tool_parsers(service, turn)
    prompt = service.conversations.encode(turn.conversation, size=len(context.body))
    marks = tokenizer.ids_of(tools[0].special_tokens) if tools[0] else {}
    decoding = service.generations.prepare(_decoding(tokenizer, turn, tools[0], marks))
    reasoning = _response_parsers(service, turn, decoding, prompt.token_ids)
    if reasoning is None:
        reasoning = _reasoning_parsers(service, turn, decoding, prompt.token_ids)
    tags = tokenizer.ids_of(reasoning[0].special_tokens) if reasoning[0] else {}
    generation = service.generations.start(
        context,
        prompt,
        decoding,
        variant=variant,
        kept_special_ids={*marks.values(), *tags.values()},
    )
    parsers = [AnswerParser(*pair) for pair in zip(reasoning, tools, strict=True)]
    return StartedTurn(generation, parsers, variant or service.model_name)


def _response_template(service: GenerationService, turn: Turn) -> ResponseTemplate | None:
    """Return the tokenizer's template; None if options name formats, or if calls are forced."""
    server = service.options.server
    if server.tool_call_parser is not None or server.reasoning_parser != "auto":
        return None
    return None if turn.forced_calls is not None else service.conversations.response_template


def _response_parsers(
    service: GenerationService, turn: Turn, decoding: Decoding, prompt: Sequence[int]
) -> Sequence[ResponseParser] | None:
    """Return a parser for each answer; None if no template applies.

    That is also so if structured outputs fix the format from the first token on.
    """
    template = _response_template(service, turn)
    if template is None or decoding.has_form:
        return None
    end = service.prompting.decode(prompt[-_MESSAGE_TOKENS:])
    tools = turn.conversation.tools or None
    return [ResponseParser(template, end, tools) for _ in range(decoding.params.n)]


def _reasoning_parsers(
    service: GenerationService, turn: Turn, decoding: Decoding, prompt: Sequence[int]
) -> Sequence[ReasoningParser | None]:
    """Return a parser for each answer.

    The parsers are None if the answers cannot reason. That is so if structured outputs fix the
    format from the first token on, or if the answers continue a message.
    """
    params, name = decoding.params, _reasoning_parser(service)
    is_bound = decoding.has_form or turn.conversation.continue_final_message
    if name is None or is_bound:
        return [None] * params.n
    end = service.prompting.decode(prompt[-_END_TOKENS:])
    return [make_reasoning_parser(name, end) for _ in range(params.n)]


def _reasoning_parser(service: GenerationService) -> ReasoningParserName | None:
    """Return the model's reasoning parser; None if reasoning stays in the content."""
    choice = service.options.server.reasoning_parser
    if choice == "auto":
        return find_reasoning_parser(service.conversations.template_text)
    return None if choice == "none" else choice


def _tool_parsers(service: GenerationService, turn: Turn) -> Sequence[ToolParser | None]:
    """Return a parser for each answer; None for each if the request has no tools.

    That is also so if the tokenizer's response template finds the calls.
    """
    num_answers = turn.decoding.params.n
    if not turn.conversation.tools or _response_template(service, turn) is not None:
        return [None] * num_answers
    name = service.options.server.tool_call_parser
    if name is None and turn.forced_calls is None:
        raise RequestError(
            "tools",
            "set option.tool_call_parser to the format in which the model writes tool calls",
        )
    name = name or DEFAULT_TOOL_PARSER
    if turn.forced_calls is not None and make_tool_parser(name).notation(()) is None:
        name = DEFAULT_TOOL_PARSER
    return [make_tool_parser(name, turn.conversation.tools) for _ in range(num_answers)]


def _decoding(
    tokenizer: Tokenizer, turn: Turn, parser: ToolParser | None, marks: Mapping[str, int]
) -> Decoding:
    """Return the turn's decoding, with forced calls turned into structured outputs.

    `marks` are the special tokens of the call format that the vocabulary has, with their ids.
    """
    calls = turn.forced_calls
    if calls is None or parser is None:
        return turn.decoding
    special = {text: id for text, id in marks.items() if id in tokenizer.special_ids}
    notation = parser.notation(marks)
    assert notation is not None, "_tool_parsers chooses a parser with a notation"
    form = notation.form(calls.functions, special, is_single=calls.is_single)
    return turn.decoding.with_form(form, "tools")
