"""Lowering of a graph's nodes in order: symbolic tensors for inputs, and calls of operators' functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...custom.operator import CustomOperator
from ...custom.registry import Implementation, snapshot_of
from ...kernels.elementwise.sub_byte import packed_bytes, unpack
from ...model.ir import HALVES, Constant, DType, Graph, InvalidModel, Node, UnknownRank, Unsupported, Value
from ...passes.emission.emission import StepTrials
from ...program.expressions.symbolic import Dim, Expr, eq, is_read_back, le, product, symbol
from ...program.lowering.context import Buffer, BufferKind, DeviceProperties, Lowering, LoweringOptions, Tensor
from ...program.lowering.host import defer_host
from ...program.steps.containers import Operand, TensorOptional, TensorSequence
from ...program.steps.quarantine import Quarantine, operator_name
from .control_flow import MAX_UNROLLED_NODES, CompiledBodies, expand, inline
from .float32_nodes import Float32Nodes
from .ranks import RanksOfTrial
from .repetition import FunctionNode

MAX_DIM = 2**40
"""Maximum size of an input's dimension. Plans check it, so that expressions can fold clamps to INT64_MAX."""
MAX_RANK = 16
"""Maximum rank of inputs and outputs of clusters, equal to the executor's ``OCP_MAX_RANK``."""
_TYPICAL_DIM = 16
"""Hint (expected size) for an unknown dimension."""


class InputSymbols:
    """Symbols for the dimensions and host values of a plan's inputs.

    Symbols are numbered in the order of creation. If all inputs are created in order, followed by all host inputs, a
    symbol's number is its register in the plan. ``guards`` are the conditions under which symbols equal the sizes.
    """

    def __init__(self) -> None:
        self.count = 0
        self.guards: list[Dim] = []
        self._named: dict[tuple[str, int], Expr] = {}
        self._host: dict[Buffer, tuple[Dim, ...]] = {}

    def _fresh(self, name: str, hint: int, lower: int | None, upper: int | None) -> Expr:
        self.count += 1
        return symbol(self.count - 1, name, hint, lower, upper)

    def dimension(self, dim: int | str | None, hint: int | None = None) -> Dim:
        """Return the model's dimension ``dim``: an integer as it is, with a guard on the size, else a symbol.

        Dimensions with the same name and hint (expected size) share one symbol, with a guard that their sizes are
        equal.
        """
        if isinstance(dim, int):
            self.guards.append(eq(self._fresh("", dim, 0, None), dim))
            return dim
        hint = _TYPICAL_DIM if hint is None else hint
        fresh = self._fresh(dim or "", hint, 0, None)
        first = self._named.get((dim, hint)) if dim else None
        if first is not None:
            self.guards.append(eq(fresh, first))
            return first
        self.guards.append(le(fresh, MAX_DIM))
        bounded = symbol(self.count - 1, dim or "", hint, 0, MAX_DIM)
        if dim:
            self._named[dim, hint] = bounded
        return bounded

    def number(self) -> Dim:
        """Return a new symbol for an unknown integer."""
        return self._fresh("", 1, None, None)

    def host_values(self, buffer: Buffer, hints: Sequence[int], name: str = "") -> tuple[Dim, ...]:
        """Return the symbols of the elements of the host input ``name``; each call returns the same symbols."""
        if buffer not in self._host:
            self._host[buffer] = tuple(self._fresh(f"{name}[{i}]", hint, None, None) for i, hint in enumerate(hints))
        return self._host[buffer]


_REMEDY = "Feed the declared shape, or correct the declaration in the model"


def symbolic_input(
    symbols: InputSymbols,
    value: Value,
    index: int,
    hints: Sequence[int] | None = None,
    ranks: RanksOfTrial | None = None,
) -> Tensor:
    """Return the tensor of an input of a cluster or of the graph, with sub-byte elements packed as in ORT.

    ``hints`` are the tensor's dimensions in the Run for which the plan is built. Without ``hints``, ``ranks`` has the
    ranks that ORT does not know. Raises Unsupported for a type that the device does not support, UnknownRank if no
    rank is known, and InvalidModel if ``hints`` contradict the model or exceed `MAX_DIM`.
    """
    if value.dtype is None:
        raise Unsupported("dtype", f"{value.name!r} is not a tensor")
    if not value.dtype.is_supported:
        raise Unsupported("dtype", f"{value.name!r}: element type {value.dtype.name} is not supported")
    known = value.shape
    if known is None:
        rank = len(hints) if hints is not None else ranks.rank(value) if ranks is not None else None
        if rank is None:
            raise UnknownRank(f"the rank of {value.name!r} is known only when the model runs")
        known = (None,) * rank
    _check_rank(value, len(known))
    if hints is not None and len(hints) != len(known):
        raise InvalidModel(
            f"input {value.name!r}: got rank {len(hints)}, the model declares rank {len(known)}. {_REMEDY}"
        )
    shape: list[Dim] = []
    for axis, dim in enumerate(known):
        if isinstance(dim, int) and hints is not None and hints[axis] != dim:
            wrong = f"input {value.name!r}: got {hints[axis]} in dimension {axis}"
            raise InvalidModel(f"{wrong}, the model declares {dim}. {_REMEDY}")
        if hints is not None and hints[axis] > MAX_DIM:
            raise InvalidModel(
                f"input {value.name!r}: got {hints[axis]} in dimension {axis}, expected at most {MAX_DIM}"
            )
        shape.append(symbols.dimension(dim, None if hints is None else hints[axis]))
    size = product(shape)
    nbytes = packed_bytes(size, value.dtype) if value.dtype.is_packed else size * value.dtype.itemsize
    return Tensor(value.dtype, shape, Buffer(BufferKind.INPUT, nbytes, index=index))


class UnknownValue(KeyError):
    """The value is neither an input nor a result of a lowered node."""


class NodeLowering:
    """Lowers nodes in order, and holds the tensors of their values.

    ``read_host_input(buffer, count)`` returns the symbols of a host input's elements. While contents of host inputs are
    unknown, ``guesses`` creates symbols for values that depend on them. ``compiled`` are clusters that bodies may
    contain. ``trial``, ``states`` and ``settles`` as for `Lowering`.
    """

    def __init__(
        self,
        graph: Graph,
        device: DeviceProperties,
        options: LoweringOptions,
        read_host_input: Callable[[Buffer, int], tuple[Dim, ...]],
        *,
        record: bool,
        guesses: InputSymbols | None = None,
        states: dict[Node, Constant] | None = None,
        settles: bool = True,
        trial: int | None = None,
        compiled: CompiledBodies | None = None,
    ) -> None:
        self.graph = graph
        self._is_claim = not record
        self.compiled = compiled or CompiledBodies()
        self.ctx = Lowering(
            device,
            options,
            try_step=None if record else StepTrials(),
            speculative=guesses is not None,
            read_host_input=read_host_input,
            states=states,
            settles=settles,
            trial=trial,
        )
        self.tensors: dict[Value, Tensor] = {}
        self.containers: dict[Value, TensorSequence | TensorOptional] = {}
        self.served: dict[Node, CustomOperator] = {}
        """For each node that a custom operator lowered, that operator."""
        self._guesses = guesses
        self._in_float32 = Float32Nodes(options.keep_float32, is_claim=not record)
        self._nodes_unrolled = 0
        self._depth = 0

    def tensor(self, value: Value) -> Tensor:
        """Return the tensor of an initializer, an input or a result of a lowered node."""
        tensor = self.tensors.get(value)
        if tensor is None:
            if value.initializer is None:
                raise UnknownValue(value.name)
            tensor = self.tensors[value] = self.ctx.initializer(value.initializer)
        return tensor

    def operand(self, value: Value) -> Operand:
        """Return the operand of a value, which may also be a sequence or an optional value."""
        return self.containers[value] if value in self.containers else self.tensor(value)

    def operands(self) -> dict[Value, Operand]:
        """Return all known operands."""
        return {**self.tensors, **self.containers}

    def set(self, value: Value, operand: Operand) -> None:
        """Set the operand of ``value``."""
        if isinstance(operand, Tensor):
            self.tensors[value] = operand
        else:
            self.containers[value] = operand

    def knows(self, value: Value) -> bool:
        """Return whether `operand` can return the value's operand."""
        return value in self.tensors or value in self.containers or value.initializer is not None

    def add_input(self, value: Value, tensor: Tensor) -> None:
        """Add an input of the cluster or graph, with its tensor from `symbolic_input`."""
        self.ctx.node = None
        self.tensors[value] = unpack(self.ctx, tensor) if tensor.dtype.is_packed else tensor

    def spend_nodes(self, count: int) -> None:
        """Count nodes of unrolled iterations. Raises Unsupported if a node of the graph unrolls to too many nodes."""
        self._nodes_unrolled += count
        if self._nodes_unrolled > MAX_UNROLLED_NODES:
            raise Unsupported(
                "cost", f"unrolling the node's loops results in too many nodes; supported: up to {MAX_UNROLLED_NODES}"
            )

    def lower(self, node: Node) -> None:
        """Run the lowering function of the node's operator and store its results.

        Raises the errors of the function, and UnknownValue for an input that has no tensor yet.
        """
        self.ctx.node = node
        inputs = [None if value is None else self.operand(value) for value in node.inputs]
        is_float32 = self._in_float32.has(node)
        if node.unreadable_attributes and node.op_type != "Optional":  # Optional's result has its input's type
            supported = "an integer, a float, a string, a list of integers, floats or strings, or a tensor"
            name = node.unreadable_attributes[0]
            raise Unsupported("attribute", f"attribute {name!r} cannot be read; supported: {supported}")
        if self._is_claim and (refusal := _refusal(self.ctx.device.quarantine, node, inputs, is_float32)):
            raise Unsupported("quarantine", refusal)
        self.ctx.guessed = False
        self.ctx.opset = self.graph.opsets.get(node.domain, node.since_version)
        is_float32, results = self._typed_results(node, inputs, is_float32)
        for number, value in enumerate(node.outputs):
            if value is None:
                continue
            if number >= len(results):
                if value not in self.graph.used_values:
                    continue
                raise Unsupported("attribute", f"output {number} of {node.op_type} is not implemented")
            result = results[number]
            if not isinstance(result, Tensor):
                if value.dtype is not None:
                    raise InvalidModel(
                        f"{value.name!r}: expected a tensor of {value.dtype.name}, as the model declares, got no tensor"
                    )
                self.set(value, result)
                continue
            if self.ctx.guessed and self._guesses and (value.shape is None or len(value.shape) == result.rank):
                result = self._guessed(self._guesses, value, result)
            if is_float32:
                result = self._in_float32.rounded(self.ctx, value, result)
            # The result's shape may differ from the one that the model declares: no other code reads the declared one.
            if value.dtype is not None and value.dtype is not result.dtype:
                declared = f"the model declares {value.name!r} as {value.dtype.name}"
                raise Unsupported("dtype", f"{declared}, but {node.op_type} returns {result.dtype.name}")
            _check_rank(value, result.rank)
            self.tensors[value] = result

    def _guessed(self, symbols: InputSymbols, value: Value, result: Tensor) -> Tensor:
        """Return a stand-in for ``value``, for which ``result`` is only one of the possible results of a Run.

        The stand-in has the rank and type of ``result``, and the shape of ``value`` as far as ORT infers it. If the
        host requests its elements, they are unknown integers, or those of ``result`` if a Run reads these back.
        """
        known = value.shape or [None] * result.rank
        guess = self.ctx.stand_in([d if isinstance(d, int) else symbols.dimension(d) for d in known], result.dtype)
        positions = guess.positions()
        if positions is None or not (guess.dtype.is_integer or guess.dtype is DType.BOOL):
            return guess

        def contents(found: Sequence[Dim]) -> tuple[Dim, ...]:
            if not any(map(is_read_back, found)):
                return tuple(symbols.number() for _ in positions)
            if len(found) != len(positions):
                raise Unsupported(
                    "shape",
                    f"{value.name!r} has {len(found)} elements; supported: {len(positions)}, as the model declares",
                )
            return tuple(found)

        return defer_host(self.ctx, guess, [result], contents)

    def report(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with a line for each node that is computed in float32 because of value range analysis."""
        for line in self._in_float32.reports:
            tell(line)

    def _typed_results(
        self, node: Node, inputs: Sequence[Operand | None], is_listed: bool
    ) -> tuple[bool, Sequence[Operand]]:
        """Lower the node in float32 if keep_float32 says so, else in its own type; return whether in float32, and the
        results.

        If value range analysis chooses the node after it was lowered in its own type, the node is lowered again. Dead
        code elimination drops the steps of the first time.
        """
        kept = self._in_float32
        if not is_listed and not kept.reads_beyond(node):
            results = self._results(node, inputs)
            if kept.carries(node):
                kept.carry(node, self._results(node, kept.inputs(self.ctx, node, inputs)))
            if not kept.exceeds(self.ctx, node, results):
                return False, results
        try:
            results = self._results(kept.node(node), kept.inputs(self.ctx, node, inputs))
        except Unsupported:
            if is_listed:
                raise
            return False, self._results(node, inputs)  # an automatic choice must not decline a node
        kept.note(self.ctx, node, results, is_listed=is_listed)
        return True, results

    def _results(self, node: Node, inputs: Sequence[Operand | None]) -> Sequence[Operand]:
        if isinstance(node, FunctionNode):
            return node.function(self if node.subgraphs else self.ctx, *inputs)
        if node.has_subgraphs:
            return self._inlined(node, inputs)
        cluster = self.compiled.find(node) if self._depth else None
        if cluster is not None:
            return expand(self, cluster, inputs)
        first = inputs[0] if inputs else None
        if (node.domain, node.op_type) == ("", "Identity") and isinstance(first, TensorSequence | TensorOptional):
            return [first]
        return self._implemented(node, inputs)

    def _implemented(self, node: Node, inputs: Sequence[Operand | None]) -> Sequence[Operand]:
        """Lower by the first implementation that does not decline the node; if all decline, raise the last reason."""
        *others, last = snapshot_of(self.graph).implementations(node, self.ctx.opset)
        for implementation in others:
            try:
                return self._lowered_by(implementation, node, inputs)
            except UnknownRank:
                raise
            except Unsupported:
                continue
        return self._lowered_by(last, node, inputs)

    def _lowered_by(
        self, implementation: Implementation, node: Node, inputs: Sequence[Operand | None]
    ) -> Sequence[Operand]:
        if not isinstance(implementation, CustomOperator):
            return implementation.lower(self.ctx, inputs, node.attributes)
        tensors = [x for x in inputs if isinstance(x, Tensor | None)]
        if len(tensors) < len(inputs):
            raise Unsupported(
                "dtype", f"{implementation.label}: an input is a sequence or an optional value; supported: tensors"
            )
        results = implementation.lower(self.ctx, tensors, node.attributes)
        self.served[node] = implementation
        return results

    def _inlined(self, node: Node, inputs: Sequence[Operand | None]) -> Sequence[Operand]:
        if self._depth == 0:
            self._nodes_unrolled = 0
        self._depth += 1
        try:
            return inline(self, node, inputs)
        finally:
            self._depth -= 1


def _refusal(quarantine: Quarantine, node: Node, inputs: Sequence[Operand | None], is_float32: bool) -> str:
    """Return why the node is quarantined, "" if it is not. With ``is_float32`` it computes 16-bit inputs in float32."""
    if not quarantine.entries:
        return ""
    dtypes = (x.dtype for x in inputs if isinstance(x, Tensor))
    types = {DType.FLOAT32.short if is_float32 and dtype in HALVES else dtype.short for dtype in dtypes}
    return quarantine.refusal(operator_name(node.domain, node.op_type), types)


def _check_rank(value: Value, rank: int) -> None:
    if rank > MAX_RANK:
        raise Unsupported("shape", f"the rank of {value.name!r} is {rank}; supported: up to {MAX_RANK}")
