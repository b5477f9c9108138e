"""The table of reasoning parsers, for `option.reasoning_parser`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from core.configuration.options import ReasoningParserName
from core.text.reasoning.base import ReasoningParser
from core.text.reasoning.harmony import Harmony
from core.text.reasoning.think_tags import ThinkTags


def _harmony(prompt: str) -> ReasoningParser:
    """Return the parser of harmony. Unlike other parsers, it ignores the prompt."""
    return Harmony()


_think = partial(ThinkTags, "<think>", "</think>")
_PARSERS: Mapping[ReasoningParserName, Callable[[str], ReasoningParser]] = {
    "qwen3": _think,
    "deepseek_r1": partial(_think, starts_inside=True),
    "deepseek_v3": _think,
    "glm45": _think,
    "minimax_m2": partial(_think, starts_inside=True),
    "olmo3": partial(_think, starts_inside=True),
    "seed_oss": partial(ThinkTags, "<seed:think>", "</seed:think>"),
    "mistral": partial(ThinkTags, "[THINK]", "[/THINK]"),
    "openai_gptoss": _harmony,
}


def make_reasoning_parser(name: ReasoningParserName, prompt: str) -> ReasoningParser:
    """Return a new parser for one answer. prompt: at least the end of the prompt."""
    return _PARSERS[name](prompt)


def find_reasoning_parser(template: str) -> ReasoningParserName | None:
    """Return the parser for models with this chat template; None if it shows no reasoning.

    A template removes or inserts the reasoning of earlier answers. Either way, it names the tags.
    If an answer has no tags, these parsers return all of it as content.
    """
    if all(mark in template for mark in ("<|start|>", "<|channel|>analysis", "<|message|>")):
        return "openai_gptoss"
    tags: Mapping[str, ReasoningParserName] = {
        "</think>": "qwen3",
        "</seed:think>": "seed_oss",
        "[/THINK]": "mistral",
    }
    return next((name for tag, name in tags.items() if tag in template), None)
