"""Describe a deployment: a model's container, the instances it runs on, and how they scale.

Builds the requests to AWS as data; `deploy.sagemaker.resources.endpoint` sends them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.resources.tags import deployment_tags

VARIANT = "AllTraffic"
GPU_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""SageMaker's first GPU AMI with a driver for CUDA 13, which torch is built for."""
MAX_NAME = 54
"""SageMaker allows 63 characters; models and configurations add a suffix of nine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The settings of a deployment. Raises DeployError if they are invalid."""

    name: str
    image: str
    role: str
    instance_type: str
    instances: int = 1
    max_instances: int = 1
    target_concurrency: int = 32
    """Concurrent requests per instance, or per component copy, above which to scale out."""
    startup_timeout_s: int = 1800
    download_timeout_s: int = 1800
    ami: str | None = None
    """None means GPU_AMI on GPU instances."""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_component: bool = False
    """Deploy as an inference component, which can share the endpoint's instances with others."""
    accelerators: int = 1
    memory_mib: int = 8192

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.instances <= self.max_instances:
            raise DeployError(
                f"--instances {self.instances} --max-instances {self.max_instances}: "
                "expected 1 <= instances <= max-instances"
            )
        for option, seconds in (
            ("--startup-timeout", self.startup_timeout_s),
            ("--download-timeout", self.download_timeout_s),
        ):
            if not 60 <= seconds <= 3600:
                raise DeployError(f"{option} {seconds}: SageMaker allows 60 to 3600 seconds")

    @property
    def has_gpus(self) -> bool:
        return self.instance_type.startswith(("ml.g", "ml.p"))

    def model_request(self, model_uri: str) -> dict[str, Any]:
        """Return the CreateModel request; `model_uri` is an S3 prefix or a model.tar.gz."""
        is_archive = not model_uri.endswith("/")
        source = {
            "S3Uri": model_uri,
            "S3DataType": "S3Object" if is_archive else "S3Prefix",
            "CompressionType": "Gzip" if is_archive else "None",
        }
        container = {
            "Image": self.image,
            "ModelDataSource": {"S3DataSource": source},
            "Environment": dict(self.environment),
        }
        body = {"ExecutionRoleArn": self.role, "PrimaryContainer": container}
        return {"ModelName": self._digest_name(body), **body, "Tags": deployment_tags(self.name)}

    def configuration_request(self, model_name: str) -> dict[str, Any]:
        """Return the CreateEndpointConfig request."""
        variant: dict[str, Any] = {
            "VariantName": VARIANT,
            "InstanceType": self.instance_type,
            "InitialInstanceCount": self.instances,
            "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
            **self._timeouts(),
        }
        ami = self.ami or (GPU_AMI if self.has_gpus else None)
        if ami is not None:
            variant["InferenceAmiVersion"] = ami
        if not self.is_component:
            variant["ModelName"] = model_name
            body: dict[str, Any] = {"ProductionVariants": [variant]}
        else:
            variant["ManagedInstanceScaling"] = {
                "Status": "ENABLED",
                "MinInstanceCount": self.instances,
                "MaxInstanceCount": self.max_instances,
            }
            body = {"ProductionVariants": [variant], "ExecutionRoleArn": self.role}
        return {
            "EndpointConfigName": self._digest_name(body),
            **body,
            "Tags": deployment_tags(self.name),
        }

    def component_request(self, model_name: str) -> dict[str, Any]:
        """Return the CreateInferenceComponent request; the component has the endpoint's name."""
        requirements: dict[str, Any] = {"MinMemoryRequiredInMb": self.memory_mib}
        if self.has_gpus:
            requirements["NumberOfAcceleratorDevicesRequired"] = self.accelerators
        return {
            "InferenceComponentName": self.name,
            "EndpointName": self.name,
            "VariantName": VARIANT,
            "Specification": {
                "ModelName": model_name,
                "StartupParameters": self._timeouts(),
                "ComputeResourceRequirements": requirements,
            },
            "RuntimeConfig": {"CopyCount": self.instances},
            "Tags": deployment_tags(self.name),
        }

    def _timeouts(self) -> dict[str, int]:
        return {
            "ContainerStartupHealthCheckTimeoutInSeconds": self.startup_timeout_s,
            "ModelDataDownloadTimeoutInSeconds": self.download_timeout_s,
        }

    def _digest_name(self, body: dict[str, Any]) -> str:
        """Return a name that ends in a digest of the request.

        SageMaker cannot update models and configurations, so a changed request needs a new name.
        """
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:8]}"


def check_name(name: str) -> None:
    """Raise DeployError for a name that SageMaker would reject."""
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", name) or len(name) > MAX_NAME:
        raise DeployError(
            f"--name {name}: expected letters, digits and inner hyphens, at most {MAX_NAME}"
        )
