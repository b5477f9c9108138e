"""The S3 bucket for models: by default one per account and region, created if it is missing."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from boto3.s3.transfer import TransferConfig
from tqdm import tqdm

from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.package import ARCHIVE, Package, blob_size, open_blob
from deploy.sagemaker.resources.aws import Aws, none_if_missing
from deploy.sagemaker.resources.tags import TAG

OWN_TAG = "longshore:bucket"
_MANY_KEYS = 1000
"""Maximum objects that one call may delete."""


class Bucket:
    """A bucket of the user, or with `name=None` our own, `longshore-ACCOUNT-REGION`."""

    def __init__(self, aws: Aws, name: str | None = None) -> None:
        self._aws = aws
        self._s3 = aws.client("s3")
        self._is_ours = name is None
        self.name = name or f"longshore-{aws.account}-{aws.region}"

    def ensure(self) -> None:
        """Create our own bucket if it is missing. Raises DeployError if the user's is missing."""
        if none_if_missing(self._s3.head_bucket, Bucket=self.name) is not None:
            return
        if not self._is_ours:
            raise DeployError(f"--bucket {self.name}: bucket does not exist")
        location = {"LocationConstraint": self._aws.region}
        # S3 rejects us-east-1 as a LocationConstraint.
        is_default = self._aws.region == "us-east-1"
        settings = {} if is_default else {"CreateBucketConfiguration": location}
        self._s3.create_bucket(Bucket=self.name, **settings)
        self._s3.put_bucket_tagging(
            Bucket=self.name, Tagging={"TagSet": [{"Key": OWN_TAG, "Value": "made"}]}
        )
        self._aws.say(f"created bucket {self.name}")

    def upload(self, deployment: str, package: Package, *, as_archive: bool = False) -> str:
        """Upload a package, skipping objects that are there already.

        Returns its S3 URI: a prefix, or with `as_archive` a model.tar.gz.
        """
        prefix = f"{_prefix(deployment)}{package.digest}/"
        if not as_archive:
            blobs = dict(package.blobs())
            self._upload_missing(deployment, prefix, blobs)
            return f"s3://{self.name}/{prefix}"
        if ARCHIVE not in self._sizes(prefix):
            with tempfile.TemporaryDirectory(prefix="longshore-") as directory:
                path = Path(directory) / ARCHIVE
                with _progress_bar("pack", package.num_bytes) as bar:
                    package.write_archive(path, bar.update)
                self._upload_missing(deployment, prefix, {ARCHIVE: path})
        return f"s3://{self.name}/{prefix}{ARCHIVE}"

    def remove(self, deployment: str) -> int:
        """Delete the deployment's objects and return their number."""
        keys = list(self.keys_of(deployment))
        for start in range(0, len(keys), _MANY_KEYS):
            objects = [{"Key": key} for key in keys[start : start + _MANY_KEYS]]
            answer = self._s3.delete_objects(Bucket=self.name, Delete={"Objects": objects})
            if failed := answer.get("Errors"):
                first = failed[0]
                raise DeployError(f"s3://{self.name}/{first['Key']}: {first['Message']}")
        return len(keys)

    def remove_if_empty(self) -> bool:
        """Delete the bucket if it is empty and we created it; return whether it was deleted."""
        tagging = none_if_missing(self._s3.get_bucket_tagging, Bucket=self.name) or {}
        if not any(tag["Key"] == OWN_TAG for tag in tagging.get("TagSet", [])):
            return False
        if self._s3.list_objects_v2(Bucket=self.name, MaxKeys=1).get("Contents"):
            return False
        self._s3.delete_bucket(Bucket=self.name)
        return True

    def exists(self) -> bool:
        return none_if_missing(self._s3.head_bucket, Bucket=self.name) is not None

    def _upload_missing(self, deployment: str, prefix: str, blobs: dict[str, Path | bytes]) -> None:
        sizes = self._sizes(prefix)
        missing = {name: blob for name, blob in blobs.items() if sizes.get(name) != blob_size(blob)}
        # A dry run shows one call per file, not one per part of a large file.
        config = TransferConfig(multipart_threshold=2**50) if self._aws.is_dry_run else None
        settings = {"Tagging": urlencode({TAG: deployment})}
        with _progress_bar("upload", sum(map(blob_size, missing.values()))) as bar:
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
        """Return the size in bytes of each object, keyed by its name below the prefix."""
        return {entry["Key"].removeprefix(prefix): entry["Size"] for entry in self._objects(prefix)}

    def _objects(self, prefix: str) -> Iterator[dict[str, Any]]:
        pages = self._s3.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self.name, Prefix=prefix):
            yield from page.get("Contents", [])

    def keys_of(self, deployment: str) -> Iterator[str]:
        """Yield the keys of the objects that have the deployment's tag."""
        for entry in self._objects(_prefix(deployment)):
            tagging = self._s3.get_object_tagging(Bucket=self.name, Key=entry["Key"])
            if {"Key": TAG, "Value": deployment} in tagging["TagSet"]:
                yield entry["Key"]


def _prefix(deployment: str) -> str:
    return f"longshore/{deployment}/"


def _progress_bar(title: str, num_bytes: int) -> tqdm:
    return tqdm(
        total=num_bytes, desc=title, unit="B", unit_scale=True, disable=not sys.stderr.isatty()
    )
