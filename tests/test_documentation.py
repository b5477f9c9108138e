"""Links in the documentation lead somewhere, and the README's sample is what the model says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from tests.browser.captions import marked_texts

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    {
        path.relative_to(ROOT).as_posix()
        for pages in ("*.md", "docs/**/*.md", "[!.]*/README.md", "deploy/*/README.md")
        for path in ROOT.glob(pages)
    }
)
PAGES_ABOUT_CODE = [
    "CONTRIBUTING.md",
    "docs/design.md",
    "docs/structures.md",
    *(
        name
        for name in PAGES
        if name.endswith("/README.md") and not name.startswith(("docs/", "examples/"))
    ),
]
FILES_OF_OTHERS = {"config.json", "model.py", "strategies/x.py"}
"""Files of a user's model, and the strategy that a page tells how to add."""


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of every link in a page that leads into this repository."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for path, anchor in links(ROOT / name):
        assert path.exists(), f"{name}: {path}"
        assert not anchor or anchor in anchors(path), f"{name}: {path}#{anchor}"


@pytest.mark.parametrize("name", PAGES)
def test_every_picture_says_how_it_was_made(name: str) -> None:
    """`make pictures` writes captions with the command, the machine, the day and the commit."""
    text = (ROOT / name).read_text()
    for picture in re.findall(r"!\[[^]]*\]\((?:\w+/)*([\w.-]+\.png)\)", text):
        caption = marked_texts(text).get(picture)
        assert caption, f"{name}: no caption of {picture} between markers"
        how = r"`.+` on .+; \d{4}-\d\d-\d\d, commit [0-9a-f]{7}(?!-dirty)"
        assert re.search(how, caption), caption


@pytest.mark.parametrize("name", PAGES)
def test_tests_that_pages_name_exist(name: str) -> None:
    for path, test in re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", (ROOT / name).read_text()):
        assert f"\ndef {test}(" in (ROOT / path).read_text(), f"{name}: {path}::{test}"


@pytest.fixture(scope="module")
def files() -> list[str]:
    """The paths of all files of the repository, each after a slash."""
    folders = [path for path in ROOT.glob("[!.]*") if path.is_dir() and path.name != "build"]
    return [
        f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in folder.rglob("*")
    ]


@pytest.mark.parametrize("name", PAGES_ABOUT_CODE)
def test_files_that_pages_name_exist(name: str, files: list[str]) -> None:
    """Pages may leave out the beginning of a path."""
    text = (ROOT / name).read_text()
    named = set(re.findall(r"`([\w/]+\.(?:py|h|cpp|js|json))`", text)) - FILES_OF_OTHERS
    lost = {path for path in named if not any(file.endswith(f"/{path}") for file in files)}
    assert not lost, f"{name}: {lost}"


def test_pages_that_code_names_exist() -> None:
    """Docstrings, errors, comments and help texts name pages by their path."""
    folders = [path for path in ROOT.iterdir() if (path / "__init__.py").exists()]
    files = [path for folder in folders for path in folder.rglob("*")]
    code = [path for path in files if path.suffix in {".py", ".yaml", ".properties"}]
    named = {
        (path, page) for path in code for page in re.findall(r"docs/[a-z/-]+\.md", path.read_text())
    }
    assert named
    missing = {(path, page) for path, page in named if not (ROOT / page).exists()}
    assert not missing


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {path.resolve() for path, _ in links(index)}
    assert linked >= set((ROOT / "docs").rglob("*.md")) - {index}


def test_the_sample_of_the_readme_is_true() -> None:
    """The test runs the model in fp32. The likeliest tokens are the same in bf16."""
    readme = (ROOT / "README.md").read_text()
    sample = re.search(r"```text\n(.*?)\n```", readme, flags=re.DOTALL)
    assert sample is not None
    params = SamplingParams(temperature=0, max_tokens=40)
    with LLM(model=str(ROOT / "models" / "demo"), dtype="fp32") as llm:
        answer = llm.generate(["ROMEO:"], params, use_tqdm=False)[0].outputs[0]
    assert answer.text.strip() == sample.group(1)


def targets(*settings: str) -> set[str]:
    """Return the targets that `make help` names."""
    command = ["make", "--no-print-directory", "help", *settings]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in shown.splitlines()}


def test_make_help_shows_the_usual_targets_and_with_all_every_one() -> None:
    assert targets() == {"help", "serve", "compare", "test", "check", "gpu", "docs"}
    (phony,) = re.findall(
        r"^\.PHONY: ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert targets("ALL=1") == set(phony.replace("\\", "").split())
