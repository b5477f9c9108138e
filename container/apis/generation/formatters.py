"""The user's formatters: functions of a model.py that change requests and responses.

As a process, checks that the formatters of a file can be loaded.
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
from core.foreign_code import contained, reason_of
from core.process.internal_arguments import internal_arguments
from core.process.user_code import exit_code_of_check, run_file, start_error
from core.text.chat_template import ChatMessage, ChatTemplate
from core.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Formatter = Callable[..., object]


class FormatterTokenizer:
    """The `tokenizer` argument of a formatter: the model's tokenizer with transformers' methods."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the text's token ids."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[ChatMessage],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> str | list[int]:
        """Return the conversation's prompt, as token ids if `tokenize` is set, else as text.

        Raises RequestError if the model has no chat template, or if the template rejects the
        conversation.
        """
        if self._template is None:
            raise RequestError("messages", "the model has no chat template")
        prompt = self._template.render(conversation, add_generation_prompt=add_generation_prompt)
        return self.encode(prompt, add_special_tokens=False) if tokenize else prompt


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a file that are decorated as formatters."""

    input: Formatter | None
    output: Formatter | None


class Formatters:
    """Calls the user's functions. Any exception but a LongshoreError becomes a GenerationError."""

    def __init__(self, functions: Functions, tokenizer: FormatterTokenizer) -> None:
        self._input = functions.input
        self._output = functions.output
        self._takes_tokenizer = self._input is not None and _takes_tokenizer(self._input)
        self._tokenizer = tokenizer

    def format_input(self, body: dict[str, object]) -> dict[str, object]:
        """Return the client's body as changed by the input_formatter.

        Raises GenerationError if the formatter fails or does not return a dict.
        """
        if self._input is None:
            return body
        keywords = {"tokenizer": self._tokenizer} if self._takes_tokenizer else {}
        formatted = _result("input_formatter", self._input, body, **keywords)
        if not isinstance(formatted, dict):
            raise GenerationError(f"input_formatter: returned {formatted!r:.100} instead of a dict")
        return cast(dict[str, object], formatted)

    def format_output(self, record: object) -> object:
        """Return a document, or a stream's record, as changed by the output_formatter.

        A str is sent to the client unchanged. Raises GenerationError if the formatter fails.
        """
        return record if self._output is None else _result("output_formatter", self._output, record)


def _result(name: str, function: Formatter, data: object, **keywords: object) -> object:
    """Call the function and convert its result to JSON types."""
    try:
        with contained:
            return msgspec.to_builtins(function(data, **keywords), str_keys=True)
    except LongshoreError:
        raise
    except Exception as error:
        logger.warning("%s failed", name, exc_info=error)
        raise GenerationError(f"{name}: {reason_of(error)}") from error


def _takes_tokenizer(function: Formatter) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(
        parameter.name == "tokenizer" or parameter.kind == parameter.VAR_KEYWORD
        for parameter in parameters
    )


def load_formatters(path: Path, library_dir: str) -> Functions:
    """Run the file in its own directory and return its formatters.

    Raises ConfigurationError if the file misuses the decorators or fails. The message of a failure
    names the line.
    """
    if library_dir:
        sys.path.insert(0, library_dir)
    os.chdir(path.parent)  # relative paths are relative to the file, as for a handler
    try:
        with contained:
            module = run_file(path)
    except Exception as error:
        raise start_error(error, path) from error
    return Functions(_marked(module, path, "input"), _marked(module, path, "output"))


def _marked(module: ModuleType, path: Path, which: str) -> Formatter | None:
    mark = f"is_{which}_formatter"
    values = [value for value in vars(module).values() if callable(value)]
    # Functions are told apart by id, since one function may have several names.
    functions = list({id(value): value for value in values if getattr(value, mark, False)}.values())
    if len(functions) > 1:
        raise ConfigurationError(
            f"{path}: has {len(functions)} functions with @{which}_formatter; keep one"
        )
    if functions and inspect.iscoroutinefunction(functions[0]):
        raise ConfigurationError(
            f"{path}: the @{which}_formatter function is async; make it a plain function"
        )
    return functions[0] if functions else None


def main(path: str, library_dir: str = "") -> int:
    """Check the file and return the exit code."""
    return exit_code_of_check(lambda: load_formatters(Path(path), library_dir))


if __name__ == "__main__":
    module = "container.apis.generation.formatters"
    description = "Checks that formatters can be loaded. `longshore serve` starts it."
    sys.exit(main(*internal_arguments(module, description, "FILE LIBRARY_DIR")))
