"""Lowering of a Loop or Scan whose number of iterations is known only in a Run: the body becomes a part of the plan.

The body is lowered once. The loop-carried tensors (states) have the same memory in all iterations. The device counts
the iterations and evaluates the condition (`DeviceLoop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

from ...kernels.elementwise.device_loop import Counter, Slice, begin, copy_slices, count_iteration
from ...model.ir import DType, InvalidModel, Node, Unsupported
from ...passes.table import PASSES, run_passes
from ...program.expressions.symbolic import Dim, eq
from ...program.lowering.context import Lowering
from ...program.lowering.elementwise import elementwise
from ...program.lowering.recorder import copy_of
from ...program.steps.containers import Operand
from ...program.steps.steps import Map
from ...program.steps.tensor import Buffer, BufferKind, Tensor
from ...program.steps.trace import (
    Copy,
    DeviceLoop,
    Launch,
    LibraryCall,
    LoopCondition,
    Memset,
    Recordable,
    Step,
)
from .loop_states import update_in_place

PASSES_OF_BODY = [each for each in PASSES if each.name != "constant_folding"]
"""The passes that compile the steps of a loop. Loop-invariant steps move out of the loop, where the passes of the whole
plan fold constants.
"""


@dataclass(frozen=True)
class Slices:
    """A tensor whose slices along ``axis`` the iterations read; ``backwards``: the last slice first."""

    x: Tensor
    axis: int
    backwards: bool


@dataclass(frozen=True)
class Stack:
    """A result of the body whose values from all iterations are stacked along ``axis``.

    ``backwards``: the value of the last iteration comes first.
    """

    axis: int
    backwards: bool


@dataclass(frozen=True)
class Iteration:
    """The arguments of the body: the iteration's number (int64, from 0), the states, and a slice of each sequence."""

    number: Tensor
    states: tuple[Tensor, ...]
    slices: tuple[Tensor, ...]


@dataclass(frozen=True)
class LoopPlan:
    """A loop to lower.

    ``limit`` is the maximum number of iterations, a size or a tensor of one int64; None: no maximum. ``on`` is the
    first condition (bool, one element), None for true. ``lower`` lowers the body and returns its condition (None:
    true), the next states, and the values to stack.
    """

    node: Node
    limit: Dim | Tensor | None
    on: Tensor | None
    states: tuple[Tensor, ...]
    slices: tuple[Slices, ...]
    stacks: tuple[Stack, ...]
    lower: Callable[[Iteration], tuple[Tensor | None, Sequence[Operand], Sequence[Operand]]]


def carried_tensors(node: Node, operands: Iterable[Operand]) -> tuple[Tensor, ...]:
    """Return the operands, which a loop carries. Raises Unsupported if one is not a tensor."""
    return tuple(_tensor(node, operand) for operand in operands)


def lower_loop(ctx: Lowering, plan: LoopPlan) -> list[Operand]:
    """Record the loop, and return the last states and the stacked values.

    Raises Unsupported if the option ``device_loops`` is 0, if a state may change its shape, if the number of stacked
    values is unknown before the loop, or if the host must read a value that an iteration computes.
    """
    if not ctx.options.device_loops:
        raise Unsupported("control-flow", "the option device_loops is 0")
    for x in (*plan.states, *(each.x for each in plan.slices)):
        _refuse_packed(x)
    loop = _Loop(ctx, plan)
    with ctx.recording((plan.node,)) as first:
        loop.begin()
    with ctx.recording((plan.node,)) as body, _in_loop(ctx):
        loop.iterate()
    ctx.node = plan.node
    ctx.guessed = False
    reads = "reads a flag before each iteration" if loop.count is None else "knows the number of iterations"
    ctx.notes[plan.node] = f"a loop on the device; without a CUDA graph the host {reads}"
    if ctx.is_recording:
        _record(ctx, loop, first, body)
    return [*loop.states, *loop.stacked]


def _refuse_packed(x: Tensor) -> None:
    if x.dtype.is_packed:
        raise Unsupported("control-flow", f"a loop on the device does not support {x.dtype.short} tensors")


def lower_if(ctx: Lowering, node: Node, condition: Tensor, branch: Callable[[str], Sequence[Operand]]) -> list[Operand]:
    """Record an If in the body of a loop whose condition an iteration computes, and return its results.

    Each branch is a loop of at most one iteration, whose states are the results. ``branch`` lowers a branch by name.
    Raises Unsupported if the branches have results of different shapes.
    """
    with ctx.recording((node,)):  # only for the shapes
        shapes = [(x.shape, x.dtype) for x in carried_tensors(node, branch("else_branch"))]
    ctx.node = node
    results: list[Operand] = []
    for shape, dtype in shapes:
        x = ctx.empty(shape, dtype)
        ctx.memset(x, 0)
        results.append(x)
    otherwise = elementwise(ctx, lambda holds: ~holds, condition)
    for name, on in (("else_branch", otherwise), ("then_branch", condition)):
        taken = partial(_branch, branch, name)
        results = lower_loop(ctx, LoopPlan(node, 1, on, carried_tensors(node, results), (), (), taken))
    return results


def _branch(
    branch: Callable[[str], Sequence[Operand]], name: str, iteration: Iteration
) -> tuple[None, Sequence[Operand], Sequence[Operand]]:
    return None, branch(name), ()


@contextmanager
def _in_loop(ctx: Lowering) -> Iterator[None]:
    outer = ctx.is_in_loop
    ctx.is_in_loop = True
    try:
        yield
    finally:
        ctx.is_in_loop = outer


class _Loop:
    """The tensors of a loop that is being lowered. ``states`` and ``stacked`` are its results."""

    def __init__(self, ctx: Lowering, plan: LoopPlan) -> None:
        self.ctx, self.plan = ctx, plan
        self.counter = Counter(ctx.empty((1,), DType.INT32), ctx.empty((), DType.INT64), plan.limit, LoopCondition())
        self.states = tuple(ctx.empty(x.shape, x.dtype) for x in plan.states)
        self.stacked: list[Tensor] = []
        self.count: Dim | None = None

    @property
    def own_buffers(self) -> set[Buffer]:
        """Return the buffers that keep their contents from one iteration to the next."""
        kept = (self.counter.flag, self.counter.number, *self.states, *self.stacked)
        return {x.buffer for x in kept}

    def begin(self) -> None:
        """Record the steps before the first iteration."""
        ctx = self.ctx
        for state, x in zip(self.states, self.plan.states, strict=True):
            ctx.copy(state, ctx.contiguous(ctx.materialize(x)))
        on = self.plan.on
        begin(ctx, self.counter, None if on is None else ctx.contiguous(ctx.materialize(on)))

    def iterate(self) -> None:
        """Record the steps of an iteration."""
        ctx, plan = self.ctx, self.plan
        slices = [self._slice(each) for each in plan.slices]
        copy_slices(ctx, slices, self.counter.number, stacks=False)
        parts = tuple(each.part for each in slices)
        on, states, values = plan.lower(Iteration(self.counter.number, self.states, parts))
        ctx.node = plan.node
        if on is None and plan.limit is None:
            raise Unsupported(
                "control-flow",
                f"{plan.node.op_type} has no trip count, and its body computes a condition that is always true",
            )
        if on is None and plan.on is None and not isinstance(plan.limit, Tensor):
            self.count = plan.limit
        rows = [self._stack(stack, value) for stack, value in zip(plan.stacks, values, strict=True)]
        copy_slices(ctx, rows, self.counter.number, stacks=True)
        if on is not None:
            on = ctx.materialize(on)
            on = copy_of(ctx, on) if on.buffer in {x.buffer for x in self.states} else ctx.contiguous(on)
        self._replace_states(states)
        count_iteration(ctx, self.counter, on)

    def _slice(self, slices: Slices) -> Slice:
        x = slices.x
        part = self.ctx.empty([dim for axis, dim in enumerate(x.shape) if axis != slices.axis], x.dtype)
        return Slice(x, part, slices.axis, slices.backwards)

    def _stack(self, stack: Stack, value: Operand) -> Slice:
        ctx = self.ctx
        if self.count is None:
            raise Unsupported(
                "control-flow",
                f"{self.plan.node.op_type} stacks values of its iterations, whose number is unknown before the last "
                "one; supported: a trip count that the host knows, and a body whose condition is always true",
            )
        x = ctx.contiguous(ctx.materialize(_tensor(self.plan.node, value)))
        _refuse_packed(x)
        axis = stack.axis + (x.rank + 1 if stack.axis < 0 else 0)
        if not 0 <= axis <= x.rank:
            raise InvalidModel(
                f"{self.plan.node.op_type}: scan_output_axes: got axis {stack.axis}, expected {-x.rank - 1} to {x.rank}"
            )
        whole = ctx.empty([*x.shape[:axis], self.count, *x.shape[axis:]], x.dtype)
        self.stacked.append(whole)
        return Slice(whole, x, axis, stack.backwards)

    def _replace_states(self, results: Sequence[Operand]) -> None:
        """Copy the body's results to the states. Results that are views of a state are copied before states change."""
        ctx, node = self.ctx, self.plan.node
        own = {state.buffer for state in self.states}
        name, moves = _NAMES.get(node.op_type, "state"), []
        for number, (state, operand) in enumerate(zip(self.states, results, strict=True)):
            x = _tensor(node, operand)
            if x.dtype is not state.dtype:
                types = _compared(node, state.dtype.short, x.dtype.short)
                raise InvalidModel(f"{node.op_type}: {name} {number} is {types}, expected one type")
            if x.rank != state.rank or not all(
                ctx.settled(eq(dim, before)) for dim, before in zip(x.shape, state.shape, strict=True)
            ):
                shapes = _compared(node, list(state.shape), list(x.shape))
                raise Unsupported("control-flow", f"{name} {number} may have the shape {shapes}; supported: one shape")
            x = ctx.materialize(x)
            if x.buffer is state.buffer and x.is_contiguous and x.offset == 0:
                continue
            moves.append((state, copy_of(ctx, x) if x.buffer in own else ctx.contiguous(x)))
        for state, x in moves:
            ctx.copy(state, ctx.view(x, state.shape, None, x.offset))


_NAMES = {"If": "result", "Loop": "loop-carried value", "Scan": "state variable"}
"""What messages call a value that `_Loop` carries, by operator."""


def _compared(node: Node, before: object, after: object) -> str:
    if node.op_type == "If":  # a loop of at most one iteration, see `lower_if`
        return f"{before} in one branch and {after} in the other"
    return f"{before} before an iteration and {after} after it"


def _tensor(node: Node, operand: Operand) -> Tensor:
    if not isinstance(operand, Tensor):
        reason = f"a state or a result of {node.op_type} is a sequence or an optional value; supported: tensors"
        raise Unsupported("control-flow", reason)
    return operand


def _record(ctx: Lowering, loop: _Loop, first: Sequence[Step], body: Sequence[Step]) -> None:
    """Compile the steps, and record the loop and the launches that do not depend on the iteration."""
    own = loop.own_buffers
    before, repeated = (_compiled(ctx, steps, own) for steps in (first, body))
    invariant, repeated = _split_invariant(repeated, own)
    ctx.trace.steps += invariant
    repeated = update_in_place(repeated, {state.buffer for state in loop.states})
    steps = [*before, *repeated]
    written = {buffer for step in steps for buffer in step.writes}
    read = dict.fromkeys(buffer for step in steps for buffer in step.reads if buffer not in written)
    results = dict.fromkeys(x.buffer for x in (*loop.states, *loop.stacked))
    ctx.trace.steps.append(
        DeviceLoop(
            (loop.plan.node,),
            tuple(read),
            tuple(results),
            loop.counter.condition,
            loop.counter.flag,
            loop.count,
            tuple(before),
            tuple(repeated),
        )
    )


def _compiled(ctx: Lowering, steps: Sequence[Step], own: set[Buffer]) -> list[Recordable]:
    """Run the passes on the steps. The buffers ``own`` count as outputs, since the next iteration reads them."""
    kinds = {buffer: buffer.kind for buffer in own}
    tuner, ctx.tuner = ctx.tuner, None  # autotuning would time steps whose sizes are unknown while the loop is lowered
    for buffer in own:
        buffer.kind = BufferKind.OUTPUT
    try:
        compiled = run_passes(ctx, steps, PASSES_OF_BODY)
    finally:
        ctx.tuner = tuner
        for buffer, kind in kinds.items():
            buffer.kind = kind
    return [step for step in compiled if not isinstance(step, Map)]


def _split_invariant(steps: Sequence[Recordable], own: set[Buffer]) -> tuple[list[Recordable], list[Recordable]]:
    """Return the steps that compute the same in each iteration, and all others (loop-invariant code motion)."""
    writers: dict[Buffer, int] = {}
    for buffer in chain.from_iterable(step.writes for step in steps):
        writers[buffer] = writers.get(buffer, 0) + 1
    variant = {*own, *(buffer for buffer, count in writers.items() if count > 1)}
    invariant: list[Recordable] = []
    rest: list[Recordable] = []
    for step in steps:
        moves = isinstance(step, Launch | LibraryCall | Copy | Memset) and variant.isdisjoint(
            (*step.reads, *step.writes)
        )
        moves = moves and all(buffer.kind is BufferKind.SCRATCH for buffer in step.writes)
        moves = moves and all(buffer.kind is not BufferKind.STATE for buffer in step.reads)
        (invariant if moves else rest).append(step)
        if not moves:
            variant.update(step.writes)
    return invariant, rest
