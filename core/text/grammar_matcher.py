"""Compiles grammars with llguidance for the tokenizer of one model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from core.errors import RequestError
from core.foreign_code import contained
from core.text.grammar import FIELD, converting_errors, grammar_error, load_llguidance
from core.text.tokenizer import tokenizer_file

T = TypeVar("T")

Matcher = Any
"""llguidance's LLMatcher: the state of a grammar after an answer's tokens so far."""
GrammarTokenizer = Any
"""llguidance's LLTokenizer."""
STACK_BYTES = 16 * 2**20
"""Bytes of stack on which the engine compiles. llguidance recurses into nested rules and schemas,
with up to 10 KB of stack for each level, and ends the process with SIGSEGV when the stack is full.
"""

_stack_size_lock = threading.Lock()


def read_grammar_tokenizer(model_dir: Path, eos_token_ids: Collection[int]) -> GrammarTokenizer:
    """Read a model's tokenizer. Holds the GIL, for most of a second if there are 128,000 tokens.

    Raises RequestError if the model has no tokenizer that llguidance can use.
    """
    try:
        text = _without_truncation(tokenizer_file(model_dir).read_bytes())
        with contained:
            return load_llguidance().LLTokenizer(text, eos_token=list(eos_token_ids) or None)
    except (MemoryError, RequestError):
        raise
    except Exception as error:  # the tokenizer's file, or llguidance
        raise RequestError(FIELD, f"cannot be used with this model: {error}") from None


def compile_grammar(
    tokenizer: GrammarTokenizer, text: str, *, stack_bytes: int = STACK_BYTES
) -> Matcher:
    """Return the grammar's matcher in its initial state. Compiles without the GIL.

    Raises RequestError if the grammar is wrong or too complex, or does not fit the tokenizer.
    """
    llguidance = load_llguidance()
    limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile() -> Matcher:
        with converting_errors():
            return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)

    matcher = call_on_stack(stack_bytes, compile)
    if matcher.is_error():
        raise grammar_error(matcher.get_error())
    return matcher


def call_on_stack(num_bytes: int, work: Callable[[], T]) -> T:
    """Call `work` in a thread with a stack of `num_bytes`. Return its result or raise its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run)
    with _stack_size_lock:  # the size applies to every thread that the process starts meanwhile
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()


def _without_truncation(tokenizer: bytes) -> str:
    """Remove truncation and padding settings, which a file may keep from training."""
    fields = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    disabled = dict.fromkeys(("truncation", "padding"), msgspec.Raw(b"null"))
    return msgspec.json.encode({**fields, **disabled}).decode()
