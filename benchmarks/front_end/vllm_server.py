"""vLLM's own server, whose engine computes nothing, and what its front end takes of the CPU.

Its front end is the process of its API server, which reads requests, tokenizes, decodes the
engine's messages, detokenizes and writes. vLLM's scheduler, here with a fake executor, runs in
another process, which does not count. Both are as vLLM starts them, without a log line for each
request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from benchmarks.cpu.http_server import running_server
from benchmarks.front_end.client import LIMIT_S
from benchmarks.front_end.engine import FACTS, text_tokens
from benchmarks.front_end.server import Workers

MODULE = "vllm.entrypoints.openai.api_server"
EXECUTOR = "benchmarks.front_end.vllm_executor.FakeExecutor"
APIS = ("completions", "chat")
"""Those that vLLM has too."""
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(round(LIMIT_S)),
}
STEP_TOKENS = 2**18
"""More than all prompts together have."""


@contextmanager
def vllm_server(python: Path, model: Path, connections: int, log: Path) -> Iterator[Workers]:
    """Run the server. Raises MeasurementError if it does not start.

    python: interpreter of an environment with vLLM. connections: requests at a time.
    """
    tokens = msgspec.json.encode({"token_ids": text_tokens(model)}).decode()
    limits = {
        "max-model-len": FACTS.max_model_len,
        "max-num-seqs": connections,
        "max-num-batched-tokens": STEP_TOKENS,
    }
    command = [str(python), "-m", MODULE, "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--model", str(model), "--distributed-executor-backend", EXECUTOR]
    command += ["--additional-config", tokens.replace("{", "{{").replace("}", "}}")]
    command += ["--disable-uvicorn-access-log"]
    for name, limit in limits.items():
        command += [f"--{name}", str(limit)]
    before = psutil.Process().children()
    with running_server(command, SETTINGS, "/health", log) as url:
        port = urlsplit(url).port
        assert port is not None, url
        yield Workers(
            port, [each for each in psutil.Process().children() if each not in before], None
        )
