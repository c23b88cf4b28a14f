"""Autotuner: chooses kernels of steps, and passes of plans, by measuring each candidate once per problem and device.

The tuner compiles each candidate of a step at the sizes of the current Run, as a small program without inputs (as in
`plan.precompute`) and with its own memory. The candidates of a pass are the whole program with and without
it; in both, the cost model makes all other choices. A ``Measure`` function runs the programs on the device. The timing
cache on disk keeps the times for later sessions.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from ..compiler.caches.timing_cache import TimedProblem, TimingCache
from ..compiler.kernel import digest_of
from ..compiler.toolchain import installed_tools, joined_digest, sources_digest, toolchain_digest
from ..model.ir import InvalidModel, Unsupported
from ..passes.emission.emission import emit
from ..passes.simplification.constant_folding import split_constants
from ..passes.table import KERNEL_SELECTION, run_passes
from ..plan.planner import make_plan
from ..plan.precompute import precompute
from ..plan.tables import KnownEntries, Tables
from ..program.expressions.scalar import Scalar, reachable
from ..program.expressions.symbolic import Dim, hint, is_read_back, le, lt
from ..program.lowering.context import Compile, Lowering, Make, Tactic, Tuner
from ..program.steps.concrete import Concrete
from ..program.steps.schedule import Choice, Engine, Schedule, describe, schedule_text
from ..program.steps.steps import Attend, Convolve, Map, Rows, Sums
from ..program.steps.tensor import Tensor
from ..program.steps.trace import LibraryCall, Recordable, Step
from .cluster import Variant

logger = logging.getLogger("ort_cuda_plugin")

Measure = Callable[[Sequence[Variant]], Sequence[float | None]]
"""Returns each program's median execution time, seconds; infinity: it can never run, None: it cannot run now."""


class MeasuringTuner(Tuner):
    """A `Tuner` that measures the problems that the timing cache lacks. ``device`` is a `device_identity`."""

    def __init__(self, cache: TimingCache, device: str, measure: Measure) -> None:
        self._cache = cache
        self._device = device
        self._measure = measure

    def choice(self, ctx: Lowering, step: Sums, choices: Sequence[Choice]) -> Choice | None:
        """Return the fastest of ``choices`` at the sizes of the current Run.

        A plan with a measured schedule is valid for sizes between two successive powers of two; other sizes get another
        plan and another measurement. Guessed sizes, and sizes that a Run computes, are not measured.
        """
        by_text = {schedule_text(choice.schedule): choice for choice in choices}
        best = self._fastest(
            ctx,
            _timing_id(ctx, step),
            _types(step),
            _sizes(step),
            list(by_text),
            lambda text: _program(ctx, step, by_text[text].schedule),
            ", ".join(node.label for node in step.nodes) or "a step",
            lambda text: describe(by_text[text].schedule),
        )
        return None if best is None else replace(by_text[best.name], why=best.why)

    def fastest(
        self, ctx: Lowering, problem: str, inputs: Sequence[Tensor | None], names: Sequence[str], make: Make
    ) -> Tactic | None:
        """Return the fastest tactic of ``names`` for a custom operator, by the same rules as `choice`. See `Tuner`."""
        given = [x for x in inputs if x is not None]
        options = asdict(ctx.options)
        parts = [problem, [_layout(x) for x in given], [options[name] for name in sorted(options)], kernels_digest()]
        return self._fastest(
            ctx,
            repr(parts),
            [x.dtype.short for x in given],
            [size for x in given for size in x.shape],
            names,
            lambda name: _operator_program(ctx, inputs, name, make),
            ctx.node.label if ctx.node is not None else "an operator",
        )

    def pays(self, ctx: Lowering, name: str, before: Sequence[Step], after: Sequence[Step], compiled: Compile) -> bool:
        """Return whether the plan with the pass ``name`` is at least as fast as the plan without it. See `Tuner`.

        Both plans are measured, for sizes as in `choice`. If a plan is not or cannot be measured, return True: for
        example, plans with read-backs, copies or calls of Python functions are not measured.
        """
        sizes = _program_sizes(before) + _program_sizes(after)
        unknown = list(dict.fromkeys(size for size in sizes if not isinstance(size, int)))
        is_open = any(map(is_read_back, unknown)) or (bool(unknown) and ctx.is_guess)
        if is_open or not all(isinstance(step, Map) for step in (*before, *after)):
            return True
        programs: dict[str, Variant] = {}
        for key, steps in (("with", after), ("without", before)):
            try:
                programs[key] = _whole_program(ctx, steps, compiled)
            except (Unsupported, InvalidModel) as error:
                logger.info(
                    "autotune: the plan %s the pass %s cannot be measured, so the pass is used: %s", key, name, error
                )
                return True
        timing_id = f"{name} {[_program_digest(program) for program in programs.values()]} {kernels_digest()}"
        problem = TimedProblem.of(timing_id, self._device, [], [])
        missing = self._cache.missing(problem, list(programs))
        if missing:
            self._cache.record(problem, self._measured(missing, programs.__getitem__, f"pass {name}"))
        times = self._cache.times(problem)
        if len(times) < len(programs):
            return True
        for size in unknown:
            _keep_near(ctx, size)
        pays = times["with"] <= times["without"]
        logger.info(
            "autotune: the plan with the pass %s takes %s, without it %s: the pass is %s",
            name,
            _duration(times["with"]),
            _duration(times["without"]),
            "used" if pays else "left out",
        )
        return pays

    def _fastest(
        self,
        ctx: Lowering,
        timing_id: str,
        types: Sequence[str],
        sizes: Sequence[Dim],
        names: Sequence[str],
        program: Callable[[str], Variant | None],
        label: str,
        shown: Callable[[str], str] = str,
    ) -> Tactic | None:
        """Return the fastest of the candidates ``names``; measure those that the timing cache lacks.

        ``program`` returns the program of a candidate, or None if it cannot run; ``shown`` describes a candidate.
        Return None if sizes are guessed or read back, and if no candidate can run.
        """
        unknown = [size for size in sizes if not isinstance(size, int)]
        if any(map(is_read_back, unknown)) or (unknown and ctx.is_guess):
            return None
        problem = TimedProblem.of(timing_id, self._device, types, map(hint, sizes))
        missing = self._cache.missing(problem, names)
        if missing:
            self._cache.record(problem, self._measured(missing, program, label))
        times = {name: seconds for name, seconds in self._cache.times(problem).items() if name in names}
        finite = [name for name in names if times.get(name, math.inf) < math.inf]
        if not finite:
            return None
        best = min(finite, key=times.__getitem__)
        for size in unknown:
            _keep_near(ctx, size)
        return Tactic(best, _account(best, {name: times[name] for name in names if name in times}, shown))

    def _measured(self, names: Sequence[str], program: Callable[[str], Variant | None], label: str) -> dict[str, float]:
        programs: dict[str, Variant] = {}
        times: dict[str, float] = {}
        for name in names:
            try:
                made = program(name)
            except (Unsupported, InvalidModel) as error:
                logger.info("autotune: candidate %s of %s cannot be measured: %s", name, label, error)
                made = None
            if made is None:
                times[name] = math.inf
            else:
                programs[name] = made
        found = self._measure(list(programs.values()))
        times.update({name: time for name, time in zip(programs, found, strict=True) if time is not None})
        return times


def _program(ctx: Lowering, step: Sums, schedule: Schedule) -> Variant | None:
    """Return a program that computes only ``step``, by ``schedule``; None if its vendor library declines the step."""
    own = Lowering(ctx.device, ctx.options)
    own.nodes = step.nodes
    concrete = Concrete()
    alone = concrete.step(step)
    concrete.own_memory()
    assert isinstance(alone, Sums)
    launches = _launches(own, [replace(alone, schedule=schedule)])
    if schedule.engine is Engine.LIBRARY and not any(isinstance(launch, LibraryCall) for launch in launches):
        return None
    return _alone(own, launches)


def _operator_program(ctx: Lowering, inputs: Sequence[Tensor | None], name: str, make: Make) -> Variant:
    """Return a program that runs only a custom operator, with the tactic ``name``."""
    own = Lowering(ctx.device, ctx.options)
    own.node, own.opset = ctx.node, ctx.opset
    concrete = Concrete()
    copies = [None if x is None else concrete.tensor(x) for x in inputs]
    concrete.own_memory()
    make(own, copies, name)
    return program_of(own, own.trace.steps)


def _whole_program(ctx: Lowering, steps: Sequence[Step], compiled: Compile) -> Variant:
    """Return a program of copies of ``steps`` with memory of their own, after the passes that ``compiled`` runs."""
    own = Lowering(ctx.device, ctx.options)
    own.tuner = Tuner()
    concrete = Concrete()
    copies = [concrete.step(step) for step in steps if isinstance(step, Map)]
    launches = [step for step in compiled(own, copies) if not isinstance(step, Map)]
    concrete.own_memory(intermediates=False)
    folded = [launch for group in own.trace.folded for launch in group]
    return _alone(own, [*folded, *launches])


def _program_sizes(steps: Sequence[Step]) -> list[Dim]:
    """Return the sizes of all steps, and of the tensors that they read and write."""
    sizes: list[Dim] = []
    for step in steps:
        if isinstance(step, Map):
            sizes += [*step.shape, *(size for x in _tensors(step) for size in x.shape)]
    return sizes


def _program_digest(program: Variant) -> str:
    """Return a hash of the plan and of its kernels and library problems."""
    return digest_of(program.plan, [spec.digest for spec in program.kernels], program.problems)


def _launches(own: Lowering, steps: Sequence[Step]) -> list[Recordable]:
    own.tuner = Tuner()
    return emit(own, run_passes(own, steps, KERNEL_SELECTION))


def program_of(own: Lowering, steps: Sequence[Step]) -> Variant:
    """Return a program that consists of ``steps`` and has no inputs; the cost model chooses the other schedules."""
    return _alone(own, _launches(own, steps))


def _alone(own: Lowering, launches: Sequence[Recordable]) -> Variant:
    """Return a program that consists of ``launches`` and has no inputs."""
    fixed, rest = split_constants(launches) if own.options.fusion else ([], list[Recordable](launches))
    tables = Tables(KnownEntries())
    precompute(fixed, rest, tables)
    plan = make_plan(own.trace, rest, (), (), (), tables, 0)
    return Variant(plan, tables.kernels.new, tables.weights.new, tables.problems.new, tables)


# ---- identity of a problem ----


def _tensors(step: Map) -> list[Tensor]:
    return [*step.tensors_read, *(y for _, y in step.outputs)]


def _sizes(step: Sums) -> list[Dim]:
    """Return all sizes on which the work of a step depends."""
    sizes: list[Dim] = [*step.shape]
    for x in step.operands:
        sizes += x.shape
    if isinstance(step, Convolve):
        sizes += [*step.windows.size, *step.windows.kernel]
    return sizes


def _types(step: Sums) -> list[str]:
    return [x.dtype.short for x in _tensors(step)]


def _timing_id(ctx: Lowering, step: Sums) -> str:
    """Return a key of the step without sizes and types: layouts, epilogue, options, libraries and `kernels_digest`."""
    parts: list[object] = [type(step).__name__, [_layout(x) for x in _tensors(step)], _operations(step)]
    if isinstance(step, Convolve):
        parts += [step.windows.strides, step.windows.dilations, step.groups, step.transposed]
    options = asdict(ctx.options)
    parts.append([options[name] for name in sorted(options)])
    parts += [sorted(ctx.device.libraries), kernels_digest()]
    return repr(parts)


def _layout(x: Tensor) -> str:
    """Return the layout of x as text: a letter per dimension, the dimensions by decreasing stride, "c" for a constant.

    The letter says what the dimension's stride is: 0 ("b", broadcast), 1 ("n") or another ("s").
    """
    strides = [hint(stride) for stride in x.strides]
    order = sorted(range(x.rank), key=lambda axis: -strides[axis])
    kinds = ["b" if stride == 0 else "n" if stride == 1 else "s" for stride in strides]
    return f"{''.join(kinds)}{''.join(map(str, order))}{'c' if x.is_constant else ''}"


def _operations(step: Sums) -> list[tuple[str, int]]:
    """Return how often each operation occurs in the epilogue and in the operands' prologues."""
    expressions: list[Scalar] = [value for value, _ in step.outputs]
    expressions += [conversion.value for conversion in step.conversions if conversion is not None]
    if isinstance(step, Attend):
        expressions.append(step.weight)
        for part in step.parts:
            expressions += [value for value, _ in part.outputs] if isinstance(part, Rows) else []
    return sorted(Counter(f"{x.op}.{x.dtype.short}" for x in reachable(expressions)).items())


@cache
def kernels_digest() -> str:
    """Return a hash of the toolchain and of the sources of kernels, schedules and passes.

    A change of the toolchain or of a source invalidates measured times.
    """
    root = Path(__file__).parent.parent
    rooms = ("kernels", "schedule", "passes")
    sources = [path.relative_to(root).as_posix() for room in rooms for path in root.glob(f"{room}/**/*.py")]
    own = sources_digest(tuple(sorted(sources)))
    return joined_digest(toolchain_digest(installed_tools(False), False), own)


# ---- results ----


def _keep_near(ctx: Lowering, size: Dim) -> None:
    """Add guards for the measured range of ``size``: between two successive powers of two."""
    most = 1 << max(hint(size) - 1, 0).bit_length()
    ctx.guard(le(size, most))
    ctx.guard(lt(most // 2, size))


def _account(best: str, times: dict[str, float], shown: Callable[[str], str]) -> str:
    """Format the measured times of all candidates, the fastest first. ``shown`` describes a candidate."""
    order = sorted(times, key=lambda name: (times[name], name != best))
    others = [f"{shown(name)} {_duration(times[name])}" for name in order if name != best]
    return f"measured {_duration(times[best])}{'; ' if others else ''}{', '.join(others)}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "cannot"
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
