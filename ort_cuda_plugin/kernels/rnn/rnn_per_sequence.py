"""RNN, GRU and LSTM with one block per sequence: for weights that exceed the registers of `rnn_persistent`.

A GEMM multiplies the inputs of all time steps by their weights beforehand. The rest of a time step depends on the step
before: the hidden state times the recurrence weights, and the gates, which are scalar expressions. Thread t owns the
hidden elements t, t + threads, ... The hidden state is double-buffered in global memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.lowering.context import Lowering
from ...program.steps.trace import Use
from ..codegen.launch_geometry import no_wider
from ..codegen.source import kernel_name
from .rnn_cell import CellKernel, Direction, Elements, Gates
from .rnn_emulated import StripCell
from .rnn_persistent import PartCell, have_equal_strides, try_persistent

THREADS = 128  # maximum threads per block


def run_cells(ctx: Lowering, directions: Sequence[Direction], *, same_cell: bool) -> None:
    """Launch all time steps of one or both directions; with ``same_cell`` both differ only in their tensors."""
    size = directions[0].outputs.shape[2]
    if same_cell and have_equal_strides(directions) and isinstance(size, int) and try_persistent(ctx, directions[0]):
        PartCell(ctx, directions, size).launch()
        return
    for direction in directions:
        if ctx.device.emulated and isinstance(size, int) and size > 0:
            StripCell(ctx, direction, size).launch(direction.backward)
        elif isinstance(size, int) and try_persistent(ctx, direction):
            PartCell(ctx, [direction], size).launch()
        else:
            _BlockCell(ctx, direction).launch(direction.backward)


class _BlockCell(CellKernel):
    """Generator of the kernel that computes all time steps of one direction.

    In the kernel, ``sequence`` is the block's sequence, ``t`` the time step, ``j`` a hidden element of the thread. The
    sequence's row of a scratch tensor begins at ``base``; in the second copy of the hidden state it begins at
    ``other``. A time step reads the copy at ``now`` and writes the copy at ``next``.
    """

    def __init__(self, ctx: Lowering, direction: Direction) -> None:
        batch, size = direction.given.inputs.shape[1], direction.outputs.shape[2]
        super().__init__(ctx, direction, batch, 1)
        self.batch, self.size = batch, size
        self.threads = no_wider(THREADS, size)
        self.n = self.builder.integer(size)
        self.read = ctx.contiguous(self.given.weights)
        self.weights = Elements(self.builder, self.read)
        self.add_lengths()

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

    # ---- sections of the kernel ----

    def _start(self) -> None:
        """Compute the loop invariants, and store the initial state."""
        emit, given = self.emit, self.given
        emit.line("sequence = int64(cuda.blockIdx.x)")
        emit.line(f"base = sequence * {self.n}")
        emit.line(f"other = {self.n_batch} * {self.n} + base")
        self.length("sequence")
        for target, start in ((self.hidden, given.hidden), (self.states, given.state)):
            if target:
                elements = None if start is None else Elements(self.builder, start)
                with self._every_element():
                    value = "0" if elements is None else elements.load("sequence", "j")
                    emit.line(f"{target}[base + j] = {self.number}({value})")
        emit.line("cuda.syncthreads()")

    def _reset_hidden(self, reset: Callable[[Gates, Gates], Scalar]) -> None:
        """Emit a time step's first pass: all gates but the last, and the hidden state times ``reset``."""
        emit, gates = self.emit, range(self.cell.gates - 1)
        with self._every_element():
            inputs, products = self.input_products(gates), self.products(gates)
            factor = emit.value(reset(inputs, products))
            emit.line(f"{self.reset}[base + j] = {factor} * {self.hidden}[now + j]")
            for pointer, gate in zip(self.gated, [*inputs, *products], strict=True):
                emit.line(f"{pointer}[base + j] = {emit.value(gate)}")
        emit.line("cuda.syncthreads()")

    def _step(self) -> None:
        """Emit the new hidden state, the new cell state, and the result."""
        emit = self.emit
        with self._every_element():
            self.bind_parameters()
            inputs, products = self.gates()
            state = self.named(emit.assign(f"{self.states}[base + j]")) if self.cell.has_state else None
            before = self.named(emit.assign(f"{self.hidden}[now + j]"))
            after, new_state = self.cell.update(inputs, products, before, state)
            emit.line(f"{self.hidden}[next + j] = {emit.value(after)}")
            if new_state is not None:
                emit.line(f"{self.states}[base + j] = {emit.value(new_state)}")
            self.results.store(after, "t", "sequence", "j")

    def _finish(self) -> None:
        """Emit the stores of the last states, and of zeros in the results after the end of the sequence."""
        emit = self.emit
        with self._every_element():
            with emit.block(f"for t in range(length, {self.n_steps}):"):
                self.results.store(s.constant(0.0, self.compute), "t", "sequence", "j")
            emit.line("last = base if length % 2 == 0 else other")
            self.final.store(self.named(emit.assign(f"{self.hidden}[last + j]")), "sequence", "j")
            if self.final_state is not None:
                self.final_state.store(self.named(emit.assign(f"{self.states}[base + j]")), "sequence", "j")

    # ---- the gates of hidden element j ----

    def products(self, gates: Sequence[int]) -> list[Scalar]:
        emit, biases = self.emit, self.recurrent_biases
        by_reset = self.cell.reset is not None and self.cell.gates - 1 in gates
        names = [emit.fresh("sum") for _ in gates]
        for gate, name in zip(gates, names, strict=True):
            emit.line(f"{name} = {self.number}({0 if biases is None else biases.load(self.gate_index(gate))})")
        with emit.block(f"for k in range({self.n}):"):
            emit.line(f"h = {f'{self.reset}[base + k]' if by_reset else f'{self.hidden}[now + k]'}")
            for gate, name in zip(gates, names, strict=True):
                emit.line(f"{name} += h * {self.weights.load('k', self.gate_index(gate))}")
        return [self.named(name) for name in names]

    # ---- source text ----

    def gate_index(self, gate: int) -> str:
        return f"({gate} * {self.n} + j)"

    def kept(self, pointer: str) -> str:
        return f"{pointer}[base + j]"

    def _every_element(self) -> AbstractContextManager[None]:
        return self.emit.block(f"for j in range(int64(cuda.threadIdx.x), {self.n}, {self.threads}):")
