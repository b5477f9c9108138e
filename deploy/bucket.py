"""The bucket that models are uploaded to: one an account and region, made where it is missing."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from boto3.s3.transfer import TransferConfig
from tqdm import tqdm

from deploy.aws import TAG, Aws, found
from deploy.errors import DeployError
from deploy.package import ARCHIVE, Package, blob_size, open_blob

OWN_TAG = "longshore:bucket"
_MANY_KEYS = 1000
"""Objects that one call deletes."""


class Bucket:
    """name: somebody's bucket; None: our own, `longshore-ACCOUNT-REGION`."""

    def __init__(self, aws: Aws, name: str | None = None) -> None:
        self._aws = aws
        self._s3 = aws.client("s3")
        self._is_ours = name is None
        self.name = name or f"longshore-{aws.account}-{aws.region}"

    def ensure(self) -> None:
        """Makes it where it is missing. Raises DeployError where somebody else's is."""
        if found(self._s3.head_bucket, Bucket=self.name) is not None:
            return
        if not self._is_ours:
            raise DeployError(f"--bucket {self.name}: there is no such bucket")
        place = {"LocationConstraint": self._aws.region}
        # us-east-1 is the one region that must not be said.
        where = {} if self._aws.region == "us-east-1" else {"CreateBucketConfiguration": place}
        self._s3.create_bucket(Bucket=self.name, **where)
        self._s3.put_bucket_tagging(
            Bucket=self.name, Tagging={"TagSet": [{"Key": OWN_TAG, "Value": "made"}]}
        )
        self._aws.say(f"made bucket {self.name}")

    def upload(self, deployment: str, package: Package, *, as_archive: bool = False) -> str:
        """The package's address: a prefix, or a model.tar.gz. What is there is not sent again."""
        prefix = f"{_prefix(deployment)}{package.digest}/"
        if not as_archive:
            blobs = dict(package.blobs())
            self._send(deployment, prefix, blobs)
            return f"s3://{self.name}/{prefix}"
        if ARCHIVE not in self._sizes(prefix):
            with tempfile.TemporaryDirectory(prefix="longshore-") as directory:
                path = Path(directory) / ARCHIVE
                with _bar("pack", package.num_bytes) as bar:
                    package.write_archive(path, bar.update)
                self._send(deployment, prefix, {ARCHIVE: path})
        return f"s3://{self.name}/{prefix}{ARCHIVE}"

    def remove(self, deployment: str) -> int:
        """Deletes the deployment's objects; returns how many there were."""
        keys = list(self.keys_of(deployment))
        for start in range(0, len(keys), _MANY_KEYS):
            part = [{"Key": key} for key in keys[start : start + _MANY_KEYS]]
            answer = self._s3.delete_objects(Bucket=self.name, Delete={"Objects": part})
            if failed := answer.get("Errors"):
                first = failed[0]
                raise DeployError(f"s3://{self.name}/{first['Key']}: {first['Message']}")
        return len(keys)

    def remove_if_empty(self) -> bool:
        """Deletes the bucket if we made it and nothing is in it; whether that was so."""
        tagging = found(self._s3.get_bucket_tagging, Bucket=self.name) or {}
        if not any(tag["Key"] == OWN_TAG for tag in tagging.get("TagSet", [])):
            return False
        if self._s3.list_objects_v2(Bucket=self.name, MaxKeys=1).get("Contents"):
            return False
        self._s3.delete_bucket(Bucket=self.name)
        return True

    def exists(self) -> bool:
        return found(self._s3.head_bucket, Bucket=self.name) is not None

    def _send(self, deployment: str, prefix: str, blobs: dict[str, Path | bytes]) -> None:
        there = self._sizes(prefix)
        missing = {name: blob for name, blob in blobs.items() if there.get(name) != blob_size(blob)}
        # A dry run shows a call a file, not one for each of a large file's parts.
        config = TransferConfig(multipart_threshold=2**50) if self._aws.is_dry_run else None
        settings = {"Tagging": urlencode({TAG: deployment})}
        with _bar("upload", sum(map(blob_size, missing.values()))) as bar:
            for name, blob in missing.items():
                with open_blob(blob) as file:
                    self._s3.upload_fileobj(
                        file,
                        self.name,
                        prefix + name,
                        ExtraArgs=settings,
                        Callback=bar.update,
                        Config=config,
                    )

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object, by its key after the prefix."""
        return {entry["Key"].removeprefix(prefix): entry["Size"] for entry in self._objects(prefix)}

    def _objects(self, prefix: str) -> Iterator[dict[str, Any]]:
        pages = self._s3.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self.name, Prefix=prefix):
            yield from page.get("Contents", [])

    def keys_of(self, deployment: str) -> Iterator[str]:
        """The deployment's objects, by their tag."""
        for entry in self._objects(_prefix(deployment)):
            tagging = self._s3.get_object_tagging(Bucket=self.name, Key=entry["Key"])
            if {"Key": TAG, "Value": deployment} in tagging["TagSet"]:
                yield entry["Key"]


def _prefix(deployment: str) -> str:
    return f"longshore/{deployment}/"


def _bar(what: str, num_bytes: int) -> tqdm:
    return tqdm(
        total=num_bytes, desc=what, unit="B", unit_scale=True, disable=not sys.stderr.isatty()
    )
