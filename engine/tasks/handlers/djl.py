"""A handler in DJL Serving's form: `handle(inputs)`, sync or async."""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import torch

from djl_python import Input
from engine.tasks.handlers.answer import answer_of, answers_of, attempt, failed
from engine.tasks.handlers.stream import Stream, stream_of
from engine.tasks.performer import Answer, Description, Job, Outcome

logger = logging.getLogger(__name__)


class DjlHandler:
    """Called once with an empty Input, to get ready; raises what that raises.

    A coroutine function is called for each request of a batch, all at once. Another is called with
    the whole batch, as in LMI. Where it raises then, or does not answer each request, every request
    gets a call of its own: so one fails alone, and a handler need not know of batches.

    Either kind may be a generator, or return one, or an Output with `add_stream_content`: then its
    parts are sent as they come. One that is called for a request is called for each by itself.
    """

    def __init__(self, handle: Callable[[Input], Any], properties: Mapping[str, str]) -> None:
        self._handle = handle
        self._properties = properties
        is_async = inspect.iscoroutinefunction(handle) or inspect.isasyncgenfunction(handle)
        self._is_async = is_async
        self._knows_batches = not inspect.isgeneratorfunction(handle)
        # One for all calls, since what a handler keeps open, such as a session, belongs to a loop.
        self._loop = asyncio.Runner()
        weakref.finalize(self, self._loop.close)
        self._get_ready(self._with_properties(Input()))

    @property
    def description(self) -> Description:
        return Description(architecture="handle(inputs)")

    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        inputs = [self._input(job) for job in jobs]
        if self._is_async:
            return self._loop.run(self._gather(inputs, jobs))
        if len(inputs) > 1 and self._knows_batches:
            answers = self._batch(inputs)
            if answers is not None:
                return answers
            between_runs()
        outcomes: list[Outcome] = []
        for each, job in zip(inputs, jobs, strict=True):
            outcomes.append(attempt(lambda each=each, job=job: self._answer(each, job)))
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

    def _batch(self, inputs: list[Input]) -> list[Outcome] | None:
        """None where the requests must be tried alone."""
        try:
            answers = answers_of(self._call(self._with_properties(Input(inputs))), len(inputs))
        except torch.AcceleratorError:
            raise
        except (Exception, SystemExit) as error:
            logger.warning("a batch of %d failed, each is tried alone: %s", len(inputs), error)
            return None
        if answers is None:
            self._knows_batches = False
            logger.warning(
                "handle does not answer each of get_batches(); it gets single requests from now on"
            )
        return answers

    async def _gather(self, inputs: list[Input], jobs: Sequence[Job]) -> list[Outcome]:
        async def one(each: Input, job: Job) -> Outcome:
            try:
                result = self._handle(each)
                result = await result if inspect.isawaitable(result) else result
                stream = stream_of(result)
                return answer_of(result) if stream is None else await stream.send_async(job)
            except torch.AcceleratorError:
                raise
            except (Exception, SystemExit) as error:
                return failed(error)

        return await asyncio.gather(*map(one, inputs, jobs))

    def _get_ready(self, empty: Input) -> None:
        """A generator runs only when its parts are taken."""
        stream = stream_of(self._call(empty))
        if stream is not None:
            self._send(stream, Job(b"", send=lambda part: True))

    def _answer(self, inputs: Input, job: Job) -> Answer:
        result = self._call(inputs)
        stream = stream_of(result)
        return answer_of(result) if stream is None else self._send(stream, job)

    def _send(self, stream: Stream, job: Job) -> Answer:
        is_async = isinstance(stream.parts, AsyncIterator)
        return self._loop.run(stream.send_async(job)) if is_async else stream.send(job)

    def _call(self, inputs: Input) -> Any:
        result = self._handle(inputs)
        return self._loop.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result
