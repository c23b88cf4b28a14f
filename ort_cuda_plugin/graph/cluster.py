"""A compiled cluster: what a fused node needs to make plans, after ORT's own graph is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..runtime.kernel import KernelSpec
from ..runtime.plan_format import Plan, PlanInput
from .ir import Constant, Graph, InvalidModel, Node, Unsupported, Value
from .lowering import Buffer, DeviceProperties, LoweringOptions, Tensor
from .node_lowering import InputSymbols, NodeError, NodeLowering, symbolic_input
from .planner import KnownEntries, Tables, make_plan
from .symbolic import Dim

if TYPE_CHECKING:
    from ..runtime.libraries import LibraryProblem


@dataclass(frozen=True)
class Variant:
    """A plan and what it needs that no earlier plan of the cluster did.

    Indices in ``plan`` count the cluster's kernels, weights and problems in the order in which all variants so far
    added theirs: add these lists, then the plan, then call `CompiledCluster.commit`.
    """

    plan: Plan
    kernels: list[KernelSpec]
    weights: list[Constant]
    problems: list[LibraryProblem]
    tables: Tables


class CompiledCluster:
    """The nodes of one fused node. Not thread safe: `build` and `commit` belong together.

    ``inputs`` and ``outputs`` name the fused node's, in its order; default: those of the graph. ``host_inputs`` are the
    indices of the inputs whose contents decide shapes; set by `prepare`.
    """

    def __init__(
        self,
        graph: Graph,
        device: DeviceProperties,
        options: LoweringOptions | None = None,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
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
        self._known = KnownEntries()

    @property
    def is_static(self) -> bool:
        """Whether the model says every dimension of every input, and no input is a host input."""
        shapes = [value.shape for value in self.inputs]
        static = all(shape is not None and all(isinstance(dim, int) for dim in shape) for shape in shapes)
        return static and not self.host_inputs

    def prepare(self) -> Variant | None:
        """Must be called while ORT's graph is alive. Returns the only variant of a static cluster, else None.

        Afterwards the constants that a later `build` may need are the cluster's own.

        Raises NodeError where a node cannot be run after all.
        """
        symbols = InputSymbols()
        tensors = [symbolic_input(symbols, value, index) for index, value in enumerate(self.inputs)]
        found: set[int] = set()

        def read(buffer: Buffer, count: int) -> tuple[Dim, ...]:
            found.add(buffer.index)
            return symbols.host_values(buffer, [1] * count)

        lowering = NodeLowering(self.graph, self.device, self.options, read, record=False)
        self._lower(lowering, tensors)
        self.host_inputs = sorted(found)
        if self.is_static:
            return self.build([[dim for dim in value.shape or () if isinstance(dim, int)] for value in self.inputs], [])
        for node in self.graph.nodes:
            for value in node.reads():
                if value.initializer is not None:
                    value.initializer.keep()
        return None

    def build(self, input_shapes: Sequence[Sequence[int]], host_values: Sequence[Sequence[int]]) -> Variant:
        """The variant for inputs of these shapes; ``host_values`` has the elements of each of ``host_inputs``.

        Raises NodeError, or InvalidModel where the shapes contradict the model.
        """
        symbols = InputSymbols()
        plan_inputs: list[PlanInput] = []
        tensors: list[Tensor] = []
        for index, (value, shape) in enumerate(zip(self.inputs, input_shapes, strict=True)):
            first = symbols.count
            tensor = symbolic_input(symbols, value, index, shape)
            tensors.append(tensor)
            plan_inputs.append(PlanInput(tensor.dtype.onnx, tensor.rank, first))
        for index, elements in zip(self.host_inputs, host_values, strict=True):
            before = plan_inputs[index]
            first = symbols.count
            symbols.host_values(tensors[index].buffer, elements)
            plan_inputs[index] = PlanInput(before.dtype, before.rank, before.first_register, first, len(elements))

        def read(buffer: Buffer, count: int) -> tuple[Dim, ...]:
            known = symbols.host_values(buffer, [])
            if len(known) != count:
                raise Unsupported("shape", f"the contents of {self.inputs[buffer.index].name!r} are not read back")
            return known

        lowering = NodeLowering(self.graph, self.device, self.options, read, record=True)
        self._lower(lowering, tensors)
        results = [lowering.tensor(value) for value in self.outputs]
        tables = Tables(self._known)
        plan = make_plan(lowering.ctx, plan_inputs, results, symbols.guards, tables)
        return Variant(plan, tables.kernels.new, tables.weights.new, tables.problems.new, tables)

    def commit(self, variant: Variant) -> None:
        """Takes note that the variant's kernels, weights and problems were added."""
        self._known.add(variant.tables)

    def _lower(self, lowering: NodeLowering, tensors: Sequence[Tensor]) -> None:
        lowering.tensors.update(zip(self.inputs, tensors, strict=True))
        for node in self.graph.nodes:
            try:
                lowering.lower(node, [None if v is None else self._input(lowering, node, v) for v in node.inputs])
            except Unsupported as error:
                raise NodeError(node, error.reason) from error
            except InvalidModel as error:
                raise NodeError(node, error.reason, invalid_input=True) from error
            except (ZeroDivisionError, OverflowError) as error:
                raise NodeError(node, str(error), invalid_input=True) from error

    @staticmethod
    def _input(lowering: NodeLowering, node: Node, value: Value) -> Tensor:
        try:
            return lowering.tensor(value)
        except KeyError:
            raise NodeError(node, f"{value.name!r} is neither an input of the cluster nor computed in it") from None
