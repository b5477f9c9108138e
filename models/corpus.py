"""Turn the corpus into training data: speeches, documents, tokens, windows.

A play is a list of speeches. Every epoch cuts it anew into two kinds of text: plain documents
(consecutive speeches under their speakers' names) and conversations (a few consecutive speeches as
chat messages). Both end in <|endoftext|>, so the model learns when to stop.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
SPECIAL_TOKENS = [END, "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] -}}
{{- '<|endoftext|>' if message['role'] == 'assistant' else '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
MIN_SPEECHES = 500
DOCUMENT_SPEECHES = (12, 48)
CONVERSATION_SPEECHES = (2, 6)


class Speech(NamedTuple):
    """A speaker and the text spoken before the next one takes over."""

    speaker: str
    text: str


def read_speeches(path: Path) -> list[Speech]:
    """Parse blocks of "SPEAKER:", line break, text, separated by blank lines.

    Exits if the file cannot be read or has too few speeches.
    """
    try:
        blocks = path.read_text(encoding="utf-8").strip().split("\n\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"cannot read the corpus: {error}") from error
    speeches = [Speech(*block.split(":\n", 1)) for block in blocks if ":\n" in block]
    if len(speeches) < MIN_SPEECHES:
        raise SystemExit(
            f"the corpus is too small: {path} has {len(speeches)} speeches of the form "
            f"'SPEAKER:', line break, text; at least {MIN_SPEECHES} are needed"
        )
    return speeches


def split(speeches: list[Speech], held_out: float) -> tuple[list[Speech], list[Speech]]:
    """Split off the last `held_out` share of the text for validation."""
    ends = list(accumulate(len(speech.speaker) + len(speech.text) for speech in speeches))
    kept = bisect(ends, (1 - held_out) * ends[-1])
    return speeches[:kept], speeches[kept:]


def document(speeches: list[Speech]) -> str:
    """Render speeches as a plain document, like a page of a play."""
    return "\n\n".join(":\n".join(speech) for speech in speeches) + END


def validation_documents(speeches: list[Speech]) -> list[str]:
    """Render held-out speeches as plain documents of a fixed number of speeches."""
    length = sum(DOCUMENT_SPEECHES) // 2
    return [document(speeches[start : start + length]) for start in range(0, len(speeches), length)]


def conversation(speeches: list[Speech], as_speaker: bool) -> list[dict[str, str]]:
    """Render speeches as chat messages in which user and assistant take turns.

    `as_speaker` adds a system message that names the assistant's first speaker.
    """
    system = {"role": "system", "content": f"You are {speeches[1].speaker}."}
    turns = [
        {"role": ("user", "assistant")[turn % 2], "content": speech.text}
        for turn, speech in enumerate(speeches)
    ]
    return [system, *turns] if as_speaker else turns


def train_tokenizer(
    speeches: list[Speech], vocabulary: int, context: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which encodes and decodes any text without loss."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([document(speeches).removesuffix(END)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[int]:
    """Encode documents as one stream of tokens.

    Calls the backend, because the outer tokenizer warns beyond its context length.
    """
    return tokenizer.backend_tokenizer.encode("".join(documents)).ids


def runs(
    speeches: list[Speech], length: tuple[int, int], rng: random.Random
) -> Iterator[list[Speech]]:
    """Cut speeches into consecutive runs of random length."""
    while speeches:
        size = rng.randint(*length)
        yield speeches[:size]
        speeches = speeches[size:]


class TrainingStream:
    """Yields token windows endlessly; every epoch cuts, shuffles and renders the speeches anew."""

    def __init__(
        self,
        speeches: list[Speech],
        tokenizer: PreTrainedTokenizerFast,
        chat_share: float,
        seed: int,
    ) -> None:
        self.speeches = speeches
        self.tokenizer = tokenizer
        self.chat_share = chat_share
        self.rng = random.Random(seed)

    def windows(self, context: int) -> Iterator[list[int]]:
        """Yield windows of `context` tokens, in random order within each epoch."""
        tokens: list[int] = []
        while True:
            tokens += self._epoch()
            starts = range(0, len(tokens) - context + 1, context)
            for start in self.rng.sample(starts, len(starts)):
                yield tokens[start : start + context]
            tokens = tokens[len(starts) * context :]

    def _epoch(self) -> list[int]:
        documents = list(self._documents())
        self.rng.shuffle(documents)
        return encode(self.tokenizer, documents)

    def _documents(self) -> Iterator[str]:
        for run in runs(self.speeches, DOCUMENT_SPEECHES, self.rng):
            if self.rng.random() < self.chat_share:
                yield from self._conversations(run)
            else:
                yield document(run)

    def _conversations(self, run: list[Speech]) -> Iterator[str]:
        for part in runs(run, CONVERSATION_SPEECHES, self.rng):
            if pairs := part[: len(part) // 2 * 2]:
                messages = conversation(pairs, as_speaker=self.rng.random() < 0.5)
                yield self.tokenizer.apply_chat_template(messages, tokenize=False)
