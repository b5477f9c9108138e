"""The directories from which requests may load adapters and models."""

from __future__ import annotations

import pytest

from container.security.source_roots import source_roots
from core.configuration.options import ServerOptions
from core.errors import RequestError


@pytest.fixture
def folders(tmp_path):
    for name in ("allowed/inner", "own", "other", "allowed-not"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "allowed" / "link-out").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "link-in").symlink_to(tmp_path / "allowed")
    return tmp_path


@pytest.fixture
def roots(folders):
    options = ServerOptions(source_roots=f"/nowhere:{folders}/allowed")
    return source_roots(options, [folders / "own"])


@pytest.mark.parametrize(
    "path", ["allowed", "allowed/inner", "allowed/missing", "own/a", "other/link-in/inner"]
)
def test_paths_below_a_root_are_allowed(folders, roots, path):
    roots.require(f"{folders}/{path}", "src")


@pytest.mark.parametrize(
    "path",
    ["other", "allowed/../other", "allowed-not", "allowed/link-out", "allowed/link-out/x", "x\0y"],
)
def test_other_paths_are_refused_whether_they_exist_or_not(folders, roots, path):
    with pytest.raises(RequestError) as caught:
        roots.require(f"{folders}/{path}", "src")
    assert caught.value.field == "src"
    assert f"is not below /nowhere or {folders}/allowed or {folders}/own" in caught.value.message
    assert "option.source_roots" in caught.value.message


@pytest.mark.parametrize("configured", ["/allowed:", ":/allowed", "/allowed: :/other"])
def test_an_empty_entry_does_not_allow_the_working_directory(configured):
    roots = source_roots(ServerOptions(source_roots=configured), [])
    roots.require("/allowed/a", "url")
    with pytest.raises(RequestError):
        roots.require("relative", "url")


@pytest.mark.parametrize("path", ["", "relative", "/etc/passwd", "/opt/mlx", "/"])
def test_by_default_only_sagemakers_directory_is_allowed(path):
    roots = source_roots(ServerOptions(), [])
    roots.require("/opt/ml/models/a", "url")
    with pytest.raises(RequestError):
        roots.require(path, "url")
