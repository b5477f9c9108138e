"""Loads and unloads models, each in a container of its own."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import gevent
from gevent.event import Event
from gevent.lock import Semaphore

from container.apis.model_routes import ModelStatus
from container.launch.stop_times import ENGINE_STOP_S, FRONT_END_STOP_S
from container.multi_model.model import STATUS_WORDS, Model, RefusedError
from container.multi_model.model_container import COMMAND, ModelContainer
from container.multi_model.needs import Needs, estimate_needs
from container.multi_model.overrides import Overrides
from core.errors import ConfigurationError, InsufficientMemoryError
from core.process.gpus import visible_gpus
from core.process.host_memory import available_host_memory
from core.process.processes import reap_orphans

logger = logging.getLogger(__name__)

STOP_S = FRONT_END_STOP_S + ENGINE_STOP_S
_NOT_INHERITED = ("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_BIND_TO_PORT")
_ROUNDING_ERROR = 1e-6


class ModelRegistry:
    """The loaded models. Call all methods from greenlets of one thread."""

    def __init__(
        self,
        run_dir: Path,
        variables: Mapping[str, str],
        command: Sequence[str] = COMMAND,
        *,
        gpus: Sequence[str] | None = None,
    ) -> None:
        """`command` starts a model's container, with the arguments of `serve_model.py` appended."""
        self._run_dir = run_dir
        self._variables = {
            name: text for name, text in variables.items() if name not in _NOT_INHERITED
        }
        self._command = command
        self._gpus = visible_gpus(variables) if gpus is None else tuple(gpus)
        self._models: dict[str, Model] = {}
        self._numbers = itertools.count()
        # Models load one at a time, because an engine measures the free memory while it loads.
        self._load_lock = Semaphore()
        self._is_stopping = False
        self.initial_models_loaded = False
        """Whether the models to load at start have been loaded."""

    def load(self, name: str, url: str, overrides: Overrides | None = None) -> None:
        """Load a model and return when it answers requests.

        Loading continues even if the client that requested it disconnects. Raises RefusedError: 400
        if the model cannot be loaded, 409 if the name is taken, 507 if there is not enough memory.
        If loading fails, all processes of the model are gone before the error is raised.
        """
        while (known := self._models.get(name)) is not None:
            if known.status != "FAILED":
                raise RefusedError(
                    409, f"model '{name}' is {STATUS_WORDS[known.status]}", "model_name"
                )
            self.unload(name)
        path = Path(url.removeprefix("file://"))
        if not path.is_absolute():
            raise RefusedError(400, f"url: {url!r} is not an absolute path in the container", "url")
        if not os.path.exists(path):  # Path.exists raises for names that are too long
            raise RefusedError(
                400, f"url: {url} does not exist; expected a directory or archive", "url"
            )
        model = self._models[name] = Model(name, url)
        try:
            with self._load_lock:
                self._check_still_wanted(model)
                self._start(model, path, overrides or Overrides())
        except BaseException:
            if model.container is not None:
                model.container.kill()
            del self._models[name]
            model.removed.set()
            raise

    def unload(self, name: str) -> None:
        """Unload a model and return when all its processes have ended.

        Running requests may finish first. Raises RefusedError (404) if there is no such model.
        """
        model = self._find(name)
        previous, model.stage = model.stage, "UNLOADING"
        if previous == "READY" and model.container is not None:
            model.container.stop(STOP_S)
            del self._models[name]
            model.removed.set()
            logger.info("model=%s event=unloaded", name)
        elif previous == "LOADING" and model.container is not None:
            model.container.kill()
        model.removed.wait()

    def ready(self, name: str) -> ModelContainer:
        """Return the container that answers requests for a model.

        Raises RefusedError: 404 if there is no such model or it is being unloaded, 503 while it
        loads or if it has failed.
        """
        model = self._find(name)
        if model.container is None or model.status in ("LOADING", "UNLOADING"):
            code = 404 if model.status == "UNLOADING" else 503
            raise RefusedError(code, f"model '{name}' is {STATUS_WORDS[model.status]}")
        if model.status == "FAILED":
            reason = model.container.exit_reason()
            raise RefusedError(503, f"model '{name}' has ended ({reason}); load it again")
        return model.container

    def only_model_name(self) -> str:
        """Return the name of the only model. Raises RefusedError if there are none or several."""
        if len(self._models) == 1:
            return next(iter(self._models))
        raise RefusedError(
            400,
            "specify a model in the header X-Amzn-SageMaker-Target-Model or the path "
            f"/models/NAME/invoke; loaded: {self._names()}",
        )

    def describe(self, name: str) -> ModelStatus:
        """Return a model's status. Raises RefusedError (404) if there is no such model."""
        return self._find(name).as_status

    def statuses(self) -> list[ModelStatus]:
        """Return the status of all models, sorted by name."""
        return [self._models[name].as_status for name in sorted(self._models)]

    def sockets(self) -> list[Path]:
        """Return the sockets of the models that answer requests."""
        return [
            model.container.socket
            for model in self._models.values()
            if model.container is not None and model.status == "READY"
        ]

    def begin_stop(self) -> None:
        """Ask all containers to stop, and load no more models. May be repeated."""
        self._is_stopping = True
        for container in self._containers():
            container.terminate()

    def stop(self, stop_now: Event) -> None:
        """Stop all containers. Running requests may finish until `stop_now` is set."""
        self.begin_stop()
        containers = self._containers()
        deadline = time.monotonic() + STOP_S
        while (
            any(container.exit_code is None for container in containers) and not stop_now.is_set()
        ):
            if time.monotonic() > deadline:
                break
            stop_now.wait(0.05)
        kills: list[gevent.Greenlet[[], None]] = [
            gevent.spawn(container.kill) for container in containers
        ]
        gevent.joinall(kills)

    def reap_orphans(self) -> None:
        """Reap what process 1 inherits, and the containers that have ended."""
        running = [container for container in self._containers() if container.exit_code is None]
        reap_orphans([container.pid for container in running])

    def _containers(self) -> list[ModelContainer]:
        return [model.container for model in self._models.values() if model.container is not None]

    def _start(self, model: Model, path: Path, overrides: Overrides) -> None:
        others_share = self._reserve_memory(model, self._needs(path, overrides))
        self._check_still_wanted(model)
        socket = self._run_dir / f"{next(self._numbers)}.sock"
        share = f"{others_share:.6f}"
        arguments = [str(path), model.name, str(socket), share, overrides.as_json()]
        variables = self._variables
        if model.gpu is not None:
            variables = {**variables, "CUDA_VISIBLE_DEVICES": model.gpu}
        began = time.monotonic()
        command = [*self._command, str(os.getpid()), *arguments]
        container = model.container = ModelContainer(model.name, socket, command, variables)
        is_ready = container.wait_until_ready()
        self._check_still_wanted(model)
        if not is_ready:
            raise _failure(model.name, container)
        model.stage = "READY"
        logger.info("model=%s event=loaded seconds=%.1f", model.name, time.monotonic() - began)

    def _check_still_wanted(self, model: Model) -> None:
        if self._is_stopping:
            raise RefusedError(503, "the server is stopping")
        if model.stage != "LOADING":
            raise RefusedError(409, f"model '{model.name}' was unloaded while it was loading")

    def _needs(self, path: Path, overrides: Overrides) -> Needs:
        try:
            pool = gevent.get_hub().threadpool  # unpacking an archive may take long
            return pool.apply(estimate_needs, (path, self._variables, overrides))
        except (ConfigurationError, OSError) as error:
            raise RefusedError(400, f"url: {error}", "url") from None

    def _reserve_memory(self, model: Model, needs: Needs) -> float:
        """Choose the model's GPU and check the free memory; return the GPU share of other models.

        Raises RefusedError (507) if there is not enough memory.
        """
        if not (needs.may_use_gpu and self._gpus):
            available = available_host_memory()
            if needs.min_bytes > available:
                raise RefusedError(
                    507,
                    f"model '{model.name}' needs at least {needs.min_bytes / 2**20:,.0f} MiB, "
                    f"but {available / 2**20:,.0f} MiB are free; unload another model",
                )
            return 0.0
        model.gpu = min(self._gpus, key=self._used_share)
        used_share = self._used_share(model.gpu)
        if used_share + needs.gpu_share > 1 + _ROUNDING_ERROR:
            raise RefusedError(
                507,
                f"model '{model.name}' needs {needs.gpu_share:g} of a GPU's memory "
                f"(option.gpu_memory_utilization), but other models already take {used_share:g}; "
                "unload one of them, or set shares whose sum is at most 1",
            )
        model.gpu_share = needs.gpu_share
        return used_share

    def _used_share(self, gpu: str) -> float:
        return sum(
            model.gpu_share
            for model in self._models.values()
            if model.gpu == gpu and model.status != "FAILED"
        )

    def _find(self, name: str) -> Model:
        if name not in self._models:
            raise RefusedError(404, f"no model '{name}'; loaded: {self._names()}")
        return self._models[name]

    def _names(self) -> str:
        return ", ".join(sorted(self._models)) or "none"


def _failure(name: str, container: ModelContainer) -> RefusedError:
    """Return why a model was not loaded: 507 if it ran out of memory, else 400."""
    code = container.exit_code
    # Assume that a signal during loading came from the kernel's out-of-memory killer.
    out_of_memory = code is not None and (code < 0 or code == InsufficientMemoryError.exit_code)
    hint = "; unload another model" if out_of_memory else ""
    reason = f"model '{name}' cannot be loaded: {container.exit_reason()}{hint}"
    return RefusedError(507 if out_of_memory else 400, reason, None if out_of_memory else "url")
