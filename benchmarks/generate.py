"""transformers' own ways to serve the same load: what our strategies are compared with.

Both take the model with its own attention (SDPA, unless a flash-attention package is installed)
and greedy decoding that ignores the end of the sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.journal import Flight, Journal
from benchmarks.workload import Request

Serve = Callable[[Iterable[Request], float], Journal]
"""Serves requests for at most so many seconds."""
POLL_SECONDS = 0.1


@contextmanager
def padded_batches(model: Any, clients: int) -> Iterator[Serve]:
    """`generate`, a batch for all clients: padded to its longest prompt, run to its longest answer.

    Dynamic batching as a handler in Python does it. A client has its answer when the batch ends.
    """
    model.generation_config = _greedy()

    def serve(requests: Iterable[Request], seconds: float) -> Journal:
        stream, begin = iter(requests), time.perf_counter()
        journal, longest = Journal(begin, begin), 0.0
        while batch := list(islice(stream, clients)):
            before = journal.end
            _run_batch(model, batch, journal)
            longest = max(longest, journal.end - before)
            if journal.end + longest > begin + seconds:
                break
        return journal

    yield serve


def _run_batch(model: Any, batch: list[Request], journal: Journal) -> None:
    begin, config = journal.end, _greedy()
    longest = max(len(request.prompt) for request in batch)
    config.max_new_tokens = max(request.max_tokens for request in batch)
    padding = [longest - len(request.prompt) for request in batch]
    rows = [[0] * pad + request.prompt for pad, request in zip(padding, batch, strict=True)]
    masks = [[0] * pad + [1] * (longest - pad) for pad in padding]
    ids = model.generate(
        input_ids=torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(masks, device=model.device),
        generation_config=config,
    )
    answers = ids[:, longest:].tolist()
    journal.end = time.perf_counter()
    for request, answer in zip(batch, answers, strict=True):
        flight = Flight(request, begin)
        flight.take(journal.end, len(answer[: request.max_tokens]))
        journal.flights.append(flight)
    for step in range(config.max_new_tokens):
        filled = sum(len(each.prompt) + min(step, each.max_tokens) for each in batch)
        journal.held.append(len(batch) * (longest + step))
        journal.filled.append(filled)


@contextmanager
def generate_batch(model: Any, clients: int) -> Iterator[Serve]:
    """`generate_batch`, transformers' continuous batching, over paged memory of the size it likes.

    Through the manager behind it, so that clients come and go, and streamed, so that tokens have
    a time. Nothing is set whose name differs between transformers' versions.
    """
    settings = ContinuousBatchingConfig(
        max_requests_per_batch=clients,
        allow_block_sharing=False,  # the prompts have nothing in common
    )
    if model.device.type == "cpu":
        # By itself it would take most of the machine's memory.
        settings.num_blocks, settings.max_batch_tokens = 16, 64
    config = _greedy()
    config.eos_token_id = -1
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, timeout=10
    ) as manager:
        yield _ManagerLoop(manager, clients).run


class _ManagerLoop:
    """What closed_loop.ClosedLoop is for an engine, for a manager with a thread of its own."""

    def __init__(self, manager: Any, clients: int) -> None:
        self._manager = manager
        self._clients = clients
        self._flights: dict[str, Flight] = {}

    def run(self, requests: Iterable[Request], seconds: float) -> Journal:
        stream, begin = iter(requests), time.perf_counter()
        journal = Journal(begin, begin)
        for request in islice(stream, self._clients):
            self._submit(request, journal)
        while self._flights and time.perf_counter() < begin + seconds:
            result = self._manager.get_result(timeout=POLL_SECONDS)
            if result is None:
                self._check_alive()
                continue
            journal.end = time.perf_counter()
            if self._take(result, journal.end):
                for request in islice(stream, 1):
                    self._submit(request, journal)
        for request_id in self._flights:
            self._manager.cancel_request(request_id)
        return journal

    def _submit(self, request: Request, journal: Journal) -> None:
        flight = Flight(request, time.perf_counter())
        journal.flights.append(flight)
        request_id = self._manager.add_request(
            request.prompt, max_new_tokens=request.max_tokens, streaming=True
        )
        self._flights[request_id] = flight

    def _take(self, result: Any, now: float) -> bool:
        """Whether the answer has ended with it."""
        if result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        flight = self._flights[result.request_id]
        is_complete = flight.take(now, len(result.generated_tokens) - flight.num_tokens)
        if is_complete:
            del self._flights[result.request_id]
        return is_complete

    def _check_alive(self) -> None:
        if not self._manager.is_running():
            raise RuntimeError("the manager's thread has ended")


def _greedy() -> GenerationConfig:
    return GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
