"""The helper process: performs one job after another, each within limits of time and memory.

A job that exceeds a limit, or crashes, ends the process; its parent then starts another.

`python -m container.isolation.process PARENT`, with a socket as standard input. PARENT is the id of
the process that starts this one; this process ends when the parent ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from container.isolation.jobs import Compile, Done, Job, Render, Setup
from core.process.frames import run_helper
from core.process.internal_arguments import internal_arguments
from core.process.processes import cpu_limit, limit_memory
from core.structured_outputs import StructuredOutputsParams
from core.text.chat_template import ChatTemplate
from core.text.grammar import converting_errors, grammar_error, grammar_text
from core.text.grammar_matcher import (
    STACK_BYTES,
    GrammarTokenizer,
    call_on_stack,
    compile_grammar,
    read_grammar_tokenizer,
)

CPU_SECONDS = 1.0
"""Limit on a job's CPU time. A grammar of usual size takes 10 ms, a conversation of 1 MB 20 ms."""
MEMORY_BYTES = 512 * 2**20
"""Memory that all jobs together may add to what the process has after its start. Once it has read
the tokenizer, they may add this much to what it has then."""
HELPER_STACK_BYTES = STACK_BYTES // 8
"""The engine has eight times this stack, so it can compile every grammar that compiles here."""


class Jobs:
    """Performs jobs for one model."""

    def __init__(self, setup: Setup) -> None:
        self._model_dir = Path(setup.model_dir)
        source = setup.template
        self._template = source and ChatTemplate(**msgspec.structs.asdict(source))
        self._tokenizer: GrammarTokenizer = None

    def perform(self, job: Job) -> str:
        """Return the job's text. Raises RequestError."""
        match job:
            case Compile(form, eos_token_ids):
                if self._tokenizer is None:
                    self._tokenizer = read_grammar_tokenizer(self._model_dir, eos_token_ids)
                    limit_memory(MEMORY_BYTES)
                with cpu_limit(CPU_SECONDS):
                    return call_on_stack(HELPER_STACK_BYTES, lambda: self._compile(form))
            case Render():
                assert self._template is not None, "the worker has checked that there is a template"
                with cpu_limit(CPU_SECONDS):
                    return self._template.render(
                        job.messages,
                        tools=job.tools,
                        add_generation_prompt=job.add_generation_prompt,
                        continue_final_message=job.continue_final_message,
                        variables=job.variables,
                    )

    def _compile(self, form: StructuredOutputsParams) -> str:
        """Do all that the engine does with a grammar before the first token."""
        text = grammar_text(form)
        matcher = compile_grammar(self._tokenizer, text, stack_bytes=HELPER_STACK_BYTES)
        first = matcher.deep_copy()
        with converting_errors():
            first.compute_bitmask()
            if first.is_error():
                raise grammar_error(first.get_error())
        return text


def start(setup: bytes) -> Callable[[bytes], Done]:
    """Return the function that performs jobs for the model named in the first message."""
    jobs = Jobs(msgspec.msgpack.decode(setup, type=Setup))
    limit_memory(MEMORY_BYTES)
    decode = msgspec.msgpack.Decoder[Job](Job).decode
    return lambda job: Done(jobs.perform(decode(job)))


if __name__ == "__main__":
    description = "The helper for grammars and long conversations. An HTTP worker starts it."
    [parent] = internal_arguments("container.isolation.process", description, "PARENT:int")
    sys.exit(run_helper(int(parent), start))
