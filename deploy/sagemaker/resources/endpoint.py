"""Create, update and watch a deployment's endpoint."""

from __future__ import annotations

from typing import Any

from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.resources.aws import Aws, none_if_missing
from deploy.sagemaker.resources.deployment import Deployment
from deploy.sagemaker.resources.logs import last_lines
from deploy.sagemaker.resources.resources import tags_of
from deploy.sagemaker.resources.tags import TAG, deployment_tags

POLL_S = 15.0
SETTLED = ("InService", "Failed", "OutOfService", "UpdateRollbackFailed")
_PROGRESS_INTERVAL_S = 60.0
_LOG_LINES = 20
_NO_REASON = "SageMaker gives no reason"


class Endpoint:
    """An endpoint, and its inference component of the same name if it has one."""

    def __init__(self, aws: Aws, name: str) -> None:
        self._aws = aws
        self._sagemaker = aws.sagemaker
        self.name = name

    def describe(self) -> dict[str, Any] | None:
        """Return SageMaker's description, or None if the endpoint does not exist."""
        return none_if_missing(self._sagemaker.describe_endpoint, EndpointName=self.name)

    def describe_component(self) -> dict[str, Any] | None:
        return none_if_missing(
            self._sagemaker.describe_inference_component, InferenceComponentName=self.name
        )

    def ensure(self, deployment: Deployment, model_uri: str, timeout_s: float) -> None:
        """Create what is missing, update what differs, and wait until everything is in service.

        Raises DeployError if an endpoint of that name exists without the deployment's tag, if
        `timeout_s` passes, or if the endpoint or component fails. The message of a failure has
        SageMaker's reason and the last lines of the log.
        """
        existing = self.describe()
        if existing is not None:
            self._check_usable(existing)
            if existing["EndpointStatus"] not in SETTLED:  # SageMaker makes one change at a time
                self._wait("endpoint", timeout_s)
                existing = self.describe()
        model = deployment.model_request(model_uri)
        configuration = deployment.configuration_request(model["ModelName"])
        self._ensure_model(model)
        self._ensure_configuration(configuration)
        self._create_or_update(configuration["EndpointConfigName"], existing)
        self._wait("endpoint", timeout_s)
        if deployment.is_component:
            self._ensure_component(deployment.component_request(model["ModelName"]))
            self._wait("component", timeout_s)

    def _check_usable(self, description: dict[str, Any]) -> None:
        if tags_of(self._aws, description["EndpointArn"]).get(TAG) != self.name:
            raise DeployError(
                f"endpoint {self.name} exists and was not created by deploy (it has no tag "
                f"{TAG}={self.name}); choose another --name"
            )
        if description["EndpointStatus"] == "Failed":
            reason = description.get("FailureReason", _NO_REASON)
            raise DeployError(f"endpoint {self.name} has failed; remove it first: {reason}")

    def _ensure_model(self, request: dict[str, Any]) -> None:
        name = request["ModelName"]
        if none_if_missing(self._sagemaker.describe_model, ModelName=name) is None:
            self._sagemaker.create_model(**request)
            self._aws.say(f"created model {name}")

    def _ensure_configuration(self, request: dict[str, Any]) -> None:
        name = request["EndpointConfigName"]
        if (
            none_if_missing(self._sagemaker.describe_endpoint_config, EndpointConfigName=name)
            is None
        ):
            self._sagemaker.create_endpoint_config(**request)
            self._aws.say(f"created configuration {name}")

    def _create_or_update(self, configuration: str, existing: dict[str, Any] | None) -> None:
        names = {"EndpointName": self.name, "EndpointConfigName": configuration}
        if existing is None:
            self._sagemaker.create_endpoint(**names, Tags=deployment_tags(self.name))
            self._aws.say(f"created endpoint {self.name}")
        elif existing["EndpointConfigName"] != configuration:
            # Keep the number of instances that autoscaling has set.
            self._sagemaker.update_endpoint(**names, RetainAllVariantProperties=True)
            self._aws.say(f"updating endpoint {self.name}")

    def _ensure_component(self, request: dict[str, Any]) -> None:
        existing = self.describe_component()
        model_name = request["Specification"]["ModelName"]
        if existing is None:
            self._sagemaker.create_inference_component(**request)
            self._aws.say(f"created component {self.name}")
        elif existing["Specification"].get("ModelName") != model_name:
            self._sagemaker.update_inference_component(
                InferenceComponentName=self.name, Specification=request["Specification"]
            )
            self._aws.say(f"updating component {self.name}")

    def _wait(self, kind: str, timeout_s: float) -> None:
        """Wait for "endpoint" or "component". Raises DeployError if it fails or the time is up."""
        started, printed = self._aws.clock(), None
        while True:
            status, description = self._status(kind)
            waited = self._aws.clock() - started
            progress = (status, waited // _PROGRESS_INTERVAL_S)
            if progress != printed:
                printed = progress
                self._aws.say(f"{kind} {self.name}: {status} after {waited:.0f} s")
            if status in SETTLED:
                break
            if waited > timeout_s:
                raise DeployError(
                    f"{kind} {self.name} is still {status} after {waited:.0f} s (--timeout)"
                )
            self._aws.sleep(POLL_S)
        if status != "InService":
            raise DeployError(self._failure_message(kind, status, description))

    def _status(self, kind: str) -> tuple[str, dict[str, Any]]:
        is_endpoint = kind == "endpoint"
        description = self.describe() if is_endpoint else self.describe_component()
        if description is None:
            raise DeployError(f"{kind} {self.name} was removed in the meantime")
        key = "EndpointStatus" if is_endpoint else "InferenceComponentStatus"
        return description[key], description

    def _failure_message(self, kind: str, status: str, description: dict[str, Any]) -> str:
        reason = description.get("FailureReason", _NO_REASON)
        lines = last_lines(self._aws, self.name, _LOG_LINES)
        log = ["last lines of its log:", *lines] if lines else ["its log is empty"]
        return "\n".join([f"{kind} {self.name} is {status}: {reason}", *log])
