"""GEMV kernels, for GEMMs with few rows: `VectorGemv`, vectorized for GPUs, and `Gemv` for operands of any type.

Each thread of `VectorGemv` has several vector loads of b in flight. It loads unaligned operands element by element: in
the same order of additions if b is contiguous along n, in another order if b is contiguous along k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...program.expressions.symbolic import Dim, ceildiv, hint
from ...program.lowering.context import DeviceProperties
from ..codegen.block_mapping import batch_offsets, columns_of_row
from ..codegen.fragment import Fragment, join
from ..codegen.simt_fragments import WARP, Element, indent, indented, suffix
from ..codegen.source import text_property
from ..codegen.vectors import VECTOR_BYTES
from ..contraction.prologue import conversion_setup
from .gemm_simt import Product

MOST_COLUMNS = 4
"""Maximum columns per block if b is contiguous along k; a thread multiplies each element of a by all of them."""
MOST_VECTORS = 4
"""Maximum vector loads per column that a thread has in flight if b is contiguous along k."""
MOST_THREADS = 512  # maximum threads per block if b is contiguous along n
ROWS_IN_FLIGHT = 8
"""Vector loads of b that a thread has in flight if b is contiguous along n."""
_itemsize = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class GemvKernel(Product):
    """GEMM kernel for few rows: a block computes ``block_columns`` columns of one row.

    Blocks for the same columns are adjacent in the grid, so that all rows but the first read b from the L2. Subclasses
    implement `along_k` and `along_n`, for b contiguous along k or n. Other strides of b are not supported.
    """

    @property
    def threads(self) -> int:
        raise NotImplementedError

    @property
    def block_columns(self) -> int:
        raise NotImplementedError

    @text_property
    def body(self) -> str:
        if self.b_contiguous not in ("k", "n"):
            raise ValueError(f"{type(self).__name__}: b_contiguous: expected 'k' or 'n', got {self.b_contiguous!r}")
        lines = self.along_k() if self.b_contiguous == "k" else self.along_n()
        return join([*self.setup(), Fragment(f"along_{self.b_contiguous}", "\n".join(lines))])

    def setup(self) -> list[Fragment]:
        """Return the fragments that compute the block's row and first column, and the operands' base offsets."""
        return [
            conversion_setup(*self.elements),
            columns_of_row(self.block_columns),
            self.first_column(),
            batch_offsets("ab", "base", self.batch_rank),
            Fragment("row_of_a", f"a_base += int64({self.index_type}(row * {self.stride('a_m')}))"),
        ]

    def first_column(self) -> Fragment:
        text = f"""
            column0 = int32((rest - batch * blocks_n) * {self.block_columns})
            thread = int32(cuda.threadIdx.x)
            """
        return Fragment("first_column", text, "column0 thread")

    def along_k(self) -> list[str]:
        raise NotImplementedError

    def along_n(self) -> list[str]:
        raise NotImplementedError

    @property
    def zero(self) -> str:
        return f"{self.element.accumulator}(0)"

    def load_a(self, k: str) -> str:
        factor = k if k.endswith(")") else f"({k})"
        offset = f"a_base + int64({self.index_type}({factor} * {self.stride('a_k')}))"
        return self.elements[0].load("a", offset, "row", k)

    def column(self, first: str, number: int) -> str:
        """Return the source of column ``first + number`` of b, clamped to the last one."""
        return f"min(int32({first} + {number}), int32(n - 1))"

    def column_of_b(self, first: str, number: int) -> str:
        """Return the line that computes the offset ``b<number>`` of column ``first + number`` of b."""
        return f"b{number} = b_base + int64({self.index_type}({self.column(first, number)} * b_n))"

    def multiply_add(self, x: str, y: str, total: str) -> str:
        return f"fma_f32({x}, {y}, {total})" if self.element.accumulator == "float32" else f"{total} + {x} * {y}"

    def element_lines(self, column: str, total: str) -> list[str]:
        """Return lines that add the low-rank product to accumulator ``total`` of ``column``, and apply the epilogue."""
        return [
            f"column_0 = int32({column})",
            f"total_0 = {total}",
            *([] if self.low_rank is None else self.low_rank.added("total_0", "row", "column_0")),
            *self.epilogue.elements("_0"),
            *self.epilogue.stores("_0"),
        ]

    def finish(self) -> list[str]:
        """Return lines that apply the epilogue to variable ``total``, of column ``column0 + thread``."""
        accumulator = self.element.accumulator
        # Numba widens int32 additions to int64.
        total = f"{accumulator}(total)" if "int" in accumulator else "total"
        return [*self.epilogue.rows(), *self.element_lines("column0 + thread", total)]


@dataclass(frozen=True)
class Gemv(GemvKernel):
    """GEMV kernel for operands of any type.

    If b is contiguous along k, a thread multiplies chunks of 8 elements along k for 4 columns. If b is contiguous along
    n, a thread owns 8 adjacent columns and every 16th k. Partial dot products are reduced in shared memory.
    """

    @property
    def block_columns(self) -> int:
        return 4 if self.b_contiguous == "k" else 64

    @property
    def threads(self) -> int:
        return 64 if self.b_contiguous == "k" else 128

    @property
    def name(self) -> str:
        return f"matmul_row_{self.b_contiguous}_{self.types}"

    def along_k(self) -> list[str]:
        accumulator = self.element.accumulator
        columns, chunk = range(4), range(8)
        own = [self.column("column0", r) for r in columns]
        lines = [f"partial = array_pointer(cuda.shared.array({4 * self.threads}, {accumulator}, 16))"]
        lines += [self.column_of_b("column0", r) for r in columns]
        lines += [f"c{r}_{i} = {accumulator}(0)" for r in columns for i in chunk]
        lines += [f"for k in range(int32(thread * 8), k_end, {self.threads * 8}):", "    if k + 7 < k_end:"]
        lines += [f"        a{i} = {self.load_a(f'k + {i}')}" for i in chunk]
        for r in columns:
            before, weights = self.elements[1].neighbors("b", f"b{r} + k", own[r], "k", len(chunk), f"b{r}_near")
            lines += indented(before, 2)
            for i in chunk:
                lines.append(f"        c{r}_{i} = {self.multiply_add(f'a{i}', weights[i], f'c{r}_{i}')}")
        lines += ["    else:", "        for last in range(k, k_end):", f"            x = {self.load_a('last')}"]
        for r in columns:
            weight = self.elements[1].load("b", f"b{r} + last", own[r], "last")
            lines.append(f"            c{r}_0 = {self.multiply_add('x', weight, f'c{r}_0')}")
        for r in columns:
            total = " + ".join(f"((c{r}_{i} + c{r}_{i + 4}) + (c{r}_{i + 2} + c{r}_{i + 6}))" for i in range(2))
            lines.append(f"partial[thread + {r * self.threads}] = {total}")
        finish = f"""
            cuda.syncthreads()
            total = {accumulator}(0)
            if thread < 32:
                for i in range(8):
                    total += partial[thread * 8 + i]
            cuda.syncthreads()
            if thread < 32:
                partial[thread] = total
            cuda.syncthreads()
            if thread < 4 and column0 + thread < n:
                total = {accumulator}(0)
                for i in range(8):
                    total += partial[thread * 8 + i]
            """
        return [*lines, indent(finish, 0), *indented(self.finish(), 1)]

    def along_n(self) -> list[str]:
        accumulator = self.element.accumulator
        chunk = range(8)
        lines = [
            f"partial = array_pointer(cuda.shared.array({16 * 64}, {accumulator}, 16))",
            "slice = int32(thread >> 3)",
            "column = int32(column0 + (thread & 7) * 8)",
            *[f"c{i} = {accumulator}(0)" for i in chunk],
            "for k in range(slice, k_end, 16):",
            f"    x = {self.load_a('k')}",
            f"    at = b_base + int64({self.index_type}(k * b_k)) + int64(column)",
        ]
        weights = [self.elements[1].load("b", f"at + {i}", f"column + {i}", "k") for i in chunk]
        added = [f"c{i} = {self.multiply_add('x', weight, f'c{i}')}" for i, weight in enumerate(weights)]
        lines += ["    if column + 7 < n:", *indented(added, 2), "    else:"]
        for i in chunk:
            lines += [f"        if column + {i} < n:", f"            {added[i]}"]
        lines += ["place = int64(int32(slice * 64 + (thread & 7) * 8))"]
        lines += [f"partial[place + {i}] = c{i}" for i in chunk]
        finish = f"""
            cuda.syncthreads()
            if thread < 64 and column0 + thread < n:
                total = {accumulator}(0)
                for i in range(16):
                    total += partial[thread + i * 64]
            """
        return [*lines, indent(finish, 0), *indented(self.finish(), 1)]


@dataclass(frozen=True)
class VectorGemv(GemvKernel):
    """Vectorized GEMV kernel for operands without prologues.

    If b is contiguous along k, all ``threads`` split the columns of the block along k; each has ``vectors`` loads per
    column in flight. If b is contiguous along n, ``side`` adjacent threads own a vector of columns each, threads with
    the same columns split k, and each has ``vectors`` rows of b in flight. Partial dot products are reduced by shuffles
    in a warp, and across warps in shared memory.
    """

    threads: int = 128
    block_columns: int = MOST_COLUMNS
    vectors: int = MOST_VECTORS

    @property
    def name(self) -> str:
        return f"matmul_row_{self.b_contiguous}{self.block_columns}_{self.types}"

    @property
    def width(self) -> int:
        """Elements per vector load of b."""
        return vector_width(self.elements[1])

    @property
    def side(self) -> int:
        return self.block_columns // self.width

    def setup(self) -> list[Fragment]:
        return super().setup()[1:]

    def along_k(self) -> list[str]:
        a, b = self.elements
        columns, step = range(self.block_columns), self.threads * self.width
        lines = []
        for r in columns:
            lines += [self.column_of_b("column0", r), f"total{r} = {self.zero}"]
        lines += [
            f"aligned = ((b_base | int64(b_n) | a_base) & {self.width - 1}) == 0",
            f"aligned = aligned & is_aligned(a, {self.width}) & is_aligned(b, {self.width})",
            f"whole = choose(aligned, int32(k_end & {-self.width}), int32(0))",
            f"k = int32(thread * {self.width})",
        ]
        for count in dict.fromkeys((self.vectors, 1)):
            lanes = self.width * count
            lines += [f"while k + {(count - 1) * step} < whole:", f"    x{count} = lanes_of(a, {lanes})"]
            lines.append(f"    {self._load(f'x{count}', 'a', 'a_base + k', str(step), count)}")
            for r in columns:
                lines.append(f"    w{count}_{r} = lanes_of(b, {lanes})")
                lines.append(f"    {self._load(f'w{count}_{r}', 'b', f'b{r} + k', str(step), count)}")
            lines += [f"    for e in range({lanes}):", f"        value = {a.load(f'x{count}', 'e')}"]
            for r in columns:
                total = self.multiply_add("value", b.load(f"w{count}_{r}", "e"), f"total{r}")
                lines.append(f"        total{r} = {total}")
            lines.append(f"    k = int32(k + {count * step})")
        lines += [
            f"for last in range(int32(whole + thread), k_end, {self.threads}):",
            f"    value = {a.load('a', 'a_base + last')}",
        ]
        for r in columns:
            lines.append(f"    total{r} = {self.multiply_add('value', b.load('b', f'b{r} + last'), f'total{r}')}")
        return [*lines, *self._reduce([f"total{r}" for r in columns], 1)]

    def along_n(self) -> list[str]:
        a, b = self.elements
        each, slices = range(self.width), self.threads // self.side
        index = self.index_type
        lines = [
            f"column = int32(column0 + thread % {self.side} * {self.width})",
            f"aligned = ((b_base | int64(b_k)) & {self.width - 1}) == 0",
            f"aligned = aligned & is_aligned(b, {self.width}) & (column + {self.width} <= n)",
            f"last = b_base + int64({index}((k_end - 1) * b_k)) + int64(n - 1)",
            *(f"total{i} = {self.zero}" for i in each),
            f"k = int32(thread // {self.side})",
        ]
        for count in dict.fromkeys((self.vectors, 1)):
            at, rows = f"b_base + int64({index}(k * b_k)) + int64(column)", f"int64({index}({slices} * b_k))"
            lines += [
                f"while k + {(count - 1) * slices} < k_end:",
                f"    w{count} = lanes_of(b, {self.width * count})",
                f"    load_lanes(w{count}, 0, b, {at}, {rows}, last, aligned, {self.width}, {count})",
                f"    for u in range({count}):",
                f"        place = a_base + int64({index}((k + u * {slices}) * {self.stride('a_k')}))",
                f"        value = {a.load('a', 'place')}",
            ]
            for i in each:
                weight = b.load(f"w{count}", f"u * {self.width} + {i}")
                lines.append(f"        total{i} = {self.multiply_add('value', weight, f'total{i}')}")
            lines.append(f"    k = int32(k + {count * slices})")
        return [*lines, *self._reduce([f"total{i}" for i in each], self.side)]

    def _load(self, lanes: str, pointer: str, at: str, step: str, count: int) -> str:
        return f"load_lanes({lanes}, 0, {pointer}, int64({at}), int64({step}), int64(0), True, {self.width}, {count})"

    def _reduce(self, totals: Sequence[str], side: int) -> list[str]:
        """Reduce the variables ``totals`` across threads, and apply the epilogue.

        Each of ``side`` adjacent threads holds partial dot products of different columns of the block.
        """
        short = suffix(self.element.accumulator)
        lines = []
        distance = WARP // 2
        while distance >= side:
            lines += [f"{name} += shfl_xor_{short}({name}, int32({distance}))" for name in totals]
            distance //= 2
        warps, columns = self.threads // WARP, self.block_columns
        lines += [
            f"partial = array_pointer(cuda.shared.array({warps * columns}, {self.element.accumulator}, 16))",
            f"place = int64(int32((thread >> 5) * {columns} + (thread & 31) * {len(totals)}))",
            f"if thread & 31 < {side}:",
            *(f"    partial[place + {i}] = {name}" for i, name in enumerate(totals)),
        ]
        finish = f"""
            cuda.syncthreads()
            if thread < {columns} and column0 + thread < n:
                total = partial[thread]
                for warp in range(1, {warps}):
                    total += partial[warp * {columns} + thread]
            """
        return [*lines, indent(finish, 0), *indented(self.finish(), 1)]


def vector_width(element: Element) -> int:
    """Return the elements per vector of 16 bytes; 0 for types without vectorized loads, and with a prologue."""
    size = _itemsize.get(element.storage, 0)
    return VECTOR_BYTES // size if size and type(element) is Element else 0


def takes(elements: tuple[Element, Element], a_contiguous: str, b_contiguous: str) -> bool:
    """Tell whether `VectorGemv` supports these operands."""
    a, b = elements
    if not vector_width(a) or not vector_width(b) or not b_contiguous:
        return False
    return b_contiguous == "n" or (a == b and a_contiguous == "k")


def few_row_form(device: DeviceProperties, product: Product, blocks: Dim, n: Dim, k: Dim) -> VectorGemv | None:
    """Return `VectorGemv` with parameters for the expected sizes; it supports all sizes. None for unsupported operands.

    ``blocks`` is the number of rows of all batches, which is the number of blocks for the same columns.
    """
    if not takes(product.elements, product.a_contiguous, product.b_contiguous):
        return None
    form = (product.elements, product.epilogue, product.a_contiguous, product.b_contiguous)
    more = (product.batch_rank, product.index)
    width = vector_width(product.elements[1])
    if product.b_contiguous == "k":
        columns = MOST_COLUMNS
        while columns > 1 and hint(ceildiv(n, columns) * blocks) < 2 * device.multiprocessors:
            columns //= 2
        found = hint(k) // width
        threads = 128 if found >= 256 else 64 if found >= 64 else WARP
        own = max(found // threads, 1)
        vectors = max(x for x in range(1, MOST_VECTORS + 1) if own % x == 0)
        vectors = vectors if vectors > 1 else min(own, MOST_VECTORS)
        return VectorGemv(*form, *more, threads, columns, vectors, low_rank=product.low_rank)
    side = 8
    while side > 2 and hint(ceildiv(n, side * width) * blocks) < device.multiprocessors:
        side //= 2
    threads = MOST_THREADS
    while threads > 2 * WARP and threads // side * ROWS_IN_FLIGHT > hint(k):
        threads //= 2
    return VectorGemv(*form, *more, threads, side * width, ROWS_IN_FLIGHT, low_rank=product.low_rank)
