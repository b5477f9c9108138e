"""GPUs of SageMaker's instance types.

The data come from GpuInfo in EC2's DescribeInstanceTypes, read in November 2026; SageMaker adds the
prefix `ml.`. Only types with GPUs from sm_80 to sm_90 are listed, as the kernels are compiled for
these.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.configuration.suggest import did_you_mean
from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Instance:
    """A SageMaker instance type."""

    name: str
    gpu: str
    num_gpus: int
    gpu_mib: int
    """Memory of each GPU, in MiB."""


_G_SIZES = {
    1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge",
    4: "12xlarge 24xlarge",
    8: "48xlarge",
}
_FAMILIES = {
    "g5": ("A10G", 22_888, _G_SIZES),
    "g6": ("L4", 22_888, _G_SIZES),
    "g6e": ("L40S", 45_776, _G_SIZES),
    "p4d": ("A100", 40_960, {8: "24xlarge"}),
    "p4de": ("A100", 81_920, {8: "24xlarge"}),
    "p5": ("H100", 81_920, {1: "4xlarge", 8: "48xlarge"}),
    "p5e": ("H200", 144_384, {8: "48xlarge"}),
    "p5en": ("H200", 144_384, {8: "48xlarge"}),
}
"""Per family: the GPU, its memory in MiB, and the instance sizes by number of GPUs."""
_TOO_OLD = {"g4dn": ("T4", "7.5"), "p3": ("V100", "7.0"), "p3dn": ("V100", "7.0")}
"""Families whose GPUs the kernels do not support: the GPU and its compute capability."""


def instances() -> dict[str, Instance]:
    """Return all instance types by name."""
    found = [
        Instance(f"ml.{family}.{size}", gpu, count, mib)
        for family, (gpu, mib, sizes) in _FAMILIES.items()
        for count, names in sizes.items()
        for size in names.split()
    ]
    return {instance.name: instance for instance in found}


def find_instance(name: str) -> Instance:
    """Return an instance type.

    Raises ConfigurationError, with a suggestion, if it is unknown or its GPU is too old.
    """
    known = instances()
    if name not in known:
        families = ", ".join(f"ml.{family}" for family in _FAMILIES)
        family = name.removeprefix("ml.").partition(".")[0]
        if family in _TOO_OLD:
            gpu, capability = _TOO_OLD[family]
            raise ConfigurationError(
                f"--instance-type {name}: its {gpu} has compute capability {capability}, and the "
                f"kernels need at least 8.0; families with newer GPUs are {families}"
            )
        raise ConfigurationError(
            f"--instance-type {name}: unknown{did_you_mean(name, known)}; the families are "
            f"{families}"
        )
    return known[name]
