"""Tensors of the program IR: strided views of buffers, whose contents may be known during lowering."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...model.ir import Array, Constant, ConstantView, DType, Node
from ..expressions.symbolic import Dim, Expr, product

MAX_HOST_ELEMENTS = 1024
"""Maximum elements of an integer tensor whose contents lowering knows. A shape has only one element per dimension."""


class BufferKind(enum.IntEnum):
    """Location of a tensor's elements; the values up to SCRATCH equal those of ``ocp_ref_kind``.

    HOST: known to the host, and not in device memory. STATE: memory that keeps its contents between Runs, and that
    launches of its node write.
    """

    INPUT = 0
    OUTPUT = 1
    WEIGHT = 2
    SCRATCH = 3
    HOST = 4
    STATE = 5


class Buffer:
    """Memory that tensors view, compared by identity. ``index`` is the number of the cluster's INPUT or OUTPUT.

    Known contents belong to the buffer, and so to every view of it. ``data`` has the contents of a WEIGHT, ``state``
    the initial contents of a STATE, ``host`` the elements of a HOST buffer. ``deferred_host`` computes the elements
    when the host needs them.
    """

    __slots__ = ("data", "deferred_host", "host", "index", "kind", "nbytes", "state")

    def __init__(
        self,
        kind: BufferKind,
        nbytes: Dim,
        *,
        index: int = -1,
        data: Constant | None = None,
        host: tuple[Dim, ...] | None = None,
        state: Constant | None = None,
    ) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.index = index
        self.data = data
        self.host = host
        self.state = state
        self.deferred_host: DeferredContents | None = None


@dataclass(eq=False)
class DeferredContents:
    """Contents that ``compute`` derives from ``sources`` when the host needs them; see `lowering.host.defer_host`."""

    node: Node | None
    sources: tuple[Tensor, ...]
    compute: Callable[..., tuple[Dim, ...]]
    contents: tuple[Dim, ...] | None = None


def dims_of(shape: Sequence[Dim], dtype: DType) -> tuple[Dim, ...]:
    """Return the sizes of ``shape`` as ints and expressions.

    Raises TypeError for sizes of other types, and if ``dtype`` is not a DType.
    """
    if not isinstance(dtype, DType):
        raise TypeError(f"dtype: expected an element type such as DType.FLOAT32, got {dtype!r}")
    try:
        return tuple(dim if isinstance(dim, int | Expr) else operator.index(dim) for dim in shape)
    except TypeError as error:
        raise TypeError(f"shape: expected whole numbers or expressions, got {shape!r}") from error


class Tensor:
    """An immutable strided view of a buffer. Strides and ``offset`` count elements.

    A tensor in a HOST buffer is the result of shape arithmetic; a launch that uses it needs a copy on the device
    (`materialize`).
    """

    __slots__ = ("_contiguous", "_host", "buffer", "dtype", "offset", "shape", "strides")

    def __init__(
        self,
        dtype: DType,
        shape: Sequence[Dim],
        buffer: Buffer,
        *,
        strides: Sequence[Dim] | None = None,
        offset: Dim = 0,
    ) -> None:
        self.dtype = dtype
        self.shape: tuple[Dim, ...] = tuple(shape)
        self.buffer = buffer
        self.strides: tuple[Dim, ...] = contiguous_strides(self.shape) if strides is None else tuple(strides)
        self.offset = offset
        self._contiguous: bool | None = True if strides is None else None
        self._host: tuple[Dim, ...] | None = None

    def in_buffer(self, buffer: Buffer) -> Tensor:
        """Return the same view of another buffer."""
        other = Tensor(self.dtype, self.shape, buffer, strides=self.strides, offset=self.offset)
        other._contiguous = self._contiguous
        return other

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """Return the number of elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Dim:
        return self.size * self.dtype.itemsize

    @property
    def distinct_bytes(self) -> Dim:
        """Return the size in bytes of the view's distinct elements; broadcast elements count once."""
        dims = [dim for dim, stride in zip(self.shape, self.strides, strict=True) if stride != 0]
        return product(dims) * self.dtype.itemsize

    @property
    def is_constant(self) -> bool:
        """Return whether the tensor views constant data with static sizes. Does not read it, unlike `constant`."""
        return self.buffer.data is not None and self._static

    @property
    def static_shape(self) -> tuple[int, ...]:
        """Return the shape as integers. Raises TypeError if a dimension is symbolic."""
        return tuple(operator.index(dim) for dim in self.shape)

    @property
    def constant(self) -> Array | None:
        """Return the contents as an array of ``dtype.numpy`` and of this shape if the tensor is constant, else None."""
        data = self.buffer.data
        if data is None or not self._static:
            return None
        data.look()
        return self.constant_view().array

    def constant_view(self) -> ConstantView:
        """Return the constant as an operand of a recipe, without reading it. Raises TypeError for other tensors."""
        data = self.buffer.data
        if data is None:
            raise TypeError(f"{self!r}: expected a constant, got {self.buffer.kind.name}")
        strides = tuple(operator.index(stride) for stride in self.strides)
        return ConstantView(data, self.static_shape, strides, operator.index(self.offset))

    @property
    def host(self) -> tuple[Dim, ...] | None:
        """Return the elements of an integer or bool tensor in row-major order; None if lowering does not know them.

        Lowering knows results of shape arithmetic and constants, of at most `MAX_HOST_ELEMENTS` elements.
        """
        if self._host is None and (self.buffer.host is not None or self.buffer.data is not None):
            positions = self.positions()
            if positions is None:
                return None
            if self.buffer.host is not None:
                self._host = tuple(self.buffer.host[position] for position in positions)
            elif self.dtype.is_integer or self.dtype is DType.BOOL:
                array = self.constant
                assert array is not None
                self._host = tuple(int(x) for x in array.reshape(-1).tolist())
        return self._host

    def positions(self) -> tuple[int, ...] | None:
        """Return the offset of each element in the buffer, in row-major order of the elements.

        Returns None for more than `MAX_HOST_ELEMENTS` elements, or symbolic sizes.
        """
        size = self.size
        if not self._static or not isinstance(size, int) or size > MAX_HOST_ELEMENTS:
            return None
        assert isinstance(self.offset, int)
        if self.is_contiguous:
            return tuple(range(self.offset, self.offset + size))
        found = [self.offset]
        for dim, stride in zip(self.shape, self.strides, strict=True):
            assert isinstance(dim, int)
            assert isinstance(stride, int)
            found = [position + i * stride for position in found for i in range(dim)]
        return tuple(found)

    @property
    def _static(self) -> bool:
        return all(isinstance(dim, int) for dim in (self.offset, *self.shape, *self.strides))

    @property
    def is_contiguous(self) -> bool:
        """Return whether elements are in row-major order without gaps; strides of dimensions of size 1 are ignored."""
        if self._contiguous is None:
            self._contiguous = all(
                dim == 1 or stride == dense
                for dim, stride, dense in zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
            ) or any(dim == 0 for dim in self.shape)
        return self._contiguous

    def __repr__(self) -> str:
        return f"{self.dtype.short}[{', '.join(map(repr, self.shape))}]"


def contiguous_strides(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides: list[Dim] = []
    stride: Dim = 1
    for dim in reversed(shape):
        strides.append(stride)
        stride = stride * dim
    return tuple(reversed(strides))


def known_bytes(buffer: Buffer) -> int:
    """Return the size in bytes of a buffer whose size is static, such as a weight."""
    assert isinstance(buffer.nbytes, int)
    return buffer.nbytes
