"""Encoders with the files of sentence-transformers."""

from __future__ import annotations

import json
import shutil

import pytest


@pytest.fixture
def described(task_model, tmp_path):
    """Return a function that makes an encoder with the given files of sentence-transformers."""

    def make(name="encoder", normalize=True, pooling=None, types=None, **files):
        path = tmp_path / "described"
        shutil.copytree(task_model(name), path, dirs_exist_ok=True)
        types = types or ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        modules = [
            {"idx": at, "name": str(at), "type": f"sentence_transformers.models.{module_type}",
             "path": "" if module_type == "Transformer" else f"{at}_{module_type}"}
            for at, module_type in enumerate(types)
        ]  # fmt: skip
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir(exist_ok=True)
        settings = pooling or {"pooling_mode_mean_tokens": True}
        (path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
        for file, content in files.items():
            (path / f"{file}.json").write_text(json.dumps(content))
        return path

    return make
