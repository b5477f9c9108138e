"""Answer a large file of prompts on all machines of a Ray cluster, with Ray Data.

A line of --input has a prompt or the messages of a chat, and an id if you like:

    {"id": "a", "prompt": "ROMEO:"}
    {"id": "b", "messages": [{"role": "user", "content": "Who is Romeo?"}]}

A line of the files part-*.jsonl in --output has the answer, or says why there is none. Files and
lines are in the order of the input:

    {"line": 1, "id": "a", "text": "...", "finish_reason": "length", "error": null}
    {"line": 2, "id": "b", "text": null, "finish_reason": null, "error": "messages: ..."}

To continue an interrupted run, run the same command again: it answers the parts without a file.
"""

# pyright: reportMissingImports=false
# One file: Ray sends the main module to the other machines, but no module that it imports.
from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from longshore import LLM, GenerationError, RequestError, SamplingParams

Json = dict[str, Any]
ROW = ("line", "id", "text", "finish_reason", "error")


class Answerer:
    """An actor. It has a model and an engine, and answers one part of the input after the other."""

    def __init__(self, source: str, model: str, options: Json, sampling: Json) -> None:
        self._source = source
        self.llm = LLM(model, **options)
        self._params = SamplingParams(**sampling)

    def __call__(self, part: Json) -> Json:
        """Write the file of a part, which appears with all of its lines or not at all."""
        with open(self._source, "rb") as file:
            file.seek(part["offset"])
            rows = self.answers(enumerate(islice(file, part["num_lines"]), part["first_line"]))
        path = Path(part["path"])
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        unfinished.replace(path)
        return {"lines": len(rows), "errors": sum(row["error"] is not None for row in rows)}

    def answers(self, lines: Iterable[tuple[int, bytes]]) -> list[Json]:
        """Return a row for each numbered line that is not blank."""
        rows = [(dict.fromkeys(ROW) | {"line": n}, line) for n, line in lines if line.strip()]
        valid: list[tuple[Json, Any]] = []
        for row, line in rows:
            try:
                valid.append((row, self._prompt(row, json.loads(line))))
            except (ValueError, RecursionError, RequestError) as error:
                row["error"] = str(error)
        if valid:
            self._answer(valid)
        return [row for row, _ in rows]

    def _prompt(self, row: Json, fields: object) -> Any:
        if not isinstance(fields, dict):
            raise ValueError("expected an object")
        json.dumps(fields, ensure_ascii=False).encode()  # half of a surrogate pair is a ValueError
        row["id"] = fields.get("id")
        match fields:
            case {"prompt": str(prompt)}:
                return prompt
            case {"messages": [*messages]} if all(isinstance(each, dict) for each in messages):
                return self.llm.apply_chat_template(messages)
        raise ValueError("expected a prompt, or messages")

    def _answer(self, rows: list[tuple[Json, Any]]) -> None:
        """Set the text or the error of each row, given with its prompt.

        A prompt that is too long, or a step that fails (such as for lack of memory), stops all
        prompts that were given with it. So each half is tried alone, down to one prompt.
        """
        prompts = [prompt for _, prompt in rows]
        try:
            found = self.llm.generate(prompts, self._params, use_tqdm=False)
        except (RequestError, GenerationError) as error:
            if len(rows) == 1:
                rows[0][0]["error"] = str(error)
            else:
                self._answer(rows[: len(rows) // 2])
                self._answer(rows[len(rows) // 2 :])
            return
        for (row, _), request in zip(rows, found, strict=True):
            answer = request.outputs[0]
            row |= {"text": answer.text, "finish_reason": answer.finish_reason}


def missing_parts(source: Path, output: Path, lines_per_part: int) -> list[Json]:
    """Return the parts of the input that have no file in the output yet. Reads the input once."""
    parts: list[Json] = []
    offset, first_line = 0, 1
    with source.open("rb") as file:
        while lines := list(islice(file, lines_per_part)):
            path = output / f"part-{first_line:09}.jsonl"
            part = {"offset": offset, "first_line": first_line, "num_lines": len(lines)}
            if not path.exists():
                parts.append({**part, "path": str(path)})
            offset, first_line = offset + sum(map(len, lines)), first_line + len(lines)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", type=Path, required=True, help="file that every machine sees under this name")
    add("--output", type=Path, required=True, help="folder, likewise; another one for each input")
    add("--model", required=True, help="folder that every machine has, or model id of the hub")
    add("--options", type=json.loads, default={}, help="options of LLM, as JSON")
    add("--sampling", type=json.loads, default={}, help="fields of SamplingParams, as JSON")
    add("--lines-per-part", type=int, default=256, help="lines in a file of the output")
    add("--actors", type=int, default=1, help="copies of the model")
    add("--gpus", type=float, help="GPUs of each actor")
    add("--address", default="local", help="Ray cluster: HOST:PORT, auto, or local (a new one)")
    given = parser.parse_args()
    source, output = given.input.resolve(), given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    parts = missing_parts(source, output, given.lines_per_part)
    if not parts:
        parser.exit(message="all lines have their answers\n")
    import ray.data  # here, since --help does without it

    ray.init(address=given.address)
    counts = ray.data.from_items(parts, override_num_blocks=len(parts)).map(
        Answerer,
        fn_constructor_args=(str(source), given.model, given.options, given.sampling),
        compute=ray.data.ActorPoolStrategy(size=given.actors, max_tasks_in_flight_per_actor=2),
        num_gpus=given.gpus,
        max_task_retries=3,  # so that no prompt can kill actors for ever
    )
    rows = counts.take_all()
    num_errors = sum(row["errors"] for row in rows)
    print(f"{sum(row['lines'] for row in rows)} lines processed, {num_errors} with an error")


if __name__ == "__main__":
    main()
