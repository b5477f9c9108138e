"""Retrieval with Milvus Lite: two containers, and a database that persists between commands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT, Container, serve
from tests.engine.tasks.models import save_task_model
from tests.examples.conftest import ENVIRONMENT, MODULE

PARAGRAPHS = ["the cat sat on the mat", "a dog ran", "where is it"]


def ask(
    question: str, tmp_path: Path, *urls: str, documents: Path
) -> subprocess.CompletedProcess[str]:
    embeddings, chat = urls
    return subprocess.run(
        [*MODULE, "examples.rag.rag", "--documents", str(documents), "--embeddings", embeddings,
         "--chat", chat, "--database", str(tmp_path / "notes.db"), "--notes", "2",
         "--max-tokens", "8", question],
        cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT,
    )  # fmt: skip


@pytest.mark.matrix(cases=0)
def test_index_and_ask(container: Container, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a.txt").write_text(f"{PARAGRAPHS[0]}\n\n{PARAGRAPHS[1]}\n")
    (documents / "b.txt").write_text(f"\n\n{PARAGRAPHS[2]}\n\n")
    chat = f"http://127.0.0.1:{container.port}"
    model = save_task_model("encoder", tmp_path)
    with serve(tmp_path, "max_batch_delay=5\noption.dtype=fp32\n", model=model) as encoder:
        urls = (f"http://127.0.0.1:{encoder.port}", chat)
        # The encoder's weights are random, so only equal texts are sure to have close embeddings.
        for paragraph in (PARAGRAPHS[0], PARAGRAPHS[2]):
            done = ask(paragraph, tmp_path, *urls, documents=documents)
            assert done.returncode == 0, done.stderr
            assert f"[1] {paragraph}\n[2] " in done.stderr
            assert "[3]" not in done.stderr
            assert done.stdout.strip(), "the demo model answers"
            documents = tmp_path / "not read again"
        (tmp_path / "new").mkdir()
        empty = ask("who", tmp_path / "new", *urls, documents=documents)
        assert empty.returncode == 1
        assert "has no text in *.txt" in empty.stderr
        assert encoder.stop() == 0
