"""Running containers for end-to-end tests: real processes on a free port, and HTTP helpers.

The processes run from the checkout. If LONGSHORE_IMAGE names a buildah container, as in
packaging/image/check, they run inside it, as on SageMaker: with the model read-only in
/opt/ml/model, and with only the argument `serve`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.container.processes import HANG_S, descendants, free_port, is_gone, wait_until

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
START_S = 100
IMAGE = os.environ.get("LONGSHORE_IMAGE")
MODEL_NAME = "model" if IMAGE else "demo"
"""The model name that clients see: the name of its directory."""
_MODELS = Path("/opt/ml/models")
_COMMAND = (sys.executable, "-m", "container", "serve")
_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "OPTION_HTTP_WORKERS": "1"}
"""One front-end worker, unless a test asks for more. With several, one worker may not yet know
something that another one has already shown to a client."""
LONG_ANSWER = 8_000
"""How many tokens tests request from the model of `long_winded`, to keep it busy for seconds."""
BUILDAH = shlex.split(os.environ.get("BUILDAH", "buildah"))


def long_winded(folder: Path) -> Path:
    """Copy the demo model and let its answers have LONG_ANSWER tokens. Return the copy.

    Use it for requests that must still run when a test looks at them. The demo model itself stops
    at 1,024 tokens, which a quick machine generates within a heartbeat. Both models answer alike.
    """
    copy = shutil.copytree(DEMO, folder / DEMO.name)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = 2**13
    (copy / "config.json").write_text(json.dumps(config))
    return copy


class Container:
    """A `python -m container serve` process that answers /ping."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def engine(self) -> int:
        """The process id of the engine."""
        (pid,) = (pid for pid in descendants(self.process.pid) if is_engine(pid))
        return pid

    def metric(self, *names: str) -> float:
        """Return the sum of all samples of these metrics."""
        return sum(self.metrics(*names))

    def metrics(self, *names: str) -> list[float]:
        """Return the sum of the samples of each of these metrics, all read at once."""
        status, data = self.request("GET", "/metrics")
        assert status == 200
        text = data.decode()
        assert all(f"# TYPE {name} " in text for name in names), text
        samples = re.findall(r"^([\w:]+)(?:{.*})? (\S+)$", text, re.MULTILINE)
        return [sum(float(value) for sample, value in samples if sample == name) for name in names]

    def wait_for_log(self, text: str) -> None:
        """Wait for this text in the log. /ping can answer before the log is complete."""
        wait_until(lambda: text in self.log)

    def request(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        payload = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        status, data = response.status, response.read()
        connection.close()
        return status, data

    def invoke(self, inputs: str, *, status: int = 200, **parameters: object) -> dict:
        got, data = self.request(
            "POST", "/invocations", {"inputs": inputs, "parameters": parameters}
        )
        assert got == status, data
        return json.loads(data)

    @contextmanager
    def stream(
        self, inputs: str, *, path: str = "/invocations", **parameters: object
    ) -> Iterator[Iterator[dict]]:
        """Yield the lines of a streamed response as they come; leaving the block disconnects."""
        body = {"inputs": inputs, "parameters": parameters, "stream": True}
        with self.post_lines(body, path=path) as lines:
            yield lines

    @contextmanager
    def post_lines(self, body: object, *, path: str = "/invocations") -> Iterator[Iterator[dict]]:
        """Post any body. Yield the lines as they come; leaving the block disconnects."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        try:
            yield (json.loads(line) for line in response)
        finally:
            response.close()
            connection.close()

    @contextmanager
    def events(self, path: str = "/ui/events") -> Iterator[Iterator[tuple[str, dict]]]:
        """Yield the name and data of each event of the live page; leaving the block disconnects."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        try:
            yield _read_events(response)
        finally:
            response.close()
            connection.close()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Stop the container and return its exit code. Fail if a process is left."""
        children = descendants(self.process.pid)
        assert len(children) >= 3, "the engine, gunicorn and a worker run"
        os.kill(self._supervisor(children), signum)
        code = self.process.wait(HANG_S)
        wait_until(lambda: all(map(is_gone, children)))
        return code

    def _supervisor(self, children: list[int]) -> int:
        """Return the supervisor's process id.

        With an image, it is the first Python process under buildah (process 1 in a real container).
        """
        if not IMAGE:
            return self.process.pid
        programs = ((pid, Path(f"/proc/{pid}/exe").readlink().name) for pid in children)
        return next(pid for pid, program in programs if program.startswith("python"))


def is_engine(pid: int) -> bool:
    """Return whether a process runs the engine."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return arguments[1:3] == [b"-m", b"engine"]


def _read_events(lines: Iterable[bytes]) -> Iterator[tuple[str, dict]]:
    name = ""
    for line in lines:
        if line.startswith(b"event: "):
            name = line.removeprefix(b"event: ").decode().strip()
        elif line.startswith(b"data: "):
            yield name, json.loads(line.removeprefix(b"data: "))


@contextmanager
def serve(
    tmp_path: Path,
    properties: str = "",
    *,
    model: Path = DEMO,
    flags: Sequence[str] = (),
    **environment: str,
) -> Iterator[Container]:
    """Start a container with this serving.properties; kill it if the test does not stop it."""
    port = free_port()
    variables = _VARIABLES | environment
    if IMAGE:
        mounted = shutil.copytree(model, tmp_path / "mounted", dirs_exist_ok=True)
        (mounted / "serving.properties").write_text(properties)
        command = _image_command(mounted, Path("/opt/ml/model"), port, variables)
    else:
        path = tmp_path / "serving.properties"
        path.write_text(properties)
        files = ["--properties", str(path), "--model-dir", str(model)]
        command = [*_COMMAND, "--port", str(port), *files]
    command += flags
    with _running(tmp_path, command, port, variables) as container:
        yield container


@contextmanager
def serve_models(tmp_path: Path, models: Path, **environment: str) -> Iterator[Container]:
    """Start a multi-model endpoint; the models can be loaded from `model_url`."""
    port = free_port()
    variables = _VARIABLES | {"SAGEMAKER_MULTI_MODEL": "true"} | environment
    if IMAGE:
        command = _image_command(models, _MODELS, port, variables)
    else:
        command = [*_COMMAND, "--port", str(port)]
        variables["OPTION_SOURCE_ROOTS"] = str(models)
    with _running(tmp_path, command, port, variables) as container:
        yield container


def model_url(models: Path, name: str) -> str:
    """Return the path of a model in the container."""
    return str((_MODELS if IMAGE else models) / name / "model")


@contextmanager
def _running(
    tmp_path: Path, command: list[str], port: int, variables: dict[str, str]
) -> Iterator[Container]:
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
    container = Container(process, port, log)
    try:
        _wait_until_healthy(container)
        yield container
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its children die with it
            process.wait()


def _image_command(mounted: Path, inside: Path, port: int, variables: dict[str, str]) -> list[str]:
    variables = {**variables, "SAGEMAKER_BIND_TO_PORT": str(port)}
    variables.pop("TMPDIR", None)  # the image sets its own
    settings = [f"--env={name}={value}" for name, value in variables.items()]
    mount = f"--volume={mounted}:{inside}:ro"
    run = [*BUILDAH, "run", "--isolation=chroot", mount, *settings, IMAGE, "--"]
    return [*run, *image_configuration()["Entrypoint"], "serve"]


def image_configuration() -> dict:
    """Return the image's OCI configuration."""
    found = subprocess.run([*BUILDAH, "inspect", IMAGE], capture_output=True, check=True)
    return json.loads(found.stdout)["OCIv1"]["config"]


def _wait_until_healthy(container: Container) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert container.process.poll() is None, container.log
        try:
            if container.request("GET", "/ping")[0] == 200:
                return
        except (ConnectionError, http.client.HTTPException):
            pass
        time.sleep(0.05)
    raise AssertionError(container.log)
