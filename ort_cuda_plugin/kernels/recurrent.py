"""One direction of an RNN, GRU or LSTM: a block per sequence of the batch walks through time.

Products of the inputs with their weights are made beforehand, for all steps at once. What is left of a step depends on
the step before: the products of the hidden state with the recurrence weights, and the gates, which are scalar
expressions. Thread t owns the hidden elements t, t + threads, ...; the hidden state stands in global memory, twice, so
that a step reads one copy while it writes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ort_cuda_plugin.graph.ir import DType
from ort_cuda_plugin.graph.lowering import Lowering, Tensor
from ort_cuda_plugin.kernels import scalar as s
from ort_cuda_plugin.kernels.codegen import KernelBuilder, load_text, register_type
from ort_cuda_plugin.kernels.elementwise import kernel_name
from ort_cuda_plugin.kernels.layout import no_wider
from ort_cuda_plugin.kernels.scalar import Scalar

__all__ = ["Cell", "Sequences", "run_cell"]

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
    dtype = given.inputs.dtype
    compute = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
    number = register_type(compute)
    steps, batch, _ = given.inputs.shape
    size = outputs.shape[2]
    threads = no_wider(THREADS, size)
    builder = KernelBuilder()
    emit = builder.emit
    n_steps, n_batch, n = builder.integer(steps), builder.integer(batch), builder.integer(size)

    def scratch(copies: int) -> str:
        return builder.tensor(ctx.empty((copies, batch, size), compute), written=True)

    def place(x: Tensor, *, written: bool = False) -> tuple[str, list[str]]:
        return builder.tensor(x, written=written), [builder.stride(stride) for stride in x.strides]

    def load(placed: tuple[str, list[str]], source: Tensor, *at: str) -> str:
        pointer, strides = placed
        offset = " + ".join(f"{index} * {stride}" for index, stride in zip(at, strides, strict=True))
        leaf = Scalar(source.dtype, "leaf")
        emit.bind(leaf, emit.assign(load_text(pointer, offset, source.dtype)))
        return emit.value(s.cast(leaf, compute))

    def store(placed: tuple[str, list[str]], target: Tensor, value: Scalar, *at: str) -> None:
        pointer, strides = placed
        offset = " + ".join(f"{index} * {stride}" for index, stride in zip(at, strides, strict=True))
        emit.store(pointer, offset, s.cast(value, target.dtype))

    def named(text: str) -> Scalar:
        leaf = Scalar(compute, "leaf")
        emit.bind(leaf, text)
        return leaf

    inputs, weights = place(given.inputs), place(given.weights)
    biases = None if given.biases is None else place(given.biases)
    recurrent_biases = None if given.recurrent_biases is None else place(given.recurrent_biases)
    vectors = [(leaf, x, place(x)) for leaf, x in parameters]
    results, final = place(outputs, written=True), place(last_hidden, written=True)
    final_state = None if last_state is None else place(last_state, written=True)
    hidden = scratch(2)
    states = scratch(1) if cell.has_state else ""
    reset = scratch(1) if cell.reset is not None else ""
    gated = [scratch(1) for _ in range(2 * (cell.gates - 1))] if cell.reset is not None else []

    def bias_of(x: Tensor | None, placed: tuple[str, list[str]] | None, at: str) -> str | None:
        return None if x is None or placed is None else load(placed, x, at)

    def products(gates: Sequence[int], vector: str) -> list[Scalar]:
        """The recurrent products of some gates for hidden element j."""
        names = [emit.fresh("sum") for _ in gates]
        for gate, name in zip(gates, names, strict=True):
            at = f"({gate} * {n} + j)"
            emit.line(f"{name} = {number}({bias_of(given.recurrent_biases, recurrent_biases, at) or 0})")
        with emit.block(f"for k in range({n}):"):
            emit.line(f"h = {vector}")
            for gate, name in zip(gates, names, strict=True):
                emit.line(f"{name} += h * {load(weights, given.weights, 'k', f'({gate} * {n} + j)')}")
        return [named(name) for name in names]

    def input_gates(gates: Sequence[int]) -> list[Scalar]:
        values = []
        for gate in gates:
            at = f"({gate} * {n} + j)"
            value = named(load(inputs, given.inputs, "t", "sequence", at))
            bias = bias_of(given.biases, biases, at)
            values.append(value if bias is None else value + named(bias))
        return values

    def bind_parameters() -> None:
        for leaf, x, placed in vectors:
            emit.bind(leaf, load(placed, x, "j"))

    def every_element() -> str:
        return f"for j in range(int64(cuda.threadIdx.x), {n}, {threads}):"

    emit.line("sequence = int64(cuda.blockIdx.x)")
    emit.line(f"base = sequence * {n}")
    emit.line(f"other = {n_batch} * {n} + base")
    emit.line(f"length = {n_steps}")
    if given.lengths is not None:
        pointer, (stride,) = place(given.lengths)
        emit.line(f"length = min(max(int64({pointer}[sequence * {stride}]), int64(0)), {n_steps})")
    for target, start in ((hidden, given.hidden), (states, given.state)):
        if target:
            placed = None if start is None else place(start)
            with emit.block(every_element()):
                value = "0" if placed is None or start is None else load(placed, start, "sequence", "j")
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
            store(results, outputs, after, "t", "sequence", "j")
        emit.line("cuda.syncthreads()")
    with emit.block(every_element()):
        with emit.block(f"for t in range(length, {n_steps}):"):
            store(results, outputs, s.constant(0.0, compute), "t", "sequence", "j")
        emit.line("last = base if length % 2 == 0 else other")
        store(final, last_hidden, named(emit.assign(f"{hidden}[last + j]")), "sequence", "j")
        if final_state is not None and last_state is not None:
            store(final_state, last_state, named(emit.assign(f"{states}[base + j]")), "sequence", "j")
    builder.launch(ctx, kernel_name(ctx), (batch, 1, 1), (threads, 1, 1))
