"""What Python does in each Run: callbacks of a plan, and what they see of the Run."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ...compiler.kernel import KernelSpec
from ...model.ir import Array, DType


@dataclass(frozen=True)
class DeviceArray:
    """Contiguous elements on the device, for as long as the callback runs; other code may take it as a CUDA array.

    ``stream`` is the handle of the Run's CUDA stream, on which the elements are in order.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    stream: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __int__(self) -> int:
        return self.address

    def view(self, dtype: DType, shape: Sequence[int], offset: int = 0) -> DeviceArray:
        """Other elements of the same memory, ``offset`` bytes behind its start. Raises ValueError beyond its end."""
        made = DeviceArray(self.address + offset, tuple(shape), dtype, self.stream)
        if offset < 0 or offset + made.nbytes > self.nbytes:
            raise ValueError(f"{made.nbytes} bytes from byte {offset} on are not in {self.nbytes} bytes")
        return made

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.address if self.size else 0, False),
            "version": 3,
            "strides": None,
            "stream": self.stream or 1,  # 1 is the default stream there
        }


Number: TypeAlias = int | float


class CallStream(Protocol):
    """The stream of a Run, and what a callback may enqueue on it."""

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``."""

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
        """Enqueues a kernel; numbers are given to its parameters as the signature says."""

    def copy(self, destination: DeviceArray, source: DeviceArray) -> None:
        """Enqueues a copy of all bytes."""

    def memset(self, destination: DeviceArray, byte: int) -> None: ...

    def read(self, array: DeviceArray) -> Array:
        """The elements, after the work that is enqueued so far."""

    def write(self, array: DeviceArray, values: Array) -> None:
        """Replaces the elements, after the work that is enqueued so far."""

    def synchronize(self) -> None:
        """Waits for the work that is enqueued so far."""


class CallFunction(Protocol):
    """What a callback does. ``numbers`` are those of its `HostCall`."""

    def __call__(self, tensors: Sequence[DeviceArray], numbers: Sequence[int], stream: CallStream) -> None: ...


@dataclass(frozen=True)
class Callback:
    """What Python does in each Run for one node.

    ``key`` is the same for all that do the same. ``tensors`` has the type and the rank of each tensor that it takes,
    ``num_numbers`` how many numbers it takes beside. ``function`` makes what is called, once for each cluster in a
    process; ``stored`` is what a compiled model keeps of it, None where it cannot be kept.
    """

    key: Hashable
    name: str
    tensors: tuple[tuple[DType, int], ...]
    num_numbers: int = 0
    function: Callable[[], CallFunction] = field(kw_only=True, compare=False)
    stored: Mapping[str, Any] | None = field(default=None, kw_only=True, compare=False)

    def arrays(self, addresses: Sequence[int], numbers: Sequence[int], stream: int) -> list[DeviceArray]:
        """The tensors of a Run: all dimensions come first among the numbers."""
        arrays, first = [], 0
        for address, (dtype, rank) in zip(addresses, self.tensors, strict=True):
            arrays.append(DeviceArray(address, tuple(numbers[first : first + rank]), dtype, stream))
            first += rank
        return arrays

    @property
    def num_dims(self) -> int:
        """How many numbers of a record are dimensions of tensors."""
        return sum(rank for _, rank in self.tensors)
