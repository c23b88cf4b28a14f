"""Rates how well a compiled model fits a device, by the compatibility string in the model's metadata."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence

from ..compiler.targets import Target
from ..compiler.toolchain import toolkit_version
from ..plan.format import version as plan_version
from .fits import driver_runs
from .storage.container import VERSION
from .writer import cpu_digest


class Fit(enum.IntEnum):
    """Values of ONNX Runtime's ``OrtCompiledModelCompatibility``."""

    NOT_APPLICABLE = 0
    OPTIMAL = 1
    USABLE = 2
    UNSUPPORTED = 3


def compatibility_info(architectures: Sequence[str]) -> str:
    """Return the compatibility string: format versions, architectures, toolkit, and the CPU of emulated kernels."""
    cpu = cpu_digest(Target.emulated())[:16] if "emulated" in architectures else ""
    toolkit = toolkit_version() if any(arch.startswith("sm_") for arch in architectures) else ""
    versions = f"format={VERSION[0]}.{VERSION[1]};plans={plan_version};toolkit={toolkit}"
    return f"{versions};for={','.join(architectures)};cpu={cpu}"


def fit(info: str, target: Target, allow_host_code: bool, driver_version: str = "") -> Fit:
    """Rate a compiled model for a device by its compatibility string.

    OPTIMAL: the model has code for ``target`` that can run. USABLE: the session uses code for another architecture, or
    compiles the model again. UNSUPPORTED: the context format has another major version. NOT_APPLICABLE: the string is
    not the plugin's. ``allow_host_code`` says whether code of the model may run on this computer's CPU.
    ``driver_version`` is the CUDA version of the device's driver. The string has no schedules, so the rating ignores
    the device's quarantine.
    """
    fields = dict(part.partition("=")[::2] for part in info.split(";"))
    major = re.match(r"(\d+)\.\d+$", fields.get("format", ""))
    if major is None:
        return Fit.NOT_APPLICABLE
    if int(major[1]) != VERSION[0]:
        return Fit.UNSUPPORTED
    if fields.get("plans") != str(plan_version) or target.arch not in fields.get("for", "").split(","):
        return Fit.USABLE
    if target.is_emulated and not (allow_host_code and fields.get("cpu") == cpu_digest(target)[:16]):
        return Fit.USABLE
    if not target.is_emulated and not driver_runs(fields.get("toolkit", ""), driver_version):
        return Fit.USABLE
    return Fit.OPTIMAL
