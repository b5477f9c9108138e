"""Compiles grammars, each once, and makes a matcher for each answer."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterable, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from core.configuration.limits import GRAMMAR, GRAMMARS_IN_USE
from core.errors import OverloadedError, RequestError
from core.part import Feature, Part
from core.sampling import SamplingParams
from core.structured_outputs import StructuredOutputsParams
from core.text.grammar import converting_errors, grammar_text
from core.text.grammar_matcher import (
    GrammarTokenizer,
    Matcher,
    compile_grammar,
    read_grammar_tokenizer,
)

MAX_KEPT = 64
"""Compiled grammars to keep. The least recently used are dropped, unless in use."""
MAX_CHARACTERS_KEPT = 8 * GRAMMAR.maximum
"""The most characters that the texts of these grammars have together. A compiled grammar takes up
to 0.5 KB for each character."""
SECONDS_PER_MASK = 0.01
"""CPU time that an answer's masks may take on average. Usual masks take 0.1 ms, masks of ambiguous
grammars up to 1 s."""
MAX_OVERRUN_S = 0.2
"""CPU time by which an answer's masks may exceed that average. An answer beyond it fails, because
all other sequences of its steps wait for its masks."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Constraint(Part):
    """The grammar of one answer. The mask of a token depends on the token before it."""

    needs_newest = True
    text: str
    matcher: Matcher
    overrun_s: float = 0.0
    """CPU time of its masks beyond SECONDS_PER_MASK each; quick masks make up for slow ones."""
    failure: str | None = None
    """Why the newest mask could not be computed; None if it was."""

    @contextmanager
    def timed(self) -> Generator[None]:
        """Count the time of the block, which computes a mask."""
        begin = time.thread_time()
        yield
        took = time.thread_time() - begin
        self.overrun_s = max(0.0, self.overrun_s + took - SECONDS_PER_MASK)

    def fork(self) -> Constraint:
        return replace(self, matcher=self.matcher.deep_copy())


class Grammars(Feature):
    """A cache of compiled grammars for one model.

    Any thread may call `is_compiled` and `matcher`. Only the loop's thread calls the other
    methods, or a matcher.
    """

    fields = ("structured_outputs",)

    def __init__(self, model_dir: Path, eos_token_ids: Collection[int]) -> None:
        self._model_dir = model_dir
        self._eos_token_ids = eos_token_ids
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        """Matchers in their initial state, by the grammar's text; pending while it is compiled."""
        self._held: WeakSet[Constraint] = WeakSet()
        """The constraint of each request, until the request ends."""
        self._in_use: Set[str] = frozenset()
        """Grammars of waiting and running requests. The set is replaced and never changed, since
        other threads read it."""
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def is_compiled(self, form: StructuredOutputsParams) -> bool:
        """Whether the grammar is compiled. Raises RequestError if `form` is invalid."""
        compiled = self._compiled.get(grammar_text(form))
        return compiled is not None and compiled.done()

    def matcher(self, form: StructuredOutputsParams) -> Matcher:
        """Return a matcher in its initial state, compiling the grammar if it is not cached.

        The first compilation also reads the tokenizer. Waits if another thread compiles the same
        grammar.

        Raises RequestError if the grammar is wrong, too complex, or does not fit this model.
        """
        text = grammar_text(form)
        with self._lock:
            compiled = self._compiled.get(text)
            is_new = compiled is None
            if compiled is None:
                compiled = self._compiled[text] = Future[Matcher]()
            self._compiled.move_to_end(text)
        if is_new:
            self._compile(text, compiled)
        matcher = compiled.result()
        with self._lock:
            return matcher.deep_copy()

    def part(self, params: SamplingParams, num_prompt_tokens: int) -> Constraint | None:
        form = params.structured_outputs
        return None if form is None else self.constraint(form)

    def constraint(self, form: StructuredOutputsParams) -> Constraint:
        """Return a request's constraint, and keep its grammar as long as the request lives.

        So no step has to compile a grammar again, however many others have been compiled since.

        Raises RequestError if the grammar is wrong and OverloadedError if the grammars in use are
        too large together; nothing is kept then.
        """
        text = grammar_text(form)
        texts = {text, *(constraint.text for constraint in self._held)}
        if _size(texts) > GRAMMARS_IN_USE.maximum:
            raise OverloadedError(
                f"the grammars in use have more than {GRAMMARS_IN_USE.maximum} characters together"
            )
        self._in_use = frozenset(texts)
        constraint = Constraint(text, self.matcher(form))
        self._held.add(constraint)
        return constraint

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end an answer where the grammar allows the end. Call `matcher` first."""
        return self._tokenizer.eos_tokens

    def masks(self, constraints: Sequence[Constraint], vocab_size: int) -> NDArray[np.uint8]:
        """Return bit masks [N, bytes] of the tokens allowed next.

        Token t is bit t % 8 of byte t // 8.

        vocab_size: the logits' vocabulary. Tokens that the tokenizer lacks are not allowed.
        """
        masks = np.empty((len(constraints), -(-self._tokenizer.vocab_size // 32)), np.uint32)
        for constraint, mask in zip(constraints, masks, strict=True):
            try:
                with constraint.timed(), converting_errors():
                    constraint.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            except RequestError as error:
                constraint.failure = str(error)
                mask.fill(np.iinfo(np.uint32).max)
        num_bytes = -(-vocab_size // 8)
        masks = masks.view(np.uint8)[:, :num_bytes]
        return np.pad(masks, ((0, 0), (0, num_bytes - masks.shape[1])))

    def _compile(self, text: str, compiled: Future[Matcher]) -> None:
        """Compile a grammar and set the future's outcome. A grammar that fails is not kept."""
        try:
            with self._reading:
                tokenizer = self._tokenizer
            compiled.set_result(compile_grammar(tokenizer, text))
        except BaseException as error:
            with self._lock:
                self._compiled.pop(text, None)
            compiled.set_exception(error)
            return
        with self._lock:
            for oldest in [text for text in self._compiled if text not in self._in_use]:
                if len(self._compiled) <= MAX_KEPT and _size(self._compiled) <= MAX_CHARACTERS_KEPT:
                    break
                del self._compiled[oldest]

    @cached_property
    def _tokenizer(self) -> GrammarTokenizer:
        return read_grammar_tokenizer(self._model_dir, self._eos_token_ids)


def _size(texts: Iterable[str]) -> int:
    return sum(map(len, texts))
