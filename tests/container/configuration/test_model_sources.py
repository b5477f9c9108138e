"""Models from archives and from S3."""

from __future__ import annotations

import io
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from container.__main__ import main
from container.configuration.resolve import load_configuration
from container.model_files.directory import (
    SAGEMAKER_MODEL_DIR,
    default_model_dir,
    describe_model,
    model_place,
    open_model_dir,
    resolve_model_dir,
)
from core.configuration.hub import from_hub
from core.configuration.options import ModelOptions
from core.errors import ConfigurationError
from core.files.cached_directory import cached_directory

Resolve = Callable[[str], Path]
Packed = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def packed(tmp_path: Path, tokenizer_dir: Path) -> Packed:
    """Return a function that packs the test model's files and `more` files, all below `inside`."""

    def pack(name: str, inside: str = "", **more: str) -> Path:
        path = tmp_path / "packed" / name
        path.parent.mkdir(exist_ok=True)
        files = {file.name: file.read_bytes() for file in tokenizer_dir.iterdir()}
        files |= {name: text.encode() for name, text in more.items()}
        if name.endswith(".zip"):
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in files.items():
                    archive.writestr(inside + name, data)
            return path
        with tarfile.open(path, "w:gz") as archive:
            for name, data in files.items():
                member = tarfile.TarInfo(inside + name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return path

    return pack


def resolve(model_id: str) -> Path:
    configuration = load_configuration(None, {"OPTION_MODEL_ID": model_id})
    place = model_place(configuration, Path("unused"))
    return resolve_model_dir(place, configuration.options.model)


def test_of_two_processes_that_fill_one_directory_the_slower_uses_it_too() -> None:
    def fill(partial: Path) -> None:
        (partial / "file").write_text("slower")
        cached_directory("key", lambda path: path.joinpath("file").write_text("faster"))

    path = cached_directory("key", fill)
    assert (path / "file").read_text() == "faster"
    assert list(path.parent.iterdir()) == [path], "nothing partial is left"


@pytest.mark.parametrize(
    ("name", "inside"), [("model.tar.gz", ""), ("model.tgz", "./m/"), ("model.zip", "m/n/")]
)
def test_archives_are_unpacked(packed: Packed, tokenizer_dir: Path, name: str, inside: str) -> None:
    path = packed(name, inside)
    model = resolve(str(path))
    assert {file.name for file in model.iterdir()} == {
        file.name for file in tokenizer_dir.iterdir()
    }
    assert list(path.parent.iterdir()) == [path], "the archive's directory may be read-only"
    assert resolve(str(path)) == model, "the archive is not unpacked again"
    assert open_model_dir(path.parent) == model, (
        "the directory may be named instead, as on SageMaker"
    )


def test_a_changed_archive_is_unpacked_again(packed: Packed) -> None:
    first = open_model_dir(packed("model.tar.gz"))
    second = open_model_dir(packed("model.tar.gz", extra="x" * 99))
    assert first != second
    assert (second / "extra").is_file()


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """Return a file in a directory with a serving.properties."""
    directory = tmp_path / "gguf"
    directory.mkdir()
    (directory / "serving.properties").write_text("option.batching=none\n")
    (directory / "model.gguf").write_bytes(b"GGUF")
    return directory / "model.gguf"


def test_a_gguf_file_is_translated_once(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[3], "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr("container.model_files.gguf.run_to_end", run)
    directory = resolve(str(gguf_file))
    assert (directory / "config.json").is_file()
    assert main(["explain", str(gguf_file.parent)]) == 0
    shown = capsys.readouterr().out
    assert f"model: {gguf_file.parent}" in shown
    assert "batching: none (option.batching=none)" in shown
    assert main(["explain", str(gguf_file)]) == 0
    assert f"model: {gguf_file}" in capsys.readouterr().out
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("model_id", "expected"),
    [
        ("org/one", "a-Q8_0.gguf"),
        ("org/two:q4_k_m", "b.Q4_K_M-00001-of-00002.gguf"),
        (
            "org/two",
            "has 2 GGUF files; choose a type .*: a-Q8_0.gguf, b.Q4_K_M",
        ),
        ("org/two:Q4_K", "has 0 GGUF files of the type Q4_K"),
    ],
)
def test_gguf_files_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_id: str, expected: str
) -> None:
    names = ["README.md", "a-Q8_0.gguf", "mmproj-a-Q8_0.gguf"]
    if "two" in model_id:
        names += [f"b.Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]

    def download(
        model_id: str,
        *,
        revision: str | None,
        ignore_patterns: Sequence[str] = (),
        allow_patterns: Sequence[str] = ("*",),
    ) -> str:
        for name in names:
            is_wanted = any(fnmatch(name, pattern) for pattern in allow_patterns)
            if is_wanted and not any(fnmatch(name, pattern) for pattern in ignore_patterns):
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: names)
    monkeypatch.setattr("core.configuration.hub.require_network", lambda: None)
    found = partial(
        from_hub, model_id, None, ModelOptions(), given_as="model", local=Path("unused")
    )
    if expected.startswith("has"):
        with pytest.raises(ConfigurationError, match=expected):
            found()
        return
    assert found() == tmp_path / expected
    assert len(list(tmp_path.glob("*.gguf"))) == (2 if "two" in model_id else 1)


@pytest.mark.matrix(cases=0)
def test_a_broken_gguf_file_ends_the_start(gguf_file: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"not a GGUF file .*download it"):
        resolve(str(gguf_file))


def test_an_archives_own_configuration_is_used(
    packed: Packed, capsys: pytest.CaptureFixture[str]
) -> None:
    path = packed("model.tar.gz", **{"serving.properties": "option.batching=none\n"})
    assert main(["explain", "--model-dir", str(path)]) == 0
    assert "batching: none (option.batching=none)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.tar.gz", "model.zip"])
def test_a_broken_archive(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no archive")
    with pytest.raises(ConfigurationError, match=f"cannot unpack .*{name}"):
        open_model_dir(tmp_path / name)
    assert not list((tmp_path / "tmp").glob("*/*")), "no partial directory is left"


def test_an_archive_with_paths_outside_is_rejected(packed: Packed, tmp_path: Path) -> None:
    path = packed("model.tar.gz", inside="../../outside/")
    with pytest.raises(ConfigurationError, match="outside"):
        open_model_dir(path)
    assert not (tmp_path / "tmp" / "outside").exists()


class Bucket(BaseHTTPRequestHandler):
    """A minimal S3 server for downloads, with one bucket named `b`."""

    files: dict[str, bytes]
    fetched: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if "list-type" in parse_qs(url.query):
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            self._send(200, self._listing(prefix).encode(), body=True)
        else:
            self._answer(body=True)

    def _listing(self, prefix: str) -> str:
        contents = "".join(
            f"<Contents><Key>{key}</Key><ETag>{hash(data)}</ETag><Size>{len(data)}</Size></Contents>"
            for key, data in self.files.items()
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"

    def _answer(self, *, body: bool) -> None:
        key = unquote(urlsplit(self.path).path).removeprefix("/b/")
        if body:
            self.fetched.append(key)
        data = self.files.get(key)
        self._send(404 if data is None else 200, data or b"", body=body)

    def _send(self, status: int, data: bytes, *, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"x"')
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Bucket]]:
    served = type("Served", (Bucket,), {"files": {}, "fetched": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), served)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_on_s3(bucket: type[Bucket], tokenizer_dir: Path) -> None:
    for path in tokenizer_dir.iterdir():
        bucket.files[f"models/one/{path.name}"] = path.read_bytes()
    bucket.files |= {"models/one/deep/file": b"x", "models/one-more/file": b"", "models/one/": b""}
    for uri in ("s3://b/models/one", "s3://b/models/one/"):
        model = resolve(uri)
        found = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
        assert found == {"deep/file", *(path.name for path in tokenizer_dir.iterdir())}
    num_fetched = len(bucket.fetched)
    assert resolve("s3://b/models/one") == resolve("s3://b/models/one")
    assert len(bucket.fetched) == num_fetched, "nothing is downloaded again"
    bucket.files["models/one/deep/file"] = b"changed"
    assert (resolve("s3://b/models/one") / "deep" / "file").read_bytes() == b"changed"


def test_an_archive_on_s3(bucket: type[Bucket], packed: Packed) -> None:
    bucket.files["a/model.tar.gz"] = packed("model.tar.gz").read_bytes()
    assert (resolve("s3://b/a/model.tar.gz") / "config.json").is_file()


def test_no_files_on_s3(bucket: type[Bucket]) -> None:
    with pytest.raises(ConfigurationError, match="s3://b/none: no such object"):
        resolve("s3://b/none")
    bucket.files["x/../../../evil"] = b""
    with pytest.raises(ConfigurationError, match="outside the model directory"):
        resolve("s3://b/x")


def test_unreachable_s3(bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="s3://b/x: Could not connect"):
        resolve("s3://b/x")


def test_explain_downloads_nothing() -> None:
    configuration = load_configuration(None, {"OPTION_MODEL_ID": "s3://b/x"})
    assert describe_model(model_place(configuration, Path())) == "s3://b/x (to be downloaded)"


@pytest.mark.skipif(SAGEMAKER_MODEL_DIR.is_dir(), reason="on an endpoint, the default is its model")
def test_the_default_model_is_the_demo() -> None:
    assert (default_model_dir() / "config.json").is_file()
