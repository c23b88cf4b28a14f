"""Callbacks of a plan: Python functions that each Run calls, and the arrays and the stream that they get."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ...compiler.kernel import KernelSpec
from ...model.ir import Array, DType


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous array in device memory, which implements the CUDA array interface. Valid while the callback runs.

    ``stream`` is the handle of the Run's CUDA stream; work on this stream sees the elements.
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
        """Return the memory from byte ``offset`` on as an array of another type and shape.

        Raises ValueError for a range outside of this array.
        """
        made = DeviceArray(self.address + offset, tuple(shape), dtype, self.stream)
        if offset < 0 or offset + made.nbytes > self.nbytes:
            raise ValueError(
                f"view: got bytes {offset} to {offset + made.nbytes}, expected a range in 0 to {self.nbytes}"
            )
        return made

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.address if self.size else 0, False),
            "version": 3,
            "strides": None,
            "stream": self.stream or 1,  # in __cuda_array_interface__, 1 is the legacy default stream
        }


Number: TypeAlias = int | float


class CallStream(Protocol):
    """The stream of a Run, on which a callback enqueues its work."""

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
        """Enqueue a kernel launch; scalar arguments are converted to the types of the kernel's signature."""

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """Enqueue a copy of all bytes of ``source`` to ``destination``."""

    def memset(self, destination: DeviceArray, byte: int) -> None: ...

    def read(self, array: DeviceArray) -> Array:
        """Wait for the work that was enqueued so far, and return the elements of ``array``."""

    def write(self, array: DeviceArray, values: Array) -> None:
        """Enqueue a write of ``values`` to ``array``, after the work that was enqueued so far."""

    def synchronize(self) -> None:
        """Wait for the work that was enqueued on the stream so far."""


class CallFunction(Protocol):
    """The function of a callback. ``tensors`` and ``numbers`` are the arrays and integers of the `HostCall`."""

    def __call__(self, tensors: Sequence[DeviceArray], numbers: Sequence[int], stream: CallStream) -> None: ...


@dataclass(frozen=True)
class Callback:
    """A Python function that each Run calls, for one node.

    Equal callbacks have equal ``key``. ``tensors`` holds type and rank of each tensor argument, ``num_numbers`` is the
    number of integer arguments. ``function`` creates the function to call, once per cluster and process. ``stored`` is
    the callback's serialized form in a compiled model, None if it cannot be stored.
    """

    key: Hashable
    name: str
    tensors: tuple[tuple[DType, int], ...]
    num_numbers: int = 0
    function: Callable[[], CallFunction] = field(kw_only=True, compare=False)
    stored: Mapping[str, Any] | None = field(default=None, kw_only=True, compare=False)

    def arrays(self, addresses: Sequence[int], numbers: Sequence[int], stream: int) -> list[DeviceArray]:
        """Return the tensors of a Run as arrays. ``numbers`` begins with the dimensions of all tensors."""
        arrays, first = [], 0
        for address, (dtype, rank) in zip(addresses, self.tensors, strict=True):
            arrays.append(DeviceArray(address, tuple(numbers[first : first + rank]), dtype, stream))
            first += rank
        return arrays

    @property
    def num_dims(self) -> int:
        """Return the number of dimensions of all tensors. In a plan, their sizes precede the call's other integers."""
        return sum(rank for _, rank in self.tensors)
