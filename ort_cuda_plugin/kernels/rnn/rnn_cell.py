"""Common parts of the RNN, GRU and LSTM kernels: cells, and operands, gates and states of one direction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering, Tensor
from ..codegen.source import KernelBuilder, StridedTensor, load_text, register_type

Gates = Sequence[Scalar]


@dataclass(frozen=True)
class Cell:
    """Expressions of one time step of a cell, for one hidden element. Scalars are float64 for float64, else float32.

    ``update(inputs, products, hidden, state)`` returns (new hidden, new state). ``inputs`` are x @ W and ``products``
    are hidden @ R, a Scalar per gate, both with biases; ``state`` is an LSTM's cell state, else None. With ``reset``,
    the last gate's product is (``reset(inputs, products)`` * hidden) @ R, which needs a second pass over the weights.
    """

    gates: int
    update: Callable[[Gates, Gates, Scalar, Scalar | None], tuple[Scalar, Scalar | None]]
    has_state: bool = False
    reset: Callable[[Gates, Gates], Scalar] | None = None


@dataclass(frozen=True)
class Sequences:
    """Operands of one direction, of any strides; "hidden" is the hidden size.

    ``inputs`` [time, batch, gates * hidden] are x @ W, computed beforehand; ``weights`` [hidden, gates * hidden] are R.
    Gates are in the operator's order. ``lengths`` is int32 [batch], None if all sequences have all time steps.
    ``hidden`` and ``state`` are the initial states [batch, hidden], None for zeros.
    """

    inputs: Tensor
    weights: Tensor
    biases: Tensor | None
    recurrent_biases: Tensor | None
    lengths: Tensor | None
    hidden: Tensor | None
    state: Tensor | None


@dataclass(frozen=True)
class Direction:
    """Cell, operands and results of one direction.

    ``parameters`` are leaves of the cell's expressions, with vectors of one element per hidden element. ``outputs`` is
    [time, batch, hidden], ``last_hidden`` and ``last_state`` (None for a cell without state) are [batch, hidden];
    results have any strides. Outputs after the end of a sequence are zeros; a ``backward`` direction starts at the end
    of each sequence.
    """

    cell: Cell
    given: Sequences
    parameters: Sequence[tuple[Scalar, Tensor]]
    outputs: Tensor
    last_hidden: Tensor
    last_state: Tensor | None
    backward: bool


class Elements(StridedTensor):
    """A tensor parameter of a kernel under construction, with loads and stores by int64 coordinates."""

    def __init__(self, builder: KernelBuilder, tensor: Tensor, *, written: bool = False) -> None:
        super().__init__(builder, tensor, written=written)
        self._emit, self._dtype = builder.emit, tensor.dtype

    def load(self, *at: str) -> str:
        """Emit the load of an element, converted to the accumulation type; return its variable."""
        leaf = Scalar(self._dtype, "leaf")
        self._emit.bind(leaf, self._emit.assign(load_text(self.pointer, self.offset(*at), self._dtype)))
        return self._emit.value(s.cast(leaf, s.accumulation_type(self._dtype)))

    def store(self, value: Scalar, *at: str) -> None:
        self._emit.store(self.pointer, self.offset(*at), s.cast(value, self._dtype))


class CellKernel(ABC):
    """Base of the RNN kernels: kernel parameters, scratch tensors, and the values of gates.

    Scratch tensors of states are [copies, ``rows``, hidden size]; there are two copies of hidden states, and
    ``state_copies`` of an LSTM's cell states. In the kernel, ``t`` is the time step of sequence ``sequence``, and ``j``
    a hidden element.
    """

    def __init__(self, ctx: Lowering, direction: Direction, rows: Dim, state_copies: int) -> None:
        cell, given = direction.cell, direction.given
        self.ctx, self.cell, self.given = ctx, cell, given
        self.compute = s.accumulation_type(given.inputs.dtype)
        self.number = register_type(self.compute)
        self.builder = builder = KernelBuilder()
        self.emit = builder.emit
        steps, batch, _ = given.inputs.shape
        self.n_steps, self.n_batch = builder.integer(steps), builder.integer(batch)
        self.inputs = Elements(builder, given.inputs)
        self.biases = None if given.biases is None else Elements(builder, given.biases)
        self.recurrent_biases = None if given.recurrent_biases is None else Elements(builder, given.recurrent_biases)
        self.vectors = [(leaf, Elements(builder, x)) for leaf, x in direction.parameters]
        self.results = Elements(builder, direction.outputs, written=True)
        self.final = Elements(builder, direction.last_hidden, written=True)
        last_state = direction.last_state
        self.final_state = None if last_state is None else Elements(builder, last_state, written=True)
        shape = rows, direction.outputs.shape[2]

        def scratch(copies: int) -> str:
            return builder.tensor(ctx.empty((copies, *shape), self.compute), written=True)

        self.hidden = scratch(2)
        self.states = scratch(state_copies) if cell.has_state else ""
        self.reset = scratch(1) if cell.reset is not None else ""
        # With ``reset``, a time step's first pass stores values in these tensors, which the second pass loads: the
        # ``inputs`` (`Cell.update`) of all gates but the last, then the ``products`` of these gates.
        self.gated = [scratch(1) for _ in range(2 * (cell.gates - 1))] if cell.reset is not None else []

    def add_lengths(self) -> None:
        """Add the kernel parameters that `length` reads."""
        lengths = self.given.lengths
        self.lengths, self.length_stride = "", ""
        if lengths is not None:
            self.lengths, self.length_stride = self.builder.tensor(lengths), self.builder.stride(lengths.strides[0])

    def length(self, sequence: str) -> None:
        """Emit ``length``, the number of time steps of a sequence, clamped to those of the inputs."""
        self.emit.line(f"length = {self.n_steps}")
        if self.lengths:
            at = f"int64({self.lengths}[{sequence} * {self.length_stride}])"
            self.emit.line(f"length = min(max({at}, int64(0)), {self.n_steps})")

    @abstractmethod
    def gate_index(self, gate: int) -> str:
        """Return the source of the index of a gate's element j in a vector of all gates."""

    @abstractmethod
    def kept(self, pointer: str) -> str:
        """Return the source of element j of scratch tensor ``pointer``, one of ``gated``."""

    @abstractmethod
    def products(self, gates: Sequence[int]) -> list[Scalar]:
        """Return element j of hidden @ R with biases for ``gates``; with ``reset``, the last gate has its own pass."""

    def gates(self) -> tuple[Gates, Gates]:
        """Return ``inputs`` and ``products`` (`Cell.update`) of all gates, in the pass that computes the last gate."""
        gates = range(self.cell.gates)
        if self.cell.reset is None:
            return self.input_products(gates), self.products(gates)
        kept = [self.named(self.emit.assign(self.kept(pointer))) for pointer in self.gated]
        half = len(kept) // 2
        return [*kept[:half], *self.input_products(gates[-1:])], [*kept[half:], *self.products(gates[-1:])]

    def input_products(self, gates: Sequence[int]) -> list[Scalar]:
        return [
            self.biased(self.named(self.inputs.load("t", "sequence", self.gate_index(gate))), self.biases, gate)
            for gate in gates
        ]

    def biased(self, value: Scalar, biases: Elements | None, gate: int) -> Scalar:
        return value if biases is None else value + self.named(biases.load(self.gate_index(gate)))

    def named(self, text: str) -> Scalar:
        """Return a leaf of the accumulation type whose value is the source ``text``."""
        leaf = Scalar(self.compute, "leaf")
        self.emit.bind(leaf, text)
        return leaf

    def bind_parameters(self) -> None:
        """Bind the leaves of the direction's parameters to their values for element j."""
        for leaf, elements in self.vectors:
            self.emit.bind(leaf, elements.load("j"))
