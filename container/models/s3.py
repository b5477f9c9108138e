"""Models on S3, through boto3, which only this needs: `pip install longshore[aws]`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from container.models.cache import cached
from core.errors import ConfigurationError


class _Object(NamedTuple):
    key: str
    etag: str


def downloaded(uri: str) -> Path:
    """A directory with the object of this `s3://` address, or with all below that prefix.

    Credentials, region and endpoint are found as boto3 finds them. What was fetched before is not
    fetched again, unless it has changed. Raises ConfigurationError where nothing is to be had.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    try:
        boto3 = importlib.import_module("boto3")
        exceptions = importlib.import_module("boto3.exceptions")
        botocore = importlib.import_module("botocore.exceptions")
    except ImportError:
        raise ConfigurationError(f"{uri}: needs boto3; pip install 'longshore[aws]'") from None
    try:
        client = boto3.client("s3")
        objects = _listed(client, bucket, prefix)
        if not objects:
            raise ConfigurationError(f"{uri}: there is nothing")
        return cached(
            f"{uri} {objects}", lambda directory: _fetch(client, bucket, objects, directory)
        )
    except (exceptions.Boto3Error, botocore.BotoCoreError, botocore.ClientError) as error:
        raise ConfigurationError(f"{uri}: {error}") from None


def _listed(client: Any, bucket: str, prefix: str) -> dict[str, _Object]:
    """By the path below the prefix. Names that begin like the prefix are not below it."""
    below = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    objects: dict[str, _Object] = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            key: str = entry["Key"]
            if key == prefix and not key.endswith("/"):
                objects[key.rsplit("/", 1)[-1]] = _Object(key, entry["ETag"])
            elif key.startswith(below) and not key.endswith("/"):
                objects[key.removeprefix(below)] = _Object(key, entry["ETag"])
    return objects


def _fetch(client: Any, bucket: str, objects: dict[str, _Object], directory: Path) -> None:
    for name, object in objects.items():
        path = (directory / name).resolve()
        if not path.is_relative_to(directory.resolve()):
            raise ConfigurationError(f"s3://{bucket}/{object.key}: would lie outside of the model")
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, object.key, str(path))
