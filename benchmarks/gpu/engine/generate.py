"""transformers' own batching, which our strategies are compared with on the same load.

`padded_batches` and `generate_batch` use the model's own attention (SDPA, unless a flash-attention
package is installed) and greedy decoding that ignores end-of-sequence tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.load.journal import Journal, RequestRecord
from benchmarks.load.workload import Request

Serve = Callable[[Iterable[Request], float], Journal]
"""Serves requests for at most the given number of seconds."""
POLL_SECONDS = 0.1


@contextmanager
def padded_batches(
    model: Any, clients: int, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Serve]:
    """Serve with `generate`, one batch at a time, in which each client has one request.

    Batches are padded to their longest prompt and run to their longest output, like dynamic
    batching in a Python handler. Clients get their outputs when the batch ends.
    """
    model.generation_config = _greedy()

    def serve(requests: Iterable[Request], seconds: float) -> Journal:
        stream, begin = iter(requests), clock()
        journal, longest = Journal(begin, begin), 0.0
        while batch := list(islice(stream, clients)):
            batch_begin = journal.end
            _run_batch(model, batch, journal, clock)
            longest = max(longest, journal.end - batch_begin)
            if journal.end + longest > begin + seconds:
                break
        return journal

    yield serve


def _run_batch(
    model: Any, batch: list[Request], journal: Journal, clock: Callable[[], float]
) -> None:
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
    outputs = ids[:, longest:].tolist()
    journal.end = clock()
    for request, output in zip(batch, outputs, strict=True):
        record = RequestRecord(request, begin)
        record.add_tokens(journal.end, len(output[: request.max_tokens]))
        journal.records.append(record)
    for step in range(config.max_new_tokens):
        filled = sum(len(request.prompt) + min(step, request.max_tokens) for request in batch)
        journal.held.append(len(batch) * (longest + step))
        journal.filled.append(filled)


@contextmanager
def generate_batch(model: Any, clients: int) -> Iterator[Serve]:
    """Serve with `generate_batch`, transformers' continuous batching, with its default KV cache.

    Uses its manager directly, so that requests can be added while others run. Streams the answers,
    so that each token has an arrival time. Sets no option whose name differs between transformers
    versions.
    """
    settings = ContinuousBatchingConfig(
        max_requests_per_batch=clients,
        allow_block_sharing=False,  # the prompts share no prefix
    )
    if model.device.type == "cpu":
        # The default would take most of the machine's memory.
        settings.num_blocks, settings.max_batch_tokens = 16, 64
    config = _greedy()
    config.eos_token_id = -1
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, timeout=10
    ) as manager:
        yield ManagerLoop(manager, clients).run


class ManagerLoop:
    """The counterpart of closed_loop.ClosedLoop for a manager with its own thread."""

    def __init__(
        self, manager: Any, clients: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._manager = manager
        self._clients = clients
        self._clock = clock
        self._records: dict[str, RequestRecord] = {}

    def run(self, requests: Iterable[Request], seconds: float) -> Journal:
        stream, begin = iter(requests), self._clock()
        journal = Journal(begin, begin)
        for request in islice(stream, self._clients):
            self._submit(request, journal)
        while self._records and self._clock() < begin + seconds:
            result = self._manager.get_result(timeout=POLL_SECONDS)
            if result is None:
                self._check_alive()
                continue
            journal.end = self._clock()
            if self._add_result(result, journal.end):
                for request in islice(stream, 1):
                    self._submit(request, journal)
        for request_id in self._records:
            self._manager.cancel_request(request_id)
        return journal

    def _submit(self, request: Request, journal: Journal) -> None:
        record = RequestRecord(request, self._clock())
        journal.records.append(record)
        request_id = self._manager.add_request(
            request.prompt, max_new_tokens=request.max_tokens, streaming=True
        )
        self._records[request_id] = record

    def _add_result(self, result: Any, now: float) -> bool:
        """Record a result; return whether its request has finished."""
        if result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        record = self._records[result.request_id]
        is_complete = record.add_tokens(now, len(result.generated_tokens) - record.num_tokens)
        if is_complete:
            del self._records[result.request_id]
        return is_complete

    def _check_alive(self) -> None:
        if not self._manager.is_running():
            raise RuntimeError("the manager's thread is not running")


def _greedy() -> GenerationConfig:
    return GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
