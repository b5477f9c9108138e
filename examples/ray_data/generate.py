"""Answer a large file of prompts on all machines of a Ray cluster, with Ray Data.

A line of --input is a JSON object with a prompt or the messages of a chat. Its id is optional:

    {"id": "a", "prompt": "ROMEO:"}
    {"id": "b", "messages": [{"role": "user", "content": "Who is Romeo?"}]}

A line of the files part-*.jsonl in --output has the answer, or says why there is none. Files and
lines are in the order of the input:

    {"line": 1, "id": "a", "text": "...", "finish_reason": "length", "error": null}
    {"line": 2, "id": "b", "text": null, "finish_reason": null, "error": "messages: ..."}

To continue an interrupted run, run the same command again. The exit code is 0 once every line has
an answer or an error.
"""

# pyright: reportMissingImports=false
# One file: Ray sends the main module to the other machines, but no module that it imports.
from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tqdm import tqdm

import longshore

if TYPE_CHECKING:
    from ray.data import Dataset

Json = dict[str, Any]

EXAMPLES = """examples:
  %(prog)s --input prompts.jsonl --output answers --model models/demo --actors 2
  %(prog)s --address auto --input /shared/prompts.jsonl --output /shared/answers \\
      --model /shared/model --actors 8 --gpus 1 --sampling '{"max_tokens": 64, "temperature": 0}'
"""
FIELDS = ("id", "prompt", "messages")
ROW = ("line", "id", "text", "finish_reason", "error")
RUN_FILE = "run.json"
"""File in the output that records the input and the settings of its answers."""
MAX_RETRIES = 3
"""How often a part whose actor died is tried again, so that no prompt can kill actors for ever."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive lines of the input, which one actor answers together and writes as one file."""

    number: int
    first_line: int
    """Number of the first line in the input, counted from 1."""
    offset: int
    """Byte offset of the first line."""
    num_lines: int

    def path(self, output: Path) -> Path:
        return output / f"part-{self.number:08}.jsonl"


class Answerer:
    """An actor. It has a model and an engine, and answers one part after the other."""

    def __init__(self, source: str, output: str, model: str, options: Json, sampling: Json) -> None:
        self.source, self.output = Path(source), Path(output)
        self.llm = longshore.LLM(model, **options)
        self._params = longshore.SamplingParams(**sampling)

    def __call__(self, part_as_row: Json) -> Json:
        """Write the file of a part, unless an earlier actor did. Return line and error counts."""
        part = Part(**part_as_row)
        path = part.path(self.output)
        if not path.exists():
            write_atomically(path, map(json.dumps, self.answers(read_part(self.source, part))))
        with path.open(encoding="utf-8") as lines:
            num_errors = sum(json.loads(line)["error"] is not None for line in lines)
        return {"num_lines": part.num_lines, "num_errors": num_errors}

    def answers(self, lines: Iterable[tuple[int, bytes]]) -> list[Json]:
        """Return a line of the output for each numbered line of the input."""
        rows: list[Json] = []
        valid: list[tuple[Json, Any]] = []
        for number, line in lines:
            row: Json = dict.fromkeys(ROW)
            row["line"] = number
            rows.append(row)
            try:
                fields = parse(line)
                row["id"] = fields.get("id")
                valid.append((row, self._prompt(fields)))
            except (ValueError, longshore.RequestError) as error:
                row["error"] = str(error)
        self._answer(valid)
        return rows

    def _prompt(self, fields: Json) -> Any:
        match fields:
            case {"messages": _, "prompt": _}:
                raise ValueError("both prompt and messages; give one of them")
            case {"prompt": str(prompt)}:
                return prompt
            case {"messages": [_, *_] as messages} if all(map(is_message, messages)):
                return self.llm.apply_chat_template(messages)
        raise ValueError("expected a prompt, or messages with role and content; all are strings")

    def _answer(self, rows: Sequence[tuple[Json, Any]]) -> None:
        """Set the text or the error of each row, given with its prompt.

        A prompt that is too long, or a step that fails (such as for lack of memory), stops all
        prompts that were given with it. So each half is tried alone, down to one prompt. If that
        one fails, its row gets the error. If the engine has died, another error ends the run.
        """
        if not rows:
            return
        try:
            answers = self.llm.generate(
                [prompt for _, prompt in rows], self._params, use_tqdm=False
            )
        except (longshore.RequestError, longshore.GenerationError) as error:
            if len(rows) == 1:
                rows[0][0]["error"] = str(error)
                return
            half = len(rows) // 2
            self._answer(rows[:half])
            self._answer(rows[half:])
            return
        for (row, _), answer in zip(rows, answers, strict=True):
            row["text"] = answer.outputs[0].text
            row["finish_reason"] = answer.outputs[0].finish_reason


def parse(line: bytes) -> Json:
    """Return the fields of a line of the input. Raises ValueError."""
    try:
        fields = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, not {line[:40].decode(errors='replace').strip()}")
    if unknown := fields.keys() - set(FIELDS):
        raise ValueError(f"{', '.join(sorted(unknown))}: unknown; a line has {', '.join(FIELDS)}")
    if not isinstance(fields.get("id"), str | int | None) or isinstance(fields.get("id"), bool):
        raise ValueError("id: expected a string or an integer")
    json.dumps(fields, ensure_ascii=False).encode()  # half of a surrogate pair is a ValueError
    return fields


def is_message(found: object) -> bool:
    match found:
        case {"role": str(), "content": str(), **others}:
            return not others
    return False


def read_part(source: Path, part: Part) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a part that are not blank, with their numbers."""
    with source.open("rb") as file:
        file.seek(part.offset)
        for number, line in enumerate(islice(file, part.num_lines), part.first_line):
            if line.strip():
                yield number, line


UNFINISHED = re.compile(r"\.part-[0-9]{8}\.jsonl\.[0-9a-f]{32}")
"""The names under which `write_atomically` writes parts."""


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Write a file that appears with all of its lines or not at all."""
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def split(source: Path, lines_per_part: int) -> tuple[list[Part], str]:
    """Return the parts of a file, and its SHA-256. Reads it once, a part at a time."""
    parts: list[Part] = []
    digest, offset, number = hashlib.sha256(), 0, 1
    with source.open("rb") as file:
        while chunk := list(islice(file, lines_per_part)):
            parts.append(Part(len(parts), number, offset, len(chunk)))
            number += len(chunk)
            offset += sum(map(len, chunk))
            for line in chunk:
                digest.update(line)
    return parts, digest.hexdigest()


def open_output(output: Path, settings: Json) -> None:
    """Create the output folder, or check that its answers are of a run with these settings.

    Raises ValueError if they are not, and OSError if the folder cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    file = output / RUN_FILE
    if not any(output.glob("part-*")):  # new, or its run failed before it had an answer
        write_atomically(file, [json.dumps(settings)])
        return
    if not file.exists():
        raise ValueError(f"{output}: has parts, but no {RUN_FILE}; choose another --output")
    before: Json = json.loads(file.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if before.get(name) != value:
            raise ValueError(
                f"{output}: has answers of a run with {name}={json.dumps(before.get(name))}, not "
                f"{json.dumps(value)}; choose another --output"
            )


def run(options: argparse.Namespace) -> str:
    """Answer the parts that have no answers yet, and return a summary.

    Raises ValueError, RequestError and OSError for what the command line names, and RuntimeError
    if the actors cannot go on.
    """
    params = longshore.SamplingParams(**options.sampling)  # an error before any actor starts
    if params.n != 1:
        raise ValueError(f"--sampling: n={params.n}: a line has one answer; leave n out")
    parts, digest = split(options.input, options.lines_per_part)
    names = ("model", "options", "sampling", "lines_per_part")
    settings = {name: getattr(options, name) for name in names}
    missing = [part for part in parts if not part.path(options.output).exists()]
    if missing:
        require_ray()
    open_output(options.output, {"input_sha256": digest, **settings})
    num_lines, num_to_answer = (sum(part.num_lines for part in some) for some in (parts, missing))
    num_errors = 0
    if missing:
        with tqdm(
            total=num_lines, initial=num_lines - num_to_answer, unit="line", disable=None
        ) as bar:
            for row in run_parts(missing, options):
                num_errors += row["num_errors"]
                bar.update(row["num_lines"])
                bar.set_postfix(errors=num_errors)
    for path in options.output.iterdir():
        if UNFINISHED.fullmatch(path.name):  # left by an actor that died
            path.unlink()
    return f"{num_to_answer} of {num_lines} lines processed in this run, {num_errors} with an error"


def require_ray() -> None:
    try:
        importlib.import_module("ray.data")
    except ImportError as error:
        raise ValueError(f"needs Ray: pip install 'longshore[ray]' 'ray[data]' ({error})") from None


def run_parts(parts: Sequence[Part], options: argparse.Namespace) -> Iterator[Json]:
    """Answer the parts, and yield what `Answerer` returns for each. Raises RuntimeError."""
    import ray  # lazy: --help works without it

    ray.init(address=options.address)
    try:
        yield from make_dataset(parts, options).iter_rows()
    except ray.exceptions.RayError as error:  # its last line is the error of the actor
        raise RuntimeError(str(error).strip().splitlines()[-1]) from error


def make_dataset(parts: Sequence[Part], options: argparse.Namespace) -> Dataset:
    """Return a dataset that answers the parts when it is read."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False  # they count parts, not lines
    rows = ray.data.from_items([asdict(part) for part in parts], override_num_blocks=len(parts))
    # Ray 2.60 warns of max_task_retries as deprecated, but has no other way to set it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return rows.map(
        Answerer,
        fn_constructor_args=(
            str(options.input.resolve()), str(options.output.resolve()),
            options.model, options.options, options.sampling,
        ),
        compute=ray.data.ActorPoolStrategy(size=options.actors, max_tasks_in_flight_per_actor=2),
        num_cpus=options.cpus,
        num_gpus=options.gpus or None,
        max_task_retries=MAX_RETRIES,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit code."""
    options = make_parser().parse_args(arguments)
    try:
        print(run(options), flush=True)
    except (OSError, ValueError, longshore.RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}; fix the cause, then run the same command again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ray_data.generate", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--input", type=Path, required=True, metavar="FILE",
        help="prompts; every machine must see it under this name",
    )  # fmt: skip
    add(
        "--output", type=Path, required=True, metavar="DIR",
        help="folder of the answers; every machine must see it under this name, and one run at a "
        "time may use it",
    )  # fmt: skip
    add(
        "--model", type=_model, required=True,
        help="folder that every machine has, or model id of the Hugging Face hub",
    )  # fmt: skip
    add(
        "--options", type=_json, default={}, metavar="JSON",
        help="options of LLM (docs/offline.md), such as '{\"dtype\": \"bf16\"}'",
    )  # fmt: skip
    add(
        "--sampling", type=_json, default={}, metavar="JSON",
        help="fields of SamplingParams, such as '{\"max_tokens\": 64, \"temperature\": 0}'",
    )  # fmt: skip
    add(
        "--lines-per-part", type=_count, default=256, metavar="N",
        help="lines that an actor answers together and writes as one file; several times "
        "option.max_rolling_batch_size keeps batches full (default: 256)",
    )  # fmt: skip
    add("--actors", type=_count, default=1, metavar="N", help="copies of the model (default: 1)")
    add("--gpus", type=float, default=0, metavar="N", help="GPUs of each actor (default: 0)")
    add("--cpus", type=float, default=1, metavar="N", help="cores of each actor (default: 1)")
    add(
        "--address", default="local",
        help="the Ray cluster: HOST:PORT, auto (the one that this machine belongs to), or local "
        "(a new one of this machine alone; the default)",
    )  # fmt: skip
    return parser


def _model(text: str) -> str:
    folder = Path(text)  # or a model id
    return str(folder.resolve()) if folder.is_dir() else text


def _json(text: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"{text}: expected an object, such as '{{\"max_tokens\": 64}}'"
        )
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
