"""Vectorized elementwise kernels for a GPU: a thread loads and stores vectors of adjacent elements.

Threads enumerate vectors of the flattened index space. A tensor that is contiguous, or whose rows consist of whole
vectors, is accessed by vectors if its address is aligned. The kernel tests the addresses; the outcome is the same in
all blocks, except in a last block with a partial vector. Elements of other inputs are loaded one by one; lanes that
load the same element share the access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, ceildiv, divides, hint, product
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.steps import Input, Map
from ..codegen.launch_geometry import Extent, coordinates, extent, index_type
from ..codegen.row_cache import find_by_column
from ..codegen.source import KernelBuilder, kernel_name, load_text, offset_text, register_type
from ..codegen.vectors import (
    BLOCKS_PER_MULTIPROCESSOR,
    FEW_ELEMENTS,
    MAX_WORK,
    VECTOR_BYTES,
    has_vectors,
    is_dense,
    vector_threads,
    work_of,
)

MANY_ELEMENTS = 1 << 21
"""Minimum elements for which a kernel with much work per element may also have two vectors per thread."""
SOUGHT_WORK = 32
"""Operations to compute the offset of one element, if vectors span rows (estimate)."""
FEWER_BLOCKS = 0.5
"""Wanted blocks per multiprocessor if several inputs are broadcast along rows: each block reads these as a whole."""


@dataclass(frozen=True)
class VectorForm:
    """What one thread computes: ``count`` vectors of ``width`` adjacent elements."""

    width: int
    count: int

    @property
    def lanes(self) -> int:
        return self.width * self.count


def choose_vectors(
    step: Map, dims: Sequence[Dim], inputs: Sequence[tuple[Tensor, Sequence[Dim]]], outputs: Sequence[Sequence[Dim]]
) -> VectorForm | None:
    """Choose the vectors per thread; None for few elements, or if results have no vectors of adjacent elements."""
    if not dims or hint(product(dims)) < FEW_ELEMENTS:
        return None
    moved = [x for x, strides in inputs if any(stride != 0 for stride in strides) and strides[-1] == 1]
    largest = max(x.dtype.itemsize for x in (*moved, *(y for _, y in step.outputs)))
    work = max(work_of([x for x, _ in step.outputs]), 1)
    width = VECTOR_BYTES // largest
    # Shorten vectors if an element takes much work; vectors of 1-byte elements may take twice as much in total.
    while width > 4 and width * work > MAX_WORK * (2 if largest == 1 else 1):
        width //= 2
    while width > 1 and not all(has_vectors(strides, dims, width) for strides in outputs):
        width //= 2
    if width == 1:
        return None
    most = MAX_WORK if hint(product(dims)) < MANY_ELEMENTS else 2 * MAX_WORK
    if not divides(width, dims[-1]):
        # Vectors span rows: a thread must compute an offset for each element of a non-contiguous input.
        sought = sum(not is_dense(along, dims) for _, along in inputs if any(stride != 0 for stride in along))
        work += SOUGHT_WORK * sought
    return VectorForm(width, 2 if 2 * width * work <= most and 2 * width <= VECTOR_BYTES else 1)


@dataclass
class _Moved:
    """A tensor that a thread accesses by vectors; ``lanes`` is the variable that holds them.

    For a tensor that is not contiguous, ``offsets`` has variables for each vector: its offset in the tensor, and the
    flat index of its first element. It is None for a contiguous tensor.
    """

    pointer: str
    dtype: DType
    strides: tuple[Dim, ...]
    lanes: str = ""
    offsets: list[tuple[str, str]] | None = None


class VectorMap:
    """Generator of the vectorized kernel of one Map."""

    def __init__(self, ctx: Lowering, builder: KernelBuilder, dims: Sequence[Dim], form: VectorForm) -> None:
        self.ctx, self.builder, self.emit = ctx, builder, builder.emit
        self.dims, self.form = dims, form
        self.n = builder.integer(product(dims))
        self.dtype = index_type(ctx, product(dims))
        self._extents: list[Extent] | None = None

    def launch(
        self, step: Map, inputs: Sequence[tuple[Input, Sequence[Dim]]], outputs: Sequence[Sequence[Dim]]
    ) -> None:
        builder, emit, form = self.builder, self.emit, self.form
        moved = [
            (leaf, _Moved(builder.tensor(x), x.dtype, tuple(strides)))
            for (leaf, x), strides in inputs
            if self._moves_by_vectors(strides)
        ]
        others = [
            (leaf, x.dtype, builder.tensor(x), strides)
            for (leaf, x), strides in inputs
            if not self._moves_by_vectors(strides)
        ]
        written = [
            (expression, _Moved(builder.tensor(y, written=True), y.dtype, tuple(strides)))
            for (expression, y), strides in zip(step.outputs, outputs, strict=True)
        ]
        everything = [x for _, x in moved] + [x for _, x in written]
        emit.line(f"at = first_element({form.width}, {form.count})")
        emit.line(f"step = vector_step({form.width})")
        for leaf, dtype, pointer, strides in others:
            if all(stride == 0 for stride in strides):
                emit.bind(leaf, emit.assign(load_text(pointer, "0", dtype)))
        for x in everything:
            x.lanes = emit.lanes(x.pointer, form.lanes)
            if not is_dense(x.strides, self.dims):
                x.offsets = self._row_offsets(x.strides)
        conditions = [f"whole_vectors(at, step, {self.n}, {form.width}, {form.count})"]
        conditions += [f"is_aligned({x.pointer}, {form.width})" for x in everything]
        emit.line(f"whole = {' & '.join(conditions)}")
        for _, x in moved:
            self._move("load", x)
        varying = {leaf for (leaf, _), strides in inputs if any(stride != 0 for stride in strides)}
        roots = [expression for expression, _ in written]
        emit.hoist(roots, find_by_column([roots], varying.__contains__))
        with emit.block(f"for e in range({form.lanes}):"):
            for leaf, x in moved:
                emit.bind(leaf, emit.assign(load_text(x.lanes, "e", x.dtype)))
            for leaf, dtype, pointer, strides in others:
                if emit.bound(leaf) is None:
                    emit.bind(leaf, emit.assign(load_text(pointer, self._element(strides), dtype)))
            for expression, x in written:
                emit.store(x.lanes, "e", expression)
        for _, x in written:
            self._move("store", x)
        of_columns = sum(any(stride == 0 for stride in x.strides) for _, x in moved)
        blocks = FEWER_BLOCKS if of_columns > 1 else BLOCKS_PER_MULTIPROCESSOR
        threads = vector_threads(self.ctx.device, ceildiv(product(self.dims), form.lanes), blocks)
        grid = ceildiv(product(self.dims), threads * form.lanes)
        builder.launch(self.ctx, kernel_name(self.ctx), (grid, 1, 1), (threads, 1, 1))

    def _moves_by_vectors(self, strides: Sequence[Dim]) -> bool:
        return any(stride != 0 for stride in strides) and has_vectors(strides, self.dims, self.form.width)

    def _coordinates(self, flat: str) -> list[str]:
        if self._extents is None:
            self._extents = [extent(self.builder, dim, self.dtype) for dim in self.dims[1:]]
        # The last threads may have no second vector: they load element 0 instead, which exists.
        index = self.emit.assign(f"{register_type(self.dtype)}(choose({flat} < {self.n}, {flat}, int64(0)))")
        return coordinates(self.emit, index, self._extents, self.dtype)

    def _offset(self, names: Sequence[str], strides: Sequence[Dim]) -> str:
        return offset_text([(name, self.builder.stride(s)) for name, s in zip(names, strides, strict=True)])

    def _row_offsets(self, strides: Sequence[Dim]) -> list[tuple[str, str]]:
        """Emit, for each of the thread's vectors, its offset in a tensor with ``strides`` and its flat index."""
        offsets = []
        texts = [self.builder.stride(stride) for stride in strides]
        for number in range(self.form.count):
            flat = self.emit.assign(f"at + {number} * step")
            terms = list(zip(self._coordinates(flat), texts, strict=True))
            offsets.append((self.emit.assign(offset_text(terms)), flat))
        return offsets

    def _element(self, strides: Sequence[Dim]) -> str:
        """Emit the offset of the thread's element ``e`` in a tensor that is loaded element by element; return it."""
        emit, width = self.emit, self.form.width
        vector = emit.assign(f"at + (e >> {width.bit_length() - 1}) * step")
        lane = emit.assign(f"e & {width - 1}")
        if not divides(width, self.dims[-1]):
            return self._offset(self._coordinates(emit.assign(f"{vector} + {lane}")), strides)
        names = self._coordinates(vector)
        return self._offset([*names[:-1], emit.assign(f"{names[-1]} + {lane}")], strides)

    def _move(self, how: str, x: _Moved) -> None:
        """Emit the loads or stores (``how``) of a tensor's vectors; a tensor with offsets has one for each vector."""
        form, is_load = self.form, how == "load"
        if x.offsets is None:
            vectors = [("at", f"{self.n} - 1" if is_load else self.n)]
        elif is_load:
            vectors = [(offset, f"{offset} + {form.width - 1}") for offset, _ in x.offsets]
        else:
            ends = [f"choose({flat} < {self.n}, {offset} + {form.width}, {offset})" for offset, flat in x.offsets]
            vectors = [(offset, end) for (offset, _), end in zip(x.offsets, ends, strict=True)]
        for number, (offset, limit) in enumerate(vectors):
            places = f"{x.lanes}, {number * form.width}, {x.pointer}, {offset}, step, {limit}"
            self.emit.line(f"{how}_lanes({places}, whole, {form.width}, {form.count // len(vectors)})")
