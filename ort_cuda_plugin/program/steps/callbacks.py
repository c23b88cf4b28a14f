"""Callbacks of a plan: Python code that each Run calls, and the arrays and the stream that it gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ...compiler.kernel import KernelSpec
from ...model.ir import Array, DType


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous device array, valid while the callback runs; it has the CUDA array interface.

    ``stream`` is the handle of the Run's CUDA stream, on which the elements are ready.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    stream: int = 0

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __int__(self) -> int:
        return self.address

    def view(self, dtype: DType, shape: Sequence[int], offset: int = 0) -> DeviceArray:
        """View the memory from byte ``offset`` on as other elements. Raises ValueError for a view that exceeds it."""
        made = DeviceArray(self.address + offset, tuple(shape), dtype, self.stream)
        if offset < 0 or offset + made.nbytes > self.nbytes:
            raise ValueError(f"view: got bytes {offset} to {offset + made.nbytes}, expected at most {self.nbytes}")
        return made

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.address if self.size else 0, False),
            "version": 3,
            "strides": None,
            "stream": self.stream or 1,  # __cuda_array_interface__: 1 is the default stream
        }


Number: TypeAlias = int | float


class CallStream(Protocol):
    """The stream of a Run, on which a callback enqueues work."""

    @property
    def handle(self) -> int:
        """Return the ``cudaStream_t``."""

    @property
    def is_emulated(self) -> bool: ...

    def launch(
        self,
        spec: KernelSpec,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[DeviceArray | Number],
        shared_bytes: int = 0,
    ) -> None:
        """Enqueue a kernel; scalars are converted to the types of its signature."""

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """Enqueue a copy of all bytes of ``source``."""

    def memset(self, destination: DeviceArray, byte: int) -> None: ...

    def read(self, array: DeviceArray) -> Array:
        """Wait for the work enqueued so far, and return the elements of ``array``."""

    def write(self, array: DeviceArray, values: Array) -> None:
        """Replace the elements of ``array``, after the work enqueued so far."""

    def synchronize(self) -> None:
        """Wait for the work enqueued on the stream so far."""


class CallFunction(Protocol):
    """The type of a callback's function; ``numbers`` are the integers of the `HostCall`."""

    def __call__(self, tensors: Sequence[DeviceArray], numbers: Sequence[int], stream: CallStream) -> None: ...


@dataclass(frozen=True)
class Callback:
    """A Python call in each Run, for one node.

    Equal callbacks have equal ``key``. ``tensors`` holds type and rank of each tensor argument, ``num_numbers`` is the
    number of integer arguments. ``function`` creates the callable, once per cluster in a process; ``stored`` is its
    serialized form in a compiled model, None if it cannot be stored.
    """

    key: Hashable
    name: str
    tensors: tuple[tuple[DType, int], ...]
    num_numbers: int = 0
    function: Callable[[], CallFunction] = field(kw_only=True, compare=False)
    stored: Mapping[str, Any] | None = field(default=None, kw_only=True, compare=False)

    def arrays(self, addresses: Sequence[int], numbers: Sequence[int], stream: int) -> list[DeviceArray]:
        """Return the tensors of a Run as arrays; ``numbers`` begins with their dimensions."""
        arrays, first = [], 0
        for address, (dtype, rank) in zip(addresses, self.tensors, strict=True):
            arrays.append(DeviceArray(address, tuple(numbers[first : first + rank]), dtype, stream))
            first += rank
        return arrays

    @property
    def num_dims(self) -> int:
        """Return the number of dimensions of all tensors. In a plan, their sizes precede a call's other integers."""
        return sum(rank for _, rank in self.tensors)
