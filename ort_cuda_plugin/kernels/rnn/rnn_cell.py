"""What a direction of an RNN, GRU or LSTM is made of, for the kernels of `recurrent` and `recurrent_strips`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering, Tensor
from ..codegen.source import KernelBuilder, load_text, offset_text, register_type

__all__ = ["Cell", "CellKernel", "Direction", "Elements", "Gates", "Sequences"]

Gates = Sequence[Scalar]


@dataclass(frozen=True)
class Cell:
    """What a step computes. Scalars are of the accumulation type: float32, or float64 for float64.

    ``update(inputs, products, hidden, state)`` gives (new hidden, new state): ``inputs`` are the input products and
    ``products`` the recurrent products of each gate, both with their biases, ``state`` is an LSTM's cell and None for
    others. With ``reset``, the last gate's product is not of the hidden state but of ``reset(inputs, products)`` times
    it, which takes a second pass over the weights.
    """

    gates: int
    update: Callable[[Gates, Gates, Scalar, Scalar | None], tuple[Scalar, Scalar | None]]
    has_state: bool = False
    reset: Callable[[Gates, Gates], Scalar] | None = None


@dataclass(frozen=True)
class Sequences:
    """The tensors of one direction; "hidden" is the hidden size. Results have any strides.

    ``inputs`` [time, batch, gates * hidden], ``weights`` [hidden, gates * hidden], of any strides, and ``parameters``
    (vectors of hidden elements) are in the operator's order of gates. ``lengths`` (int32 [batch]), ``hidden`` and
    ``state`` ([batch, hidden]: the start) may be None: all steps, and zeros.
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
    """What one direction reads and writes.

    ``parameters`` are leaves of the cell's expressions that stand for an element per hidden element. ``outputs`` is
    [time, batch, hidden], ``last_hidden`` and ``last_state`` are [batch, hidden]. Steps behind a sequence's length give
    zeros; ``backward`` starts with the sequence's last element.
    """

    cell: Cell
    given: Sequences
    parameters: Sequence[tuple[Scalar, Tensor]]
    outputs: Tensor
    last_hidden: Tensor
    last_state: Tensor | None
    backward: bool


class Elements:
    """A tensor as a parameter of a kernel in the making, whose elements are read and written by int64 coordinates."""

    def __init__(self, builder: KernelBuilder, tensor: Tensor, *, written: bool = False) -> None:
        self._emit = builder.emit
        self._dtype = tensor.dtype
        self.pointer = builder.tensor(tensor, written=written)
        self._strides = [builder.stride(stride) for stride in tensor.strides]

    def _offset(self, at: Sequence[str]) -> str:
        return offset_text(list(zip(at, self._strides, strict=True)))

    def load(self, *at: str) -> str:
        """The name of the element in the type that recurrences compute in."""
        leaf = Scalar(self._dtype, "leaf")
        self._emit.bind(leaf, self._emit.assign(load_text(self.pointer, self._offset(at), self._dtype)))
        return self._emit.value(s.cast(leaf, s.accumulation_type(self._dtype)))

    def store(self, value: Scalar, *at: str) -> None:
        self._emit.store(self.pointer, self._offset(at), s.cast(value, self._dtype))


class CellKernel(ABC):
    """The operands and the gates of a kernel in the making that walks through time.

    What a step keeps has ``rows`` rows of the hidden size; ``states`` are in ``state_copies`` copies. In the kernel
    ``t`` is the place in time of sequence ``sequence`` and ``j`` a hidden element.
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
        # What the first pass of a step leaves to the second: inputs, then products, of all gates but one.
        self.gated = [scratch(1) for _ in range(2 * (cell.gates - 1))] if cell.reset is not None else []

    @abstractmethod
    def place(self, gate: int) -> str:
        """Where element j of a gate is among those of all gates."""

    @abstractmethod
    def kept(self, pointer: str) -> str:
        """Element j of one of ``gated``."""

    @abstractmethod
    def products(self, gates: Sequence[int]) -> list[Scalar]:
        """The recurrent products with their biases; with ``reset``, the last gate has a pass of its own."""

    def gates(self) -> tuple[Gates, Gates]:
        """The input products and the recurrent products of all gates, in the pass of the last one."""
        gates = range(self.cell.gates)
        if self.cell.reset is None:
            return self.input_products(gates), self.products(gates)
        kept = [self.named(self.emit.assign(self.kept(pointer))) for pointer in self.gated]
        half = len(kept) // 2
        return [*kept[:half], *self.input_products(gates[-1:])], [*kept[half:], *self.products(gates[-1:])]

    def input_products(self, gates: Sequence[int]) -> list[Scalar]:
        return [
            self.biased(self.named(self.inputs.load("t", "sequence", self.place(gate))), self.biases, gate)
            for gate in gates
        ]

    def biased(self, value: Scalar, biases: Elements | None, gate: int) -> Scalar:
        return value if biases is None else value + self.named(biases.load(self.place(gate)))

    def named(self, text: str) -> Scalar:
        """What stands for a name of the kernel, in the type that recurrences compute in."""
        leaf = Scalar(self.compute, "leaf")
        self.emit.bind(leaf, text)
        return leaf

    def bind_parameters(self) -> None:
        """Lets the cell's expressions read the parameters of element j."""
        for leaf, elements in self.vectors:
            self.emit.bind(leaf, elements.load("j"))
