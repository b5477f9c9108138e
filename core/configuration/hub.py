"""Downloads models from the Hugging Face hub."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from core.configuration.options import ModelOptions
from core.errors import ConfigurationError

PICKLE_CURE = (
    "weights in *.bin files are pickle files, which can run code when they are read: convert them "
    "with AutoModel.from_pretrained(...).save_pretrained(...), or set "
    "option.allow_pickle_weights=true if you trust them"
)
_NOT_NEEDED = ("*.gguf", "*.onnx", "onnx/*", "*.msgpack", "*.h5", "*.ot", "*.pth", "original/*")


def require_network() -> None:
    """Raise OSError if the hub's host name has no address.

    With an HTTPS proxy, this does not look the name up, because the proxy does.
    """
    import huggingface_hub.constants

    host = urlsplit(huggingface_hub.constants.ENDPOINT).hostname
    if "https" not in getproxies():
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            raise OSError(f"{host} has no address; is there a network?") from error


def from_hub(
    model_id: str, revision: str | None, options: ModelOptions, *, given_as: str, local: Path
) -> Path:
    """Return the local copy of a model, after downloading its missing files.

    If the model has no *.safetensors but a GGUF file, returns that. An id such as org/name:Q4_K_M
    chooses one of several.

    given_as: the setting that holds the id, for messages. local: the directory that `model_id`
    names if it is read as a path, for messages.

    Raises ConfigurationError if the hub has no such model or cannot be reached.
    """
    if "://" in model_id:
        raise ConfigurationError(
            f"{given_as}={model_id}: expected a path, an s3:// address or a Hugging Face id"
        )
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise ConfigurationError(f"{given_as}={model_id}: there is no directory {local}")
    try:
        repository, _, kind = model_id.partition(":")
        if kind:
            return _gguf(repository, revision, kind)
        return _snapshot(model_id, revision, options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"{given_as}={model_id}: not a directory ({local}), and not available from the "
            f"Hugging Face hub ({reason.rstrip('.')}): correct the id, set HF_TOKEN for a gated "
            "model, or use a local directory if there is no network"
        ) from error


def _snapshot(model_id: str, revision: str | None, options: ModelOptions) -> Path:
    import huggingface_hub  # takes half a second to import

    def fetch(unwanted: list[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
                model_id, revision=revision, ignore_patterns=unwanted
            )
        )

    # Many repositories hold the weights twice. Download *.bin only if there are no *.safetensors
    # and unpickling is allowed.
    is_dummy = options.load_format == "dummy"
    path = fetch([*_NOT_NEEDED, "*.bin", *(["*.safetensors"] if is_dummy else [])])
    if not is_dummy and not any(path.glob("*.safetensors")):
        if _has_gguf(model_id, revision):
            return _gguf(model_id, revision, "")
        if not options.allow_pickle_weights:
            raise ConfigurationError(f"{model_id} has no *.safetensors; {PICKLE_CURE}")
        path = fetch(list(_NOT_NEEDED))
    return path


def _has_gguf(model_id: str, revision: str | None) -> bool:
    return any(name.endswith(".gguf") for name in _published(model_id, revision))


def _gguf(model_id: str, revision: str | None, kind: str) -> Path:
    """Download a GGUF file, and return its path, or that of its first part."""
    import huggingface_hub

    from core.files.gguf import choose_published

    pattern = choose_published(_published(model_id, revision), kind, model_id)
    path = Path(
        huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
            model_id, revision=revision, allow_patterns=[pattern]
        )
    )
    return min(path.glob(pattern))


def _published(model_id: str, revision: str | None) -> Sequence[str]:
    """Return the names of a model's files; without a network, those that are here already."""
    import huggingface_hub

    try:
        require_network()
        return huggingface_hub.list_repo_files(model_id, revision=revision)
    except OSError:
        path = Path(
            huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
                model_id, revision=revision, local_files_only=True
            )
        )
        return [str(file.relative_to(path)) for file in path.rglob("*.gguf")]
