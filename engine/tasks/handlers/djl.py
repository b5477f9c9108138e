"""Handlers with DJL Serving's interface: `handle(inputs)`, sync or async."""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from core.foreign_code import contained
from engine.tasks.handlers.answer import call_handler, log_failure, to_answer, to_answers
from engine.tasks.handlers.djl_python import Input
from engine.tasks.handlers.stream import Stream, as_stream
from engine.tasks.performer import FATAL, Answer, Description, Job, Outcome

logger = logging.getLogger(__name__)


class DjlHandler:
    """Runs the user's `handle`; construction calls it once with an empty Input, as LMI does.

    Construction raises whatever that first call raises.

    A coroutine function is called once per request, concurrently for a batch. A plain function is
    called with the whole batch, as in LMI. If that call raises, or does not answer every request,
    each request gets its own call. So a bad request fails alone, and a handler need not support
    batches.

    Both kinds may be generators, return one, or return an Output with `add_stream_content`: the
    parts are then sent as they are produced. A generator function is called once per request.
    """

    def __init__(self, handle: Callable[[Input], Any], properties: Mapping[str, str]) -> None:
        self._handle = handle
        self._properties = properties
        is_async = inspect.iscoroutinefunction(handle) or inspect.isasyncgenfunction(handle)
        self._is_async = is_async
        self._supports_batches = not inspect.isgeneratorfunction(handle)
        # One event loop for all calls, since objects such as an HTTP session belong to the loop
        # that they were created in.
        self._loop = asyncio.Runner()
        weakref.finalize(self, self._loop.close)
        self._initialize(self._with_properties(Input()))

    @property
    def description(self) -> Description:
        return Description(architecture="handle(inputs)")

    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        inputs = [self._input(job) for job in jobs]
        if self._is_async:
            return self._loop.run(self._gather(inputs, jobs))
        if len(inputs) > 1 and self._supports_batches:
            answers = self._call_batch(inputs)
            if answers is not None:
                return answers
            between_runs()
        outcomes: list[Outcome] = []
        for request, job in zip(inputs, jobs, strict=True):
            outcomes.append(
                call_handler(lambda request=request, job=job: self._answer(request, job))
            )
            between_runs()
        return outcomes

    def _input(self, job: Job) -> Input:
        inputs = self._with_properties(Input())
        inputs.properties |= job.headers
        inputs.content.add("data", job.body)
        return inputs

    def _with_properties(self, inputs: Input) -> Input:
        inputs.properties = {**self._properties, **inputs.properties}
        return inputs

    def _call_batch(self, inputs: list[Input]) -> list[Outcome] | None:
        """Call `handle` with the whole batch; None if each request needs a call of its own."""
        try:
            with contained:
                answers = to_answers(self._call(self._with_properties(Input(inputs))), len(inputs))
        except FATAL:
            raise
        except Exception as error:
            logger.warning(
                "a batch of %d failed; retrying each request alone: %s", len(inputs), error
            )
            return None
        if answers is None:
            self._supports_batches = False
            logger.warning(
                "handle did not answer every request of get_batches(); from now on it is called "
                "once per request"
            )
        return answers

    async def _gather(self, inputs: list[Input], jobs: Sequence[Job]) -> list[Outcome]:
        async def answer_one(request: Input, job: Job) -> Outcome:
            try:
                with contained:
                    result = self._handle(request)
                    result = await result if inspect.isawaitable(result) else result
                    stream = as_stream(result)
                    return to_answer(result) if stream is None else await stream.send_async(job)
            except FATAL:
                raise
            except Exception as error:
                return log_failure(error)

        return await asyncio.gather(*map(answer_one, inputs, jobs))

    def _initialize(self, empty: Input) -> None:
        stream = as_stream(self._call(empty))
        # The body of a generator runs only when it is iterated.
        if stream is not None:
            self._send(stream, Job(b"", send=lambda part: True))

    def _answer(self, inputs: Input, job: Job) -> Answer:
        result = self._call(inputs)
        stream = as_stream(result)
        return to_answer(result) if stream is None else self._send(stream, job)

    def _send(self, stream: Stream, job: Job) -> Answer:
        is_async = isinstance(stream.parts, AsyncIterator)
        return self._loop.run(stream.send_async(job)) if is_async else stream.send(job)

    def _call(self, inputs: Input) -> Any:
        result = self._handle(inputs)
        return self._loop.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(result: Any) -> Any:
    return await result
