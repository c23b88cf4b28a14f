"""Emission: generates kernels for elementwise steps, row programs, GEMMs, convolutions and attention from their
schedules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ...kernels.attention.flash_step import launch_flash
from ...kernels.attention.multi_pass import launch_attend
from ...kernels.conv.dispatch import launch_convolve
from ...kernels.elementwise.map import launch_map
from ...kernels.gemm.dispatch import launch_contract
from ...kernels.reduction.split_rows import launch_rows
from ...program.lowering.context import Lowering
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.schedule import Engine
from ...program.steps.steps import Attend, Contract, Convolve, Map, Rows, Sums
from ...program.steps.tensor import Buffer
from ...program.steps.trace import InPlace, Launch, Recordable, Step
from ...schedule.choose import scheduled
from ...schedule.reasons import note_schedule
from .repeated_steps import Emissions, copy_launches
from .step_structure import Inspected, inspecting, structure_of

__all__ = ["StepTrials", "emit", "launch_step"]


def emit(ctx: Lowering, steps: Iterable[Step]) -> list[Recordable]:
    """Emit a kernel for each step that is not yet a launch.

    A step may become several launches, such as a copy of weights before a GEMM.

    Assumes: kernels are selected. A contraction has no schedule if a later pass changed it or split it off another one;
        rules then choose one of the plugin's kernels.
    Guarantees: only launches, library calls, copies, fills, read-backs and Python callbacks are left. The launches of
        an elementwise step list the inputs that may share memory with a result. The guards of the kernels become guards
        of the plan.
    Example: ``y = Relu(MatMul(a, b))`` -> ``launch matmul_relu(a, b, y)``.
    """
    launched: list[Recordable] = []
    emissions = Emissions()
    for step in steps:
        if not isinstance(step, Map):
            launched.append(step)
            continue
        # None with a tuner: the tuner may measure each step by itself
        structure = structure_of(step) if ctx.tuner is None else None
        known = emissions.find(structure)
        if known is not None and structure is not None:
            with ctx.recording(step.nodes) as copies:
                copy_launches(ctx, step, known, structure.buffers)
            launched += emit(ctx, copies)
            continue
        requirements = len(ctx.trace.requirements)
        with (
            inspecting(structure.buffers if structure is not None else ()) as inspected,
            ctx.recording(step.nodes) as made,
        ):
            launch_step(ctx, step)
        if not isinstance(step, Rows | Sums):
            _allow_in_place(step, made)
        own = emit(ctx, made)
        launched += own
        if structure is not None and len(ctx.trace.requirements) == requirements:
            emissions.add(step, structure, inspected, own)
    return launched


class StepTrials:
    """Generates the kernels of the steps of a claimed node, to find out early whether that fails.

    Steps of equal structure share one trial, if the constants that the kernels depend on are equal as well.
    """

    def __init__(self) -> None:
        self._tried: dict[Hashable, Inspected] = {}

    def __call__(self, ctx: Lowering, step: Map) -> None:
        """Generate the kernels of a step unless a step of equal structure, with equal `Inspected` constants, has been
        tried. Raises the errors of `launch_step`.
        """
        structure = structure_of(step)
        if structure is None:
            launch_step(ctx, step)
            return
        tried = self._tried.get(structure.key)
        if tried is None or not tried.are_equal(structure.buffers):
            with inspecting(structure.buffers) as inspected:
                launch_step(ctx, step)
            self._tried[structure.key] = inspected


def _allow_in_place(step: Map, launched: Iterable[Step]) -> None:
    """Record in the launches of an elementwise step which inputs may share memory with a result.

    A thread of an elementwise kernel loads its elements of all inputs before it stores its elements of the results. So
    an input and a result may share memory if every thread reads and writes the same elements of it.
    """
    indices: dict[Buffer, list[tuple[object, ...]]] = {}
    for x in (x for tensors in (step.inputs, step.outputs) for _, x in tensors):
        strides = broadcast_strides(x, step.shape)
        along = tuple(stride for dim, stride in zip(step.shape, strides, strict=True) if dim != 1)
        indices.setdefault(x.buffer, []).append((x.dtype.itemsize, x.offset, along))
    pairs = tuple(
        InPlace(read, written)
        for written in step.writes
        for read in step.reads
        if read is not written and len(set(indices[read] + indices[written])) == 1
    )
    for launch in launched:
        if isinstance(launch, Launch):
            launch.in_place = tuple(pair for pair in pairs if pair.written in launch.writes)


def launch_step(ctx: Lowering, step: Map) -> None:
    """Generate the kernels of one step, and record their launches."""
    if isinstance(step, Sums):
        _launch_contraction(ctx, scheduled(ctx, step))
    elif isinstance(step, Rows):
        launch_rows(ctx, step)
    else:
        launch_map(ctx, step)


def _launch_contraction(ctx: Lowering, step: Sums) -> None:
    """Record the launches of the step's schedule, each with the schedule and the reason for its choice."""
    assert step.schedule is not None
    before = len(ctx.trace.steps)
    match step:
        case Contract():
            launch_contract(ctx, step)
        case Convolve():
            launch_convolve(ctx, step)
        case Attend() if step.schedule.engine in (Engine.FLASH, Engine.FLASH_MMA):
            launch_flash(ctx, step)
        case Attend():
            launch_attend(ctx, step)
    note_schedule(ctx.trace.steps[before:], step.schedule, step.why)
