"""Matrix products: a block-tiled kernel, and one for few rows, whose blocks read each element of b once.

Both compute a[batch] @ b[batch], give each sum to an epilogue, and take the same parameters (`contract`). The
epilogue's coordinates are ``batch``, ``row`` and ``column``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...model.ir import DType
from ..codegen.epilogue import Epilogue
from ..codegen.simt_fragments import (
    Element,
    Operand,
    Tile,
    batch_offsets,
    declare,
    fill_matrix,
    indent,
    indented,
    joined,
    log2,
    pipeline,
    store_tile,
)
from ..codegen.source import register_type, text_property
from ..contraction.prologue import conversion_setup, type_names

# One width, so that the number of rows alone decides which of them does the least work.
TALL = Tile(128, 64, gap=4)
SQUARE = Tile(64, 64, gap=4)
FLAT = Tile(32, 64, thread_m=4, gap=4)
LONG = Tile(32, 64, thread_m=4, gap=2)
"""For elements of 8 bytes: larger tiles have too many registers and too much shared memory for a GPU."""


@dataclass(frozen=True)
class Product:
    """What the kernels have in common.

    ``a_contiguous`` ("m", "k" or "") and ``b_contiguous`` ("n", "k" or "") name the dimension along which neighbours in
    memory lie. Batches have ``batch_rank`` dimensions, over which operands are broadcast with strides of 0.
    ``index`` is the type of offsets within one matrix.
    """

    elements: tuple[Element, Element]
    epilogue: Epilogue
    a_contiguous: str = "k"
    b_contiguous: str = "n"
    batch_rank: int = 1
    index: DType = DType.INT32

    @property
    def strides(self) -> tuple[str, ...]:
        """Names of the strides that are parameters, out of a_m, a_k, b_k, b_n."""
        known = (f"a_{self.a_contiguous}", f"b_{self.b_contiguous}")
        return tuple(name for name in ("a_m", "a_k", "b_k", "b_n") if name not in known)

    @property
    def element(self) -> Element:
        """Says the type of sums."""
        return self.elements[0]

    @property
    def types(self) -> str:
        """Ends the kernel's name."""
        return type_names(*self.elements)

    @property
    def index_type(self) -> str:
        return register_type(self.index)

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor should hold at once; 0 for any number."""
        return 0

    @property
    def shared_bytes(self) -> int:
        """That launches ask for."""
        return 0

    @property
    def name(self) -> str:
        raise NotImplementedError

    @text_property
    def body(self) -> str:
        raise NotImplementedError

    def stride(self, name: str) -> str:
        return name if name in self.strides else "1"

    def finish(self) -> list[str]:
        """What a thread does with ``total`` of the element (``row``, ``column0 + thread``)."""
        epilogue, accumulator = self.epilogue, self.element.accumulator
        # Numba adds integers of 32 bits as those of 64.
        total = f"{accumulator}(total)" if "int" in accumulator else "total"
        lines = ["column_0 = int32(column0 + thread)", f"total_0 = {total}"]
        return [*epilogue.rows(), *lines, *epilogue.elements("_0"), *epilogue.stores("_0")]


@dataclass(frozen=True)
class TiledProduct(Product):
    """One block of ``tile.threads`` per tile of out; the grid is (ceil(m/tile.m) * ceil(n/tile.n) * batches, 1, 1)."""

    tile: Tile = SQUARE

    @property
    def name(self) -> str:
        return f"matmul_{self.tile.name}_{self.types}"

    @text_property
    def body(self) -> str:
        tile, element = self.tile, self.element
        a = Operand("a", "a", "row0", "m", "k_end", self.stride("a_m"), self.stride("a_k"), self.a_contiguous != "m")
        b = Operand("b", "b", "column0", "n", "k_end", self.stride("b_n"), self.stride("b_k"), self.b_contiguous == "k")
        fill = [
            fill_matrix(x, extent, tile, each, self.index_type)
            for x, extent, each in zip((a, b), (tile.m, tile.n), self.elements, strict=True)
        ]
        prologue = f"""
            tiles_n = int32((n + {tile.n - 1}) >> {log2(tile.n)})
            tiles_m = int32((m + {tile.m - 1}) >> {log2(tile.m)})
            block = int32(cuda.blockIdx.x)
            rest = int32(block // tiles_n)
            column0 = int32((block - rest * tiles_n) * {tile.n})
            batch = int32(rest // tiles_m)
            row0 = int32((rest - batch * tiles_m) * {tile.m})
            steps = int32((k_end + {tile.k - 1}) >> {log2(tile.k)})
        """
        body = [
            conversion_setup(*self.elements),
            prologue,
            batch_offsets("ab", "base", self.batch_rank),
            declare(tile, element.accumulator),
            pipeline(tile, element.accumulator, "\n".join(fill)),
            store_tile(tile, "m", "n", element, self.epilogue),
        ]
        return joined(body)


@dataclass(frozen=True)
class RowProduct(Product):
    """One block per row of out and ``block_columns`` columns; the grid is (m * ceil(n/block_columns) * batches, 1, 1).

    Blocks of the same columns are neighbours, so that all rows but the first find the elements of b in a cache.
    Where b is contiguous along k, a thread multiplies chunks of 8 neighbours for 4 columns; where it is contiguous
    along n, a thread owns 8 neighbouring columns and every sixteenth k. Partial sums meet in shared memory.
    ``b_contiguous`` must not be "".
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

    @text_property
    def body(self) -> str:
        if self.b_contiguous not in ("k", "n"):
            raise ValueError("a row product needs a contiguous dimension of b")
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
        dot = self._along_k() if self.b_contiguous == "k" else self._along_n()
        setup = conversion_setup(*self.elements)
        return joined([setup, prologue, batch_offsets("ab", "base", self.batch_rank), a_row, dot])

    def _load_a(self, k: str) -> str:
        place = f"a_base + int64({self.index_type}(({k}) * {self.stride('a_k')}))"
        return self.elements[0].load("a", place, "row", k)

    def _load_b(self, place: str, column: str, k: str) -> str:
        return self.elements[1].load("b", place, column, k)

    def _multiply_add(self, x: str, y: str, total: str) -> str:
        return f"fma_f32({x}, {y}, {total})" if self.element.accumulator == "float32" else f"{total} + {x} * {y}"

    def _along_k(self) -> str:
        accumulator = self.element.accumulator
        columns, chunk = range(4), range(8)
        own = [f"min(int32(column0 + {r}), int32(n - 1))" for r in columns]
        row = [f"int64({self.index_type}({column} * b_n))" for column in own]
        lines = [f"partial = array_pointer(cuda.shared.array({4 * self.threads}, {accumulator}, 16))"]
        lines += [f"b{r} = b_base + {row[r]}" for r in columns]  # columns beyond n repeat the last one
        lines += [f"c{r}_{i} = {accumulator}(0)" for r in columns for i in chunk]
        lines += [f"for k in range(int32(thread * 8), k_end, {self.threads * 8}):", "    if k + 7 < k_end:"]
        lines += [f"        a{i} = {self._load_a(f'k + {i}')}" for i in chunk]
        for r in columns:
            before, weights = self.elements[1].neighbours("b", f"b{r} + k", own[r], "k", len(chunk), f"b{r}_near")
            lines += indented(before, 2)
            for i in chunk:
                lines.append(f"        c{r}_{i} = {self._multiply_add(f'a{i}', weights[i], f'c{r}_{i}')}")
        lines += ["    else:", "        for last in range(k, k_end):", f"            x = {self._load_a('last')}"]
        for r in columns:
            weight = self._load_b(f"b{r} + last", own[r], "last")
            lines.append(f"            c{r}_0 = {self._multiply_add('x', weight, f'c{r}_0')}")
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
        return "\n".join([*lines, indent(finish, 0), *indented(self.finish(), 1)])

    def _along_n(self) -> str:
        accumulator = self.element.accumulator
        chunk = range(8)
        lines = [
            f"partial = array_pointer(cuda.shared.array({16 * 64}, {accumulator}, 16))",
            "slice = int32(thread >> 3)",
            "column = int32(column0 + (thread & 7) * 8)",
            *[f"c{i} = {accumulator}(0)" for i in chunk],
            "for k in range(slice, k_end, 16):",
            f"    x = {self._load_a('k')}",
            f"    at = b_base + int64({self.index_type}(k * b_k)) + int64(column)",
            "    if column + 7 < n:",
        ]
        for i in chunk:
            weight = self._load_b(f"at + {i}", f"column + {i}", "k")
            lines.append(f"        c{i} = {self._multiply_add('x', weight, f'c{i}')}")
        lines.append("    else:")
        for i in chunk:
            weight = self._load_b(f"at + {i}", f"column + {i}", "k")
            lines.append(f"        if column + {i} < n:")
            lines.append(f"            c{i} = {self._multiply_add('x', weight, f'c{i}')}")
        lines += ["place = int64(int32(slice * 64 + (thread & 7) * 8))"]
        lines += [f"partial[place + {i}] = c{i}" for i in chunk]
        finish = f"""
            cuda.syncthreads()
            if thread < 64 and column0 + thread < n:
                total = {accumulator}(0)
                for i in range(16):
                    total += partial[thread + i * 64]
            """
        return "\n".join([*lines, indent(finish, 0), *indented(self.finish(), 1)])
