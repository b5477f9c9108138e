"""Compiles grammars with llguidance, each once, and makes a matcher for each answer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.errors import ConfigurationError, RequestError
from core.structured_outputs import StructuredOutputsParams
from core.text.grammar import FIELD, grammar_error, grammar_text, load_llguidance
from core.text.tokenizer import tokenizer_file

MAX_KEPT = 64
"""Compiled grammars to keep; the least recently used ones are dropped."""
Matcher = Any
"""llguidance's LLMatcher: the state of a grammar after an answer's tokens so far."""


class Grammars:
    """A cache of compiled grammars for one model. Thread-safe; its matchers are not."""

    def __init__(self, model_dir: Path, eos_token_ids: Collection[int]) -> None:
        self._model_dir = model_dir
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        """Matchers in their initial state, by the grammar's text."""
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def knows(self, form: StructuredOutputsParams) -> bool:
        """Whether the grammar is compiled. Raises RequestError if the form has no grammar."""
        return grammar_text(form) in self._compiled

    def matcher(self, form: StructuredOutputsParams) -> Matcher:
        """Return a matcher in its initial state, compiling the grammar if it is not cached.

        The first compilation also reads the tokenizer.

        Raises RequestError if the grammar is wrong, too complex, or does not fit this model.
        """
        text = grammar_text(form)
        with self._lock:
            if text in self._compiled:
                self._compiled.move_to_end(text)
                return self._compiled[text].deep_copy()
        matcher = self._compile(text)
        with self._lock:
            self._compiled[text] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end an answer where the grammar allows the end. Call `matcher` first."""
        return self._tokenizer.eos_tokens

    def masks(self, matchers: Sequence[Matcher], vocab_size: int) -> NDArray[np.uint8]:
        """Return bit masks [N, bytes] of the tokens allowed next.

        Token t is bit t % 8 of byte t // 8.

        vocab_size: that of the logits. Tokens that the tokenizer does not have are not allowed.
        """
        masks = np.empty((len(matchers), -(-self._tokenizer.vocab_size // 32)), np.uint32)
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        num_bytes = -(-vocab_size // 8)
        masks = masks.view(np.uint8)[:, :num_bytes]
        return np.pad(masks, ((0, 0), (0, num_bytes - masks.shape[1])))

    def _compile(self, text: str) -> Matcher:
        llguidance = load_llguidance()
        with self._loading:
            tokenizer = self._tokenizer
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise grammar_error(matcher.get_error())
        return matcher

    @cached_property
    def _tokenizer(self) -> Any:
        """llguidance's tokenizer. With 128,000 tokens it takes most of a second to read."""
        try:
            text = _without_truncation(tokenizer_file(self._model_dir).read_bytes())
            return load_llguidance().LLTokenizer(text, eos_token=self._eos_token_ids or None)
        except (ConfigurationError, ValueError) as error:
            raise RequestError(FIELD, f"cannot be used with this model: {error}") from None


def _without_truncation(tokenizer: bytes) -> str:
    """Remove truncation and padding settings, which a file may keep from training."""
    fields = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    disabled = dict.fromkeys(("truncation", "padding"), msgspec.Raw(b"null"))
    return msgspec.json.encode({**fields, **disabled}).decode()
