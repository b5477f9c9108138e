"""A deployment's endpoint: a model and a configuration behind a name."""

from __future__ import annotations

from typing import Any

from deploy.aws import TAG, Aws, found, tags
from deploy.deployment import Deployment
from deploy.errors import DeployError
from deploy.logs import last_lines
from deploy.resources import tags_of

POLL_S = 15.0
SETTLED = ("InService", "Failed", "OutOfService", "UpdateRollbackFailed")
_SAID_EVERY_S = 60.0
_LOG_LINES = 20


class Endpoint:
    """The endpoint of a name, and its inference component of the same name, if it has one."""

    def __init__(self, aws: Aws, name: str) -> None:
        self._aws = aws
        self._sagemaker = aws.sagemaker
        self.name = name

    def describe(self) -> dict[str, Any] | None:
        """SageMaker's description; None where there is none."""
        return found(self._sagemaker.describe_endpoint, EndpointName=self.name)

    def describe_component(self) -> dict[str, Any] | None:
        return found(self._sagemaker.describe_inference_component, InferenceComponentName=self.name)

    def ensure(self, deployment: Deployment, model_uri: str, timeout_s: float) -> None:
        """Makes what is missing, changes what is different, and waits until all is in service.

        Raises DeployError for an endpoint of the name that is not ours, or that fails: then with
        SageMaker's reason and the last lines of its log.
        """
        there = self.describe()
        if there is not None:
            self._check_usable(there)
            if there["EndpointStatus"] not in SETTLED:  # SageMaker makes one change at a time
                self._wait("endpoint", timeout_s)
                there = self.describe()
        model = deployment.model_request(model_uri)
        configuration = deployment.configuration_request(model["ModelName"])
        self._make_model(model)
        self._make_configuration(configuration)
        self._point_to(configuration["EndpointConfigName"], there)
        self._wait("endpoint", timeout_s)
        if deployment.is_component:
            self._make_component(deployment.component_request(model["ModelName"]))
            self._wait("component", timeout_s)

    def _check_usable(self, description: dict[str, Any]) -> None:
        if tags_of(self._aws, description["EndpointArn"]).get(TAG) != self.name:
            raise DeployError(
                f"endpoint {self.name} exists and is not ours (it lacks the tag "
                f"{TAG}={self.name}); choose another --name"
            )
        if description["EndpointStatus"] == "Failed":
            reason = description.get("FailureReason", "SageMaker does not say why")
            raise DeployError(
                f"endpoint {self.name} has failed and must be removed first: {reason}"
            )

    def _make_model(self, request: dict[str, Any]) -> None:
        name = request["ModelName"]
        if found(self._sagemaker.describe_model, ModelName=name) is None:
            self._sagemaker.create_model(**request)
            self._aws.say(f"made model {name}")

    def _make_configuration(self, request: dict[str, Any]) -> None:
        name = request["EndpointConfigName"]
        if found(self._sagemaker.describe_endpoint_config, EndpointConfigName=name) is None:
            self._sagemaker.create_endpoint_config(**request)
            self._aws.say(f"made configuration {name}")

    def _point_to(self, configuration: str, there: dict[str, Any] | None) -> None:
        names = {"EndpointName": self.name, "EndpointConfigName": configuration}
        if there is None:
            self._sagemaker.create_endpoint(**names, Tags=tags(self.name))
            self._aws.say(f"made endpoint {self.name}")
        elif there["EndpointConfigName"] != configuration:
            # The number of instances that autoscaling has come to stays.
            self._sagemaker.update_endpoint(**names, RetainAllVariantProperties=True)
            self._aws.say(f"updating endpoint {self.name}")

    def _make_component(self, request: dict[str, Any]) -> None:
        there = self.describe_component()
        model_name = request["Specification"]["ModelName"]
        if there is None:
            self._sagemaker.create_inference_component(**request)
            self._aws.say(f"made component {self.name}")
        elif there["Specification"].get("ModelName") != model_name:
            self._sagemaker.update_inference_component(
                InferenceComponentName=self.name, Specification=request["Specification"]
            )
            self._aws.say(f"updating component {self.name}")

    def _wait(self, what: str, timeout_s: float) -> None:
        """what: endpoint or component."""
        started, said = self._aws.clock(), None
        while True:
            status, description = self._status(what)
            waited = self._aws.clock() - started
            news = (status, waited // _SAID_EVERY_S)
            if news != said:
                said = news
                self._aws.say(f"{what} {self.name}: {status} after {waited:.0f} s")
            if status in SETTLED:
                break
            if waited > timeout_s:
                raise DeployError(
                    f"{what} {self.name} is still {status} after {waited:.0f} s (--timeout)"
                )
            self._aws.sleep(POLL_S)
        if status != "InService":
            raise DeployError(self._why(what, status, description))

    def _status(self, what: str) -> tuple[str, dict[str, Any]]:
        is_endpoint = what == "endpoint"
        description = self.describe() if is_endpoint else self.describe_component()
        if description is None:
            raise DeployError(f"{what} {self.name} was removed meanwhile")
        key = "EndpointStatus" if is_endpoint else "InferenceComponentStatus"
        return description[key], description

    def _why(self, what: str, status: str, description: dict[str, Any]) -> str:
        reason = description.get("FailureReason", "SageMaker does not say why")
        lines = last_lines(self._aws, self.name, _LOG_LINES)
        log = ["the last lines of its log:", *lines] if lines else ["it has logged nothing"]
        return "\n".join([f"{what} {self.name} is {status}: {reason}", *log])
