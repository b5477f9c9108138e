"""Batches over a fake model container, a real process that echoes requests."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from container.__main__ import main
from container.batch.batch import BatchStoppedError, report, run_batch
from container.batch.lines import open_output
from container.batch.serve_batch import for_batch
from container.configuration.resolve import load_configuration
from core.errors import ConfigurationError

FAKE = (sys.executable, "-m", "tests.container.multi_model.fake_model")


class Files:
    """A batch's files in a folder that is also the fake container's model directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: dict[str, Any] | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("\n".join(texts) + "\n")

    def run(self) -> dict[str, int]:
        return dict(
            run_batch(self.source, self.output, model_dir=self.folder, num_workers=4, command=FAKE)
        )

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Return the outcomes by their ids: `line-1` for the first line of the input, and so on."""
        found = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({outcome["id"] for outcome in found}) == len(found), "no line has two outcomes"
        return {outcome["id"]: outcome for outcome in found}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setenv("PYTHONPATH", ".")
    return Files(tmp_path)


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_every_line_gets_one_outcome(files: Files) -> None:
    files.write(
        line("a", prompt="é"),
        "not json",
        "",
        {"custom_id": "no body", "url": "/v1/completions"},
        line("streams", stream=True),
        line("elsewhere", url="https://example.com/v1"),
        line("too large", url="/early"),
        line("cut", url="/cut"),
        *(line(str(number), n=number) for number in range(20)),
    )
    assert files.run() == {"answered": 21, "failed": 6}
    outcomes = files.outcomes()
    assert len(outcomes) == 27
    first = outcomes["line-1"]
    assert (first["custom_id"], first["error"]) == ("a", None)
    echo = first["response"]["body"]
    assert (echo["path"], json.loads(echo["body"].encode("latin-1"))) == (
        "/v1/completions",
        {"prompt": "é"},
    )
    assert first["response"]["request_id"] == echo["headers"]["x-request-id"]
    errors = {
        number: (outcomes[f"line-{number}"]["custom_id"], outcomes[f"line-{number}"]["error"])
        for number in (2, 4, 5, 6, 8)
    }
    assert [(custom_id, error["code"]) for custom_id, error in errors.values()] == [
        (None, "invalid_line"),
        ("no body", "invalid_line"),
        ("streams", "invalid_line"),
        ("elsewhere", "invalid_line"),
        ("cut", "no_answer"),
    ]
    assert "body.stream" in errors[5][1]["message"]
    too_large = outcomes["line-7"]["response"]
    assert (too_large["status_code"], too_large["body"]) == (413, "too much")


def test_a_batch_goes_on_where_it_was_killed(files: Files) -> None:
    requests = [line(str(number)) for number in range(6)]
    files.write(*requests[:4])
    assert files.run() == {"answered": 4}
    whole = files.output.read_bytes()
    files.output.write_bytes(whole[:-10])
    files.write(*requests)
    assert files.run() == {"skipped": 3, "answered": 3}
    assert len(files.outcomes()) == 6
    assert files.run() == {"skipped": 6}


def test_a_server_that_ends_leaves_the_rest_to_the_next_run(files: Files) -> None:
    files.write(line("a"), line("b", url="/crash"), *(line(str(n)) for n in range(30)))
    with pytest.raises(BatchStoppedError):
        files.run()
    assert "line-2" not in files.outcomes()
    files.write(line("a"), line("b"), *(line(str(n)) for n in range(30)))
    files.run()
    assert len(files.outcomes()) == 32


def test_a_full_disk_ends_a_batch_that_goes_on_later(files: Files) -> None:
    files.write(*(line(str(number), text="x" * 300_000) for number in range(6)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(BatchStoppedError, match="File too large"):
            files.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.output.stat().st_size == 1_000_000, "the last line is cut off"
    assert files.run() == {"skipped": 3, "answered": 3}
    assert len(files.outcomes()) == 6


def test_lines_with_odd_urls_or_answers_have_an_outcome_too(files: Files) -> None:
    files.write(line("é", url="/é"), line("space", url="/a b"), line("bytes", url="/no-utf-8"))
    assert files.run() == {"failed": 2, "answered": 1}
    outcomes = files.outcomes()
    for name in ("line-1", "line-2"):
        assert outcomes[name]["error"]["code"] == "invalid_line"
        assert "is not a path in ASCII" in outcomes[name]["error"]["message"]
    assert outcomes["line-3"]["response"]["body"] == '"\ufffd"'


def test_the_output_of_another_batch_is_not_touched(files: Files) -> None:
    files.write(line("a"))
    files.run()
    before = files.output.read_bytes()
    files.write(line("b"))
    with pytest.raises(ConfigurationError, match="outcome of a different request for line 1"):
        files.run()
    assert files.output.read_bytes() == before
    for notes in (b"notes\n", b'{"id": "\xff"}\n'):
        files.output.write_bytes(notes)
        with pytest.raises(ConfigurationError, match="not the output of a batch"):
            files.run()
        assert files.output.read_bytes() == notes


@pytest.mark.parametrize(
    ("name", "reason"), [("none/out", "No such file"), ("folder", "Is a directory")]
)
def test_an_output_that_cannot_be_written_is_an_error_at_once(
    files: Files, name: str, reason: str
) -> None:
    (files.folder / "folder").mkdir()
    files.output = files.folder / name
    files.write(line("a"))
    with pytest.raises(ConfigurationError, match=f"--output .*: {reason}"):
        files.run()
    assert not (files.folder / "asked").exists(), "no server was started, so none was told to stop"


def test_only_an_output_that_the_batch_has_made_is_removed(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for path, stays in ((link, True), (tmp_path / "new", False)):
        with pytest.raises(ConfigurationError), open_output(path):
            raise ConfigurationError("the batch cannot begin")
        assert path.is_symlink() == stays
    assert sorted(tmp_path.iterdir()) == [link, tmp_path / "nowhere"]


def test_a_server_that_does_not_start_says_why(files: Files) -> None:
    (files.folder / "mode").write_text("refuse")
    files.write(line("a"))
    with pytest.raises(ConfigurationError, match="the model is wrong"):
        files.run()
    assert not files.output.exists()


def test_a_missing_input_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input", str(tmp_path / "none"), "--output", str(tmp_path / "out")]
    assert main(["batch", *arguments]) == 2
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("concurrency", ["0", "-1"])
def test_a_batch_sends_at_least_one_request_at_a_time(
    files: Files, capsys: pytest.CaptureFixture[str], concurrency: str
) -> None:
    files.write(line("a"))
    arguments = ["--input", str(files.source), "--output", str(files.output)]
    assert main(["batch", *arguments, "--concurrency", concurrency]) == 2
    assert f"--concurrency {concurrency}: must be at least 1" in capsys.readouterr().err


def test_the_options_of_a_server_whose_only_client_is_a_batch() -> None:
    given = {
        "OPTION_API_KEYS_FILE": "keys", "OPTION_UI": "true", "OPTION_OVERLOAD_STATUS": "429",
    }  # fmt: skip
    options = for_batch(load_configuration(None, given), 5000).options
    assert options.server.job_queue_size == 5000
    assert options.server.predict_timeout > 10**6
    assert (options.server.api_keys_file, options.server.ui) == (None, "false")
    assert options.server.overload_status == "503", "the batch retries after 503, not after 429"


def test_the_report_counts_outcomes_that_were_there_already() -> None:
    text = report({"answered": 3, "failed": 1, "skipped": 2}, 2.0, Path("out"))  # type: ignore[arg-type]
    assert text == "3 answered, 1 failed, 2 were there already: out (2.0 s, 2.0 requests/s)"
