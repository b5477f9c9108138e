"""Downloads models from S3. Needs boto3: `pip install longshore[aws]`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import ConfigurationError
from core.files.cached_directory import cached_directory


class _Object(NamedTuple):
    key: str
    etag: str


def download_from_s3(uri: str) -> Path:
    """Download the object at an `s3://` URI, or all objects below it; return their directory.

    boto3 finds the credentials, region and endpoint. If any object has changed, all are downloaded
    again. Raises ConfigurationError if there is no object or the download fails.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    try:
        boto3 = importlib.import_module("boto3")
        exceptions = importlib.import_module("boto3.exceptions")
        botocore = importlib.import_module("botocore.exceptions")
    except ImportError:
        raise ConfigurationError(f"{uri}: requires boto3; pip install 'longshore[aws]'") from None
    try:
        client = boto3.client("s3")
        objects = _listed(client, bucket, prefix)
        if not objects:
            raise ConfigurationError(f"{uri}: no such object or prefix")
        return cached_directory(
            f"{uri} {objects}", lambda directory: _fetch(client, bucket, objects, directory)
        )
    except (exceptions.Boto3Error, botocore.BotoCoreError, botocore.ClientError) as error:
        raise ConfigurationError(f"{uri}: {error}") from None


def _listed(client: Any, bucket: str, prefix: str) -> dict[str, _Object]:
    """List objects by path below the prefix, a whole path: for `a/b`, `a/bc` does not count."""
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
            raise ConfigurationError(
                f"s3://{bucket}/{object.key}: would be written outside the model directory"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, object.key, str(path))
