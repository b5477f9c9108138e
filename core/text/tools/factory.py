"""The table of tool call parsers, for `option.tool_call_parser`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.configuration.options import ToolCallParser
from core.text.tools.base import ToolParser
from core.text.tools.deepseek_v3 import DeepSeekV3Parser, DeepSeekV31Parser
from core.text.tools.hermes import HermesParser
from core.text.tools.json_list import GraniteParser, Phi4MiniParser
from core.text.tools.llama3 import Llama3Parser
from core.text.tools.mistral import MistralParser
from core.text.tools.openai import OpenAIParser
from core.text.tools.pythonic import PythonicParser
from core.text.tools.qwen3_coder import Qwen3CoderParser
from core.text.tools.response_template.formats import FORMATS, FormatParser

_PARSERS: Mapping[ToolCallParser, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "openai": OpenAIParser,
    "granite": GraniteParser,
    "phi4_mini_json": Phi4MiniParser,
}


def make_tool_parser(name: ToolCallParser, tools: Sequence[Mapping[str, Any]] = ()) -> ToolParser:
    """Return a new parser, which parses one answer to a request with these tools."""
    if name in FORMATS:
        return FormatParser(name, tools)
    return Qwen3CoderParser(tools) if name == "qwen3_coder" else _PARSERS[name]()
