"""Products of few rows on a GPU, at the pace of memory: each thread has several vectors of b in flight.

Sums are added up in one order, whatever the addresses are: what is not aligned is read by single elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...program.expressions.symbolic import Dim, ceildiv, hint
from ...program.lowering.context import DeviceProperties
from ..codegen.simt_fragments import Element, batch_offsets, indent, indented, joined, suffix
from ..codegen.source import text_property
from ..codegen.vectors import VECTOR_BYTES
from .gemm_simt import Product

WARP = 32
MOST_COLUMNS = 4
"""Maximum columns of a block where b is contiguous along k: a thread reuses each element of a for all of them."""
MOST_VECTORS = 4
"""Maximum vectors of a column that a thread has in flight there, unless another number divides better."""
MOST_THREADS = 512
ROWS_IN_FLIGHT = 8
"""Vectors of b that a thread has in flight where b is contiguous along n."""
_itemsize = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class VectorRowProduct(Product):
    """One block per row of out and ``block_columns`` columns, in a grid as that of `RowProduct`.

    Where b is contiguous along k, all ``threads`` share the block's columns, with ``vectors`` of each at a time.
    Where it is contiguous along n, ``side`` threads have a vector of neighbouring columns each, and those that have the
    same columns share k. Sums meet by shuffles, and across warps in shared memory.
    """

    threads: int = 128
    block_columns: int = MOST_COLUMNS
    vectors: int = MOST_VECTORS

    @property
    def name(self) -> str:
        return f"matmul_row_{self.b_contiguous}{self.block_columns}_{self.types}"

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return vector_width(self.elements[1])

    @property
    def side(self) -> int:
        return self.block_columns // self.width

    @text_property
    def body(self) -> str:
        prologue = f"""
            blocks_n = int32((n + {self.block_columns - 1}) // {self.block_columns})
            block = int32(cuda.blockIdx.x)
            rest = int32(block // m)
            row = int32(block - rest * m)
            batch = int32(rest // blocks_n)
            column0 = int32((rest - batch * blocks_n) * {self.block_columns})
            thread = int32(cuda.threadIdx.x)
            """
        a_row = f"a_base += int64({self.index_type}(row * {self.stride('a_m')}))"
        lines = self._along_k() if self.b_contiguous == "k" else self._along_n()
        return joined([prologue, batch_offsets("ab", "base", self.batch_rank), a_row, "\n".join(lines)])

    def _multiply_add(self, x: str, y: str, total: str) -> str:
        return f"fma_f32({x}, {y}, {total})" if self.element.accumulator == "float32" else f"{total} + {x} * {y}"

    def _along_k(self) -> list[str]:
        a, b = self.elements
        columns, step = range(self.block_columns), self.threads * self.width
        lines = []
        for r in columns:  # columns beyond n repeat the last one
            own = f"min(int32(column0 + {r}), int32(n - 1))"
            lines += [f"b{r} = b_base + int64({self.index_type}({own} * b_n))", f"total{r} = {self._zero}"]
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
                total = self._multiply_add("value", b.load(f"w{count}_{r}", "e"), f"total{r}")
                lines.append(f"        total{r} = {total}")
            lines.append(f"    k = int32(k + {count * step})")
        lines += [
            f"for last in range(int32(whole + thread), k_end, {self.threads}):",
            f"    value = {a.load('a', 'a_base + last')}",
        ]
        for r in columns:
            lines.append(f"    total{r} = {self._multiply_add('value', b.load('b', f'b{r} + last'), f'total{r}')}")
        return [*lines, *self._meet([f"total{r}" for r in columns], 1)]

    def _along_n(self) -> list[str]:
        a, b = self.elements
        each, slices = range(self.width), self.threads // self.side
        index = self.index_type
        lines = [
            f"column = int32(column0 + thread % {self.side} * {self.width})",
            f"aligned = ((b_base | int64(b_k)) & {self.width - 1}) == 0",
            f"aligned = aligned & is_aligned(b, {self.width}) & (column + {self.width} <= n)",
            f"last = b_base + int64({index}((k_end - 1) * b_k)) + int64(n - 1)",
            *(f"total{i} = {self._zero}" for i in each),
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
                lines.append(f"        total{i} = {self._multiply_add('value', weight, f'total{i}')}")
            lines.append(f"    k = int32(k + {count * slices})")
        return [*lines, *self._meet([f"total{i}" for i in each], self.side)]

    @property
    def _zero(self) -> str:
        return f"{self.element.accumulator}(0)"

    def _load(self, lanes: str, pointer: str, at: str, step: str, count: int) -> str:
        return f"load_lanes({lanes}, 0, {pointer}, int64({at}), int64({step}), int64(0), True, {self.width}, {count})"

    def _meet(self, totals: Sequence[str], side: int) -> list[str]:
        """Adds up the threads' ``totals``: of ``side`` threads side by side each has some of the block's columns."""
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
    """How many elements are a vector; 0 for those that are not loaded by vectors."""
    size = _itemsize.get(element.storage, 0)
    return VECTOR_BYTES // size if size and type(element) is Element else 0


def takes(elements: tuple[Element, Element], a_contiguous: str, b_contiguous: str) -> bool:
    """Whether `VectorRowProduct` multiplies operands of this form."""
    a, b = elements
    if not vector_width(a) or not vector_width(b) or not b_contiguous:
        return False
    return b_contiguous == "n" or (a == b and a_contiguous == "k")


def few_row_form(device: DeviceProperties, product: Product, blocks: Dim, n: Dim, k: Dim) -> VectorRowProduct | None:
    """The kernel by the sizes that are expected, of which every choice is right for all sizes; None where it has none.

    ``blocks`` are rows of all results: blocks of each column.
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
        return VectorRowProduct(*form, *more, threads, columns, vectors)
    side = 8
    while side > 2 and hint(ceildiv(n, side * width) * blocks) < device.multiprocessors:
        side //= 2
    threads = MOST_THREADS
    while threads > 2 * WARP and threads // side * ROWS_IN_FLIGHT > hint(k):
        threads //= 2
    return VectorRowProduct(*form, *more, threads, side * width, ROWS_IN_FLIGHT)
