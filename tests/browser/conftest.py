"""A browser, servers of the demo model, and a page at each width and in each colour scheme."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Page

from models.windows import DEMO, write
from tests.browser.chromium import NoBrowserError, chromium
from tests.browser.demo_server import demo_server
from tests.browser.replay_page import make_recording, replay_page

SMALL = ("--max-model-len", "512", "--num-kv-blocks", "96")


@dataclass(frozen=True, slots=True)
class Look:
    """A width in pixels and a colour scheme."""

    width: int
    scheme: str

    def __str__(self) -> str:
        return f"{self.width}-{self.scheme}"


LOOKS = [Look(width, scheme) for width in (1400, 500) for scheme in ("light", "dark")]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium. Without one the test is skipped, and the reason says what to do."""
    try:
        with chromium() as found:
            yield found
    except NoBrowserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_strategy(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that records."""
    folder = tmp_path_factory.mktemp("recording")
    with demo_server(*SMALL, "--record", str(folder)) as url:
        yield url


@pytest.fixture(scope="module")
def with_windows(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the demo model with windows in three of its four layers: two cache groups."""
    model = write(tmp_path_factory.mktemp("windows"))
    with demo_server(*SMALL, "--model-dir", str(model)) as url:
        yield url


@pytest.fixture(scope="module")
def with_drafts(browser: Browser) -> Iterator[str]:
    """A server that looks for drafts, and always verifies them."""
    flags = ("--speculative-method", "ngram", "--speculation", "always")
    with demo_server(*SMALL, *flags) as url:
        yield url


@pytest.fixture(scope="module")
def with_states(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model with random weights, of whose layers two keep a state."""
    model = tmp_path_factory.mktemp("states")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, model)
    config = json.loads((DEMO / "config.json").read_text("utf-8"))
    config |= {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
    config |= {"layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-6}
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    flags = ("--load-format", "dummy", "--max-rolling-batch-size", "8")
    with demo_server(*SMALL, "--model-dir", str(model), *flags) as url:
        yield url


@pytest.fixture(scope="module")
def all_strategies(browser: Browser) -> Iterator[str]:
    with demo_server("--strategies", "all", *SMALL) as url:
        yield url


@pytest.fixture(scope="module")
def recording(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a recording."""
    folder = tmp_path_factory.mktemp("recorded")
    make_recording(folder)
    with replay_page(folder) as url:
        yield url


@pytest.fixture(params=LOOKS, ids=str)
def look(request: pytest.FixtureRequest) -> Look:
    return request.param


@pytest.fixture
def page(browser: Browser, look: Look) -> Iterator[Page]:
    """An empty tab. At the end, the console must hold no errors, and nothing may be cut off."""
    context = browser.new_context(
        viewport={"width": look.width, "height": 900}, color_scheme=look.scheme
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= look.width
    context.close()
    assert errors == []
