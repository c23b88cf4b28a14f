"""The device that is tested, and its reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from ..api import chosen_device, create_session, described_by
from ..conformance.verdict import run_session
from ..ep.device.identity import is_our_name
from ..ep.device.libraries import library_versions
from ..ep.device.measuring import choosing_by
from ..ep.device.open_device import OpenDevice, use_device
from ..ep.device.quarantined import identity_of
from ..ep.provider import last_verdicts
from ..program.lowering.context import Tuner
from .sections.case import Array, Case

WIDENED = ("float16", "bfloat16")
"""Types whose expected results the CPU provider computes in float32. They are rounded once, as in the plugin's kernels.
"""


class Skipped(Exception):
    """A check does not apply to the device; the message gives the reason."""


@dataclass(frozen=True)
class Device:
    """The device that is tested: its kind, and its number among the devices of this kind.

    With ``takes_all``, a check is skipped unless the plugin runs all nodes of its model.
    """

    is_emulated: bool
    ordinal: int = 0
    takes_all: bool = True

    @property
    def reference(self) -> str:
        """Return the source of the expected results, see `reference_of`."""
        return reference_of(self.is_emulated)

    @property
    def memory(self) -> tuple[str, int, int]:
        """Return the last arguments of ``OrtValue.ortvalue_from_numpy`` for a value in the device's memory."""
        import onnxruntime as ort

        info = self._offered.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        return "gpu", self.ordinal, int(info.device_vendor_id)

    @property
    def _offered(self) -> Any:
        """Return the ``OrtEpDevice``. Raises RuntimeError if there is no such device."""
        return chosen_device(self.is_emulated, {"device_id": str(self.ordinal)} if self.ordinal else {})

    @property
    def opened(self) -> OpenDevice:
        """Return the open device. Raises RuntimeError if there is no such device."""
        return use_device(described_by(self._offered))

    def why_lost(self) -> str:
        """Return why the device no longer works, "" if it does."""
        try:
            self.opened.synchronize()
        except Exception as error:  # the driver or the plugin raised it
            return f"{type(error).__name__}: {error}"
        return ""

    def session(
        self, model: onnx.ModelProto, tuner: Tuner | None = None, options: Mapping[str, str] | None = None
    ) -> Any:
        """Return a session on the device.

        Raises: Skipped: the plugin declines a node although ``takes_all`` is set; the message has the reason.
        """
        given = {"claim_unprofitable_nodes": "1", **(options or {})}
        if self.ordinal:
            given["device_id"] = str(self.ordinal)
        with choosing_by(tuner):
            return _on_plugin(model, self.is_emulated, given, self.takes_all)

    def expected(self, case: Case) -> list[Array]:
        """Return the results of the reference. Raises Skipped if it cannot run the model."""
        narrow = case.model()
        if not self.is_emulated:
            return run_session(
                _on_plugin(narrow, True, {"claim_unprofitable_nodes": "1"}), [*case.feeds(narrow).values()]
            )
        import onnxruntime as ort

        found, reason = None, ""
        for type_name in dict.fromkeys(["float" if case.type in WIDENED else case.type, *_others(case)]):
            model = case.model(type_name)
            try:
                session = ort.InferenceSession(
                    model.SerializeToString(), _options(), providers=["CPUExecutionProvider"]
                )
                found = run_session(session, [*case.feeds(model).values()])
                break
            except Exception as error:  # ONNX Runtime raises errors of its own types
                reason = " ".join(str(error).split())[:200]
        if found is None:
            raise Skipped(f"the CPU provider, for comparison, cannot run the model: {reason}")
        kinds = [value.type.tensor_type.elem_type for value in narrow.graph.output]
        types = [onnx.helper.tensor_dtype_to_np_dtype(kind) for kind in kinds]
        return [result.astype(dtype) for result, dtype in zip(found, types, strict=True)]


def _others(case: Case) -> list[str]:
    """Return further element types in which the reference may compute the case with the same results.

    An exact case has small integers, so float32 gives the results of float64.
    """
    return ["float"] if case.is_exact and case.type == "double" else []


def reference_of(is_emulated: bool) -> str:
    """Return the source of the expected results.

    A GPU is compared with the emulated device. The emulated device is compared with ONNX Runtime's CPU provider, which
    shares no kernel with it: a second emulated device would make the same mistake in a kernel.
    """
    return "CPU provider" if is_emulated else "emulated device"


def describe(device: Device) -> dict[str, Any]:
    """Return name, versions and identity of the device as JSON data."""
    opened = device.opened
    info = opened.info
    major, minor = info.compute_capability
    return {
        "name": info.name,
        "ordinal": info.ordinal,
        "emulated": info.emulated,
        "compute_capability": f"{major}.{minor}",
        "multiprocessors": info.multiprocessors,
        "memory_bytes": info.memory_bytes,
        "pci_bus_id": info.pci_bus_id,
        "driver": info.driver_version,
        "kernels": opened.target.arch,
        "libraries": library_versions(opened.properties().libraries),
        "identity": identity_of(opened),
    }


def _options() -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


def _on_plugin(model: onnx.ModelProto, emulate: bool, provider_options: dict[str, str], takes_all: bool = True) -> Any:
    session, _ = create_session(model.SerializeToString(), emulate, provider_options, _options())
    declined = [f"{verdict.op_type}: {verdict.reason}" for verdict in last_verdicts() if not verdict.supported]
    parts = session.get_provider_graph_assignment_info()
    others = [node.op_type for part in parts if not is_our_name(part.ep_name) for node in part.get_nodes()]
    if others and takes_all:
        raise Skipped(next(iter(declined), f"ONNX Runtime leaves {others[0]} to another provider"))
    return session
