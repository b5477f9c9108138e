"""Measure what quantization costs: nats per byte of held-out text without it and in each precision.

The precisions are fp8, int8 and int4. The text is cut into windows of the same number of tokens;
in each, the model scores every token after the first. Nats per byte can be compared between models
with different tokenizers. The end of the text is used, because models/train.py holds out the end of
its corpus.

    python -m benchmarks.engine.accuracy models/demo --text corpus.txt
    python -m benchmarks.engine.accuracy models/demo --text corpus.txt --dtype bf16 --share 0.05
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from core.sampling import SamplingParams
from core.text.tokenizer import Tokenizer
from engine import LLM
from engine.offline.prompts import TokensPrompt

PRECISIONS = (None, "fp8", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Score:
    """How well a model predicts a text, and the size of its weights."""

    nats_per_byte: float
    best_tokens: tuple[int, ...]
    """The likeliest token at each scored place."""
    bytes_per_weight: float


def score(
    model: Path, windows: list[list[int]], num_bytes: int, precision: str | None, dtype: str
) -> Score:
    """Score windows of tokens. num_bytes: bytes of text that the scored tokens stand for."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    nats, best = 0.0, list[int]()
    with LLM(model, dtype=dtype, quantize=precision) as llm:
        prompts: list[TokensPrompt] = [{"prompt_token_ids": window} for window in windows]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for window, output in zip(windows, outputs, strict=True):
            assert output.prompt_logprobs is not None
            for token, logprobs in zip(window[1:], output.prompt_logprobs[1:], strict=True):
                assert logprobs is not None
                nats -= logprobs[token].logprob
                best.append(max(logprobs.items(), key=lambda item: item[1].logprob)[0])
        facts = llm.facts
    return Score(nats / num_bytes, tuple(best), facts.weights_bytes / facts.num_weights)


def cut(tokens: list[int], length: int) -> list[list[int]]:
    """Return windows of `length` tokens. Tokens left over at the end are dropped."""
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    text = options.text.read_text("utf-8")
    tokenizer = Tokenizer(options.model)
    windows = cut(tokenizer.encode(text[-math.ceil(len(text) * options.share) :]), options.window)
    num_bytes = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    print(f"{len(windows)} windows of {options.window} tokens, {num_bytes:,} bytes scored")
    print("| option.quantize | bytes per weight | nats per byte | worse by | same best token |")
    print("| --- | --- | --- | --- | --- |")
    unquantized: Score | None = None
    for precision in PRECISIONS:
        found = score(options.model, windows, num_bytes, precision, options.dtype)
        unquantized = unquantized or found
        worse = found.nats_per_byte / unquantized.nats_per_byte - 1
        same = sum(map(int.__eq__, found.best_tokens, unquantized.best_tokens)) / len(
            found.best_tokens
        )
        print(
            f"| {precision or 'none'} | {found.bytes_per_weight:.2f} | {found.nats_per_byte:.4f} | "
            f"{worse:+.2%} | {same:.1%} |"
        )
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure nats per byte for each precision.")
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--text", type=Path, required=True, help="text file whose end is scored")
    parser.add_argument(
        "--share", type=float, default=0.1, help="share of the text to score (default: 0.1)"
    )
    parser.add_argument("--window", type=int, default=512, help="tokens per window (default: 512)")
    parser.add_argument("--dtype", default="fp32", help="option.dtype (default: fp32)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
