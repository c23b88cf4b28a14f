"""RNN, GRU and LSTM on the emulated device: a thread computes all time steps of a few sequences of one direction.

The kernel needs no barriers, so that its loops become plain CPU loops. A strip is a group of adjacent hidden elements
that CPU vectors compute (`strip_functions` of `compiler.intrinsics.tile_intrinsics`); a weight is loaded once for all
sequences of the thread. The last strip is shifted back to end at the last hidden element, and may compute some elements
a second time; therefore a time step reads one copy of the states and writes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, le
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.trace import Use
from ..codegen.source import kernel_name
from .rnn_cell import CellKernel, Direction, Elements, Gates

ACCUMULATORS = 128
"""Accumulators of 4 bytes per thread: eight 512-bit CPU vectors."""
ROWS = 4
"""Sequences per thread; 1 for at most `FEW` sequences."""
FEW = 2  # maximum batch size for which a thread computes one sequence instead of ROWS


class StripCell(CellKernel):
    """Generator of the kernel that computes all time steps of one direction; a block has one thread.

    In the kernel, ``first`` is the block's first sequence, ``row`` the index of one of its sequences, ``j0`` the first
    hidden element of a strip and ``j`` an element of it. Hidden states are [copy][block][hidden][rows], other scratch
    tensors [copy][block][rows][hidden]. The block's slices of the two copies begin at ``base`` and ``other``; a time
    step reads the slice at ``now`` and writes the slice at ``next``.
    """

    def __init__(self, ctx: Lowering, direction: Direction, size: int) -> None:
        cell, batch = direction.cell, direction.given.inputs.shape[1]
        self.size = size
        self.rows = 1 if ctx.settled(le(batch, FEW)) else ROWS
        self.blocks: Dim = ceildiv(batch, self.rows)
        super().__init__(ctx, direction, self.blocks * self.rows, 2)
        longest = ACCUMULATORS // self.rows // (1 << (cell.gates - 1).bit_length()) * 4 // self.compute.itemsize
        self.width = min(longest, 1 << (size.bit_length() - 1))
        given, builder = self.given, self.builder
        self.n_blocks = builder.integer(self.blocks)
        self.read = self._strips_of(given.weights)
        self.weights = builder.tensor(self.read)
        self.add_lengths()

    def launch(self, backward: bool) -> None:
        emit, cell = self.emit, self.cell
        self._start()
        every = range(cell.gates)
        with emit.block("for step in range(longest):"):
            emit.line("now = base if step % 2 == 0 else other")
            emit.line("next = other if step % 2 == 0 else base")
            if cell.reset is not None:
                with self._strips(every[:-1], f"{self.hidden}, now", backward):
                    self._reset_hidden(cell.reset)
                with self._strips(every[-1:], f"{self.reset}, base", backward):
                    self._step()
            else:
                with self._strips(every, f"{self.hidden}, now", backward):
                    self._step()
        self._finish()
        uses = {self.read: Use(self.given.inputs.shape[0])}
        self.builder.launch(self.ctx, kernel_name(self.ctx), (self.blocks, 1, 1), (1, 1, 1), uses)

    # ---- weights ----

    @property
    def _is_packed(self) -> bool:
        return self.size % self.width == 0

    def _strips_of(self, weights: Tensor) -> Tensor:
        """Return the weights packed as [strips, hidden, gates, width]; unpacked if the last strip overlaps another."""
        if not self._is_packed:
            return self.ctx.contiguous(weights)
        size, width, (inner, outer) = self.size, self.width, weights.strides
        shape = (size // width, size, self.cell.gates, width)
        strides = (width * outer, inner, size * outer, outer)
        return self.ctx.contiguous(self.ctx.view(weights, shape, strides, weights.offset))

    def _weight(self, gate: int) -> str:
        """Return the source of the index of a gate's first weight for the strip and hidden element ``k``."""
        size, width, gates = self.size, self.width, self.cell.gates
        if self._is_packed:
            return f"(strip * {size} + k) * {gates * width} + {gate * width}"
        return f"k * {gates * size} + {gate * size} + j0"

    # ---- sections of the kernel ----

    def _start(self) -> None:
        """Compute the loop invariants, and store the initial states."""
        emit, given = self.emit, self.given
        count, gates = self.rows * self.size, self.cell.gates
        emit.line(f"first = int64(cuda.blockIdx.x) * {self.rows}")
        emit.line(f"base = int64(cuda.blockIdx.x) * {count}")
        emit.line(f"other = {self.n_blocks} * {count} + base")
        emit.line(f"products = array_pointer(cuda.local.array({gates * self.rows * self.width}, {self.number}))")
        for name in ("new_hidden", *(["new_state"] if self.states else []), *self._local_names()):
            emit.line(f"{name} = array_pointer(cuda.local.array({self.width}, {self.number}))")
        starts = [Elements(self.builder, x) if x is not None else None for x in (given.hidden, given.state)]
        emit.line("longest = int64(0)")
        with emit.block(f"for row in range({self.rows}):"):
            emit.line("sequence = first + row")
            emit.line(f"there = sequence < {self.n_batch}")
            emit.line(f"read = min(sequence, {self.n_batch} - 1)")
            self.length("read")
            emit.line("longest = max(longest, choose(there, length, int64(0)))")
            with emit.block(f"for j in range({self.size}):"):
                elements = [
                    f"{self.hidden}[base + j * {self.rows} + row]",
                    f"{self.states}[base + row * {self.size} + j]",
                ]
                for element, start in zip(elements[: 2 if self.states else 1], starts, strict=False):
                    value = "0" if start is None else start.load("read", "j")
                    emit.line(f"{element} = {self.number}({value})")
                emit.line(f"{self.hidden}[other + j * {self.rows} + row] = {self.number}(0)")
                if self.reset:
                    emit.line(f"{self.reset}[base + j * {self.rows} + row] = {self.number}(0)")

    @contextmanager
    def _strips(self, gates: Sequence[int], vector: str, backward: bool) -> Iterator[None]:
        """Emit a loop over strips that multiplies ``vector`` by the weights of ``gates``, and one over the sequences.

        ``vector`` is the text "pointer, index of the first element". The ``with`` block is for one strip and time step
        ``t`` of sequence ``sequence``.
        """
        emit, rows, width = self.emit, self.rows, self.width
        short, storage = self.compute.short, self.given.weights.dtype.short
        pointer, begin = vector.split(", ")
        with emit.block(f"for strip in range({-(-self.size // width)}):"):
            emit.line(f"j0 = int64(strip) * {width}")
            if not self._is_packed:
                emit.line(f"j0 = min(j0, int64({self.size - width}))")
            for gate in gates:
                emit.line(f"sums{gate} = strips_{short}({rows}, {width})")
            with emit.block(f"for k in range({self.size}):"):
                for gate in gates:
                    at = f"{pointer}, {begin} + k * {rows}, {self.weights}, int64({self._weight(gate)})"
                    emit.line(f"multiply_add_strip_{storage}(sums{gate}, {at}, {rows}, {width})")
            for gate in gates:
                emit.line(f"store_strips_{short}(products, {gate * rows * width}, sums{gate}, {rows}, {width})")
            with emit.block(f"for row in range({rows}):"):
                emit.line("sequence = first + row")
                emit.line(f"if sequence >= {self.n_batch}:")
                emit.line("    break")
                self.length("sequence")
                with emit.block("if step < length:"):
                    emit.line("t = length - 1 - step" if backward else "t = step")
                    yield
                self._keep(gates)

    def _keep(self, gates: Sequence[int]) -> None:
        """Emit the copy of a sequence's states into the next time step's buffer, if the sequence has already ended."""
        if self.cell.gates - 1 not in gates:
            return
        with self.emit.block("else:"), self._every_element():
            for pointer, at in self._state_elements():
                self.emit.line(f"{pointer}[next + {at}] = {pointer}[now + {at}]")

    def _reset_hidden(self, reset: Callable[[Gates, Gates], Scalar]) -> None:
        """Emit a time step's first pass: all gates but the last, and the hidden state times ``reset``."""
        emit, gates = self.emit, range(self.cell.gates - 1)
        with self._every_element():
            inputs, products = self.input_products(gates), self.products(gates)
            factor = emit.value(reset(inputs, products))
            emit.line(f"new_hidden[i] = {factor} * {self.hidden}[now + j * {self.rows} + row]")
            for name, gate in zip(self._local_names(), [*inputs, *products], strict=True):
                emit.line(f"{name}[i] = {emit.value(gate)}")
        with self._every_element():
            emit.line(f"{self.reset}[base + j * {self.rows} + row] = new_hidden[i]")
            for name, pointer in zip(self._local_names(), self.gated, strict=True):
                emit.line(f"{self.kept(pointer)} = {name}[i]")

    def _step(self) -> None:
        """Emit the new states and the result.

        All elements of a strip are computed before the first is stored, because LLVM must assume that a store changes
        the inputs, and would not vectorize a loop with both.
        """
        emit = self.emit
        with self._every_element():
            self.bind_parameters()
            inputs, products = self.gates()
            before = [self.named(emit.assign(f"{pointer}[now + {at}]")) for pointer, at in self._state_elements()]
            after, state = self.cell.update(inputs, products, before[0], before[1] if self.states else None)
            emit.line(f"new_hidden[i] = {emit.value(after)}")
            if state is not None:
                emit.line(f"new_state[i] = {emit.value(state)}")
        with self._every_element():
            for (pointer, at), name in zip(self._state_elements(), ("new_hidden", "new_state"), strict=False):
                emit.line(f"{pointer}[next + {at}] = {name}[i]")
            self.results.store(self.named(emit.assign("new_hidden[i]")), "t", "sequence", "j")

    def _finish(self) -> None:
        """Emit the stores of the last states, and of zeros in the results after the end of each sequence."""
        emit = self.emit
        emit.line("last = base if longest % 2 == 0 else other")
        with emit.block(f"for row in range({self.rows}):"):
            emit.line("sequence = first + row")
            emit.line(f"if sequence >= {self.n_batch}:")
            emit.line("    break")
            self.length("sequence")
            with emit.block(f"for t in range(length, {self.n_steps}):"), emit.block(f"for j in range({self.size}):"):
                self.results.store(s.constant(0.0, self.compute), "t", "sequence", "j")
            with emit.block(f"for j in range({self.size}):"):
                for (pointer, at), final in zip(self._state_elements(), (self.final, self.final_state), strict=False):
                    if final is not None:
                        final.store(self.named(emit.assign(f"{pointer}[last + {at}]")), "sequence", "j")

    # ---- the gates of hidden element j, the strip's element i ----

    def products(self, gates: Sequence[int]) -> list[Scalar]:
        elements = [f"products[{gate * self.rows * self.width} + row * {self.width} + i]" for gate in gates]
        return [
            self.biased(self.named(self.emit.assign(element)), self.recurrent_biases, gate)
            for gate, element in zip(gates, elements, strict=True)
        ]

    # ---- source text ----

    def gate_index(self, gate: int) -> str:
        return f"({gate * self.size} + j)"

    def kept(self, pointer: str) -> str:
        return f"{pointer}[base + row * {self.size} + j]"

    def _local_names(self) -> list[str]:
        return [f"kept{number}" for number in range(len(self.gated))]

    def _state_elements(self) -> list[tuple[str, str]]:
        """Return for each state (hidden, cell) its pointer, and the index of element j in one of its two copies."""
        hidden = (self.hidden, f"j * {self.rows} + row")
        return [hidden, (self.states, f"row * {self.size} + j")] if self.states else [hidden]

    @contextmanager
    def _every_element(self) -> Iterator[None]:
        with self.emit.block(f"for i in range({self.width}):"):
            self.emit.line("j = j0 + i")
            yield
