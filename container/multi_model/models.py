"""The models that are loaded, and their ways in and out."""

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

from container.apis.models.status import ModelStatus
from container.launch.supervisor import ENGINE_STOP_S, FRONT_END_STOP_S
from container.multi_model.model import WORDS, Model, RefusedError
from container.multi_model.model_container import COMMAND, ModelContainer
from container.multi_model.needs import Needs, needs_of, visible_gpus
from core.errors import ConfigurationError, InsufficientMemoryError
from core.host_memory import available_host_memory

logger = logging.getLogger(__name__)

STOP_S = FRONT_END_STOP_S + ENGINE_STOP_S
_NOT_FOR_MODELS = ("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_BIND_TO_PORT")
_ROUNDING = 1e-6


class Models:
    """Loads and unloads; every method is called from greenlets of one thread."""

    def __init__(
        self,
        run_dir: Path,
        variables: Mapping[str, str],
        command: Sequence[str] = COMMAND,
        *,
        gpus: Sequence[str] | None = None,
    ) -> None:
        """`command`: starts a model's container; its arguments are those of `child.py`."""
        self._run_dir = run_dir
        self._variables = {
            name: text for name, text in variables.items() if name not in _NOT_FOR_MODELS
        }
        self._command = command
        self._gpus = visible_gpus(variables) if gpus is None else tuple(gpus)
        self._models: dict[str, Model] = {}
        self._numbers = itertools.count()
        # One after the other: an engine measures what memory is left while it loads.
        self._turn = Semaphore()
        self._is_stopping = False
        self.is_open = False
        """Whether those that are to be there at the start are."""

    def load(self, name: str, url: str) -> None:
        """Returns when the model answers requests. Raises RefusedError, and then nothing is left.

        It is loaded to the end even if who asked for it does not wait.
        400: it cannot be loaded; 409: the name is taken; 507: memory is short.
        """
        while (known := self._models.get(name)) is not None:
            if known.status != "FAILED":
                raise RefusedError(409, f"model '{name}' is {WORDS[known.status]}", "model_name")
            self.unload(name)
        path = Path(url.removeprefix("file://"))
        if not path.is_absolute():
            raise RefusedError(400, f"url: {url!r} is no absolute path of the container", "url")
        if not os.path.exists(path):  # Path's own raises for names that are too long
            raise RefusedError(400, f"url: there is no {url}; name a directory or archive", "url")
        model = self._models[name] = Model(name, url)
        try:
            with self._turn:
                self._check_wanted(model)
                self._start(model, path)
        except BaseException:
            if model.container is not None:
                model.container.kill()
            del self._models[name]
            model.gone.set()
            raise

    def unload(self, name: str) -> None:
        """Returns when all of the model is gone; what runs may end. Raises RefusedError (404)."""
        model = self._known(name)
        was, model.stage = model.stage, "UNLOADING"
        if was == "READY" and model.container is not None:
            model.container.stop(STOP_S)
            del self._models[name]
            model.gone.set()
            logger.info("model=%s event=unloaded", name)
        elif was == "LOADING" and model.container is not None:
            model.container.kill()
        model.gone.wait()

    def ready(self, name: str) -> ModelContainer:
        """What answers the requests for a model. Raises RefusedError (404; 503 while it loads)."""
        model = self._known(name)
        if model.container is None or model.status in ("LOADING", "UNLOADING"):
            code = 404 if model.status == "UNLOADING" else 503
            raise RefusedError(code, f"model '{name}' is {WORDS[model.status]}")
        if model.status == "FAILED":
            reason = model.container.why_it_ended()
            raise RefusedError(503, f"model '{name}' has ended ({reason}); load it again")
        return model.container

    def the_only_one(self) -> str:
        """The name of the only model. Raises RefusedError where there are none or several."""
        if len(self._models) == 1:
            return next(iter(self._models))
        raise RefusedError(
            400,
            "name a model in the header X-Amzn-SageMaker-Target-Model or the path "
            f"/models/NAME/invoke; loaded: {self._names()}",
        )

    def describe(self, name: str) -> ModelStatus:
        """Raises RefusedError (404)."""
        return self._known(name).described

    def listed(self) -> list[ModelStatus]:
        """All of them, by their names."""
        return [self._models[name].described for name in sorted(self._models)]

    def sockets(self) -> list[Path]:
        """Of those that answer requests."""
        return [
            each.container.socket
            for each in self._models.values()
            if each.container is not None and each.status == "READY"
        ]

    def ask_to_stop(self) -> None:
        """Asks all of them to end, and loads no more; may be repeated."""
        self._is_stopping = True
        for container in self._started():
            container.terminate()

    def stop(self, haste: Event) -> None:
        """Ends all of them; what runs may end, until the event says to make haste."""
        self.ask_to_stop()
        started = self._started()
        deadline = time.monotonic() + STOP_S
        while any(each.exit_code is None for each in started) and not haste.is_set():
            if time.monotonic() > deadline:
                break
            haste.wait(0.05)
        ending: list[gevent.Greenlet[[], None]] = [gevent.spawn(each.kill) for each in started]
        gevent.joinall(ending)

    def _started(self) -> list[ModelContainer]:
        return [each.container for each in self._models.values() if each.container is not None]

    def _start(self, model: Model, path: Path) -> None:
        others = self._make_room(model, self._needs(path))
        self._check_wanted(model)
        socket = self._run_dir / f"{next(self._numbers)}.sock"
        arguments = [str(path), model.name, str(socket), f"{others:.6f}"]
        variables = self._variables
        if model.gpu is not None:
            variables = {**variables, "CUDA_VISIBLE_DEVICES": model.gpu}
        began = time.monotonic()
        command = [*self._command, *arguments]
        container = model.container = ModelContainer(model.name, socket, command, variables)
        is_ready = container.wait_until_ready()
        self._check_wanted(model)
        if not is_ready:
            raise _failure(model.name, container)
        model.stage = "READY"
        logger.info("model=%s event=loaded seconds=%.1f", model.name, time.monotonic() - began)

    def _check_wanted(self, model: Model) -> None:
        if self._is_stopping:
            raise RefusedError(503, "the server is stopping")
        if model.stage != "LOADING":
            raise RefusedError(409, f"model '{model.name}' was unloaded while it was loading")

    def _needs(self, path: Path) -> Needs:
        try:
            pool = gevent.get_hub().threadpool  # an archive may take long to unpack
            return pool.apply(needs_of, (path, self._variables))
        except (ConfigurationError, OSError) as error:
            raise RefusedError(400, f"url: {error}", "url") from None

    def _make_room(self, model: Model, needs: Needs) -> float:
        """Chooses the model's GPU; the share of it that others have. Raises RefusedError (507)."""
        if not (needs.may_use_gpu and self._gpus):
            available = available_host_memory()
            if needs.least_bytes > available:
                raise RefusedError(
                    507,
                    f"model '{model.name}' needs {needs.least_bytes / 2**20:,.0f} MiB at least, "
                    f"and {available / 2**20:,.0f} MiB are left; unload another one",
                )
            return 0.0
        model.gpu = min(self._gpus, key=self._share_taken)
        taken = self._share_taken(model.gpu)
        if taken + needs.gpu_share > 1 + _ROUNDING:
            raise RefusedError(
                507,
                f"model '{model.name}' is to have {needs.gpu_share:g} of a GPU's memory "
                f"(option.gpu_memory_utilization), and others have {taken:g}; unload one of them, "
                "or set smaller shares, whose sum is 1 at most",
            )
        model.gpu_share = needs.gpu_share
        return taken

    def _share_taken(self, gpu: str) -> float:
        return sum(
            each.gpu_share
            for each in self._models.values()
            if each.gpu == gpu and each.status != "FAILED"
        )

    def _known(self, name: str) -> Model:
        if name not in self._models:
            raise RefusedError(404, f"no model '{name}'; loaded: {self._names()}")
        return self._models[name]

    def _names(self) -> str:
        return ", ".join(sorted(self._models)) or "none"


def _failure(name: str, container: ModelContainer) -> RefusedError:
    """Why a model was not loaded: 507 for want of memory, else 400."""
    code = container.exit_code
    # No one kills a container while it loads but the kernel that has no memory left.
    is_short = code is not None and (code < 0 or code == InsufficientMemoryError.exit_code)
    cure = "; unload another one" if is_short else ""
    reason = f"model '{name}' cannot be loaded: {container.why_it_ended()}{cure}"
    return RefusedError(507 if is_short else 400, reason, None if is_short else "url")
