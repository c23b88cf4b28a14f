"""Persistent RNN: one or both directions of an RNN, GRU or LSTM on all multiprocessors, with a warp per hidden element.

One launch has the blocks of all time steps. When a block starts, it draws a ticket, the next value of a counter;
tickets are in order of time steps. So a block waits only for blocks that have started before it, and needs neither a
fixed order of blocks nor co-residency of all blocks. A block loads its weights into registers before it waits; then it
polls until the time step before is complete, loads the hidden state of that step, and accumulates. The order of
additions is the same in every Run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import ceildiv, hint, le
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.trace import Use
from ..codegen.source import kernel_name
from .rnn_cell import CellKernel, Direction, Elements, Gates

WARP, WARPS = 32, 8  # threads per warp, and warps per block
MOST_WEIGHTS = 128
"""Maximum 32-bit registers per thread for weights."""
FEW_WEIGHTS = 64
"""Maximum registers for weights for which a warp processes `AT_ONCE` sequences at a time; with more registers for
weights, it processes half as many sequences.
"""
AT_ONCE = 4
"""Sequences whose hidden states a warp loads and multiplies at a time."""


def try_persistent(ctx: Lowering, direction: Direction) -> bool:
    """Tell whether a GPU's registers can hold the weights; if so, guard the plan on at least one time step.

    False on the emulated device, for a dynamic hidden size, and if the guard is not possible.
    """
    steps, size = direction.given.inputs.shape[0], direction.outputs.shape[2]
    if ctx.device.emulated or not isinstance(size, int) or size <= 0:
        return False
    words = s.accumulation_type(direction.given.inputs.dtype).itemsize // 4
    fits = -(-size // WARP) * _gates_at_once(direction) * words <= MOST_WEIGHTS
    return fits and ctx.settled(le(1, steps)) is True


def _gates_at_once(direction: Direction) -> int:
    cell = direction.cell
    return cell.gates if cell.reset is None else max(cell.gates - 1, 1)


def _tensors(direction: Direction) -> list[tuple[Tensor | None, bool]]:
    """Return (tensor or None if it is absent, whether it is written) for all tensors that differ between directions."""
    given = direction.given
    read = [given.inputs, given.biases, given.recurrent_biases, *(x for _, x in direction.parameters)]
    read += [given.weights, given.hidden, given.state]
    written = [direction.outputs, direction.last_hidden, direction.last_state]
    return [*((x, False) for x in read), *((x, True) for x in written)]


def have_equal_strides(directions: Sequence[Direction]) -> bool:
    """Tell whether the directions' tensors have equal strides, so that one kernel serves all of them."""
    first, *others = ([None if x is None else x.strides for x, _ in _tensors(one)] for one in directions)
    return all(other == first for other in others)


class PartCell(CellKernel):
    """Generator of the kernel for one direction, or for two concurrent directions with equal strides.

    In the kernel, ``step`` counts the time steps, ``t`` is the position of this step in the sequence, ``j`` the warp's
    hidden element. Lane b computes the gates of sequence ``first + b``. A time step reads the copy of the hidden state
    at ``now`` and writes the copy at ``next``.
    """

    def __init__(self, ctx: Lowering, directions: Sequence[Direction], size: int) -> None:
        direction, *others = directions
        batch = direction.given.inputs.shape[1]
        super().__init__(ctx, direction, batch * len(directions), 1)
        self.directions = directions
        builder, given = self.builder, self.given
        self.batch, self.size, self.count = batch, size, -(-size // WARP)
        self.steps = given.inputs.shape[0]
        self.parts = -(-size // WARPS)
        groups = max(ctx.device.multiprocessors // (self.parts * len(directions)), 1)
        self.sequences = max(min(-(-hint(batch) // groups), WARP), 1)
        """Maximum sequences per block."""
        self.groups = ceildiv(batch, self.sequences)
        words = _gates_at_once(direction) * self.count * self.compute.itemsize // 4
        self.at_once = 1 if self.sequences == 1 else AT_ONCE if words <= FEW_WEIGHTS else AT_ONCE // 2
        self.phases = 1 if self.cell.reset is None else 2
        self.read = given.weights
        self.weights = Elements(builder, given.weights)
        self.start = None if given.hidden is None else Elements(builder, given.hidden)
        self.start_state = None if given.state is None else Elements(builder, given.state)
        self.add_lengths()
        first = [self.inputs, self.biases, self.recurrent_biases, *(x for _, x in self.vectors)]
        first += [self.weights, self.start, self.start_state, self.results, self.final, self.final_state]
        self.pairs = [
            (elements.pointer, builder.tensor(x, written=written))
            for other in others
            for elements, (x, written) in zip(first, _tensors(other), strict=True)
            if elements is not None and x is not None
        ]
        """Pairs of kernel parameters: a pointer of the first direction, and its counterpart of the second."""
        builder.integers(n_groups=self.groups * len(directions), n_each=self.groups, n_sequences=self.sequences)
        self.registers = f"registers_{self.compute.short}"

    def launch(self) -> None:
        """Emit the kernel, and launch the blocks of all time steps."""
        ctx, emit = self.ctx, self.emit
        turns = self.steps * self.phases
        groups = self.groups * len(self.directions)
        progress = ctx.empty((turns * groups + 1,), DType.INT32)
        ctx.memset(progress, 0)
        self.progress = self.builder.tensor(progress, "progress", written=True)
        self._begin()
        gates = range(self.cell.gates)
        if self.cell.reset is None:
            self._phase(gates, self._from_hidden, self._step)
        else:
            reset = self.cell.reset
            with emit.block("if turn & 1 == 0:"):
                self._phase(gates[:-1], self._from_hidden, lambda: self._reset_hidden(reset))
            with emit.block("else:"):
                self._phase(gates[-1:], self._from_reset, self._step)
        emit.line("cuda.syncthreads()")
        with emit.block("if cuda.threadIdx.x == 0:"):
            emit.line("cuda.threadfence()")
            emit.line("atomic_add_i32(progress, 1 + turn * n_groups + group, int32(1))")
        grid = turns * groups * self.parts, 1, 1
        uses = {self.read: Use(self.steps)}
        block = WARP * WARPS, 1, 1
        self.builder.launch(ctx, kernel_name(ctx), grid, block, uses, bounded=True, turns=turns)

    # ---- sections of the kernel ----

    def _begin(self) -> None:
        """Emit the draw of a ticket, and compute the time step, sequences and hidden element that it stands for."""
        emit = self.emit
        emit.line("drawn = cuda.shared.array(1, int32)")
        with emit.block("if cuda.threadIdx.x == 0:"):
            emit.line("drawn[0] = atomic_add_i32(progress, 0, int32(1))")
        emit.line("cuda.syncthreads()")
        emit.line("ticket = int64(drawn[0])")
        emit.line(f"turn = quotient_i64(ticket, n_groups * {self.parts})")
        emit.line(f"rest = ticket - turn * n_groups * {self.parts}")
        emit.line(f"group = quotient_i64(rest, int64({self.parts}))")
        emit.line(f"step = turn >> {self.phases - 1}")
        emit.line(f"lane = int64(cuda.threadIdx.x) & {WARP - 1}")
        emit.line(f"mine = (rest - group * {self.parts}) * {WARPS} + (int64(cuda.threadIdx.x) >> 5)")
        emit.line(f"j = min(mine, int64({self.size - 1}))")
        emit.line("is_second = group >= n_each")
        emit.line("first = (group - choose(is_second, n_each, int64(0))) * n_sequences")
        emit.line(f"rows = choose(is_second, {self.n_batch}, int64(0))")
        for own, other in self.pairs:
            emit.line(f"{own} = choose(is_second, {other}, {own})")
        emit.line(f"count = min(n_sequences, {self.n_batch} - first)")
        copy = f"{self.n_batch} * {self.size * len(self.directions)}"
        emit.line(f"now = (step & 1) * {copy}")
        emit.line(f"next = ((step + 1) & 1) * {copy}")
        emit.line("sequence = first + min(lane, count - 1)")
        emit.line(f"stores = (mine < {self.size}) & (lane < count)")
        emit.line(f"at = (rows + sequence) * {self.size} + j")
        self.length("sequence")
        emit.line("goes_on = step < length")
        backward = [str(direction.backward) for direction in self.directions]
        emit.line(f"is_backward = choose(is_second, {backward[-1]}, {backward[0]})")
        emit.line("t = choose(goes_on & is_backward, length - 1 - step, step)")

    def _phase(self, gates: Sequence[int], load: Callable[[str], None], finish: Callable[[], None]) -> None:
        """Emit the dot products of the vector from ``load`` and the weights of ``gates``; then call ``finish``."""
        emit = self.emit
        for gate in gates:
            emit.line(f"weights{gate} = {self.registers}({self.count})")
            with self._vector():
                value = self.weights.load("k", self.gate_index(gate))
                emit.line(f"weights{gate}[e] = {self._inside(value)}")
        with emit.block("if turn > 0:"):
            with emit.block("if cuda.threadIdx.x == 0:"):
                emit.line(f"while load_acquire_i32(progress, 1 + (turn - 1) * n_groups + group) < {self.parts}:")
                emit.line("    cuda.nanosleep(uint32(20))")
            emit.line("cuda.syncthreads()")
        for gate in gates:
            emit.line(f"sum{gate} = {self.number}(0)")
        with emit.block(f"for b in range(0, count, {self.at_once}):"):
            self._add_up(gates, load)
        finish()

    def _add_up(self, gates: Sequence[int], load: Callable[[str], None]) -> None:
        """Emit the dot products of `at_once` sequences; each lane keeps those of its own sequence."""
        emit, at_once = self.emit, range(self.at_once)
        for u in at_once:
            emit.line(f"vector{u} = {self.registers}({self.count})")
            with emit.scope():
                emit.line(f"one = first + min(b + {u}, count - 1)")
                load(f"vector{u}")
        names = {(gate, u): f"p{gate}_{u}" for gate in gates for u in at_once}
        for name in names.values():
            emit.line(f"{name} = {self.number}(0)")
        with emit.block(f"for e in range({self.count}):"):
            for (gate, u), name in names.items():
                emit.line(f"{name} += vector{u}[e] * weights{gate}[e]")
        with emit.block("for d in range(5):"):
            for name in names.values():
                emit.line(f"{name} += shfl_xor_{self.compute.short}({name}, int32(16 >> d))")
        for (gate, u), name in names.items():
            emit.line(f"sum{gate} = choose(lane == b + {u}, {name}, sum{gate})")

    def _from_hidden(self, target: str) -> None:
        """Emit the load of the hidden state of sequence ``one`` into registers ``target``."""
        emit = self.emit
        with emit.block("if step == 0:"), self._vector():
            emit.line(f"{target}[e] = {self._inside(self._initial(self.start, 'one', 'k'))}")
        with emit.block("else:"), self._vector():
            emit.line(f"{target}[e] = {self._inside(f'{self.hidden}[now + (rows + one) * {self.size} + k]')}")

    def _from_reset(self, target: str) -> None:
        with self._vector():
            self.emit.line(f"{target}[e] = {self._inside(f'{self.reset}[(rows + one) * {self.size} + k]')}")

    @contextmanager
    def _vector(self) -> Iterator[None]:
        """Emit a loop over the lane's elements ``k`` of a hidden state; ``e`` is the index in the lane's registers."""
        emit = self.emit
        with emit.block(f"for e in range({self.count}):"):
            emit.line(f"k = e * {WARP} + lane")
            if self.size % WARP:
                emit.line(f"k_inside = k < {self.size}")
                emit.line(f"k = min(k, int64({self.size - 1}))")
            yield

    def _inside(self, value: str) -> str:
        return f"choose(k_inside, {value}, {self.number}(0))" if self.size % WARP else value

    def _initial(self, start: Elements | None, *at: str) -> str:
        return f"{self.number}(0)" if start is None else start.load(*at)

    def _before(self, pointer: str, start: Elements | None, at: str) -> Scalar:
        """Emit the load of element j of a state of the lane's sequence, as it was before the time step."""
        emit, name = self.emit, self.emit.fresh("before")
        with emit.block("if step == 0:"):
            emit.line(f"{name} = {self._initial(start, 'sequence', 'j')}")
        with emit.block("else:"):
            emit.line(f"{name} = {pointer}[{at}]")
        return self.named(name)

    def _reset_hidden(self, reset: Callable[[Gates, Gates], Scalar]) -> None:
        """Emit a time step's first phase: all gates but the last, and the hidden state times ``reset``."""
        emit, gates = self.emit, range(self.cell.gates - 1)
        inputs, products = self.input_products(gates), self.products(gates)
        before = self._before(self.hidden, self.start, "now + at")
        value = emit.value(reset(inputs, products) * before)
        kept = [emit.value(gate) for gate in (*inputs, *products)]
        with emit.block("if stores:"):
            emit.line(f"{self.reset}[at] = {value}")
            for pointer, gate in zip(self.gated, kept, strict=True):
                emit.line(f"{pointer}[at] = {gate}")

    def _step(self) -> None:
        """Emit the new states and the result. After the end of a sequence, states do not change and results are 0."""
        emit = self.emit
        self.bind_parameters()
        inputs, products = self.gates()
        before = self._before(self.hidden, self.start, "now + at")
        state = self._before(self.states, self.start_state, "at") if self.cell.has_state else None
        after, new_state = self.cell.update(inputs, products, before, state)
        result = self.named(emit.assign(f"choose(goes_on, {emit.value(after)}, {self.number}(0))"))
        hidden = self.named(emit.assign(f"choose(goes_on, {emit.value(after)}, {emit.value(before)})"))
        kept: list[tuple[str, str, Scalar, Elements | None]] = [(self.hidden, "next + at", hidden, self.final)]
        if state is not None and new_state is not None:
            name = emit.assign(f"choose(goes_on, {emit.value(new_state)}, {emit.value(state)})")
            kept.append((self.states, "at", self.named(name), self.final_state))
        with emit.block("if stores:"):
            for pointer, index, value, _ in kept:
                emit.line(f"{pointer}[{index}] = {emit.value(value)}")
            self.results.store(result, "t", "sequence", "j")
            with emit.block(f"if step == {self.n_steps} - 1:"):
                for _, _, value, final in kept:
                    if final is not None:
                        final.store(value, "sequence", "j")

    # ---- the gates of hidden element j ----

    def products(self, gates: Sequence[int]) -> list[Scalar]:
        return [self.biased(self.named(f"sum{gate}"), self.recurrent_biases, gate) for gate in gates]

    # ---- source text ----

    def gate_index(self, gate: int) -> str:
        return f"({gate} * {self.size} + j)"

    def kept(self, pointer: str) -> str:
        return f"{pointer}[at]"
