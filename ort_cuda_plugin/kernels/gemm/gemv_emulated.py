"""GEMV kernel for the emulated device: a thread computes several columns of one row with CPU vectors, no barriers."""

from __future__ import annotations

from dataclasses import dataclass

from ...program.steps.steps import CODES_PER_WORD as WORD
from ..codegen.fragment import Fragment
from ..codegen.simt_fragments import Element, indent, indented, suffix
from ..contraction.block_quantized import BlockElement
from .gemv import GemvKernel

ACCUMULATORS = 128
"""Accumulators of 4 bytes per thread: eight 512-bit CPU vectors."""
COLUMNS = 4
"""Columns per thread if b is contiguous along k."""
_STORAGES = frozenset({"f32", "f64", "f16", "bf16", "i32"})
"""Types of operands for which intrinsics load CPU vectors."""
_ACCUMULATORS = frozenset({"float32", "float64", "int32"})
"""Types of accumulators for which intrinsics compute with CPU vectors."""


@dataclass(frozen=True)
class EmulatedGemv(GemvKernel):
    """GEMV kernel of the emulated device.

    If b is contiguous along n, it must have exactly ``columns`` columns, and a thread owns a strip of these. The last
    strip is shifted back to end at the last column: it computes some columns again and does not store them. If b is
    contiguous along k, the kernel serves any number of columns (``columns`` is 0), and a thread owns 4 columns, with a
    vector of partial dot products for each. Operands without vectorized loads are converted a strip at a time into a
    local array; a strip of a is converted once for all columns of the thread.
    """

    columns: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether the kernel supports the accumulators' type and the strides of b."""
        if self.element.accumulator not in _ACCUMULATORS:
            return False
        return self.b_contiguous == "k" or (self.b_contiguous == "n" and bool(self.columns))

    @property
    def threads(self) -> int:
        return 2 if self.b_contiguous == "n" else 8

    @property
    def width(self) -> int:
        """Elements per strip, along n or along k."""
        most = ACCUMULATORS * 4 // (8 if self.element.accumulator == "float64" else 4)
        return min(most, 1 << (self.columns.bit_length() - 1)) if self.b_contiguous == "n" else most // COLUMNS

    @property
    def block_columns(self) -> int:
        return self.threads * (self.width if self.b_contiguous == "n" else COLUMNS)

    @property
    def name(self) -> str:
        return f"matmul_lanes_{self.b_contiguous}{self.width}_{self.types}"

    def first_column(self) -> Fragment:
        columns = self.width if self.b_contiguous == "n" else COLUMNS
        text = f"""
            start = int32((rest - batch * blocks_n) * {self.block_columns} + int32(cuda.threadIdx.x) * {columns})
            if start >= n:
                return
            """
        return Fragment("first_column", text, "start")

    def _is_loaded(self, number: int) -> bool:
        """Tell whether operand ``number`` (0: a, 1: b) has vectorized loads and needs no prologue."""
        element = self.elements[number]
        return type(element) is Element and element.storage in _STORAGES

    def _converted(self, number: int, strip: str, start: str, outer: str, inner: str) -> list[str]:
        """Fill array ``strip`` with converted elements of operand ``number``, from offset ``start`` on.

        The elements are adjacent along n or k. Their coordinates begin at ``outer`` (along n) and ``inner`` (along k).
        """
        element, pointer = self.elements[number], "ab"[number]
        along = f"({self.stride('a_k')})" if number == 0 else "1"
        if isinstance(element, BlockElement) and number == 1 and self.b_contiguous == "k":
            lines, values = element.neighbors(pointer, f"{start} + i", outer, f"{inner} + i", WORD, f"{strip}_near")
            stores = [f"{strip}[i + {i}] = {value}" for i, value in enumerate(values)]
            return [f"for i in range(0, {self.width}, {WORD}):", *indented([*lines, *stores], 1)]
        at = f"{start} + i" if along == "1" else f"{start} + int64({self.index_type}(i * {along}))"
        coordinates = (f"{outer} + i", inner) if self.b_contiguous == "n" else (outer, f"{inner} + i")
        value = element.load(pointer, at, *coordinates)
        return [f"for i in range({self.width}):", f"    {strip}[i] = {value}"]

    def along_n(self) -> list[str]:
        width, kind = self.width, self.element.accumulator
        short = suffix(kind)
        lines = [
            f"column0 = int32(min(start, int32(n - {width})))",
            f"buffer = array_pointer(cuda.local.array({width}, {kind}))",
            f"weight = array_pointer(cuda.local.array(1, {kind}))",
            f"sums = strips_{short}(1, {width})",
            "at = b_base + int64(column0)",
        ]
        strip, convert = "b, at", list[str]()
        storage = self.elements[1].storage
        if not self._is_loaded(1):
            lines.append(f"strip = array_pointer(cuda.local.array({width}, {kind}))")
            strip, storage = "strip, 0", short
            convert = self._converted(1, "strip", "at", "column0", "int32(k)")
        return [
            *lines,
            "for k in range(k_end):",
            f"    weight[0] = {self.load_a('int32(k)')}",
            *indented(convert, 1),
            f"    multiply_add_strip_{storage}(sums, weight, 0, {strip}, 1, {width})",
            "    at += int64(b_k)",
            f"copy_strip_{short}(buffer, sums, 0, {width})",
            *self.epilogue.rows(),
            f"for i in range(int32(start - column0), {width}):",
            *indented(self.element_lines("column0 + i", "buffer[int64(i)]"), 1),
        ]

    def along_k(self) -> list[str]:
        width, kind = self.width, self.element.accumulator
        short = suffix(kind)
        columns = range(COLUMNS)
        own = [self.column("start", r) for r in columns]
        a, b = self.elements
        is_loaded = self.a_contiguous == "k" and a == b and self._is_loaded(0)
        storage = a.storage if is_loaded else short
        loaded = [is_loaded or (self._is_loaded(i) and x.storage == short) for i, x in enumerate((a, b))]
        loaded[0] &= self.a_contiguous == "k"
        strips = [f"strip{number}" for number in range(2) if not loaded[number]]
        lines = [
            f"buffer = array_pointer(cuda.local.array({COLUMNS * width}, {kind}))",
            *(f"{strip} = array_pointer(cuda.local.array({width}, {kind}))" for strip in strips),
            f"sums = strips_{short}({COLUMNS}, {width})",
            *(self.column_of_b("start", r) for r in columns),
            f"whole = int32(k_end - k_end % {width})",
            f"for k in range(0, whole, {width}):",
        ]
        row, multiply = "a, a_base + int64(k)", list[str]()
        if not loaded[0]:
            row, first = "strip0, 0", f"a_base + int64({self.index_type}(k * {self.stride('a_k')}))"
            multiply += self._converted(0, "strip0", first, "row", "int32(k)")
        for r in columns:
            line = f"b, b{r} + int64(k)"
            if not loaded[1]:
                line = "strip1, 0"
                multiply += self._converted(1, "strip1", f"b{r} + int64(k)", own[r], "int32(k)")
            multiply.append(f"multiply_add_lanes_{storage}(sums, {r}, {row}, {line}, {width})")
        lines += [*indented(multiply, 1), f"store_strips_{short}(buffer, 0, sums, {COLUMNS}, {width})"]
        half = width // 2
        while half:
            lines.append(f"for i in range({half}):")
            lines += [f"    buffer[i + {r * width}] += buffer[i + {r * width + half}]" for r in columns]
            half //= 2
        lines += ["for k in range(whole, k_end):", f"    x = {self.load_a('int32(k)')}"]
        for r in columns:
            weight = self.elements[1].load("b", f"b{r} + int64(k)", own[r], "int32(k)")
            lines.append(f"    buffer[{r * width}] += x * {weight}")
        lines += [*self.epilogue.rows(), f"for r in range(min(int32({COLUMNS}), int32(n - start))):"]
        return [*lines, indent("\n".join(self.element_lines("start + r", f"buffer[int64(r * {width})]")), 1)]
