"""Records the program of a plan after each pass, and finds the first pass after which it gives other results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx.defs import SchemaError

from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.model.ir import DType, Node, NodeError, UnknownRank, Unsupported
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.plan.format import Plan
from ort_cuda_plugin.program.analysis.program_text import ProgramText
from ort_cuda_plugin.program.analysis.step_tensors import tensors_of
from ort_cuda_plugin.program.analysis.verify import VERIFY_VARIABLE, Verifier
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering, LoweringOptions, Tuner
from ort_cuda_plugin.program.steps.steps import Contract, Map
from ort_cuda_plugin.program.steps.tensor import Tensor
from ort_cuda_plugin.program.steps.trace import Launch, LibraryCall, Remake, Step, View
from plan_interpreter import evaluate_registers
from programs.interpreter import STORES, Gather, Interpreter, InvalidViewError, Meaning, ReadsInputError, opaque_of
from programs.values import Array, Reading, is_narrow

LIBRARIES = frozenset({"cublaslt", "cudnn"})
DEVICES: Mapping[str, DeviceProperties] = {
    "emulated": DeviceProperties(),
    "sm_80": DeviceProperties.gpu((8, 0)),
    "sm_90": DeviceProperties.gpu((9, 0)),
    "sm_120": DeviceProperties.gpu((12, 0)),
    "sm_90 with libraries": DeviceProperties.gpu((9, 0), libraries=LIBRARIES),
    "sm_90 emulated": DeviceProperties(emulated=False),
}
"""Device kinds by name. "sm_90 emulated" is the emulated device with kernels for a GPU, which has no TF32."""
TOLERANCE = 1e-6
"""Maximum error of floats, relative to the largest number of a result. Passes compute constants in float32."""
NOISE = 1e-13
"""Maximum absolute error of floats: float64 rounding of sums in another order, if numbers of about 1 cancel."""
EMITTERS = ("launch_step", "copy_launches", "launch_depthwise", "launch_matrix_convolution")
"""Names of functions that launch a step's kernels; the step is their second argument."""


class CannotRunError(Exception):
    """The model has no plan, or the interpreter cannot run its program even as it is after lowering."""


@dataclass(frozen=True)
class State:
    """A program after the pass ``name``, or after lowering. Its first ``once`` steps run before the first Run."""

    name: str
    steps: tuple[Step, ...]
    once: int = 0


@dataclass
class Recorded:
    """The program of a plan after lowering and after each pass, and what launches in it compute."""

    cluster: CompiledCluster
    plan: Plan
    states: list[State]
    computes: dict[Step, tuple[Meaning, ...]] = field(default_factory=dict)

    def values(self, feeds: Sequence[Array]) -> dict[int, int] | None:
        """Return the values of symbols in a Run with these inputs; None if the plan's guards or checks do not hold."""
        known: dict[int, int] = {}
        for array, declared in zip(feeds, self.plan.inputs, strict=True):
            if array.ndim != declared.rank:
                return None
            known.update({declared.first_register + axis: dim for axis, dim in enumerate(array.shape)})
            if declared.host_register is not None:
                numbers = array.reshape(-1)
                if numbers.size != declared.host_count:
                    return None
                known.update({declared.host_register + i: int(x) for i, x in enumerate(numbers)})
        registers = dict(known)
        try:
            evaluate_registers(self.plan, registers)
        except ZeroDivisionError:
            return None
        if not all(registers[guard] for guard in self.plan.guards):
            return None
        checks = [check for check in self.plan.asserts if check.segment == 0]
        return known if all(registers[check.register] for check in checks) else None


@dataclass(frozen=True)
class Difference:
    """The first state of a program that gives other results, the state before it, and the changed steps."""

    state: str
    before: str
    what: str
    steps: str

    def __str__(self) -> str:
        return f"after {self.state} (before it: {self.before}): {self.what}\n{self.steps}"


def record(
    model: onnx.ModelProto,
    feeds: Sequence[Array],
    device: DeviceProperties,
    options: LoweringOptions | None = None,
    dynamic: bool = False,
    tuner: Tuner | None = None,
) -> Recorded:
    """Build the plan for these inputs, and record its program after each pass.

    With ``dynamic`` the inputs' sizes are symbolic. Raises CannotRunError if the model has no plan.
    """
    with _watched() as (states, computes):
        try:
            cluster = CompiledCluster(read_model(model, dynamic), device, options or LoweringOptions(), tuner=tuner)
            cluster.prepare()
            states.clear()

            def verify(verifier: Verifier, name: str, steps: Sequence[Step]) -> None:
                if not states:
                    _note_remakes(steps, computes)
                states.append(State(name, tuple(steps)))

            def watch(name: str, steps: Sequence[Step]) -> None:
                states[-1] = replace(states[-1], once=len(states[-1].steps) - len(steps))

            cluster.watch = watch
            hosts = [[int(x) for x in feeds[index].reshape(-1)] for index in cluster.host_inputs]
            # The verifier gets the folded launches first, then those of each Run: `watch` counts the former.
            with mock.patch.object(Verifier, "__call__", verify), mock.patch.dict(os.environ, {VERIFY_VARIABLE: "1"}):
                plan = cluster.build([array.shape for array in feeds], hosts).plan
        except (NodeError, Unsupported, UnknownRank, SchemaError) as error:
            raise CannotRunError(str(error)) from error
    assert plan is not None
    _note_chains(states, computes)
    _note_moved(states, computes)
    return Recorded(cluster, plan, states, computes)


def _note_remakes(steps: Sequence[Step], computes: dict[Step, tuple[Meaning, ...]]) -> None:
    """Record the meaning of launches that passes make with `Launch.remake`: that of the operator's original launch,
    with other views of its tensors.
    """

    def noting(step: Launch, remake: Remake) -> Remake:
        def noted(view: View) -> Sequence[Step]:
            steps = remake(view)
            made = [each for each in steps if isinstance(each, Launch)]
            computes.update(dict.fromkeys(made, ()))
            if made:
                computes[made[-1]] = (opaque_of(step, view),)
            return steps

        return noted

    for step in steps:
        if isinstance(step, Launch):
            computes.pop(step, None)
            if step.remake is not None:
                step.remake = noting(step, step.remake)


@contextmanager
def _watched() -> Iterator[tuple[list[State], dict[Step, tuple[Meaning, ...]]]]:
    """Yield a list for states, and a dict that records which step each launch implements, while the block compiles."""
    states, computes = list[State](), dict[Step, tuple[Meaning, ...]]()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(ctx: Lowering, step: Map, *arguments: Any, **options: Any) -> Any:
            before = len(ctx.trace.steps)
            result = function(ctx, step, *arguments, **options)
            made = ctx.trace.steps[before:]
            writing = [each for each in made if not set(step.writes).isdisjoint(each.writes)]
            # A nested call of an emitter has recorded these launches already, if it emitted a part of the step.
            if writing and writing[-1] not in computes:
                others = [each for each in made if isinstance(each, Launch) and each not in computes]
                computes.update(dict.fromkeys((*others, *writing), ()))
                computes[writing[-1]] = computes.get(step, (step,))
            return result

        return noted

    def noting_gather(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(
            ctx: Lowering, shape: Any, dtype: DType, element: Callable[..., Scalar], *others: Any, **named: Any
        ) -> Any:
            found: list[tuple[tuple[Scalar, ...], Scalar]] = []

            def noted_element(maps: Any, coordinates: Any) -> Scalar:
                value = element(maps, coordinates)
                found.append((tuple(coordinates), value))
                return value

            before = len(ctx.trace.steps)
            out = function(ctx, shape, dtype, noted_element, *others, **named)
            made = [each for each in ctx.trace.steps[before:] if isinstance(each, Launch)]
            if made and found:
                computes[made[-1]] = (Gather(out, *found[-1]),)
            return out

        return noted

    with ExitStack() as stack:
        for name, wrap in (*((name, noting) for name in EMITTERS), ("gather_map", noting_gather)):
            for module in _modules():
                function = vars(module).get(name)
                if callable(function):
                    stack.enter_context(mock.patch.object(module, name, wrap(function)))
        yield states, computes


def _note_chains(states: Sequence[State], computes: dict[Step, tuple[Meaning, ...]]) -> None:
    """Record the meaning of launches with which a pass replaced steps: the replaced steps of the same nodes."""
    for before, after in pairwise(states):
        old, new = set(before.steps), set(after.steps)
        gone = [step for step in before.steps if isinstance(step, Map) and step not in new]
        moved = {step.kernel for step in before.steps if isinstance(step, Launch) and step not in new}
        for launch in after.steps:
            if (
                isinstance(launch, Launch)
                and launch not in old
                and launch not in computes
                and launch.kernel not in moved
            ):
                steps = tuple(step for step in gone if set(step.nodes) <= set(launch.nodes))
                if steps:
                    computes[launch] = steps


def _note_moved(states: Sequence[State], computes: dict[Step, tuple[Meaning, ...]]) -> None:
    """Record the meaning of operators' launches whose tensors concat elimination moved to slices of other buffers.

    Such a launch may read one slice of a buffer and write another slice of it, so the buffers no longer tell which
    argument is read and which is written.
    """
    known: dict[tuple[KernelSpec, tuple[Node, ...]], Launch] = {}
    for step in states[0].steps:
        if isinstance(step, Launch):
            known.setdefault((step.kernel, step.nodes), step)
    for step in dict.fromkeys(step for state in states[1:] for step in state.steps):
        first = known.get((step.kernel, step.nodes)) if isinstance(step, Launch) else None
        if first is None or first is step or step in computes or not isinstance(step, Launch):
            continue
        if step.kernel.name in STORES:
            continue  # the interpreter executes these kernels itself
        pairs = zip(first.args, step.args, strict=True)
        places = {x: y for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor)}
        computes[step] = (opaque_of(first, places.__getitem__),)


def _modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("ort_cuda_plugin.")]


def first_difference(
    recorded: Recorded, feeds: Sequence[Array], compared: list[str] | None = None
) -> Difference | None:
    """Return the first state whose results for ``feeds`` differ from those of the lowered program; None if none does.

    ``compared`` gets the name of each state that was compared. Raises CannotRunError if the lowered program cannot be
    run.
    """
    values = recorded.values(feeds)
    if values is None:
        raise CannotRunError("guards do not hold")
    lowered, *others = recorded.states
    for reading in Reading:
        if reading is Reading.ROUNDED and not _has_narrow(lowered):
            continue
        interpreter = Interpreter(values, feeds, reading, recorded.computes)
        try:
            expected = interpreter.run(lowered.steps)
        except (InvalidViewError, ZeroDivisionError, ValueError) as error:
            raise CannotRunError(f"as lowered: {error}") from error
        before = lowered
        for state in others:
            if reading is Reading.ROUNDED and _may_round_elsewhere(recorded, state):
                break
            try:
                what = differing(interpreter.run(state.steps, state.once), expected)
            except (InvalidViewError, ReadsInputError, IndexError, ValueError, KeyError) as error:
                what = f"{type(error).__name__}: {error}"
            if what:
                return Difference(state.name, before.name, f"{what} ({reading})", changes(recorded, before, state))
            if compared is not None:
                compared.append(state.name)
            before = state
    return None


def _may_round_elsewhere(recorded: Recorded, state: State) -> bool:
    """Return whether a state may round at other points than the lowered program.

    A fused library call and a product with a product of low rank round once, and passes may store TF32 operands as
    float16.
    """
    if any(isinstance(step, LibraryCall) for step in state.steps):
        return True
    until = recorded.states[: recorded.states.index(state) + 1]
    if any(isinstance(step, Contract) and step.low_rank is not None for one in until for step in one.steps):
        return True
    known = {x.buffer for step in recorded.states[0].steps for x in tensors_of(step)}
    tensors = (x for step in state.steps for x in tensors_of(step) if x.buffer not in known)
    return recorded.cluster.device.tf32 and any(is_narrow(x.dtype) for x in tensors)


def _has_narrow(state: State) -> bool:
    return any(is_narrow(x.dtype) for step in state.steps for x in tensors_of(step))


def differing(found: Mapping[tuple[str, int], Array], expected: Mapping[tuple[str, int], Array]) -> str:
    """Describe the first difference between results; "" if there is none."""
    for key, wanted in expected.items():
        name = f"{key[0]} {key[1]}"
        if key not in found:
            if wanted.size == 0:
                continue  # an empty result needs no launch
            return f"{name} is not written"
        actual = found[key]
        if actual.shape != wanted.shape:
            return f"{name} has {actual.size} elements, not {wanted.size}"
        if wanted.dtype.kind == "f":
            scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
            same = np.isclose(actual, wanted, rtol=TOLERANCE, atol=max(TOLERANCE * scale, NOISE), equal_nan=True)
        else:
            same = actual == wanted
        if not same.all():
            first = int(np.argmin(same))
            count = int(np.size(same) - np.count_nonzero(same))
            return f"{name}: {count} of {same.size} elements, element {first} is {actual[first]}, not {wanted[first]}"
    return ""


def changes(recorded: Recorded, before: State, after: State) -> str:
    """Return the steps that a pass removed ("-") and added ("+"), in the format of ``explain --program``."""
    names = [value.name for value in recorded.cluster.inputs], [value.name for value in recorded.cluster.outputs]
    text = ProgramText(*names)
    lines = []
    for mark, state, other in (("-", before, after), ("+", after, before)):
        kept = set(other.steps)
        changed = [step for step in state.steps if step not in kept]
        lines += [f"{mark} {line}" for line in text.program(state.name, changed).splitlines()[1:]]
    return "\n".join(lines)
