"""Phi 4 mini: `functools[{"name": ..., "arguments": {...}}]`."""

from __future__ import annotations

from core.text.tools.json_list import JsonListParser


class Phi4MiniParser(JsonListParser):
    mark = "functools"
