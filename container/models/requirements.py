"""What a handler's requirements.txt names, installed where the container may write."""

from __future__ import annotations

import logging
import subprocess
import sys
import sysconfig
import venv
from functools import partial
from pathlib import Path

from container.models.cache import cached
from core.errors import ConfigurationError

logger = logging.getLogger(__name__)

_SITE_PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}") / (
    "site-packages"
)
_LAST_LINES = 6


def installed_requirements(path: Path) -> Path | None:
    """The directory of the packages that a requirements.txt names; None where there is no file.

    What the environment has already is not installed again, and never changed: the directory lies
    below TMPDIR and comes before it on the path. Raises ConfigurationError with pip's own words.
    """
    if not path.is_file():
        return None
    key = f"{path.parent}\n{path.read_text('utf-8')}\n{sys.version}\n{sys.prefix}"
    return cached(key, partial(_install, path)) / _SITE_PACKAGES


def _install(path: Path, environment: Path) -> None:
    """Makes a virtual environment that sees ours, which is how pip knows what is there."""
    logger.info("installing what %s names", path)
    venv.EnvBuilder(symlinks=True).create(environment)
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({each!r})" for each in sorted(ours)]
    (environment / _SITE_PACKAGES / "ours.pth").write_text("\n".join(lines) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    options = ["--no-input", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "install", *options, "--requirement", path.name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()][-_LAST_LINES:]
        raise ConfigurationError(
            "\n".join(
                [
                    f"{path} cannot be installed; correct it, put the packages into the image, or "
                    "say option.install_requirements=false:",
                    *said,
                ]
            )
        )
