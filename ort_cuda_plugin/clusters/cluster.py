"""Compiled cluster: builds the plans of a fused node, even after ORT has freed the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..compiler.kernel import KernelSpec
from ..model.ir import Array, Constant, DType, Graph, InvalidModel, Node, NodeError, UnknownRank, Unsupported, Value
from ..passes.table import PASSES, Watch
from ..plan.format import Plan, PlanInput
from ..plan.planner import make_plan
from ..plan.precompute import precompute
from ..plan.tables import KnownEntries, Precomputation, Precomputed, Tables, Weight, weight_key
from ..program.analysis.plan_record import plan_record
from ..program.analysis.program_text import ProgramHistory, ProgramText
from ..program.analysis.traffic import ProgramTraffic
from ..program.expressions.symbolic import Dim
from ..program.lowering.context import Buffer, DeviceProperties, Lowering, LoweringOptions, Tensor, Tuner
from ..program.steps.callbacks import Callback
from ..program.steps.libraries import LibraryProblem
from ..program.steps.trace import Recordable, Step
from .cycle_collection import paused
from .launches import make_launches, place_outputs
from .nodes.control_flow import CompiledBodies
from .nodes.node_lowering import InputSymbols, NodeLowering, UnknownValue, symbolic_input
from .nodes.ranks import LIKELY, Ranks

_SMALL_CONSTANT = 64 * 1024
"""Maximum bytes of a constant that stays in host memory; larger ones are read back from the device when needed."""


@dataclass(frozen=True)
class Variant:
    """A plan, with the kernels, weights, library problems and callbacks that no earlier plan of the cluster added.

    Indices in ``plan`` number the cluster's kernels, weights, problems and callbacks in the order in which all variants
    added them. So the owner of the `CompiledCluster` adds each list to the C cluster, reports that
    (`CompiledCluster.kernels_added`, ...), and adds the plan last. If shapes are unknown, ``plan`` is None, and the
    lists hold entries that later plans will probably need. ``stored`` are the plans of a compiled model, encoded by
    `plan.format.encode`. ``likely`` is a plan for guessed sizes, in place of a missing ``plan``: it shows the order in
    which Runs will read ``weights``, but cannot run.
    """

    plan: Plan | None
    kernels: list[KernelSpec]
    weights: list[Weight]
    problems: list[LibraryProblem]
    tables: Tables
    stored: tuple[bytes, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    likely: Plan | None = None

    @property
    def precomputations(self) -> list[Precomputation]:
        """Return the programs that compute the `Precomputed` weights among ``weights``."""
        return list(dict.fromkeys(weight.program for weight in self.weights if isinstance(weight, Precomputed)))


def _launches(ctx: Lowering, watch: Watch | None) -> tuple[list[list[Recordable]], list[Recordable], ProgramTraffic]:
    """Call `make_launches`. Raises NodeError if a pass has no kernel for a step."""
    try:
        return make_launches(ctx, watch)
    except Unsupported as error:
        if error.node is None:
            raise
        raise NodeError(error.node, error.reason) from error


def _agrees(value: Value, shape: Sequence[int] | None) -> bool:
    """Return whether ``shape`` is the shape that the model declares for ``value``, as far as both are known."""
    if value.shape is None or shape is None:
        return True
    pairs = zip(value.shape, shape, strict=False)
    return len(value.shape) == len(shape) and all(dim == size for dim, size in pairs if isinstance(dim, int))


class WeightReader:
    """Reads weights back from the device. ``read(number)`` returns the contents of the cluster's weight ``number``."""

    def __init__(self) -> None:
        self.read: Callable[[int], bytes] | None = None

    def array(self, number: int, dtype: DType, shape: tuple[int, ...]) -> Array:
        if self.read is None:
            raise RuntimeError(f"weight {number}: the fused node's weights were released. Report the model")
        return np.frombuffer(self.read(number), dtype.numpy).reshape(shape)


class CompiledCluster:
    """Compiles the nodes of one fused node. Not thread-safe: the owner adds each variant before the next `build`.

    ``inputs`` and ``outputs`` name the fused node's inputs and outputs in order; default: the graph's. ``ranks`` are
    the ranks that the claim assumed. ``fed`` names the values that the application feeds, whose shapes ORT checks;
    default: all inputs. ``compiled`` as for `NodeLowering`. ``known`` maps the kernels, weights, library problems and
    callbacks of earlier plans to their indices in the cluster. ``tuner`` selects kernels by measured times. The owner
    sets ``weight_reader.read`` while added weights exist. `prepare` sets ``host_inputs``, the indices of inputs whose
    contents determine shapes. ``show_program`` receives the text of each plan's program from a `ProgramHistory`,
    ``show_plan`` its `plan_record`, ``watch`` the program after each pass, ``tell`` remarks. ``traffic`` is the memory
    traffic of the last plan, at its sizes. ``states`` holds the states of stateful nodes.
    """

    def __init__(
        self,
        graph: Graph,
        device: DeviceProperties,
        options: LoweringOptions | None = None,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        ranks: Ranks | None = None,
        fed: Collection[str] | None = None,
        compiled: CompiledBodies | None = None,
        known: KnownEntries | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self.graph = graph
        self.device = device
        self.options = options or LoweringOptions()
        values = {value.name: value for value in (*graph.inputs, *graph.outputs)}
        for node in graph.nodes:
            values.update((value.name, value) for value in (*node.reads(), *node.outputs) if value is not None)
        self.inputs = graph.inputs if inputs is None else [values[name] for name in inputs]
        self.outputs = graph.outputs if outputs is None else [values[name] for name in outputs]
        self.host_inputs: list[int] = []
        self.show_program: Callable[[str], None] | None = None
        self.show_plan: Callable[[dict[str, Any]], None] | None = None
        self.tell: Callable[[str], None] = lambda line: None
        self.watch: Watch | None = None
        self.traffic: ProgramTraffic | None = None
        self.weight_reader = WeightReader()
        self._ranks = ranks or Ranks()
        self._compiled = compiled
        self._fed = [fed is None or value.name in fed for value in self.inputs]
        # ORT compares the shape of a fed value with the shape in the model, except for inputs declared as scalars.
        self._checked = [is_fed and value.shape != () for is_fed, value in zip(self._fed, self.inputs, strict=True)]
        self._known = known or KnownEntries()
        self._tuner = tuner
        self.states: dict[Node, Constant] = {}

    @property
    def input_names(self) -> list[str]:
        """Return the names of ``inputs``."""
        return [value.name for value in self.inputs]

    @paused()
    def prepare(self) -> Variant:
        """Return the first variant. The owner calls this, and adds the variant, while ORT's graph is alive.

        If all dimensions are static and there is no host input, the variant has the cluster's only plan. Otherwise it
        has weights, so that the host can free its copies, and kernels, so that session creation compiles them instead
        of the first Run. Raises NodeError if a claimed node cannot be lowered.
        """
        shapes = [value.shape for value in self.inputs]
        try:
            plan, tables, found = self._likely_plan(None)
        except UnknownRank:
            return self._prepare_by_trials()
        self.host_inputs = sorted(found)
        if not found and all(shape is not None and all(isinstance(dim, int) for dim in shape) for shape in shapes):
            return self._variant(plan, tables)
        return self._variant(None, tables, plan)

    def _likely_plan(self, trial: int | None) -> tuple[Plan, Tables, set[int]]:
        """Return a plan for guessed sizes, its tables, and the indices of the host inputs that it reads."""
        found: set[int] = set()
        nothing = [None] * len(self.inputs)
        try:
            return *self._plan(nothing, {}, found, trial=trial), found
        except NodeError as error:
            if not error.invalid_input:
                raise
            # Guessed sizes may be inconsistent although the sizes of every Run are consistent.
            found.clear()
            return *self._plan(nothing, {}, found, settles=False, trial=trial), found

    def _prepare_by_trials(self) -> Variant:
        """Return the first variant for unknown ranks, built with the ranks of the most likely trial that has a plan."""
        plan, tables = None, None
        found: set[int] = set()
        for trial in LIKELY:
            found |= self._host_inputs_of(trial)
            if tables is None:
                with contextlib.suppress(NodeError, InvalidModel, Unsupported):
                    plan, tables, _ = self._likely_plan(trial)
        self.host_inputs = sorted(found)
        return self._variant(None, Tables(self._known) if tables is None else tables, plan)

    def _host_inputs_of(self, trial: int) -> set[int]:
        """Return the indices of the inputs whose contents the lowering functions request, with the ranks of a trial."""
        symbols, found = InputSymbols(), set[int]()

        def read(buffer: Buffer, count: int) -> tuple[Dim, ...]:
            found.add(buffer.index)
            return symbols.host_values(buffer, [1] * count, self.inputs[buffer.index].name)

        lowering = NodeLowering(
            self.graph,
            self.device,
            self.options,
            read,
            record=False,
            guesses=symbols,
            trial=trial,
            compiled=self._compiled,
        )
        for index, value in enumerate(self.inputs):
            lowering.add_input(value, symbolic_input(symbols, value, index, None, self._ranks.under(trial)))
        for node in self.graph.nodes:
            with contextlib.suppress(Unsupported, InvalidModel, UnknownValue, ZeroDivisionError, OverflowError):
                lowering.lower(node)
        return found

    @paused()
    def build(self, input_shapes: Sequence[Sequence[int]], host_values: Sequence[Sequence[int]]) -> Variant:
        """Build the variant for these input shapes; ``host_values`` holds the elements of each of ``host_inputs``.

        Raises NodeError, or InvalidModel if the shapes contradict the model.
        """
        try:
            return self._variant(*self._plan(input_shapes, dict(zip(self.host_inputs, host_values, strict=True)), None))
        except NodeError as error:
            pairs = [*zip(self.inputs, input_shapes, strict=True)]
            wrong = [f"{value!r} is {list(shape)} in the Run" for value, shape in pairs if not _agrees(value, shape)]
            if wrong:
                reason = f"{error.reason}. The model declares other shapes: {', '.join(wrong)}. Correct the model"
                raise NodeError(error.node, reason, invalid_input=True) from error
            open_ = [f"{value.name!r} has rank {len(shape)}" for value, shape in pairs if value.shape is None]
            if not open_:
                raise
            reason = (
                f"{error.reason}; ranks that ONNX Runtime did not know when the session was created: {', '.join(open_)}"
            )
            raise NodeError(error.node, reason, invalid_input=error.invalid_input) from error

    def kernels_added(self, variant: Variant) -> None:
        """Record that ``variant.kernels`` were added to the C cluster after those of earlier variants."""
        variant.tables.kernels.commit()

    def problems_added(self, variant: Variant) -> None:
        """Record that ``variant.problems`` were added to the C cluster after those of earlier variants."""
        variant.tables.problems.commit()

    def callbacks_added(self, variant: Variant) -> None:
        """Record that ``variant.callbacks`` were added to the C cluster after those of earlier variants."""
        variant.tables.callbacks.commit()

    def weights_added(self, variant: Variant) -> None:
        """Record that ``variant.weights`` were added to the C cluster after those of earlier variants.

        Large constants are released; small ones that a later plan may need are copied. If ``variant`` has a plan, and
        the cluster has inputs whose shapes ORT all checks, no later plan can follow, and nothing is copied.
        """
        variant.tables.weights.commit()
        for constant in variant.weights:
            if isinstance(constant, Constant) and constant.is_initializer and constant.nbytes > _SMALL_CONSTANT:
                number = self._known.weights[weight_key(constant)]
                constant.release(partial(self.weight_reader.array, number, constant.dtype, constant.shape))
        for constant in [value.initializer for value in self.graph.used_values if value.initializer]:
            # Later plans, and the plan of a surrounding graph (`control_flow.expand`), may need the constants.
            if variant.plan is None or not all(self._checked) or not self._checked:
                constant.keep()
            else:
                constant.forget_borrowed()

    def keep_constants(self) -> None:
        """Copy all constants before ORT frees them, for an owner that adds the first variant later."""
        for value in self.graph.used_values:
            if value.initializer is not None:
                value.initializer.keep()

    @staticmethod
    def _variant(plan: Plan | None, tables: Tables, likely: Plan | None = None) -> Variant:
        new = tables.kernels.new, tables.weights.new, tables.problems.new
        return Variant(plan, *new, tables, callbacks=tuple(tables.callbacks.new), likely=likely)

    def _plan(
        self,
        input_shapes: Sequence[Sequence[int] | None],
        host_values: Mapping[int, Sequence[int]],
        found: set[int] | None,
        settles: bool = True,
        trial: int | None = None,
    ) -> tuple[Plan, Tables]:
        """Return the plan for these input shapes (None: unknown), and its tables.

        Host inputs are the keys of ``host_values``. With ``found``, an input whose contents are requested becomes a
        host input, and its index is added to ``found``; such a plan cannot run. ``settles`` and ``trial`` as for
        `Lowering`. Raises UnknownRank for an unknown rank without a trial.
        """
        symbols = InputSymbols()
        plan_inputs: list[PlanInput] = []
        tensors: list[Tensor] = []
        for index, (value, shape) in enumerate(zip(self.inputs, input_shapes, strict=True)):
            first = symbols.count
            if shape is not None and not (self._checked[index] or _agrees(value, shape)):
                # The Run's shape contradicts the model's. Values that the application feeds or the host reads seldom
                # change their rank: use the Run's shape. Assume an unknown shape for other values.
                value = replace(value, shape=tuple(shape) if self._fed[index] or index in host_values else None)
            tensor = symbolic_input(symbols, value, index, shape, self._ranks.under(trial))
            tensors.append(tensor)
            plan_inputs.append(PlanInput(tensor.dtype.ort, tensor.rank, first))
        for index, elements in host_values.items():
            first = symbols.count
            symbols.host_values(tensors[index].buffer, elements, self.inputs[index].name)
            plan_inputs[index] = replace(plan_inputs[index], host_register=first, host_count=len(elements))

        def read(buffer: Buffer, count: int) -> tuple[Dim, ...]:
            if found is not None and buffer.index not in found:
                found.add(buffer.index)
                return symbols.host_values(buffer, [1] * count, self.inputs[buffer.index].name)
            known = symbols.host_values(buffer, [])
            if len(known) != count:
                name = self.inputs[buffer.index].name
                raise Unsupported("shape", f"the host reads input {name!r}: got device memory, expected host memory")
            return known

        lowering = NodeLowering(
            self.graph,
            self.device,
            self.options,
            read,
            record=True,
            guesses=None if found is None else symbols,
            states=self.states,
            settles=settles,
            trial=trial,
            compiled=self._compiled,
        )
        lowering.ctx.tuner = self._tuner
        self._lower(lowering, tensors)
        lowering.report(self.tell)
        producers = self.graph.producers()
        results = [(lowering.tensor(value), producers.get(value)) for value in self.outputs]
        tables = Tables(self._known)
        placed = place_outputs(lowering.ctx, results)
        live, told = list[Step](), list[str]()
        shown, recorded = self._history(self.show_program), self._history(self.show_plan and told.append, formulas=True)
        histories = [each for each in (shown, recorded) if each is not None]
        fixed, launches, self.traffic = _launches(lowering.ctx, self._watch(live, histories))
        for history in histories:
            history.finish()
        if self.show_plan is not None and recorded is not None:
            once = (step for group in fixed for step in group)
            self.show_plan(plan_record(input_shapes, live, once, launches, recorded.text, told))
        precompute(fixed, launches, tables)
        plan = make_plan(lowering.ctx.trace, launches, plan_inputs, placed, symbols.guards, tables, symbols.count)
        tables.schedules = frozenset(lowering.ctx.trace.schedules)
        lowering.ctx.trace.release_steps()
        return plan, tables

    def _history(self, show: Callable[[str], None] | None, formulas: bool = False) -> ProgramHistory | None:
        """Return the watch that formats each pass's changes for ``show``; None without ``show``."""
        if show is None:
            return None
        text = ProgramText([v.name for v in self.inputs], [v.name for v in self.outputs], formulas)
        return ProgramHistory(text, show, [each.name for each in PASSES], whole={"emission"})

    def _watch(self, live: list[Step], histories: Sequence[ProgramHistory]) -> Watch | None:
        """Return a watch that calls ``self.watch`` and ``histories``; None if there is nothing to call.

        For ``self.show_plan`` it also stores the steps after dead code elimination in ``live``.
        """
        watches: list[Watch] = [*histories] if self.watch is None else [self.watch, *histories]
        if self.show_plan is not None:
            watches.append(lambda name, steps: live.extend(steps if name == "dead_code_elimination" else ()))

        def watch(name: str, steps: Sequence[Step]) -> None:
            for each in watches:
                each(name, steps)

        return watch if watches else None

    def _lower(self, lowering: NodeLowering, tensors: Sequence[Tensor]) -> None:
        for value, tensor in zip(self.inputs, tensors, strict=True):
            lowering.add_input(value, tensor)
        for node in self.graph.nodes:
            try:
                lowering.lower(node)
            except UnknownValue as error:
                reason = f"{error.args[0]!r} is neither an input of the fused node nor computed in it. Report the model"
                raise NodeError(node, reason) from None
            except UnknownRank:
                raise
            except Unsupported as error:
                raise NodeError(node, error.reason) from error
            except InvalidModel as error:
                raise NodeError(node, error.reason, invalid_input=True) from error
            except (ZeroDivisionError, OverflowError) as error:
                raise NodeError(node, str(error), invalid_input=True) from error
