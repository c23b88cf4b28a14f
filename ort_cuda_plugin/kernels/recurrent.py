"""One direction of an RNN, GRU or LSTM: a block per sequence of the batch walks through time.

Products of the inputs with their weights are made beforehand, for all steps at once. What is left of a step depends on
the step before: the products of the hidden state with the recurrence weights, and the gates, which are scalar
expressions. Thread t owns the hidden elements t, t + threads, ...; the hidden state stands in global memory, twice, so
that a step reads one copy while it writes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ort_cuda_plugin.kernels.codegen import KernelBuilder, kernel_name, load_text, offset_text, register_type
from ort_cuda_plugin.kernels.layout import no_wider
from ort_cuda_plugin.program import scalar as s
from ort_cuda_plugin.program.lowering import Lowering, Tensor
from ort_cuda_plugin.program.scalar import Scalar

__all__ = ["Cell", "Elements", "Sequences", "run_cell"]

THREADS = 128

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

    ``inputs`` [time, batch, gates * hidden], ``weights`` [hidden, gates * hidden] and ``parameters`` (vectors of hidden
    elements) are in the operator's order of gates. ``lengths`` (int32 [batch]), ``hidden`` and ``state`` ([batch,
    hidden]: the start) may be None: all steps, and zeros.
    """

    inputs: Tensor
    weights: Tensor
    biases: Tensor | None
    recurrent_biases: Tensor | None
    lengths: Tensor | None
    hidden: Tensor | None
    state: Tensor | None


class Elements:
    """A tensor as a parameter of a kernel in the making, whose elements are read and written by int64 coordinates."""

    def __init__(self, builder: KernelBuilder, tensor: Tensor, *, written: bool = False) -> None:
        self._emit = builder.emit
        self._dtype = tensor.dtype
        self._pointer = builder.tensor(tensor, written=written)
        self._strides = [builder.stride(stride) for stride in tensor.strides]

    def _offset(self, at: Sequence[str]) -> str:
        return offset_text(list(zip(at, self._strides, strict=True)))

    def load(self, *at: str) -> str:
        """The name of the element in the type that recurrences compute in."""
        leaf = Scalar(self._dtype, "leaf")
        self._emit.bind(leaf, self._emit.assign(load_text(self._pointer, self._offset(at), self._dtype)))
        return self._emit.value(s.cast(leaf, s.accumulation_type(self._dtype)))

    def store(self, value: Scalar, *at: str) -> None:
        self._emit.store(self._pointer, self._offset(at), s.cast(value, self._dtype))


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
    compute = s.accumulation_type(given.inputs.dtype)
    number = register_type(compute)
    steps, batch, _ = given.inputs.shape
    size = outputs.shape[2]
    threads = no_wider(THREADS, size)
    builder = KernelBuilder()
    emit = builder.emit
    n_steps, n_batch, n = builder.integer(steps), builder.integer(batch), builder.integer(size)

    def scratch(copies: int) -> str:
        return builder.tensor(ctx.empty((copies, batch, size), compute), written=True)

    def named(text: str) -> Scalar:
        leaf = Scalar(compute, "leaf")
        emit.bind(leaf, text)
        return leaf

    inputs, weights = Elements(builder, given.inputs), Elements(builder, given.weights)
    biases = None if given.biases is None else Elements(builder, given.biases)
    recurrent_biases = None if given.recurrent_biases is None else Elements(builder, given.recurrent_biases)
    vectors = [(leaf, Elements(builder, x)) for leaf, x in parameters]
    results, final = Elements(builder, outputs, written=True), Elements(builder, last_hidden, written=True)
    final_state = None if last_state is None else Elements(builder, last_state, written=True)
    hidden = scratch(2)
    states = scratch(1) if cell.has_state else ""
    reset = scratch(1) if cell.reset is not None else ""
    gated = [scratch(1) for _ in range(2 * (cell.gates - 1))] if cell.reset is not None else []

    def products(gates: Sequence[int], vector: str) -> list[Scalar]:
        """The recurrent products of some gates for hidden element j."""
        names = [emit.fresh("sum") for _ in gates]
        for gate, name in zip(gates, names, strict=True):
            at = f"({gate} * {n} + j)"
            emit.line(f"{name} = {number}({0 if recurrent_biases is None else recurrent_biases.load(at)})")
        with emit.block(f"for k in range({n}):"):
            emit.line(f"h = {vector}")
            for gate, name in zip(gates, names, strict=True):
                emit.line(f"{name} += h * {weights.load('k', f'({gate} * {n} + j)')}")
        return [named(name) for name in names]

    def input_gates(gates: Sequence[int]) -> list[Scalar]:
        values = []
        for gate in gates:
            at = f"({gate} * {n} + j)"
            value = named(inputs.load("t", "sequence", at))
            values.append(value if biases is None else value + named(biases.load(at)))
        return values

    def bind_parameters() -> None:
        for leaf, elements in vectors:
            emit.bind(leaf, elements.load("j"))

    def every_element() -> str:
        return f"for j in range(int64(cuda.threadIdx.x), {n}, {threads}):"

    emit.line("sequence = int64(cuda.blockIdx.x)")
    emit.line(f"base = sequence * {n}")
    emit.line(f"other = {n_batch} * {n} + base")
    emit.line(f"length = {n_steps}")
    if given.lengths is not None:
        pointer, stride = builder.tensor(given.lengths), builder.stride(given.lengths.strides[0])
        emit.line(f"length = min(max(int64({pointer}[sequence * {stride}]), int64(0)), {n_steps})")
    for target, start in ((hidden, given.hidden), (states, given.state)):
        if target:
            elements = None if start is None else Elements(builder, start)
            with emit.block(every_element()):
                value = "0" if elements is None else elements.load("sequence", "j")
                emit.line(f"{target}[base + j] = {number}({value})")
    emit.line("cuda.syncthreads()")
    everything = list(range(cell.gates))
    with emit.block("for step in range(length):"):
        emit.line("t = length - 1 - step" if backward else "t = step")
        emit.line("now = base if step % 2 == 0 else other")
        emit.line("next = other if step % 2 == 0 else base")
        if cell.reset is not None:
            with emit.block(every_element()):
                first_inputs, first = input_gates(everything[:-1]), products(everything[:-1], f"{hidden}[now + k]")
                factor = emit.value(cell.reset(first_inputs, first))
                emit.line(f"{reset}[base + j] = {factor} * {hidden}[now + j]")
                for place_of_gate, gate in zip(gated, [*first_inputs, *first], strict=True):
                    emit.line(f"{place_of_gate}[base + j] = {emit.value(gate)}")
            emit.line("cuda.syncthreads()")
        with emit.block(every_element()):
            bind_parameters()
            if cell.reset is not None:
                kept = [named(emit.assign(f"{source}[base + j]")) for source in gated]
                half = len(kept) // 2
                given_gates = [*kept[:half], *input_gates(everything[-1:])]
                sums = [*kept[half:], *products(everything[-1:], f"{reset}[base + k]")]
            else:
                given_gates, sums = input_gates(everything), products(everything, f"{hidden}[now + k]")
            state = named(emit.assign(f"{states}[base + j]")) if cell.has_state else None
            before = named(emit.assign(f"{hidden}[now + j]"))
            after, new_state = cell.update(given_gates, sums, before, state)
            result = emit.value(after)
            emit.line(f"{hidden}[next + j] = {result}")
            if new_state is not None:
                emit.line(f"{states}[base + j] = {emit.value(new_state)}")
            results.store(after, "t", "sequence", "j")
        emit.line("cuda.syncthreads()")
    with emit.block(every_element()):
        with emit.block(f"for t in range(length, {n_steps}):"):
            results.store(s.constant(0.0, compute), "t", "sequence", "j")
        emit.line("last = base if length % 2 == 0 else other")
        final.store(named(emit.assign(f"{hidden}[last + j]")), "sequence", "j")
        if final_state is not None:
            final_state.store(named(emit.assign(f"{states}[base + j]")), "sequence", "j")
    builder.launch(ctx, kernel_name(ctx), (batch, 1, 1), (threads, 1, 1))
