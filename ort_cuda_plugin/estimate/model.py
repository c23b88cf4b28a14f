"""The estimate: the time of each step of a Run on a GPU, the resource that bounds it, and the roofline of the Run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..compiler.kernel import KernelSpec
from ..compiler.targets import Target
from ..gpus import Gpu
from ..gpus.accuracy import error_text, run_range, step_range
from ..gpus.constants import Constants
from . import libraries
from .cache_model import Served, served
from .count import Counted, count_all
from .pipes import described, kernel_seconds, operations, uses_tensor_cores
from .roofline import model_roofline, step_rooflines
from .sass import Code, code_of
from .transfers.weight_streaming import Streaming
from .work import CopyStep, KernelStep, LibraryStep, Step, Work


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of one step on a GPU.

    ``seconds`` is its time, ``parts`` the time of each pipe alone and of the launch; ``bound`` names the longest of
    them. ``roofline`` is the minimum time. ``share`` is the fraction of the peak of the pipe ``bound`` that the step
    reaches. ``dram`` are the bytes of device memory traffic, ``touched`` the bytes of the tensors that the step reads
    and writes, ``details`` the counts of the kernel or call by their names.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    seconds: float
    roofline: float
    bound: str
    share: float
    touched: float
    dram: float
    flops: float
    parts: Mapping[str, float]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """The estimates of all steps of a Run on a GPU, and the rooflines of the Run.

    ``compulsory`` are the bytes of inputs, weights and outputs, each once; ``flops`` the operations of GEMMs and
    convolutions. ``roofline`` is the longer of the times that these bytes and operations take, at the GPU's peak rates.
    It depends on the model and the GPU only: it includes neither intermediate tensors nor launches. ``calibrated``
    names the device whose measured rates are those of ``device`` and ``constants``; "" if they were not measured.
    ``streaming`` are the copies of weights that a weight budget causes; None without a budget.
    """

    device: Gpu
    constants: Constants
    steps: tuple[StepEstimate, ...]
    compulsory: float
    flops: float
    roofline: float
    elsewhere: tuple[str, ...] = ()
    calibrated: str = ""
    streaming: Streaming | None = None

    @property
    def label(self) -> str:
        """Return the name of the GPU for titles, with "calibrated" if its rates were measured."""
        return f"{self.device.name}, calibrated" if self.calibrated else self.device.name

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps) + (self.streaming.waiting if self.streaming else 0.0)

    @property
    def steps_roofline(self) -> float:
        """Return the sum of the steps' rooflines: the minimum time of a Run with these steps, in the model's types."""
        return sum(step.roofline for step in self.steps)

    @property
    def ratio(self) -> float:
        """Return the estimated time divided by the model's roofline."""
        return self.seconds / self.roofline if self.roofline else 0.0

    @property
    def steps_ratio(self) -> float:
        """Return the estimated time divided by the steps' roofline."""
        return self.seconds / self.steps_roofline if self.steps else 0.0

    @property
    def dram(self) -> float:
        return sum(step.dram for step in self.steps)

    def data(self) -> dict[str, Any]:
        """Return the estimate as plain data that JSON can represent."""
        return {
            "device": self.device.name,
            "calibrated": self.calibrated,
            "accuracy": error_text(),
            "seconds": self.seconds,
            "seconds_range": list(run_range(self.seconds)),
            "roofline_seconds": self.roofline,
            "ratio": self.ratio,
            "steps_roofline_seconds": self.steps_roofline,
            "steps_ratio": self.steps_ratio,
            "compulsory_bytes": self.compulsory,
            "dram_bytes": self.dram,
            "flops": self.flops,
            "elsewhere": list(self.elsewhere),
            "streaming": None if self.streaming is None else asdict(self.streaming),
            "constants": asdict(self.constants),
            "steps": [{**asdict(step), "seconds_range": list(step_range(step.seconds))} for step in self.steps],
        }


@dataclass(frozen=True)
class Prepared:
    """A Run with all derived quantities that do not depend on the constants of the performance model."""

    work: Work
    device: Gpu
    code: Mapping[KernelSpec, Code]
    counts: Mapping[int, Counted]
    _served: dict[float, list[Served]] = field(default_factory=dict)

    def served(self, cache_bytes: float) -> list[Served]:
        """Return the L2 and device memory traffic of each step, for an L2 of ``cache_bytes``."""
        if cache_bytes not in self._served:
            self._served[cache_bytes] = served(self.work.regions, self.work.steps, cache_bytes)
        return self._served[cache_bytes]


def prepare(work: Work, device: Gpu, *, count: bool = True) -> Prepared:
    """Derive from ``work`` all that the estimate needs and that does not depend on the constants.

    With ``count``, compile the kernels for the GPU and count their instructions on the emulated device; otherwise only
    the bytes of a kernel are known. Raises KernelCompileError, and CudaError if a kernel fails on the emulated device.
    """
    code: dict[KernelSpec, Code] = {}
    counts: dict[int, Counted] = {}
    specs = list(dict.fromkeys(step.kernel for step in work.steps if isinstance(step, KernelStep)))
    if count and specs:
        code = dict(zip(specs, code_of(specs, Target.cuda(*device.compute_capability)), strict=True))
        counts = count_all(work, code)
    return Prepared(work, device, code, counts)


def estimate(work: Work, device: Gpu, constants: Constants | None = None, *, count: bool = True) -> Estimate:
    """Return the estimate of the Run ``work`` on the GPU. Raises the errors of `prepare`."""
    return timed(prepare(work, device, count=count), constants or Constants.at(device.clock))


def timed(prepared: Prepared, constants: Constants) -> Estimate:
    """Return the estimate of a prepared Run with these constants."""
    work, device = prepared.work, prepared.device
    memory = prepared.served(device.l2_bytes * constants.l2_share)
    counted = {number: operations(count) for number, count in prepared.counts.items()}
    rooflines = step_rooflines(work, device, constants, prepared.served(device.l2_bytes), counted)
    timer = _Timer(device, constants, prepared.code)
    steps = tuple(
        replace(timer.step(step, moved, prepared.counts.get(number)), roofline=roofline)
        for number, (step, moved, roofline) in enumerate(zip(work.steps, memory, rooflines, strict=True))
    )
    return Estimate(device, constants, steps, *model_roofline(work, device), work.elsewhere)


class _Timer:
    """Computes the time of each step on a GPU."""

    def __init__(self, device: Gpu, constants: Constants, code: Mapping[KernelSpec, Code]) -> None:
        self.device = device
        self.constants = constants
        self.code = code

    def step(self, step: Step, moved: Served, counted: Counted | None) -> StepEstimate:
        if isinstance(step, LibraryStep):
            return self._library(step, moved)
        if isinstance(step, KernelStep):
            return self._kernel(step, moved, counted)
        assert isinstance(step, CopyStep)
        return self._made(step.kind, step.kind, step, moved, self._memory(step, moved), 0.0)

    def _memory(self, step: Step, moved: Served, l2_read: float | None = None) -> dict[str, float]:
        """Return the seconds that L2 and device memory take for a step.

        ``l2_read`` are the bytes that the step reads from the L2; None if it reads each tensor once.
        """
        device, constants = self.device, self.constants
        read = step.read_bytes if l2_read is None else l2_read
        return {
            "dram": moved.dram / (device.dram * constants.dram),
            "l2": device.l2_seconds(read, step.written_bytes) / constants.l2,
        }

    def _library(self, step: LibraryStep, moved: Served) -> StepEstimate:
        call = libraries.call(step, self.device, self.constants)
        parts = self._memory(step, moved, call.l2_bytes)
        parts["tensor" if call.tensor else "float32"] = call.seconds
        # Layout conversions are separate kernels, one after the other.
        beside = call.transposed / (self.device.dram * self.constants.dram)
        beside += self.constants.product_seconds + self.constants.library_seconds
        beside += (call.kernels - 1) * self.constants.launch_seconds
        name = f"{'cuBLASLt' if step.kind == 'matmul' else 'cuDNN'} {'x'.join(map(str, _shape(step)))}"
        details = {"note": step.note, "transposed_bytes": call.transposed, "kernels": call.kernels}
        return self._made(name, step.kind, step, moved, parts, beside, call.flops, details, call.transposed)

    def _kernel(self, step: KernelStep, moved: Served, counted: Counted | None) -> StepEstimate:
        details: dict[str, Any] = {"grid": step.grid, "block": step.block}
        if counted is None:
            parts = self._memory(step, moved)
            return self._made(
                step.kernel.name, "kernel", step, moved, parts, self.constants.dram_latency, details=details
            )
        code = self.code[step.kernel]
        parts, fits = kernel_seconds(step, counted, code, self.device, self.constants, moved.dram)
        details |= described(counted, code, fits, step.nbytes)
        start = self.constants.product_seconds if uses_tensor_cores(counted) else 0.0
        return self._made(step.kernel.name, "kernel", step, moved, parts, start, details=details)

    def _made(
        self,
        name: str,
        kind: str,
        step: Step,
        moved: Served,
        parts: dict[str, float],
        beside: float,
        flops: float = 0.0,
        details: Mapping[str, Any] | None = None,
        more_bytes: float = 0.0,
    ) -> StepEstimate:
        parts = {**parts, "launch": self.constants.launch_seconds + beside}
        bound = max(parts, key=lambda pipe: parts[pipe])
        work = max(seconds for pipe, seconds in parts.items() if pipe != "launch")
        seconds = work + parts["launch"]
        dram = moved.dram + more_bytes
        share = self._share(bound, seconds, dram, parts)
        return StepEstimate(
            name, kind, step.nodes, seconds, 0.0, bound, share, step.nbytes, dram, flops, parts, details or {}
        )

    def _share(self, bound: str, seconds: float, dram: float, parts: Mapping[str, float]) -> float:
        if bound == "dram":
            return dram / seconds / self.device.dram
        peak = {"l2": self.constants.l2, "tensor": self.constants.tensor_library * self.device.tensor_share}
        return parts[bound] / seconds * peak.get(bound, 1.0) if bound != "launch" else 0.0


def _shape(step: LibraryStep) -> Sequence[int]:
    if step.kind == "matmul":
        m, n, k = step.sizes[:3]
        return [m, n, k] if step.sizes[6] == 1 else [step.sizes[6], m, n, k]
    images, channels, rows = step.sizes[:3]
    return [images, channels, *(step.sizes[5 + 7 * axis] for axis in range(step.rank)), rows]
