"""One model under several strategies: what the command line means, and who sees the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask

from container.__main__ import main
from container.configuration.properties import Setting
from container.configuration.resolve import load_configuration
from container.multi_model.app import create_front
from container.multi_model.model_registry import ModelRegistry
from container.multi_model.overrides import Overrides, overrides_from_json
from container.multi_model.strategies import Comparison, compare_strategies, read_strategies
from container.security.api_keys import read_api_keys
from container.security.authentication import Gate
from container.ui.routes import Page
from core.configuration.options import Options
from core.configuration.strategy_table import BATCHING_NAMES
from core.errors import ConfigurationError
from tests.container.multi_model.fronts import FAKE, MakeModel

MAX_LEN = Setting("option.max_model_len", "64", "--max-model-len")


NO_MODEL = Path(__file__).parent
"""A folder without a serving.properties."""


def compare(
    *names: str, gpus: tuple[str, ...] = (), flags: tuple[Setting, ...] = (), **variables: str
) -> Comparison:
    configuration = load_configuration(None, variables, flags)
    return compare_strategies(names, configuration, None, flags, gpus)


def options_of(comparison: Comparison, name: str, **variables: str) -> Options:
    """Return the options that a strategy's container reads from its command line."""
    overrides = overrides_from_json(comparison.overrides[name].as_json())
    return overrides.load(NO_MODEL, variables).options


def test_a_list_of_strategies() -> None:
    assert read_strategies("all") == BATCHING_NAMES
    assert read_strategies("paged, none") == ("paged", "none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pagd", "no strategy 'pagd'; did you mean 'paged'.; give all, or some of none,dynamic"),
        ("", "no strategy ''; give all"),
        ("all,none", "no strategy 'all'"),
        ("none,none", "none is named twice"),
    ],
)
def test_wrong_lists(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", f"--strategies={text}"]) == 2
    with pytest.raises(ConfigurationError, match=message):
        read_strategies(text)
    assert f"longshore: --strategies {text}: n" in capsys.readouterr().err


def test_what_strategies_cannot_be_combined_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(["serve", "--strategies", "all", *arguments]) == 2
        return capsys.readouterr().err

    assert "--strategies and --batching both" in refused("--batching", "paged")
    (tmp_path / "model.py").write_text("def handle(inputs):\n    return None\n")
    assert "the task is" in refused(str(tmp_path))
    monkeypatch.setenv("SAGEMAKER_MULTI_MODEL", "true")
    assert "name one with MODEL" in refused()


def test_each_strategy_keeps_the_flags_and_sets_option_batching_itself() -> None:
    comparison = compare("none", "paged", flags=(MAX_LEN,), OPTION_BATCHING="dynamic")
    for name in ("none", "paged"):
        options = options_of(comparison, name, OPTION_BATCHING="dynamic")
        assert (options.strategy.batching, options.memory.max_model_len) == (name, 64)


def test_the_first_of_two_flags_wins_as_without_strategies() -> None:
    """MODEL is the first of the two flags here, and --model-id the second."""
    flags = (Setting("option.model_id", "org/a", "MODEL"),
             Setting("option.model_id", "org/b", "--model-id"))  # fmt: skip
    comparison = compare("none", flags=flags)
    assert comparison.options.source.model_id == "org/a"
    assert options_of(comparison, "none").source.model_id == "org/a"


def test_a_properties_file_outside_the_model_directory(tmp_path: Path) -> None:
    path = tmp_path / "other.properties"
    path.write_text("option.max_model_len=32\n")
    again = overrides_from_json(Overrides(path, (MAX_LEN,)).as_json())
    assert again == Overrides(path, (MAX_LEN,))
    assert Overrides(path).load(tmp_path, {}).options.memory.max_model_len == 32


@pytest.mark.parametrize(
    ("gpus", "text", "share"),
    [((), "0.9", 0.9), (("0",), "0.9", 0.3), (("0", "1"), "0.8", 0.4), (("0",), "0.5", 0.1666)],
)
def test_strategies_share_the_memory_of_the_gpus(
    gpus: tuple[str, ...], text: str, share: float
) -> None:
    """One GPU has all three strategies. Of two GPUs, one has two. Shares are rounded down."""
    flag = Setting("option.gpu_memory_utilization", text, "--gpu-memory-utilization")
    comparison = compare("none", "dynamic", "paged", gpus=gpus, flags=(flag,))
    for name in comparison.overrides:
        assert options_of(comparison, name).memory.gpu_memory_utilization == share


@pytest.mark.parametrize(
    ("front", "engine"), [("auto", "true"), ("true", "true"), ("false", "false")]
)
def test_the_front_decides_who_sees_the_events(front: str, engine: str) -> None:
    comparison = compare("none", OPTION_UI=front)
    assert comparison.options.server.ui == front
    assert options_of(comparison, "none", OPTION_UI=front).server.ui == engine


@pytest.fixture
def models(short_dir: Path, model_dir: MakeModel) -> Iterator[ModelRegistry]:
    """The models of a comparison with one strategy, paged. The model is a fake."""
    comparison = compare("paged")
    models = ModelRegistry(short_dir, {"PYTHONPATH": "."}, FAKE, gpus=())
    models.load("paged", model_dir("m"), comparison.overrides["paged"])
    yield models
    models.unload("paged")


def front(models: ModelRegistry, ui: str, gate: Gate | None = None) -> Flask:
    return create_front(models, gate, page=Page(load_ui(ui).server, "compare.html"))


def load_ui(ui: str) -> Options:
    return load_configuration(None, {"OPTION_UI": ui}).options


def test_events_are_for_the_clients_that_see_the_page(models: ModelRegistry) -> None:
    far = {"REMOTE_ADDR": "203.0.113.9"}
    auto, everybody = front(models, "auto").test_client(), front(models, "true").test_client()
    own = ("/", "/ui/compare.js")
    for path in own:
        assert (
            auto.get(path).status_code == everybody.get(path, environ_base=far).status_code == 200
        )
        assert auto.get(path, environ_base=far).status_code == 404
    assert b"ui/compare.js" in auto.get("/").data
    # The fake model answers 404 to GET, but with its own body.
    events = "/models/paged/ui/events"
    assert auto.get(events).data == everybody.get(events, environ_base=far).data == b"{}"
    for path in (events, "/models/paged/ui%2Fevents"):
        for refused in (
            auto.get(path, environ_base=far),
            auto.get(path, headers={"Host": "evil.example"}),
            auto.get(path, headers={"X-Forwarded-For": "127.0.0.1"}),
        ):
            assert refused.status_code == 404
            assert refused.data != b"{}"


def test_only_the_page_needs_no_key(models: ModelRegistry, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("secret-key-of-a-client-0123456789\n")
    http = front(models, "auto", Gate(read_api_keys(path))).test_client()
    assert http.get("/").status_code == http.get("/ui/compare.js").status_code == 200
    assert http.get("/models/paged/ui/events").status_code == 401
    assert http.get("/models").status_code == 401


def test_several_models_have_no_page(models: ModelRegistry) -> None:
    http = create_front(models).test_client()
    assert http.get("/").status_code == http.get("/ui/compare.js").status_code == 404
