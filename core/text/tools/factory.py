"""Creates the parser for `option.tool_call_parser`."""

from __future__ import annotations

from core.options import ToolCallParser
from core.text.tools.base import ToolParser
from core.text.tools.hermes import HermesParser
from core.text.tools.llama3 import Llama3Parser
from core.text.tools.mistral import MistralParser


def make_tool_parser(name: ToolCallParser) -> ToolParser:
    """Return a new parser, which parses one answer."""
    match name:
        case "hermes":
            return HermesParser()
        case "llama3_json":
            return Llama3Parser()
        case "mistral":
            return MistralParser()
