"""Executes the steps of a program in NumPy, at given sizes. No kernel is compiled, so any device kind is possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program.analysis.step_tensors import tensors_of
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.expressions.symbolic import Dim
from ort_cuda_plugin.program.steps.steps import CODES_PER_WORD, Attend, Contract, Convolve, Input, Map, Rows, Sums
from ort_cuda_plugin.program.steps.tensor import Buffer, BufferKind, Tensor
from ort_cuda_plugin.program.steps.trace import (
    Copy,
    DeviceLoop,
    HostCall,
    Int64,
    Launch,
    LibraryCall,
    Memset,
    ReadBack,
    Step,
    View,
)
from plan_interpreter import evaluate
from programs import library, opaque
from programs.convolutions import convolution, transposed_convolution
from programs.values import Array, Evaluation, Reading, decoded, encoded, is_narrow, numpy_type, rounded

UNWRITTEN = 77
"""Number with which memory is filled before it is written."""


STORES = frozenset(f"store_{dtype.short}" for dtype in DType)
"""Names of the kernels of `Lowering.materialize`, which store host values to device memory."""


class InvalidViewError(Exception):
    """A tensor exceeds its buffer, or a size is negative."""


class ReadsInputError(Exception):
    """A step that should be computed once, before the first Run, reads an input of a Run."""


class _Memory:
    """The elements of a buffer, decoded as numbers of one element type."""

    def __init__(self, array: Array, dtype: DType) -> None:
        array.flags.writeable = False
        self.array, self.dtype = array, dtype

    def seen_as(self, dtype: DType) -> Array:
        if dtype is self.dtype:
            return self.array
        stored = encoded(self.array, self.dtype).view(np.uint8)
        size = stored.size // dtype.itemsize * dtype.itemsize
        return decoded(stored[:size].view(dtype.numpy), dtype)


@dataclass(frozen=True, eq=False)
class Gather:
    """The computation of a `gather_map` launch: an expression that may read elements at computed coordinates."""

    out: Tensor
    coordinates: tuple[Scalar, ...]
    value: Scalar


@dataclass(frozen=True, eq=False)
class Opaque:
    """A kernel that an operator launches itself, or a callback: its result is that of `opaque.result`."""

    key: float
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


def opaque_of(step: Launch | HostCall | DeviceLoop, view: View = lambda x: x) -> Opaque:
    """Return the `Opaque` that replaces a step; ``view`` maps its tensors."""
    name = step.callback.name if isinstance(step, HostCall) else ""
    tensors = tensors_of(step)
    reads = tuple(view(x) for x in tensors if x.buffer in step.reads)
    return Opaque(opaque.identity(step.nodes, name), reads, tuple(view(x) for x in tensors if x.buffer in step.writes))


Meaning: TypeAlias = Map | Gather | Opaque
"""The computation of a launch: the step, the gather or the operator's own kernel that it implements."""


class Interpreter:
    """Runs the programs of one plan, as they are after different passes, on the same inputs.

    ``values`` are the values of symbols, ``feeds`` the contents of inputs. ``computes`` has the `Meaning` of launches
    that passes or emission made. A step that reads equal contents in several programs is executed once.
    """

    def __init__(
        self,
        values: Mapping[int, int],
        feeds: Sequence[Array | None],
        reading: Reading,
        computes: Mapping[Step, Sequence[Meaning]] | None = None,
    ) -> None:
        self._symbols = dict(values)
        self._feeds, self._reading = feeds, reading
        self._computes = {} if computes is None else computes
        self._sizes: dict[Dim, int] = {}
        self._initial: dict[Buffer, _Memory] = {}
        self._memory: dict[Buffer, _Memory] = {}
        self._done: dict[tuple[Any, ...], dict[Buffer, _Memory]] = {}
        self.executed = 0
        """Number of executed steps; steps whose results were reused do not count."""

    def run(self, steps: Sequence[Step], once: int = 0) -> dict[tuple[str, int], Array]:
        """Run a program; return its outputs, its states, and the values that the host reads back.

        Keys are ("output", index), ("state", number) and ("read back", first symbol). The first ``once`` steps run
        before the first Run, so they must not read inputs.
        """
        self._memory = {}
        results: dict[tuple[str, int], Array] = {}
        written: dict[Buffer, None] = {}
        for number, step in enumerate(steps):
            early = [x for x in step.reads if x.kind is BufferKind.INPUT] if number < once else []
            if early:
                raise ReadsInputError(f"input {early[0].index} is read before the first Run")
            if isinstance(step, ReadBack):
                results["read back", step.first_symbol] = self._read_back(step)
            else:
                self._execute(step)
                written.update(dict.fromkeys(step.writes))
        for buffer in written:
            if buffer.kind is BufferKind.OUTPUT:
                results["output", buffer.index] = self._memory[buffer].array
            elif buffer.kind is BufferKind.STATE:
                results["state", len(results)] = self._memory[buffer].array
        return results

    # ---- sizes and memory ----

    def size(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        if dim not in self._sizes:
            self._sizes[dim] = evaluate(dim, self._symbols)
        return self._sizes[dim]

    def shape(self, dims: Iterable[Dim]) -> tuple[int, ...]:
        sizes = tuple(map(self.size, dims))
        if min(sizes, default=0) < 0:
            raise InvalidViewError(f"sizes {sizes}")
        return sizes

    def _contents(self, buffer: Buffer, dtype: DType) -> _Memory:
        found = self._memory.get(buffer) or self._initial.get(buffer)
        if found is None:
            found = self._initial[buffer] = self._first_contents(buffer, dtype)
        return found

    def _first_contents(self, buffer: Buffer, dtype: DType) -> _Memory:
        constant = buffer.data or buffer.state
        if constant is not None:
            return _Memory(decoded(np.ascontiguousarray(constant.array).reshape(-1), constant.dtype), constant.dtype)
        if buffer.host is not None:
            return _Memory(np.array([self.size(x) for x in buffer.host]).astype(numpy_type(dtype)), dtype)
        feed = self._feeds[buffer.index] if buffer.kind is BufferKind.INPUT else None
        if feed is not None:
            stored = np.ascontiguousarray(feed).reshape(-1).view(np.uint8)
            return _Memory(decoded(stored.view(dtype.numpy), dtype), dtype)
        count = self.size(buffer.nbytes) // dtype.itemsize
        return _Memory(np.full(count, UNWRITTEN, numpy_type(dtype)), dtype)

    def read(self, x: Tensor) -> Array:
        """Return the elements of a tensor."""
        return _view(self._contents(x.buffer, x.dtype).seen_as(x.dtype), self.shape(x.shape), *self._places(x))

    def _places(self, x: Tensor) -> tuple[tuple[int, ...], int]:
        return tuple(map(self.size, x.strides)), self.size(x.offset)

    def write(self, x: Tensor, values: Array) -> None:
        flat = self._contents(x.buffer, x.dtype).seen_as(x.dtype).copy()
        values = np.asarray(values)
        if x.dtype.is_float and is_narrow(x.dtype):
            values = rounded(values, x.dtype, self._reading, saturate=False)
        target = _view(flat, self.shape(x.shape), *self._places(x))
        if target.size:  # the shape of an empty ``values`` need not broadcast to the target's
            target[...] = values.astype(target.dtype, copy=False)
        self._memory[x.buffer] = _Memory(flat, x.dtype)

    # ---- steps ----

    def _execute(self, step: Step) -> None:
        """Execute a step, or reuse its results if the same step has read the same contents."""
        used = dict.fromkeys((*step.reads, *step.writes))
        key = (step, *(self._memory.get(buffer) for buffer in used))
        if key not in self._done:
            self._step(step)
            self.executed += 1
            self._done[key] = {buffer: self._memory[buffer] for buffer in step.writes if buffer in self._memory}
        self._memory.update(self._done[key])

    def _step(self, step: Step) -> None:
        match step:
            case Map() | Launch() if step in self._computes:
                for each in self._computes[step]:
                    self._meaning(each)
            case Map():
                self.map(step)
            case Launch() if step.kernel.name in STORES:
                self._store_numbers(step)
            case Launch():
                self.opaque(opaque_of(step))
            case HostCall() | DeviceLoop():  # passes do not look into a loop
                self.opaque(opaque_of(step))
            case LibraryCall():
                numbers = [self.size(x.value) for x in step.args if isinstance(x, Int64)]
                tensors = [x for x in step.args if isinstance(x, Tensor)]
                memory = [library.Memory(self._contents(x.buffer, x.dtype).seen_as(x.dtype), self.size(x.offset))
                          for x in tensors]  # fmt: skip
                out = tensors[0]
                flat = library.call(step.problem, memory, numbers)
                if is_narrow(out.dtype):
                    flat = rounded(flat, out.dtype, self._reading, saturate=False)
                self._memory[out.buffer] = _Memory(flat, out.dtype)
            case Copy():
                self.write(step.destination, self.read(step.source).reshape(self.shape(step.destination.shape)))
            case Memset():
                x = step.destination
                element = decoded(np.full(x.dtype.itemsize, step.byte, np.uint8).view(x.dtype.numpy), x.dtype)
                self.write(x, element[0])

    def _meaning(self, meaning: Meaning) -> None:
        match meaning:
            case Gather():
                self.gather(meaning)
            case Opaque():
                self.opaque(meaning)
            case Map():
                self.map(meaning)

    def _store_numbers(self, step: Launch) -> None:
        """Execute a launch of `Lowering.materialize`, which stores host values."""
        target, *numbers = step.args
        assert isinstance(target, Tensor)
        values = np.array([self.size(x.value) for x in numbers if isinstance(x, Int64)], np.int64)
        self.write(target, values.astype(numpy_type(target.dtype)))

    def opaque(self, launch: Opaque) -> None:
        """Write `opaque.result` of a kernel's inputs to each tensor that the kernel writes."""
        total = opaque.digest([self.read(x) for x in launch.reads])
        for number, x in enumerate(launch.writes):
            self.write(x, opaque.result(launch.key, number, total, self.shape(x.shape), x.dtype))

    def _read_back(self, step: ReadBack) -> Array:
        values = self.read(step.source).reshape(-1)
        new = {step.first_symbol + number: int(value) for number, value in enumerate(values)}
        if any(self._symbols.get(symbol) != value for symbol, value in new.items()):
            self._symbols.update(new)
            self._sizes.clear()
        return values

    # ---- maps ----

    def map(self, step: Map) -> None:
        """Execute a step with expressions."""
        shape = self.shape(step.shape)
        known = self._leaves(step.inputs, shape)
        axes: Iterable[int] = ()
        if isinstance(step, Rows):
            axes = step.axes
        if isinstance(step, Sums):
            total = self._sums(step, shape)
            known[step.total] = total.astype(numpy_type(step.total.dtype), copy=False)
        evaluation = Evaluation(known, self._reading, shape, tuple(axes))
        found = [(y, evaluation.value(value)) for value, y in step.outputs]
        for number, (y, value) in enumerate(found):
            if isinstance(step, Sums) and step.column_parts:
                axis = 1 if isinstance(step, Convolve) else len(shape) - 1
                part = step.column_parts[number]
                value = np.broadcast_to(value, shape)[(slice(None),) * axis + (slice(part.start, part.stop),)]
            found[number] = y, value
        if isinstance(step, Rows):
            found += [(y, evaluation.value(value)) for value, y in step.row_outputs]
        for y, value in found:
            self.write(y, _without_leading(value, len(y.shape)))

    def gather(self, gather: Gather) -> None:
        """Execute a launch of `gather_map`."""
        shape = self.shape(gather.out.shape)
        places = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij", sparse=True) if shape else []
        known = {leaf: place for leaf, place in zip(gather.coordinates, places, strict=True) if leaf.op == "coordinate"}
        handlers = {"dim": lambda x, _: np.asarray(self.size(x.value), np.int64), "load": self._loaded}
        value = Evaluation(known, self._reading, shape, (), handlers).value(gather.value)
        self.write(gather.out, np.broadcast_to(value, shape))

    def _loaded(self, x: Scalar, operands: Sequence[Array]) -> Array:
        array = self.read(x.value.tensor)
        places = operands[: array.ndim]
        if len(operands) == array.ndim:
            return np.asarray(array[tuple(np.broadcast_arrays(*places))] if places else array)
        when, other = operands[array.ndim :]
        inside = [np.clip(place, 0, size - 1) for place, size in zip(places, array.shape, strict=True)]
        return np.where(when, array[tuple(np.broadcast_arrays(*inside))], other)

    def _leaves(self, inputs: Iterable[Input], shape: Sequence[int]) -> dict[Any, Array]:
        return {leaf: _without_leading(self.read(x), len(shape)) for leaf, x in inputs}

    def _sums(self, step: Sums, shape: Sequence[int]) -> Array:
        operands = [self._operand(step, number) for number in range(len(step.operands))]
        match step:
            case Contract():
                return (_product(operands[0], operands[1], step.total.dtype) + self._low_rank(step)).reshape(shape)
            case Attend():
                return self._attention(step, operands)
            case Convolve():
                return self._convolution(step, operands).reshape(shape)
        raise NotImplementedError(type(step).__name__)

    def _low_rank(self, step: Contract) -> Array:
        """Return the second product of a GEMM; 0 without one."""
        low = step.low_rank
        if low is None:
            return np.zeros((), numpy_type(step.total.dtype))
        result = _product(self.read(low.a), self.read(low.b), step.total.dtype)
        return result if low.scale is None else result * self.read(low.scale).astype(result.dtype).reshape(())

    def _operand(self, step: Sums, number: int) -> Array:
        x = step.operands[number]
        conversion = step.conversions[number] if number < len(step.conversions) else None
        if conversion is None:
            return self.read(x)
        if not conversion.bits:
            elements, leaves = self.read(x), self._leaves(conversion.inputs, self.shape(x.shape))
        else:
            words = encoded(self._contents(x.buffer, x.dtype).seen_as(x.dtype), x.dtype).astype(np.uint64)
            places = np.arange(CODES_PER_WORD, dtype=np.uint64) * np.uint64(conversion.bits)
            codes = (words[:, None] >> places) & np.uint64((1 << conversion.bits) - 1)
            depth, columns = self.shape(x.shape)
            strides, offset = self._places(x)
            elements = _view(codes.reshape(-1).astype(np.int32), (depth, columns), strides, offset)
            leaves = {leaf: np.repeat(self.read(y), conversion.block, 0)[:depth] for leaf, y in conversion.inputs}
        evaluation = Evaluation({conversion.leaf: elements, **leaves}, self._reading, elements.shape)
        return np.broadcast_to(evaluation.value(conversion.value), elements.shape)

    def _attention(self, step: Attend, operands: Sequence[Array]) -> Array:
        shape = self.shape(step.score_shape)
        scores = np.broadcast_to(_product(operands[0], operands[1], step.score.dtype), shape)
        known = {**self._leaves(step.score_inputs, shape), step.score: scores}
        weights = Evaluation(known, self._reading, shape, (len(shape) - 1,)).value(step.weight)
        return _product(np.broadcast_to(weights, shape), operands[2], step.total.dtype)

    def _convolution(self, step: Convolve, operands: Sequence[Array]) -> Array:
        x, w = operands
        windows = step.windows
        places = self.shape(step.shape[axis] for axis in step.space)
        kernel, begin, end = map(self.shape, (windows.kernel, windows.begin, windows.end))
        function = transposed_convolution if step.transposed else convolution
        sums = function(x, w, step.groups, places, kernel, windows.strides, windows.dilations, begin, end)
        return sums.astype(numpy_type(step.total.dtype), copy=False)


def _without_leading(x: Array, rank: int) -> Array:
    """Return x with at most ``rank`` dimensions; leading ones, of size 1, are dropped."""
    return x.reshape(x.shape[max(x.ndim - rank, 0) :]) if x.ndim > rank else x


def _view(flat: Array, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Array:
    """Return a strided view of ``flat``. Raises InvalidViewError if it exceeds ``flat``."""
    if 0 in shape:
        return np.empty(shape, flat.dtype)
    ends = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    first = offset + sum(end for end in ends if end < 0)
    last = offset + sum(end for end in ends if end > 0)
    if first < 0 or last >= flat.size:
        raise InvalidViewError(f"elements {first} to {last} of {flat.size}")
    return np.lib.stride_tricks.as_strided(
        flat[offset:], shape, [stride * flat.itemsize for stride in strides], writeable=flat.flags.writeable
    )


def _product(a: Array, b: Array, dtype: DType) -> Array:
    kind = np.float64 if dtype.is_float else np.int64
    sums = np.matmul(a.astype(kind, copy=False), b.astype(kind, copy=False))
    return np.asarray(sums.astype(numpy_type(dtype), copy=False))
