"""Streams and tensors that `PluginRuntime.enqueue` gets: for a plan that is being built, or for a Run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...model.ir import Array, DType
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Arg, Int64, Lowering, Tensor
from ...program.steps.callbacks import CallStream, DeviceArray
from ...program.steps.trace import LoopCondition
from ..kernels.float_stores import check_workspace
from ..kernels.half_elements import check_halves
from ..kernels.kernels import Kernel, arguments, check_kernel, checked_block, launch, size_of, sizes_of, type_of
from .descriptors import Scope, Size, dim_of

_RECORDED = (
    "with enqueue_is_recorded = True, enqueue() has no {}: it is called once per plan, not in each Run. Set"
    " enqueue_is_recorded = False in the class of the plugin"
)


@dataclass(frozen=True, eq=False)
class RecordedTensor:
    """Contiguous memory in a plan that is being built: an argument of launches and copies."""

    tensor: Tensor
    scope: Scope

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the tensor's sizes, in memory order."""
        return tuple(map(self.scope.wrap, self.tensor.shape))

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def size(self) -> Any:
        """Return the tensor's number of elements."""
        return self.scope.wrap(self.tensor.size)

    def view(self, dtype: DType, shape: Sequence[Any], offset: Any = 0) -> RecordedTensor:
        """Return a tensor in the same memory, ``offset`` bytes after its start.

        The offset is a multiple of the element size. Raises ValueError for a range outside of this tensor, if its sizes
        are known.
        """
        old = self.tensor
        start = _elements(old.offset * old.dtype.itemsize + dim_of(offset), dtype)
        made = Tensor(dtype, tuple(map(dim_of, shape)), old.buffer, offset=start)
        end, most = dim_of(offset) + made.size * dtype.itemsize, old.size * old.dtype.itemsize
        if isinstance(end, int) and isinstance(most, int) and end > most:
            raise ValueError(f"view: got bytes {offset} to {end} of a tensor that has {most} bytes")
        return RecordedTensor(made, self.scope)

    def __int__(self) -> int:
        raise TypeError(_RECORDED.format("address"))


def _elements(nbytes: Dim, dtype: DType) -> Dim:
    if isinstance(nbytes, int):
        if nbytes % dtype.itemsize:
            raise ValueError(
                f"offset of {nbytes} bytes: expected a multiple of {dtype.itemsize}, the size of {dtype.name}"
            )
        return nbytes // dtype.itemsize
    return nbytes // dtype.itemsize


class RecordedStream:
    """The stream of a plan that is being built: records launches, copies and memsets in the plan.

    A kernel that gets ``workspace`` itself, not a view of it, must not store floats into it.
    """

    def __init__(self, ctx: Lowering, writes: Sequence[Tensor], workspace: Tensor | None = None) -> None:
        self._ctx = ctx
        self._writes = writes
        self._workspace = workspace

    def launch(self, kernel: Kernel, grid: Any, block: Any, args: Sequence[Any], shared_bytes: Any = 0) -> None:
        """Launch a kernel on tensors, sizes and numbers."""
        check_kernel(kernel)
        given = [_plain(arg) for arg in args]
        _check_workspace(kernel, given, self._workspace)
        buffers = {x.buffer for x in self._writes}
        writes = [x for x in given if isinstance(x, Tensor) and x.buffer in buffers]
        sizes = _plain(shared_bytes)
        launch(
            self._ctx,
            kernel,
            _plain_sizes(grid),
            _plain_sizes(block),
            given,
            writes=writes,
            reads=writes,
            shared_bytes=sizes,
        )

    def copy(self, destination: RecordedTensor, source: RecordedTensor) -> None:
        """Copy all bytes; both tensors have the same element type and size."""
        self._ctx.copy(destination.tensor, source.tensor)

    def memset(self, destination: RecordedTensor, byte: int) -> None:
        """Set every byte of ``destination`` to ``byte``."""
        self._ctx.memset(destination.tensor, byte)

    @property
    def is_emulated(self) -> bool:
        return not self._ctx.device.runs_cubins

    @property
    def handle(self) -> int:
        raise TypeError(_RECORDED.format("stream of a Run"))

    def read(self, array: Any) -> Array:
        raise TypeError(_RECORDED.format("contents"))

    def write(self, array: Any, values: Array) -> None:
        raise TypeError(_RECORDED.format("contents"))

    def synchronize(self) -> None:
        raise TypeError(_RECORDED.format("work to wait for"))


def _plain(arg: Any) -> Any:
    return arg.tensor if isinstance(arg, RecordedTensor) else arg.dim if isinstance(arg, Size) else arg


def _plain_sizes(sizes: Any) -> Any:
    return tuple(map(_plain, sizes)) if isinstance(sizes, Sequence) else _plain(sizes)


class RunStream:
    """The stream of a Run, for an `enqueue` that each Run calls.

    Valid until `enqueue` returns. ``fresh`` are outputs and scratch memory that nothing has written yet: a NumPy
    counterpart gets zeros for them. ``workspace``: as in `RecordedStream`.
    """

    def __init__(
        self, stream: CallStream, fresh: Sequence[DeviceArray] = (), workspace: DeviceArray | None = None
    ) -> None:
        self._stream = stream
        self._fresh = list(fresh)
        self._workspace = workspace

    @property
    def handle(self) -> int:
        """Return the stream as ``cudaStream_t``."""
        return self._stream.handle

    def __int__(self) -> int:
        return self.handle

    @property
    def is_emulated(self) -> bool:
        """Return whether the device is the emulated one. Only its kernels and copies can access its memory."""
        return self._stream.is_emulated

    def launch(self, kernel: Kernel, grid: Any, block: Any, args: Sequence[Any], shared_bytes: int = 0) -> None:
        """Launch a kernel on `DeviceArray`s and numbers."""
        check_kernel(kernel)
        threads = checked_block(kernel, sizes_of(block))
        blocks = tuple(operator.index(size_of(kernel, "grid", size)) for size in sizes_of(grid))
        if self._stream.is_emulated and not kernel.source:
            if kernel.needs_gpu:
                raise TypeError(
                    f"kernel {kernel.name} is a cubin, and has no counterpart in Numba or NumPy that the emulated "
                    "device can run. Give the kernel a counterpart, or run on a GPU"
                )
            if function := kernel.numpy_twin:
                self._call_numpy(function, blocks, args)
                return
        if kernel.source and (kernel.foreign is None or self._stream.is_emulated):
            check_halves(kernel.name, kernel.source, [getattr(arg, "dtype", None) for arg in args])
            _check_workspace(kernel, args, self._workspace)
        kernel, args = kernel.for_arguments(args)
        placed = arguments(kernel, [_Pointer(arg) if isinstance(arg, DeviceArray) else arg for arg in args])
        spec = kernel.spec(tuple(map(type_of, placed)), threads[0] * threads[1] * threads[2])
        values = [x.array if isinstance(x, _Pointer) else _value(x) for x in placed]
        self._stream.launch(spec, blocks, threads, values, shared_bytes)
        self._note_written(values)

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """Copy all bytes of ``source``."""
        self._stream.copy(destination, source)
        self._note_written([destination])

    def memset(self, destination: DeviceArray, byte: int) -> None:
        """Set every byte of ``destination`` to ``byte``."""
        self._stream.memset(destination, byte)
        self._note_written([destination])

    def read(self, array: DeviceArray) -> Array:
        """Wait for the work that was enqueued so far, and return the elements of ``array`` on the host."""
        return self._stream.read(array)

    def write(self, array: DeviceArray, values: Array) -> None:
        """Replace the elements of ``array`` by ``values``."""
        self._stream.write(array, np.asarray(values))
        self._note_written([array])

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _call_numpy(self, function: Callable[..., Any], grid: Sequence[int], args: Sequence[Any]) -> None:
        if 0 in grid:
            return
        arrays = {number: self._contents(arg) for number, arg in enumerate(args) if isinstance(arg, DeviceArray)}
        function(*(arrays.get(number, arg) for number, arg in enumerate(args)))
        for number, array in arrays.items():
            self.write(args[number], array)

    def _contents(self, array: DeviceArray) -> Array:
        if any(_overlap(array, fresh) for fresh in self._fresh):
            return np.zeros(array.shape, array.dtype.numpy)
        return self._stream.read(array)

    def _note_written(self, written: Sequence[object]) -> None:
        arrays = [x for x in written if isinstance(x, DeviceArray)]
        self._fresh = [fresh for fresh in self._fresh if not any(_overlap(x, fresh) for x in arrays)]


def _check_workspace(kernel: Kernel, args: Sequence[Any], workspace: Tensor | DeviceArray | None) -> None:
    """Raise TypeError if a Numba kernel stores floats into the workspace, whose elements are bytes."""
    for number, arg in enumerate(args):
        if kernel.source and arg is not None and arg is workspace:
            check_workspace(kernel.name, kernel.source, [getattr(each, "dtype", None) for each in args], number)


def _overlap(a: DeviceArray, b: DeviceArray) -> bool:
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


@dataclass(frozen=True, eq=False)
class _Pointer:
    """An array of a Run, as an argument of a launch."""

    array: DeviceArray

    @property
    def dtype(self) -> DType:
        return self.array.dtype


def _value(arg: Arg) -> int | float:
    assert not isinstance(arg, Tensor | LoopCondition)
    value = arg.value
    if isinstance(arg, Int64) and not isinstance(value, int):
        raise TypeError(
            f"argument {value!r} of a launch in a Run: expected an integer, not a symbolic size. Take sizes from the "
            "shapes of the tensors that enqueue gets"
        )
    assert isinstance(value, int | float)
    return value
