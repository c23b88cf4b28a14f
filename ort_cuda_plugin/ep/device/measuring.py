"""Times programs on a session's device, so that the autotuner can choose the fastest."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ...abi.core import PluginError, check, core, ffi, new_error
from ...clusters.cluster import Variant
from ...clusters.tuning import MeasuringTuner
from ...compiler.caches.timing_cache import device_identity, timing_cache
from ...compiler.kernel import KernelSpec
from ...compiler.toolchain import host_cpu, joined_digest
from ...program.lowering.context import DeviceProperties, Tuner
from ...progress.events import Task
from .device_cluster import DeviceCluster, Unnoted
from .devices import DriverError
from .libraries import library_versions
from .open_device import OpenDevice, kernel_library
from .substitutes import without_substitutes
from .thread_value import ThreadValue

logger = logging.getLogger("ort_cuda_plugin")


def tuner_of(device: OpenDevice, properties: DeviceProperties) -> MeasuringTuner:
    """Return the autotuner of a device, with the times in the user's cache."""
    info = device.info
    versions = {"driver": info.driver_version, **library_versions(properties.libraries)}
    if info.emulated:
        versions |= {"CPU": joined_digest(host_cpu())[:16], "kernels": device.target.arch}
    identity = device_identity(info.name, properties.compute_capability, properties.multiprocessors, versions)
    if info.emulated and not properties.emulated:
        identity += ", with the kernels of a GPU"
    return MeasuringTuner(timing_cache(), identity, lambda programs: measure(device, programs))


_tuner: ThreadValue[Tuner | None] = ThreadValue(None)


def choosing_by(tuner: Tuner | None) -> AbstractContextManager[None]:
    """Let ``tuner`` choose the schedules of the sessions that this thread creates in the block.

    None: a session chooses as its options say.
    """
    return _tuner.replaced_by(tuner)


def given_tuner() -> Tuner | None:
    """Return the tuner of `choosing_by` in this thread; None outside of its block."""
    return _tuner.value


def measure(device: OpenDevice, programs: Sequence[Variant]) -> list[float | None]:
    """Return the median execution time of each program, seconds; infinity if a kernel does not compile.

    None: the program failed for now, for example for lack of memory, and may run later.
    """
    specs = dict.fromkeys(spec for program in programs for spec in _kernels(program))
    try:
        kernel_library().get_many(
            list(specs), device.target
        )  # compiles in parallel; `_measure` gets the error of each kernel again
    except Exception as error:
        logger.info("autotune: compiling the candidate kernels failed, each is tried separately: %s", error)
    task = Task("measuring candidate kernels", len(programs))
    times = []
    for program in programs:
        times.append(_measure(device, program))
        task.advance(next((spec.name for spec in program.kernels), "a library call"))
    return times


def _kernels(program: Variant) -> list[KernelSpec]:
    return [*program.kernels, *(kernel for each in program.precomputations for kernel in each.kernels)]


def _measure(device: OpenDevice, program: Variant) -> float | None:
    try:
        kernel_library().get_many(_kernels(program), device.target)
    except Exception as error:
        logger.warning("autotune: a candidate is left out, since one of its kernels does not compile: %s", error)
        return math.inf
    try:
        cluster = DeviceCluster("measurement", device)
        try:
            cluster.add(program, Unnoted())
            seconds, failed = ffi.new("double *"), new_error()
            with without_substitutes():
                core().cluster_measure(cluster.pointer, seconds, failed)
            check(failed)
            return float(seconds[0]) or None
        finally:
            cluster.close()
    except (PluginError, DriverError, MemoryError) as error:
        logger.warning("autotune: a candidate could not be measured: %s", error)
        return None
