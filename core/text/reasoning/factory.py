"""The table of reasoning parsers, for `option.reasoning_parser`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from core.options import ReasoningParserName
from core.text.reasoning.base import ReasoningParser
from core.text.reasoning.harmony import Harmony
from core.text.reasoning.think_tags import ThinkTags


def _harmony(prompt: str) -> ReasoningParser:
    """Harmony's answers say themselves what they are, whatever the prompt."""
    return Harmony()


_think = partial(ThinkTags, "<think>", "</think>")
_PARSERS: Mapping[ReasoningParserName, Callable[[str], ReasoningParser]] = {
    "qwen3": _think,
    "deepseek_r1": partial(_think, assumes=True),
    "deepseek_v3": _think,
    "glm45": _think,
    "minimax_m2": partial(_think, assumes=True),
    "olmo3": partial(_think, assumes=True),
    "seed_oss": partial(ThinkTags, "<seed:think>", "</seed:think>"),
    "mistral": partial(ThinkTags, "[THINK]", "[/THINK]"),
    "openai_gptoss": _harmony,
}


def make_reasoning_parser(name: ReasoningParserName, prompt: str) -> ReasoningParser:
    """Return a new parser, which parses one answer to a prompt, of which the end is enough."""
    return _PARSERS[name](prompt)


def find_reasoning_parser(template: str) -> ReasoningParserName | None:
    """Return the parser for the models of a chat template; None if it shows no reasoning.

    Templates take the reasoning out of earlier answers or put it there, so they name its tags. An
    answer without the tags is all content to these parsers.
    """
    if all(mark in template for mark in ("<|start|>", "<|channel|>analysis", "<|message|>")):
        return "openai_gptoss"
    tags: Mapping[str, ReasoningParserName] = {
        "</think>": "qwen3",
        "</seed:think>": "seed_oss",
        "[/THINK]": "mistral",
    }
    return next((name for tag, name in tags.items() if tag in template), None)
