"""Scale the instances, or component copies, of an endpoint by their concurrent requests."""

from __future__ import annotations

from typing import Any

from deploy.sagemaker.resources.aws import Aws, none_if_missing
from deploy.sagemaker.resources.deployment import VARIANT, Deployment

_POLICY = "longshore-concurrent-requests"
_SCALE_OUT_S, _SCALE_IN_S = 60, 300
"""Cooldowns in seconds. Scaling in waits longer: a container takes minutes to start again."""


class Scaling:
    """The Application Auto Scaling target of an endpoint's variant or inference component."""

    def __init__(self, aws: Aws, name: str, *, is_component: bool) -> None:
        self._client = aws.client("application-autoscaling")
        self._aws = aws
        self._name = name
        self._metric = (
            "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
            if is_component
            else "SageMakerVariantConcurrentRequestsPerModelHighResolution"
        )
        self._target = {
            "ServiceNamespace": "sagemaker",
            "ResourceId": (
                f"inference-component/{name}"
                if is_component
                else f"endpoint/{name}/variant/{VARIANT}"
            ),
            "ScalableDimension": (
                "sagemaker:inference-component:DesiredCopyCount"
                if is_component
                else "sagemaker:variant:DesiredInstanceCount"
            ),
        }

    def ensure(self, deployment: Deployment) -> None:
        """Set the bounds and the policy; remove them if minimum and maximum are equal."""
        if deployment.max_instances == deployment.instances:
            self.remove()
            return
        self._client.register_scalable_target(
            **self._target,
            MinCapacity=deployment.instances,
            MaxCapacity=deployment.max_instances,
        )
        self._client.put_scaling_policy(
            **self._target,
            PolicyName=_POLICY,
            PolicyType="TargetTrackingScaling",
            TargetTrackingScalingPolicyConfiguration={
                "TargetValue": float(deployment.target_concurrency),
                "PredefinedMetricSpecification": {"PredefinedMetricType": self._metric},
                "ScaleOutCooldown": _SCALE_OUT_S,
                "ScaleInCooldown": _SCALE_IN_S,
            },
        )
        self._aws.say(
            f"scaling {self._name}: {deployment.instances} to {deployment.max_instances}, "
            f"{deployment.target_concurrency} concurrent requests on each"
        )

    def bounds(self) -> tuple[int, int] | None:
        """Return the minimum and maximum, or None if there is no scaling."""
        answer: dict[str, Any] = self._client.describe_scalable_targets(
            ServiceNamespace="sagemaker",
            ResourceIds=[self._target["ResourceId"]],
            ScalableDimension=self._target["ScalableDimension"],
        )
        for target in answer.get("ScalableTargets", []):
            return target["MinCapacity"], target["MaxCapacity"]
        return None

    def remove(self) -> list[str]:
        """Remove the target and its policies; return what was removed."""
        if self.bounds() is None:
            return []
        none_if_missing(self._client.deregister_scalable_target, **self._target)
        return [f"scaling of {self._target['ResourceId']}"]
