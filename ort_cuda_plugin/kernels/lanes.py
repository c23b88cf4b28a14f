"""Products of few rows on the emulated device: a thread has columns of one row in vectors, and meets no barrier."""

from __future__ import annotations

from dataclasses import dataclass

from .codegen import text_property
from .convert import conversion_setup
from .matmul import Product
from .tiles import Element, batch_offsets, indent, indented, joined, suffix

ACCUMULATORS = 128
"""Of a thread: eight of its longest vectors."""
COLUMNS = 4
"""Of a thread where b is contiguous along k."""
_STORAGES = frozenset({"f32", "f64", "f16", "bf16", "i32"})
"""What vectors are loaded of."""


@dataclass(frozen=True)
class LaneProduct(Product):
    """A product whose result has ``columns``. The grid is that of `RowProduct`.

    Where b is contiguous along n, a thread has strips of b, and the last one ends with the last column: columns that
    the thread before it has are computed twice and stored once. Else it has four columns, each of which is summed in
    as many parts as vectors have elements.
    """

    columns: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether b's elements, and a's where they are multiplied as vectors, are what vectors are loaded of."""
        a, b = self.elements
        if type(b) is not Element or b.storage not in _STORAGES or not self.columns:
            return False
        if self.b_contiguous == "k":
            return a == b and self.a_contiguous == "k"
        return self.b_contiguous == "n"

    @property
    def threads(self) -> int:
        return 2 if self.b_contiguous == "n" else 8

    @property
    def width(self) -> int:
        """Elements of a strip."""
        most = ACCUMULATORS * 4 // (8 if self.element.accumulator == "float64" else 4)
        return min(most, 1 << (self.columns.bit_length() - 1)) if self.b_contiguous == "n" else most // COLUMNS

    @property
    def block_columns(self) -> int:
        return self.threads * (self.width if self.b_contiguous == "n" else COLUMNS)

    @property
    def name(self) -> str:
        return f"matmul_lanes_{self.b_contiguous}{self.width}_{self.types}"

    @text_property
    def body(self) -> str:
        a_row = f"a_base += int64({self.index_type}(row * {self.stride('a_m')}))"
        own = self.width if self.b_contiguous == "n" else COLUMNS
        prologue = f"""
            blocks_n = int32((n + {self.block_columns - 1}) // {self.block_columns})
            block = int32(cuda.blockIdx.x)
            rest = int32(block // m)
            row = int32(block - rest * m)
            batch = int32(rest // blocks_n)
            start = int32((rest - batch * blocks_n) * {self.block_columns} + int32(cuda.threadIdx.x) * {own})
            if start >= n:
                return
            """
        lines = self._along_n() if self.b_contiguous == "n" else self._along_k()
        setup = conversion_setup(*self.elements)
        return joined([setup, prologue, batch_offsets("ab", "base", self.batch_rank), a_row, "\n".join(lines)])

    def _load_a(self, k: str) -> str:
        place = f"a_base + int64({self.index_type}({k} * {self.stride('a_k')}))"
        return self.elements[0].load("a", place, "row", k)

    def _finished(self, column: str, total: str) -> list[str]:
        epilogue = self.epilogue
        lines = [f"column_0 = int32({column})", f"total_0 = {total}"]
        return [*lines, *epilogue.elements("_0"), *epilogue.stores("_0")]

    def _along_n(self) -> list[str]:
        width, kind, storage = self.width, self.element.accumulator, self.elements[1].storage
        short = suffix(kind)
        return [
            f"column0 = int32(min(start, int32(n - {width})))",
            f"buffer = array_pointer(cuda.local.array({width}, {kind}))",
            f"weight = array_pointer(cuda.local.array(1, {kind}))",
            f"sums = strips_{short}(1, {width})",
            "at = b_base + int64(column0)",
            "for k in range(k_end):",
            f"    weight[0] = {self._load_a('int32(k)')}",
            f"    multiply_add_strip_{storage}(sums, weight, 0, b, at, 1, {width})",
            "    at += int64(b_k)",
            f"copy_strip_{short}(buffer, sums, 0, {width})",
            *self.epilogue.rows(),
            f"for i in range(int32(start - column0), {width}):",
            *indented(self._finished("column0 + i", "buffer[int64(i)]"), 1),
        ]

    def _along_k(self) -> list[str]:
        width, kind, storage = self.width, self.element.accumulator, self.elements[1].storage
        short = suffix(kind)
        columns = range(COLUMNS)
        own = [f"min(int32(start + {r}), int32(n - 1))" for r in columns]
        lines = [
            f"buffer = array_pointer(cuda.local.array({COLUMNS * width}, {kind}))",
            f"sums = strips_{short}({COLUMNS}, {width})",
            *(f"b{r} = b_base + int64({self.index_type}({own[r]} * b_n))" for r in columns),
            f"whole = int32(k_end - k_end % {width})",
            f"for k in range(0, whole, {width}):",
            *(
                f"    multiply_add_lanes_{storage}(sums, {r}, a, a_base + int64(k), b, b{r} + int64(k), {width})"
                for r in columns
            ),
            f"store_strips_{short}(buffer, 0, sums, {COLUMNS}, {width})",
        ]
        half = width // 2
        while half:
            lines.append(f"for i in range({half}):")
            lines += [f"    buffer[i + {r * width}] += buffer[i + {r * width + half}]" for r in columns]
            half //= 2
        lines += ["for k in range(whole, k_end):", f"    x = {self._load_a('int32(k)')}"]
        for r in columns:
            weight = self.elements[1].load("b", f"b{r} + int64(k)", own[r], "int32(k)")
            lines.append(f"    buffer[{r * width}] += x * {weight}")
        lines += [*self.epilogue.rows(), f"for r in range(min(int32({COLUMNS}), int32(n - start))):"]
        return [*lines, indent("\n".join(self._finished("start + r", f"buffer[int64(r * {width})]")), 1)]
