"""How many instances, or copies, an endpoint has: Application Auto Scaling by requests at once."""

from __future__ import annotations

from typing import Any

from deploy.aws import Aws, found
from deploy.deployment import VARIANT, Deployment

_POLICY = "longshore-concurrent-requests"
_SCALE_OUT_S, _SCALE_IN_S = 60, 300
"""A container starts in minutes: what is not needed for a moment may be needed in the next."""


class Scaling:
    """The scalable target of an endpoint's variant, or of its inference component."""

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
        """Bounds and policy; none where there is nothing to choose from."""
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
            f"{deployment.target_concurrency} requests at once on each"
        )

    def bounds(self) -> tuple[int, int] | None:
        """Least and most; None where nothing scales it."""
        answer: dict[str, Any] = self._client.describe_scalable_targets(
            ServiceNamespace="sagemaker",
            ResourceIds=[self._target["ResourceId"]],
            ScalableDimension=self._target["ScalableDimension"],
        )
        for target in answer.get("ScalableTargets", []):
            return target["MinCapacity"], target["MaxCapacity"]
        return None

    def remove(self) -> list[str]:
        """Its policies go with it; says what is gone."""
        if self.bounds() is None:
            return []
        found(self._client.deregister_scalable_target, **self._target)
        return [f"scaling of {self._target['ResourceId']}"]
