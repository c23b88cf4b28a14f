"""A fused node on the device: builds plan variants on request of the C executor, and adds them to its cluster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ...abi.core import PluginError, check, core, count, ffi, new_error
from ...clusters.cluster import CompiledCluster, Variant
from ...context.reader import StoredCluster
from ...context.storage.errors import MALFORMED, ContextError, MissingCompiler
from ...plan.placement import BudgetShare, StreamingSchedule, WeightPlacement
from ...program.analysis.traffic import ProgramTraffic
from ..device.cluster_handles import read_weight
from ..device.device_cluster import DeviceCluster
from ..device.open_device import OpenDevice
from .call_stream import CallKernels, RunStream
from .handles import HandleTable
from .plan_history import ALL_SIZES_KNOWN, FIRST, PlanHistory


class CallError(Exception):
    """A callback of the application failed in a Run. ONNX Runtime's log has the traceback as an error."""

    ort_code = 1  # ORT_FAIL
    log_level = "ERROR"


class FusedNode:
    """Owns an ``ocp_cluster`` with its kernels and weights. `build` may be called from any thread.

    ``why`` is the reason why a cluster of a compiled model is compiled again. ``log`` receives a line for each plan
    that is built. ``weight_budget``: the limit of device memory for the node's weights; None: no limit.
    """

    def __init__(
        self,
        name: str,
        cluster: CompiledCluster | StoredCluster,
        device: OpenDevice,
        why: str = "",
        log: Callable[[str], None] = lambda line: None,
        weight_budget: BudgetShare | None = None,
    ) -> None:
        self.name = name
        self._why = why
        self._log = log
        self._history = PlanHistory(name, cluster.input_names)
        self._cluster = cluster
        self._device = device
        self._call_kernels = CallKernels(device)
        cluster.weight_reader.read = self._read_weight
        if isinstance(cluster, CompiledCluster):
            cluster.tell = log
        self._placement = None if weight_budget is None else WeightPlacement(name, weight_budget)
        self._lock = threading.Lock()
        self.handle = FUSED_NODES.add(self)
        try:
            are_stored = isinstance(cluster, StoredCluster)
            self._on_device = DeviceCluster(name, device, self.handle, are_stored=are_stored, placement=self._placement)
        except MemoryError:
            FUSED_NODES.pop(self.handle)
            raise
        self.pointer = self._on_device.pointer

    def use_graphs(self, warm_runs: int, most: int) -> None:
        """Replay plans as CUDA graphs after ``warm_runs`` Runs with the same sizes. Keep ``most`` graphs at most.

        May be called during Runs. A node makes no graphs before this call, or with ``most`` 0.
        """
        core().cluster_set_graphs(self.pointer, warm_runs, most)
        if most == 0:
            core().cluster_release_graphs(self.pointer)

    def prepare(self, later: bool = False) -> None:
        """Copy the constants that ONNX Runtime is about to free, and build the plan now if the model fixes all shapes.

        With ``later`` only copy: the first Run builds the plan and compiles kernels.

        Raises:
            NodeError: a node cannot be run after all.
            PluginError: no device memory for the weights, or the plan is not valid.
        """
        with self._lock, self._compiling([], []):
            begun = time.perf_counter()
            variant = self._cluster.prepare()
            host_inputs = self._cluster.host_inputs
            if host_inputs:
                error = new_error()
                core().cluster_set_host_inputs(self.pointer, host_inputs, len(host_inputs), error)
                check(error)
            if not later:
                self._add(variant)
                self._built(variant, None, {}, time.perf_counter() - begun, ALL_SIZES_KNOWN)
            elif isinstance(self._cluster, CompiledCluster):
                self._cluster.keep_constants()

    def refuse_capture(self, fed: Collection[str]) -> None:
        """Refuse to capture Runs in which the host reads inputs whose names are in ``fed``. Call it after `prepare`."""
        names = dict(enumerate(self._cluster.input_names))
        inputs = [index for index in self._cluster.host_inputs if names.get(index) in fed]
        error = new_error()
        core().cluster_set_fed_inputs(self.pointer, inputs, len(inputs), error)
        check(error)

    def build(self, shapes: Sequence[Sequence[int]], host_values: Sequence[Sequence[int]]) -> None:
        """Build the plan for inputs of these shapes, and add it to the cluster.

        ``host_values`` are the contents of each host input.

        Raises: as `prepare`.
        """
        with self._lock, self._compiling(shapes, host_values):
            begun = time.perf_counter()
            contents = dict(zip(self._cluster.host_inputs, host_values, strict=True))
            reason = self._history.reason(shapes, contents)
            if isinstance(self._cluster, StoredCluster) and reason == FIRST:
                reason = self._cluster.explain(shapes, host_values)
            variant = self._cluster.build(shapes, host_values)
            self._add(variant)
            self._built(variant, shapes, contents, time.perf_counter() - begun, reason)

    def _built(
        self,
        variant: Variant,
        shapes: Sequence[Sequence[int]] | None,
        contents: Mapping[int, Sequence[int]],
        seconds: float,
        reason: str,
    ) -> None:
        if variant.plan is not None:
            self._log(str(self._history.add(variant.plan, shapes, contents, seconds, reason)))

    @contextlib.contextmanager
    def _compiling(self, shapes: Sequence[Sequence[int]], host_values: Sequence[Sequence[int]]) -> Iterator[None]:
        """Explain errors in the block for a cluster of a compiled model: a missing compiler, or contradictory data."""
        try:
            yield
        except ImportError as error:
            if isinstance(self._cluster, StoredCluster):
                raise self._cluster.unforeseen(shapes, host_values, error) from error
            if self._why:
                raise MissingCompiler(
                    f"{self._why}. But the plugin's compiler is not installed: {error}. Install it, or compile the "
                    "model for this device"
                ) from error
            raise
        except (*MALFORMED, PluginError) as error:
            is_damage = not isinstance(error, PluginError) or error.code == ContextError.ort_code
            if is_damage and (isinstance(self._cluster, StoredCluster) or self._why):
                what = str(error) if isinstance(error, PluginError) else repr(error)
                raise ContextError(
                    f"{self.name}: the compiled model contradicts itself ({what}); compile the model again"
                ) from error
            raise

    def plan_memory(self) -> tuple[int, int]:
        """Return two numbers of bytes for the intermediate tensors of the last Run: the size of the slab, and the peak
        of the bytes that are alive at once.

        Raises:
            RuntimeError: there was no Run yet, or one is running.
        """
        memory = ffi.new("ocp_plan_memory *")
        if not core().cluster_memory(self.pointer, memory):
            raise RuntimeError("plan memory: no Run has ended yet, or a Run is in progress. Ask when a Run has ended")
        return int(memory.planned), int(memory.alive_at_once)

    @property
    def traffic(self) -> ProgramTraffic | None:
        """Return the memory traffic of the plan that was compiled last, at the sizes for which it was built.

        Return None for a cluster of a compiled model.
        """
        return self._cluster.traffic if isinstance(self._cluster, CompiledCluster) else None

    def close(self) -> None:
        """Release cluster, weights and kernels. No Run may be active."""
        FUSED_NODES.pop(self.handle)
        self._cluster.weight_reader.read = None
        self._on_device.close()
        self._call_kernels.release()

    def _add(self, variant: Variant) -> None:
        self._on_device.add(variant, self._cluster)
        if variant.plan is not None:
            count("PLAN_VARIANTS_BUILT")

    def _read_weight(self, number: int) -> bytes:
        """Return a copy of the contents of the cluster's weight ``number``, from device or host memory."""
        weight, nbytes = self._on_device.weights[number]
        return read_weight(weight, nbytes, self._device)

    @property
    def streaming(self) -> list[StreamingSchedule]:
        """Return the schedules of the plans that upload weights, in the order in which the plans were added."""
        return [] if self._placement is None else list(self._placement.schedules)

    def call_back(self, number: int, addresses: Sequence[int], numbers: Sequence[int], stream: Any) -> None:
        """Run the callback that a record of a plan names, on any thread. ``stream``: the ``ocp_stream *`` of the Run.

        Raises:
            CallError: the application's code failed.
            PluginError: the device is lost.
        """
        callback, function = self._on_device.callbacks[number]
        run = RunStream(self._device, stream, self._call_kernels)
        arrays = callback.arrays(addresses, numbers, run.handle)
        try:
            function(arrays, numbers[callback.num_dims :], run)
        except PluginError:  # the device is lost, which is not the callback's error
            raise
        except Exception as error:
            raise CallError(f"{callback.name} failed with {type(error).__name__}: {error}") from error


FUSED_NODES: HandleTable[FusedNode] = HandleTable("fused node")
