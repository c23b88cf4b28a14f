"""Makes and keeps the substitutes of library calls that are refused on a device."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ...abi.core import ffi
from ...clusters.library_substitute import substitute_of
from ...compiler.caches.refusal_cache import refusal_cache
from ...model.ir import Unsupported
from ...program.steps.libraries import LibraryProblem, Refusals
from . import quarantined
from .device_cluster import DeviceCluster, Unnoted
from .open_device import OpenDevice, open_device_at
from .thread_value import ThreadValue

logger = logging.getLogger("ort_cuda_plugin")

KINDS = ("matrix product", "convolution", "attention")
"""Names of the kinds of problems, for messages."""


@dataclass(frozen=True)
class RefusedCall:
    """A call that ``library`` refuses because of ``why``.

    ``values`` are the call's integer arguments; the last one is the size of its workspace in bytes.
    ``lasts``: whether later processes should avoid the call.
    """

    library: str
    problem: LibraryProblem
    values: tuple[int, ...]
    why: str
    lasts: bool


class Refused(Exception):
    """A library refused a call whose time is being measured."""


class NoSubstitute(Exception):
    """The plugin has no kernel for a refused library call, or the selftest has quarantined this kernel."""

    ort_code = 1  # ORT_FAIL


class Substitutes:
    """The substitutes of one device. They live as long as a cluster of the device has library problems. Thread safe."""

    def __init__(self, device: OpenDevice) -> None:
        self._device = device
        device.release_substitutes = self.release
        self._lock = threading.Lock()
        self._made: dict[tuple[LibraryProblem, tuple[int, ...]], tuple[Any, DeviceCluster]] = {}

    def pointer(self, call: RefusedCall) -> Any:
        """Return the ``ocp_substitute *`` of a call. The first request for a problem with these sizes makes the
        substitute, and remembers the refusal.

        Raises:
            Refused: an autotuner measures the call.
            ImportError: the compiler of the plugin is not installed.
            NoSubstitute: the plugin has no kernel for the call, or the selftest has quarantined it.
        """
        if _measures.value:
            raise Refused("the autotuner measures the library's call")
        with self._lock:
            key = call.problem, call.values
            if key not in self._made:
                self._made[key] = self._make(call)
                self._remember(call)
            return self._made[key][0]

    def release(self) -> None:
        """Release all substitutes. No Run may be active."""
        with self._lock:
            made = [*self._made.values()]
            self._made.clear()
        for _, cluster in made:
            cluster.close()

    def _make(self, call: RefusedCall) -> tuple[Any, DeviceCluster]:
        quarantine = quarantined.load(self._device)
        properties = replace(self._device.properties(), libraries=frozenset(), quarantine=quarantine)
        try:
            substitute = substitute_of(call.problem, call.values, properties)
        except Unsupported as error:
            raise NoSubstitute(error.reason) from error
        cluster = DeviceCluster(f"substitute of a {KINDS[call.problem.kind]}", self._device)
        try:
            cluster.add(substitute.variant, Unnoted())
        except BaseException:
            cluster.close()
            raise
        made = ffi.new("ocp_substitute *")
        made.cluster, made.dtype, made.num_inputs = cluster.pointer, call.problem.dtype, len(substitute.elements)
        made.elements[0 : len(substitute.elements)] = substitute.elements
        return made, cluster

    def _remember(self, call: RefusedCall) -> None:
        refusal = Refusals.refusal(call.problem, call.values[:-1])
        is_first = self._device.refusals.add(refusal)
        sizes = ", ".join(map(str, call.values[:-1]))
        text = f"{call.library} refuses a {KINDS[call.problem.kind]} of sizes {sizes}: {call.why}"
        self._device.refusals.latest = text
        logger.log(
            logging.WARNING if is_first else logging.INFO,
            "%s. A kernel of the plugin replaces the call, which can be slower%s",
            text,
            "; later sessions on this device do not try the call again" if call.lasts else "",
        )
        if call.lasts and self._device.keeps_refusals:
            refusal_cache().keep(self._device.identity, refusal)


_measures = ThreadValue(False)


def without_substitutes() -> AbstractContextManager[None]:
    """Let refused library calls in this thread's Runs fail within the block, so that no substitute is timed instead."""
    return _measures.replaced_by(True)


_substitutes: dict[OpenDevice, Substitutes] = {}
_lock = threading.Lock()


def substitutes_of(pointer: Any) -> Substitutes:
    """Return the substitutes of the device with this ``ocp_device *``."""
    with _lock:
        device = open_device_at(pointer)
        if device not in _substitutes:
            _substitutes[device] = Substitutes(device)
        return _substitutes[device]
