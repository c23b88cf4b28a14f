"""One direction of an RNN, GRU or LSTM on a GPU: a block per sequence of the batch walks through time.

Products of the inputs with their weights are made beforehand, for all steps at once. What is left of a step depends on
the step before: the products of the hidden state with the recurrence weights, and the gates, which are scalar
expressions. Thread t owns the hidden elements t, t + threads, ...; the hidden state stands in global memory, twice, so
that a step reads one copy while it writes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ort_cuda_plugin.kernels.cells import Cell, Elements, Gates, Sequences
from ort_cuda_plugin.kernels.codegen import KernelBuilder, kernel_name, register_type
from ort_cuda_plugin.kernels.layout import no_wider
from ort_cuda_plugin.kernels.recurrent_strips import StripCell
from ort_cuda_plugin.program import scalar as s
from ort_cuda_plugin.program.lowering import Lowering, Tensor
from ort_cuda_plugin.program.scalar import Scalar
from ort_cuda_plugin.program.trace import Use

__all__ = ["run_cell"]

THREADS = 128


def run_cell(
    ctx: Lowering,
    cell: Cell,
    given: Sequences,
    parameters: Sequence[tuple[Scalar, Tensor]],
    outputs: Tensor,
    last_hidden: Tensor,
    last_state: Tensor | None,
    *,
    backward: bool,
) -> None:
    """Launches all steps: writes ``outputs`` [time, batch, hidden], ``last_hidden`` and ``last_state`` [batch, hidden].

    ``parameters`` are leaves of the cell's expressions that stand for an element per hidden element. Steps behind a
    sequence's length give zeros; ``backward`` starts with the sequence's last element.
    """
    size = outputs.shape[2]
    arguments = (ctx, cell, given, parameters, outputs, last_hidden, last_state)
    if ctx.device.emulated and isinstance(size, int) and size > 0:
        StripCell(*arguments, size).launch(backward)
    else:
        _CellKernel(*arguments).launch(backward)


class _CellKernel:
    """Emits and launches the steps of one direction.

    In the kernel ``sequence`` is the block's, ``t`` the place in time and ``j`` a hidden element of the thread. The
    sequence's row of a scratch tensor begins at ``base``, that of the hidden state's second copy at ``other``; a step
    reads the copy at ``now`` and writes the one at ``next``.
    """

    def __init__(
        self,
        ctx: Lowering,
        cell: Cell,
        given: Sequences,
        parameters: Sequence[tuple[Scalar, Tensor]],
        outputs: Tensor,
        last_hidden: Tensor,
        last_state: Tensor | None,
    ) -> None:
        self.ctx, self.cell, self.given = ctx, cell, given
        self.compute = s.accumulation_type(given.inputs.dtype)
        self.number = register_type(self.compute)
        steps, self.batch, _ = given.inputs.shape
        self.size = outputs.shape[2]
        self.threads = no_wider(THREADS, self.size)
        self.builder = builder = KernelBuilder()
        self.emit = builder.emit
        self.n_steps, self.n_batch, self.n = (builder.integer(dim) for dim in (steps, self.batch, self.size))
        self.inputs = Elements(builder, given.inputs)
        self.read = ctx.contiguous(given.weights)
        self.weights = Elements(builder, self.read)
        self.biases = None if given.biases is None else Elements(builder, given.biases)
        self.recurrent_biases = None if given.recurrent_biases is None else Elements(builder, given.recurrent_biases)
        self.vectors = [(leaf, Elements(builder, x)) for leaf, x in parameters]
        self.results = Elements(builder, outputs, written=True)
        self.final = Elements(builder, last_hidden, written=True)
        self.final_state = None if last_state is None else Elements(builder, last_state, written=True)
        self.hidden = self._scratch(2)
        self.states = self._scratch(1) if cell.has_state else ""
        self.reset = self._scratch(1) if cell.reset is not None else ""
        # What the first pass of a step leaves to the second: inputs, then products, of all gates but one.
        self.gated = [self._scratch(1) for _ in range(2 * (cell.gates - 1))] if cell.reset is not None else []

    def launch(self, backward: bool) -> None:
        emit = self.emit
        self._start()
        with emit.block("for step in range(length):"):
            emit.line("t = length - 1 - step" if backward else "t = step")
            emit.line("now = base if step % 2 == 0 else other")
            emit.line("next = other if step % 2 == 0 else base")
            if self.cell.reset is not None:
                self._reset_hidden(self.cell.reset)
            self._step()
            emit.line("cuda.syncthreads()")
        self._finish()
        uses = {self.read: Use(self.given.inputs.shape[0])}
        self.builder.launch(self.ctx, kernel_name(self.ctx), (self.batch, 1, 1), (self.threads, 1, 1), uses)

    # ---- the parts of the kernel ----

    def _start(self) -> None:
        """Names what all threads of a block share, and writes the state before the first step."""
        emit, given = self.emit, self.given
        emit.line("sequence = int64(cuda.blockIdx.x)")
        emit.line(f"base = sequence * {self.n}")
        emit.line(f"other = {self.n_batch} * {self.n} + base")
        emit.line(f"length = {self.n_steps}")
        if given.lengths is not None:
            pointer, stride = self.builder.tensor(given.lengths), self.builder.stride(given.lengths.strides[0])
            emit.line(f"length = min(max(int64({pointer}[sequence * {stride}]), int64(0)), {self.n_steps})")
        for target, start in ((self.hidden, given.hidden), (self.states, given.state)):
            if target:
                elements = None if start is None else Elements(self.builder, start)
                with self._every_element():
                    value = "0" if elements is None else elements.load("sequence", "j")
                    emit.line(f"{target}[base + j] = {self.number}({value})")
        emit.line("cuda.syncthreads()")

    def _reset_hidden(self, reset: Callable[[Gates, Gates], Scalar]) -> None:
        """The first pass of a step: all gates but the last, and the hidden state times ``reset`` of them."""
        emit, gates = self.emit, range(self.cell.gates - 1)
        with self._every_element():
            inputs, products = self._inputs(gates), self._products(gates, f"{self.hidden}[now + k]")
            factor = emit.value(reset(inputs, products))
            emit.line(f"{self.reset}[base + j] = {factor} * {self.hidden}[now + j]")
            for place, gate in zip(self.gated, [*inputs, *products], strict=True):
                emit.line(f"{place}[base + j] = {emit.value(gate)}")
        emit.line("cuda.syncthreads()")

    def _step(self) -> None:
        """The new hidden state and the new state of the cell."""
        emit = self.emit
        with self._every_element():
            for leaf, elements in self.vectors:
                emit.bind(leaf, elements.load("j"))
            inputs, products = self._gates()
            state = self._named(emit.assign(f"{self.states}[base + j]")) if self.cell.has_state else None
            before = self._named(emit.assign(f"{self.hidden}[now + j]"))
            after, new_state = self.cell.update(inputs, products, before, state)
            emit.line(f"{self.hidden}[next + j] = {emit.value(after)}")
            if new_state is not None:
                emit.line(f"{self.states}[base + j] = {emit.value(new_state)}")
            self.results.store(after, "t", "sequence", "j")

    def _finish(self) -> None:
        """Zeros behind the sequence's length, and the last states."""
        emit = self.emit
        with self._every_element():
            with emit.block(f"for t in range(length, {self.n_steps}):"):
                self.results.store(s.constant(0.0, self.compute), "t", "sequence", "j")
            emit.line("last = base if length % 2 == 0 else other")
            self.final.store(self._named(emit.assign(f"{self.hidden}[last + j]")), "sequence", "j")
            if self.final_state is not None:
                self.final_state.store(self._named(emit.assign(f"{self.states}[base + j]")), "sequence", "j")

    # ---- the gates of hidden element j ----

    def _gates(self) -> tuple[Gates, Gates]:
        """The input products and the recurrent products of all gates."""
        gates = range(self.cell.gates)
        if self.cell.reset is None:
            return self._inputs(gates), self._products(gates, f"{self.hidden}[now + k]")
        kept = [self._named(self.emit.assign(f"{source}[base + j]")) for source in self.gated]
        half = len(kept) // 2
        inputs = [*kept[:half], *self._inputs(gates[-1:])]
        return inputs, [*kept[half:], *self._products(gates[-1:], f"{self.reset}[base + k]")]

    def _inputs(self, gates: Sequence[int]) -> list[Scalar]:
        values = []
        for gate in gates:
            at = self._place(gate)
            value = self._named(self.inputs.load("t", "sequence", at))
            values.append(value if self.biases is None else value + self._named(self.biases.load(at)))
        return values

    def _products(self, gates: Sequence[int], vector: str) -> list[Scalar]:
        """The recurrent products of ``vector``, an expression of k."""
        emit, biases = self.emit, self.recurrent_biases
        names = [emit.fresh("sum") for _ in gates]
        for gate, name in zip(gates, names, strict=True):
            emit.line(f"{name} = {self.number}({0 if biases is None else biases.load(self._place(gate))})")
        with emit.block(f"for k in range({self.n}):"):
            emit.line(f"h = {vector}")
            for gate, name in zip(gates, names, strict=True):
                emit.line(f"{name} += h * {self.weights.load('k', self._place(gate))}")
        return [self._named(name) for name in names]

    # ---- text ----

    def _place(self, gate: int) -> str:
        """Where element j of a gate is among those of all gates."""
        return f"({gate} * {self.n} + j)"

    def _scratch(self, copies: int) -> str:
        return self.builder.tensor(self.ctx.empty((copies, self.batch, self.size), self.compute), written=True)

    def _named(self, text: str) -> Scalar:
        leaf = Scalar(self.compute, "leaf")
        self.emit.bind(leaf, text)
        return leaf

    def _every_element(self) -> AbstractContextManager[None]:
        return self.emit.block(f"for j in range(int64(cuda.threadIdx.x), {self.n}, {self.threads}):")
