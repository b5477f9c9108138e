"""Models in llama.cpp's format: GGUF files, and the directories into which they are translated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from core.errors import ConfigurationError
from core.files.cached_directory import cached_directory

GGUF_INDEX = "gguf_tensors.json"
"""File of a translated directory: where its tensors are in the GGUF files."""
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files that replace the tokenizer of a GGUF file if they are in its directory."""
_REVISION = 3
"""Of the translation: another one is not mistaken for this one's."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_OTHERS = ("mmproj", "imatrix")
"""Files with these words in their names belong to a language model, and are none."""


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def find_gguf(path: Path) -> list[Path]:
    """Return the GGUF file at `path`, or the one in this directory, with its parts in order.

    Returns [] if there is none, or if the directory has weights in another format. Raises
    ConfigurationError if there are several, or if a part is missing.
    """
    if is_gguf(path):
        return _parts(path)
    others = ("*.safetensors", "*.bin", GGUF_INDEX)
    if not path.is_dir() or any(any(path.glob(name)) for name in others):
        return []
    models = group_parts(file.name for file in path.glob("*.gguf"))
    if len(models) > 1:
        raise ConfigurationError(
            f"{path} holds {len(models)} models ({', '.join(sorted(models))}): name one, such as "
            f"{path / min(models)}"
        )
    return [part for name in models for part in _parts(path / name)]


def group_parts(names: Iterable[str]) -> list[str]:
    """Return the language models among the names of GGUF files; of one in parts, the first."""
    kept = (name for name in names if not any(word in Path(name).name for word in _OTHERS))
    parts = ((name, _PART.fullmatch(name.removesuffix(".gguf"))) for name in kept)
    return [name for name, part in parts if part is None or int(part[2]) == 1]


def choose_published(names: Iterable[str], kind: str, model_id: str) -> str:
    """Return the GGUF file to download from a model id's files: its only one, or that of a type.

    kind: a part of its name, such as Q4_K_M; "" for any. Of a file in parts, returns a pattern of
    their names. Raises ConfigurationError if there is not exactly one.
    """
    models = group_parts(name for name in names if name.endswith(".gguf"))
    of_kind = re.compile(rf"(^|[-._/]){re.escape(kind)}[-.]", re.IGNORECASE)
    chosen = [name for name in models if not kind or of_kind.search(name)]
    if len(chosen) != 1:
        raise ConfigurationError(
            f"{model_id} has {len(chosen)} GGUF files{kind and f' of the type {kind}'}; choose a "
            f"type with option.model_id={model_id}:Q4_K_M or so: {', '.join(sorted(models))}"
        )
    return re.sub(r"-00001-of-(\d{5}\.gguf)$", r"-?????-of-\1", chosen[0])


def translated(files: Sequence[Path], write: Callable[[Path], None]) -> Path:
    """Return the directory into which GGUF files are translated; `write` it if it is missing.

    files: as `find_gguf` returns them.
    """
    beside = (files[0].parent / name for name in BESIDE)
    states = [(str(file.resolve()), file.stat()) for file in (*files, *beside) if file.is_file()]
    key = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in states]
    name = files[0].stem  # the model's name in answers

    def fill(directory: Path) -> None:
        (directory / name).mkdir()
        write(directory / name)

    return cached_directory(f"gguf {_REVISION} {key}", fill) / name


def _parts(first: Path) -> list[Path]:
    found = _PART.fullmatch(first.stem)
    if found is None:
        return [first]
    count = int(found[3])
    parts = [first.with_name(f"{found[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None:
        raise ConfigurationError(f"{missing} is missing: the model is in {count} parts")
    return parts
