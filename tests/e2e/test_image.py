"""The image's configuration and start (packaging/image/check)."""

from __future__ import annotations

import pytest

from tests.e2e.serving import IMAGE, image_configuration, serve

pytestmark = pytest.mark.skipif(not IMAGE, reason="needs an image: make image-check")


def test_the_image_starts_as_sagemaker_expects():
    configuration = image_configuration()
    assert configuration["Entrypoint"] == ["tini", "--", "longshore"]
    assert configuration["Cmd"] == ["serve"]
    assert configuration["User"] == "1000", "not root"
    assert "8080/tcp" in configuration["ExposedPorts"]
    for capability in ("accept-bind-to-port", "bidirectional-streaming", "multi-models"):
        label = f"com.amazonaws.sagemaker.capabilities.{capability}"
        assert configuration["Labels"][label] == "true"
    variables = dict(variable.split("=", 1) for variable in configuration["Env"])
    assert variables["HF_HOME"].startswith("/tmp/")


def test_the_image_serves_a_read_only_model(tmp_path):
    with serve(tmp_path, "option.batching=paged\n") as container:
        assert "/opt/ml/model/serving.properties" in container.log
        assert "compiler" not in container.log, "the kernels are compiled already"
        assert container.invoke("ROMEO:", max_new_tokens=4)["generated_text"]
        assert container.stop() == 0
    assert {path.name for path in (tmp_path / "mounted").iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "serving.properties",
        "tokenizer.json",
        "tokenizer_config.json",
    }
