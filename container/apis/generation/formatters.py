"""The user's own formatters: what a model.py does to requests and answers of the model itself.

`python -m container.apis.generation.formatters FILE [LIBRARY_DIR]` says whether a front end could
load them.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

import msgspec

from core.errors import ConfigurationError, GenerationError, LongshoreError, RequestError
from core.text.chat_template import ChatTemplate, Message
from core.text.tokenizer import Tokenizer
from core.user_code import run_file, start_error

logger = logging.getLogger(__name__)

Formatter = Callable[..., object]


class FormatterTokenizer:
    """What a formatter gets as `tokenizer`: the model's, by transformers' names."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of the text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of the tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> str | list[int]:
        """The prompt of the conversation, or its tokens. Raises RequestError where the model has
        no template, or it refuses the conversation."""
        if self._template is None:
            raise RequestError("messages", "the model has no chat template")
        prompt = self._template.render(conversation, add_generation_prompt=add_generation_prompt)
        return self.encode(prompt, add_special_tokens=False) if tokenize else prompt


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a file that are marked."""

    input: Formatter | None
    output: Formatter | None


class Formatters:
    """Calls the functions. What they raise is a GenerationError."""

    def __init__(self, functions: Functions, tokenizer: FormatterTokenizer) -> None:
        self._input = functions.input
        self._output = functions.output
        self._takes_tokenizer = self._input is not None and _takes_tokenizer(self._input)
        self._tokenizer = tokenizer

    def request(self, body: dict[str, object]) -> dict[str, object]:
        """The fields that the model is asked with, for those that the client sent."""
        if self._input is None:
            return body
        named = {"tokenizer": self._tokenizer} if self._takes_tokenizer else {}
        formatted = _result("input_formatter", self._input, body, **named)
        if not isinstance(formatted, dict):
            raise GenerationError(f"input_formatter: returned {formatted!r:.100}, which is no dict")
        return cast(dict[str, object], formatted)

    def answer(self, record: object) -> object:
        """What the client gets for a document, or a record of a stream: text is sent as it is."""
        return record if self._output is None else _result("output_formatter", self._output, record)


def _result(name: str, function: Formatter, data: object, **named: object) -> object:
    """What the function makes of the data, as far as JSON can say it."""
    try:
        return msgspec.to_builtins(function(data, **named), str_keys=True)
    except LongshoreError:
        raise
    except (Exception, SystemExit) as error:
        logger.warning("%s failed", name, exc_info=error)
        raise GenerationError(f"{name}: {type(error).__name__}: {error}") from error


def _takes_tokenizer(function: Formatter) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == "tokenizer" or each.kind == each.VAR_KEYWORD for each in parameters)


def load_formatters(path: Path, library_dir: str) -> Functions:
    """Runs the file, in its own directory. Raises ConfigurationError with the line at fault."""
    if library_dir:
        sys.path.insert(0, library_dir)
    os.chdir(path.parent)  # as for a handler: relative paths mean what lies beside the file
    try:
        module = run_file(path)
    except (Exception, SystemExit) as error:
        raise start_error(error, path) from error
    return Functions(_marked(module, path, "input"), _marked(module, path, "output"))


def _marked(module: ModuleType, path: Path, which: str) -> Formatter | None:
    values = [each for each in vars(module).values() if callable(each)]
    marked = {id(each): each for each in values if getattr(each, f"is_{which}_formatter", False)}
    functions = list(marked.values())
    if len(functions) > 1:
        raise ConfigurationError(f"{path}: has {len(functions)} functions @{which}_formatter")
    if functions and inspect.iscoroutinefunction(functions[0]):
        raise ConfigurationError(
            f"{path}: the function @{which}_formatter is async; leave that out"
        )
    return functions[0] if functions else None


def main(path: str, library_dir: str = "") -> int:
    """Says what is wrong with the file, if anything is."""
    try:
        load_formatters(Path(path), library_dir)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
