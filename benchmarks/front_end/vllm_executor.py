"""A fake executor for vLLM: its engine schedules as it serves, but nothing computes.

vLLM's engine imports it with `--distributed-executor-backend`, so it runs in vLLM's environment and
imports nothing of ours. Pace and tokens are those of `benchmarks.front_end.engine`: a request's
`seed` is the number of microseconds between steps, and `--additional-config` has the token ids.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_cache_interface import FullAttentionSpec  # pyright: ignore[reportMissingImports]
from vllm.v1.outputs import ModelRunnerOutput  # pyright: ignore[reportMissingImports]


class FakeExecutor(Executor):
    """Answers with the same tokens over and over, each request from their beginning."""

    def _init_executor(self) -> None:
        self._token_ids = self.vllm_config.additional_config["token_ids"]
        self._step_s = self._due = 0.0
        layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
        self._facts: dict[str, Any] = {
            "get_kv_cache_spec": {"layer": layer},
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "determine_available_memory": 2**28,  # 2 M tokens
            "get_supported_tasks": ("generate",),
            "supports_draft_weight_updates": False,
        }

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None,
        non_block: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Return what the only worker would answer. Calls that set it up have no answer."""
        return [self._facts[method]] if method in self._facts else []

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Wait for the step's time. Return a token of each request, whose prompt is never split
        because the server's budget of tokens is larger than all prompts."""
        new, known = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        places = dict(zip(known.req_ids, known.num_output_tokens, strict=True))
        if new:
            self._step_s = (new[-1].sampling_params.seed or 0) / 1e6
        if not places:
            self._due = time.monotonic()
        places |= {request.req_id: 0 for request in new}
        if places:
            self._due += self._step_s
            time.sleep(max(0.0, self._due - time.monotonic()))
        output = ModelRunnerOutput(
            req_ids=[*places],
            req_id_to_index={id: index for index, id in enumerate(places)},
            sampled_token_ids=[
                [self._token_ids[place % len(self._token_ids)]] for place in places.values()
            ],
        )
        if not non_block:
            return output
        done: Future[Any] = Future()
        done.set_result(output)
        return done

    def check_health(self) -> None:
        """It never fails."""
