"""Installs the packages of a handler's requirements.txt below TMPDIR."""

from __future__ import annotations

import logging
import sys
import sysconfig
import venv
from functools import partial
from pathlib import Path

from core.errors import ConfigurationError
from core.files.cached_directory import cached_directory
from core.process.tied_command import run_to_end

logger = logging.getLogger(__name__)

_SITE_PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}") / (
    "site-packages"
)
_NUM_ERROR_LINES = 6


def install_requirements_file(path: Path) -> Path | None:
    """Install the packages of a requirements.txt and return their directory; None without a file.

    Packages that the container's environment already has are not installed again. The environment
    never changes: the directory is meant to precede it on sys.path. Raises ConfigurationError with
    the last lines of pip's error output.
    """
    if not path.is_file():
        return None
    key = f"{path.parent}\n{path.read_text('utf-8')}\n{sys.version}\n{sys.prefix}"
    return cached_directory(key, partial(_install, path)) / _SITE_PACKAGES


def _install(path: Path, environment: Path) -> None:
    """Install into a virtual environment in which pip also sees this environment's packages."""
    logger.info("installing %s", path)
    venv.EnvBuilder(symlinks=True).create(environment)
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({folder!r})" for folder in sorted(ours)]
    (environment / _SITE_PACKAGES / "ours.pth").write_text("\n".join(lines) + "\n")
    pip = [str(environment / "bin" / "python"), "-m", "pip"]
    options = ["--no-input", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "install", *options, "--requirement", path.name]
    result = run_to_end(command, path.parent)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise ConfigurationError(
            "\n".join(
                [
                    f"{path} cannot be installed; correct it, put the packages into the image, or "
                    "set option.install_requirements=false:",
                    *lines[-_NUM_ERROR_LINES:],
                ]
            )
        )
