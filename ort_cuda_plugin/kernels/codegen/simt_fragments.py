"""SIMT GEMM fragments (no tensor cores): tiles in shared memory, accumulators in registers.

A block of ``threads`` threads computes an ``m`` x ``n`` tile of the result, ``k`` elements of the reduction dimension
at a time (a k step). The operands' tiles are k-major in shared memory, double-buffered: a block fills one stage while
it multiplies the other, so that a k step needs one barrier. The code is unrolled with constant indices: accumulators
become registers on a GPU, and LLVM vectorizes rows of accumulators on the emulated device.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...program.steps.schedule import Tile as Tile
from .epilogue import Epilogue
from .fragment import Fragment

CHUNK = 4
"""Adjacent elements that a thread stores with one access."""
ROWS = 4
"""Maximum rows per thread that `store_rows` processes at a time."""
VECTORS = 8
"""Maximum vectors per thread that `store_rows` processes at a time."""
WARP = 32
THREADS = 128
"""Threads per block of kernels in which each thread computes one element."""


@dataclass(frozen=True)
class Element:
    """Source of the load of an operand's element; also the accumulators' type and the conversion before a store.

    This class loads plain elements of type ``storage``. `ConvertedElement` applies a prologue to each element, and
    `BlockElement` unpacks block-quantized codes.
    """

    storage: str

    @property
    def memory(self) -> str:
        """Type of the operand in memory."""
        return self.storage

    @property
    def accumulator(self) -> str:
        """Numba type of the accumulators: float32 for 16-bit and 32-bit floats, else that of the elements."""
        return {"f64": "float64", "i32": "int32", "i64": "int64", "u32": "uint32", "u64": "uint64"}.get(
            self.storage, "float32"
        )

    def load(self, pointer: str, index: str, outer: str = "", inner: str = "") -> str:
        """Return an expression of the accumulator's type for the element at ``index``.

        ``outer`` is its coordinate along m or n, ``inner`` its coordinate along k; "" if unknown.
        """
        value = f"{pointer}[{index}]"
        return f"{self.storage}_to_f32({value})" if self.storage in ("f16", "bf16") else value

    def neighbors(
        self, pointer: str, index: str, outer: str, inner: str, count: int, name: str
    ) -> tuple[list[str], list[str]]:
        """Return lines to emit first, and the expressions of ``count`` adjacent elements along k (as `load` does).

        The first element is at ``index`` and ``inner``, multiples of ``count``. ``name`` is the prefix of the variables
        that the lines assign.
        """
        return [], [self.load(pointer, f"{index} + {i}", outer, f"{inner} + {i}") for i in range(count)]

    def cast(self, value: str) -> str:
        """Return an expression of the storage type for a value of the accumulator's type."""
        return f"f32_to_{self.storage}({value})" if self.storage in ("f16", "bf16") else value


def indent(text: str, levels: int) -> str:
    """Dedent ``text`` and indent it by ``levels`` levels of four spaces; drop newlines at both ends."""
    return textwrap.indent(textwrap.dedent(text).strip("\n"), "    " * levels)


def log2(value: int) -> int:
    """Return the exponent of a power of two. Raises ValueError for other numbers."""
    if value <= 0 or value & (value - 1):
        raise ValueError(f"log2: expected a power of two, got {value}")
    return value.bit_length() - 1


def suffix(accumulator: str) -> str:
    """Return the suffix of the intrinsics for a Numba type, such as "f32" for "float32"."""
    return accumulator.replace("float", "f").replace("uint", "u").replace("int", "i")


def declare(tile: Tile, accumulator: str) -> Fragment:
    """Declare shared memory and the thread's accumulators, set to 0.

    ``tile_c`` holds the operands' tiles, a as [2][k][m] and then b as [2][k][n]; the epilogue reuses it as [m][n].
    """
    lines = [
        f"tile_c = array_pointer(cuda.shared.array({max(tile.operands, tile.m * tile.n)}, {accumulator}, 16))",
        "thread = int32(cuda.threadIdx.x)",
        *thread_tile(tile),
        f"sums = registers_{suffix(accumulator)}({tile.thread_m * tile.thread_n})",
    ]
    return Fragment("declare", "\n".join(lines), "tile_c thread thread_row thread_column sums")


def thread_tile(tile: Tile) -> list[str]:
    """Compute the position of the thread's accumulators in the block's tile."""
    return [
        f"thread_row = int32((thread >> {log2(tile.columns)}) * {tile.thread_m})",
        f"thread_column = int32((thread & {tile.columns - 1}) * {tile.thread_n})",
    ]


def multiply(tile: Tile, accumulator: str) -> str:
    """Add the product of the operands' tiles in stage ``current`` (0 or 1) to the accumulators."""
    lines = [
        f"at_a = int64(int32(current * {tile.k * tile.a_pitch} + thread_row))",
        f"at_b = int64(int32(current * {tile.k * tile.b_pitch} + {tile.b_first} + thread_column))",
        f"for _ in range({tile.k}):",
    ]
    sizes = f"{tile.thread_m}, {tile.thread_n}"
    lines.append(f"    multiply_add_tile_{suffix(accumulator)}(sums, tile_c, at_a, tile_c, at_b, {sizes})")
    lines += [f"    at_a += {tile.a_pitch}", f"    at_b += {tile.b_pitch}"]
    return "\n".join(lines)


def pipeline(tile: Tile, accumulator: str, fill: str, multiplies: str = "") -> Fragment:
    """Loop over the ``steps`` k steps, double-buffered: each iteration fills one stage and multiplies the other.

    ``fill`` is the source that fills stage ``filling`` of both operands' tiles for k step ``step``. ``multiplies`` is
    the condition under which a thread multiplies, "" if all threads do.
    """
    lines = [
        *([f"idle = choose({multiplies}, int32(0), int32(steps + 1))"] if multiplies else []),
        "for step in range(int32(steps + 1)):",
        "    filling = int32(step & 1)",
        "    if step < steps:",
        indent(fill, 2),
        f"    if step > {'idle' if multiplies else '0'}:",
        "        current = int32(1 - filling)",
        indent(multiply(tile, accumulator), 2),
        "    cuda.syncthreads()",
    ]
    return Fragment("pipeline", "\n".join(lines))


@dataclass(frozen=True)
class Operand:
    """A strided matrix from which a block fills a tile in shared memory. Members are expressions of the kernel.

    ``name`` is "a" or "b". Element (x, k) is at ``pointer[<name>_base + x*stride + k*inner_stride]``, where x is the
    coordinate along m for a, along n for b. The tile begins at x = ``origin``; the matrix ends at x = ``bound`` and k =
    ``inner_bound``. With ``inner_major`` a thread copies elements that are adjacent along k, else along x. For
    tensor-core tiles, ``row`` is the format string of the matrix's row in memory for coordinate x, by default x itself.
    """

    name: str
    pointer: str
    origin: str
    bound: str
    inner_bound: str
    stride: str
    inner_stride: str
    inner_major: bool
    row: str = "{}"


def fill_matrix(operand: Operand, extent: int, tile: Tile, element: Element, index: str, of_thread: int = 0) -> str:
    """Fill stage ``filling`` of the operand's tile for k step ``step``, with zeros outside the matrix.

    ``extent`` is the tile's size along x (`Operand`), ``index`` the type of index arithmetic within the matrix. If
    ``of_thread`` is not 0, each thread multiplies a group of this size along x, and groups that are entirely outside
    the matrix are not filled, since their threads do not multiply. Raises ValueError if the threads cannot have equally
    many chunks.
    """
    total, chunk = tile.k * extent, tile.chunk
    start, pitch = (tile.b_first, tile.b_pitch) if operand.name == "b" else (0, tile.a_pitch)
    chunks, rest = divmod(total // chunk, tile.threads)
    if rest:
        raise ValueError(
            f"tile {tile.name}: {total} elements of an operand do not divide into chunks of {chunk} for {tile.threads} "
            "threads. Change the tile's size along k or its number of threads"
        )
    per_line = (tile.k if operand.inner_major else extent) // chunk
    row, offset = f"int32(chunk >> {log2(per_line)})", f"int32((chunk & {per_line - 1}) * {chunk})"
    x, k = (row, offset) if operand.inner_major else (offset, row)
    stride, shared_stride = (operand.inner_stride, pitch) if operand.inner_major else (operand.stride, 1)
    last_x, last_k = (0, chunk - 1) if operand.inner_major else (chunk - 1, 0)
    edge_x, edge_k = ("0", "i") if operand.inner_major else ("i", "0")
    name = operand.name
    otherwise = "else:"
    if of_thread:
        otherwise = f"elif {operand.origin} + int32({name}_tile_x & -{of_thread}) < {operand.bound}:"

    def read(i: str) -> str:
        # A 64-bit addition cannot wrap: so LLVM can prove that the elements are adjacent, and merges their loads.
        outer, inner = f"{name}_x_at", f"{name}_k_at"
        if operand.inner_major:
            inner += f" + {i}"
        else:
            outer += f" + {i}"
        return element.load(operand.pointer, f"{name}_from + int64({i} * {stride})", outer, inner)

    moved = copied_chunk(tile, element, operand.pointer, f"{name}_from", shared_stride) if stride == "1" else []
    before, values = moved, list[str]()
    if not moved and operand.inner_major and stride == "1":
        before, values = element.neighbors(
            operand.pointer, f"{name}_from", f"{name}_x_at", f"{name}_k_at", chunk, f"{name}_near"
        )
    elif not moved:
        values = [read(str(i)) for i in range(chunk)]
    return "\n".join(
        [
            f"for piece in range({chunks}):",
            f"    chunk = int32(thread + piece * {tile.threads})",
            f"    {name}_tile_x = {x}",
            f"    {name}_tile_k = {k}",
            f"    to = int64(int32(filling * {tile.k * pitch} + {start} + {name}_tile_k * {pitch} + {name}_tile_x))",
            f"    {name}_x_at = int32({operand.origin} + {name}_tile_x)",
            f"    {name}_k_at = int32(step * {tile.k} + {name}_tile_k)",
            f"    {name}_at = {index}({index}({name}_x_at * {operand.stride}))",
            f"    {name}_at = {index}({name}_at + {index}({name}_k_at * {operand.inner_stride}))",
            f"    {name}_from = {name}_base + int64({name}_at)",
            f"    if {name}_x_at + {last_x} < {operand.bound} and {name}_k_at + {last_k} < {operand.inner_bound}:",
            *indented(before, 2),
            *[f"        {name}_value{i} = {value}" for i, value in enumerate(values)],
            *indented(_store_chunk(tile, [f"{name}_value{i}" for i in range(len(values))], element, shared_stride), 2),
            f"    {otherwise}",
            f"        for i in range({chunk}):",
            f"            {name}_edge = {element.accumulator}(0)",
            f"            inside = {name}_x_at + {edge_x} < {operand.bound}",
            f"            if inside and {name}_k_at + {edge_k} < {operand.inner_bound}:",
            f"                {name}_edge = {read('int32(i)')}",
            f"            tile_c[to + i * {shared_stride}] = {name}_edge",
        ]
    )


def pipeline_of(
    tile: Tile, accumulator: str, operands: tuple[Operand, Operand], elements: tuple[Element, Element], index: str
) -> Fragment:
    """Return the `pipeline` that multiplies the matrices a and b; ``index`` is the type of offsets in them.

    On the emulated device a thread has 16 x 16 accumulators, and the threads of a block run one after the other. So a
    thread whose accumulators are outside the result does not multiply: a Run with 16 rows is faster than one with 32.
    """
    a, b = operands
    skips = tile.chunk > CHUNK
    overlap = f"{a.origin} + thread_row < {a.bound} and {b.origin} + thread_column < {b.bound}" if skips else ""
    of_thread = (tile.thread_m, tile.thread_n) if skips else (0, 0)
    fill = [
        fill_matrix(x, extent, tile, element, index, own)
        for x, extent, element, own in zip(operands, (tile.m, tile.n), elements, of_thread, strict=True)
    ]
    return pipeline(tile, accumulator, "\n".join(fill), overlap)


def _store_chunk(tile: Tile, values: list[str], element: Element, stride: int) -> list[str]:
    """Store ``values`` to the tile at ``to``, ``to + stride``, ...; by one vectorized store to a GPU's padded tiles."""
    if tile.gap and stride == 1 and len(values) == 4 and element.accumulator == "float32":
        return [f"store_f32x4(tile_c, to, {', '.join(values)})"]
    return [f"tile_c[to + {i * stride}] = {value}" for i, value in enumerate(values)]


def copied_chunk(tile: Tile, element: Element, pointer: str, first: str, stride: int) -> list[str]:
    """Return the call of an intrinsic that copies ``tile.chunk`` elements from ``pointer[first]`` to the tile.

    In the tile they are ``stride`` apart, from ``to`` on. Returns [] for a GPU's tiles, whose chunks are short, and for
    elements that need a conversion.
    """
    kind = suffix(element.accumulator)
    if tile.chunk <= CHUNK or type(element) is not Element or element.storage != kind:
        return []
    return [f"copy_chunk_{kind}(tile_c, to, {stride}, {pointer}, {first}, {tile.chunk})"]


def fill_packed(pointer: str, base: str, tile: Tile, element: Element) -> str:
    """Fill stage ``filling`` of a's tile for k step ``step`` from a matrix [k][rows] that is padded to whole tiles.

    ``base`` is the index (int64, a multiple of ``tile.chunk``) of the tile's first element at k = 0. ``packed_rows`` is
    the row pitch of the packed matrix.
    """
    total, chunk = tile.k * tile.m, tile.chunk
    chunks = total // chunk // tile.threads
    per_line = tile.m // chunk
    names = ", ".join(f"a_value{i}" for i in range(chunk))
    at = f"{base} + int64(step * {tile.k} + a_tile_k) * packed_rows + int64(a_tile_x)"
    vector = {"f32": "load_f32x4", "f16": "load_u16x4", "bf16": "load_u16x4"}.get(element.storage)
    if vector and chunk == 4:
        read = [f"    {names} = {vector}({pointer}, {at})"]
    else:
        read = [f"    a_value{i} = {pointer}[{at} + {i}]" for i in range(chunk)]
    convert = "{}" if element.storage not in ("f16", "bf16") else f"{element.storage}_to_f32({{}})"
    stores = _store_chunk(tile, [convert.format(f"a_value{i}") for i in range(chunk)], element, 1)
    return "\n".join(
        [
            f"for piece in range({chunks}):",
            f"    chunk = int32(thread + piece * {tile.threads})",
            f"    a_tile_k = int32(chunk >> {log2(per_line)})",
            f"    a_tile_x = int32((chunk & {per_line - 1}) * {chunk})",
            f"    to = int64(int32(filling * {tile.k * tile.a_pitch} + a_tile_k * {tile.a_pitch} + a_tile_x))",
            *(indented(copied_chunk(tile, element, pointer, at, 1), 1) or [*read, *indented(stores, 1)]),
        ]
    )


def store_tile(
    tile: Tile,
    rows: str,
    columns: str,
    element: Element,
    epilogue: Epilogue,
    setup: Iterable[str] = (),
) -> Fragment:
    """Apply ``epilogue`` to the block's accumulators. ``setup`` computes the epilogue's outer coordinates from ``row``.

    The tile begins at (``row0``, ``column0``) of a ``rows`` x ``columns`` result. Accumulators go through shared
    memory, so that adjacent threads store adjacent elements.
    """
    per_line = tile.n // CHUNK
    vector = element.accumulator == "float32"
    sizes = f"{tile.thread_m}, {tile.thread_n}"
    lines = [
        f"to = int64(int32(thread_row * {tile.n} + thread_column))",
        f"store_tile_{suffix(element.accumulator)}(tile_c, to, {tile.n}, sums, {sizes})",
        "cuda.syncthreads()",
        f"for piece in range({tile.m * tile.n // CHUNK // tile.threads}):",
        f"    chunk = int32(thread + piece * {tile.threads})",
        f"    row = int32(row0 + (chunk >> {log2(per_line)}))",
        f"    column0_of_chunk = int32(column0 + (chunk & {per_line - 1}) * {CHUNK})",
        "    at = int64(chunk) * 4",
        f"    if row < {rows}:",
        *indented([*setup, *epilogue.rows()], 2),
        f"        if column0_of_chunk + {CHUNK - 1} < {columns}:",
    ]
    if vector:
        lines.append(f"            {', '.join(f'total_{i}' for i in range(CHUNK))} = load_f32x4(tile_c, at)")
    for i in range(CHUNK):
        lines += [
            f"            column_{i} = int32(column0_of_chunk + {i})",
            *([] if vector else [f"            total_{i} = tile_c[at + {i}]"]),
            *indented(epilogue.elements(f"_{i}"), 3),
        ]
    for i in range(CHUNK):
        lines += indented(epilogue.stores(f"_{i}"), 3)
    lines += [
        "        else:",
        f"            for i in range(int32({columns} - column0_of_chunk)):",
        "                column_e = int32(column0_of_chunk + i)",
        "                total_e = tile_c[at + i]",
        *indented([*epilogue.elements("_e"), *epilogue.stores("_e")], 4),
    ]
    return Fragment("store_tile", "\n".join(lines))


def store_rows(
    tile: Tile,
    rows: str,
    columns: str,
    total: str,
    epilogue: Epilogue,
    placed: Iterable[str],
    pitch: int,
    warp_groups: int = 1,
) -> list[str]:
    """Apply ``epilogue`` to accumulators that the ``placed`` lines write to ``tile_c``, with a row pitch of ``pitch``.

    A thread has the same columns in all its rows: stores coalesce, and the epilogue loads a column's values once. The
    thread processes several rows at a time, so that their loads overlap. With a vectorized epilogue its columns are
    vectors. ``total`` is the format string that converts a word of ``tile_c`` to an accumulator. With sliced-K,
    ``tile_c`` has one tile for each of the ``warp_groups``, and the epilogue gets the sum of these tiles.
    """
    threads, width = tile.threads * warp_groups, epilogue.width
    vectors = tile.n // width
    per_line = vectors & -vectors  # threads along a row: the largest power of two that divides the vectors
    if width == 1 and per_line == vectors:
        per_line //= math.gcd(CHUNK, tile.m * tile.n // threads)
    groups = vectors // per_line
    steps, rest = divmod(tile.m * vectors, groups * threads)
    steps += rest > 0
    most = ROWS if width == 1 else max(1, VECTORS // groups)
    marks = [f"_r{number}" for number in range(max(n for n in range(1, most + 1) if steps % n == 0))]
    line = f"(thread >> {log2(per_line)})"
    if per_line == (WARP // 2 if width == 1 else WARP // 8) and threads >= 2 * WARP and pitch % WARP in (8, 24):
        # Two adjacent rows would conflict in shared-memory banks, within a warp or within a quarter warp of vector
        # loads: permute the rows, so that these threads read rows that are two apart.
        line = f"(({line} & -4) | (({line} & 1) << 1) | (({line} >> 1) & 1))"
    offset = f"(thread & {per_line - 1})" + (f" * {width}" if width > 1 else "")
    lines = [
        *placed,
        "cuda.syncthreads()",
        f"first_line = int32({line})",
        f"first_column = int32(column0 + {offset})",
    ]
    for i in range(groups):
        at = i * per_line * width
        lines += [
            f"column_{i} = int32(min(int32(first_column + {at}), int32({columns} - {width})))",
            *epilogue.columns(f"_{i}"),
        ]
    lines.append(f"for piece in range(0, {steps}, {len(marks)}):")
    for number, mark in enumerate(marks):
        lines += [
            f"    line = int32(first_line + (piece + {number}) * {threads // per_line})",
            f"    own{mark} = int32(row0 + line)",
        ]
        if rest:  # in the last iteration, only some threads have a row
            lines += [
                f"    own{mark} = choose(line < {tile.m}, own{mark}, int32({rows}))",
                f"    line = int32(min(line, int32({tile.m - 1})))",
            ]
        lines += [
            f"    row{mark} = int32(min(own{mark}, int32({rows} - 1)))",
            *indented(epilogue.rows(mark), 1),
            f"    at{mark} = int64(int32(line * {pitch} + {offset}))",
        ]
    for mark in marks:
        for i in range(groups):
            offsets = [f"at{mark} + {i * per_line * width + group * tile.m * pitch}" for group in range(warp_groups)]
            lines += indented(_totals(f"_{i}{mark}", offsets, total, width), 1)
            lines += indented(epilogue.inner(f"_{i}", mark), 1)
    for mark in marks:
        lines.append(f"    if own{mark} < {rows}:")
        for i in range(groups):
            lines += [
                f"        if first_column + {i * per_line * width} < {columns}:",
                *indented(epilogue.stores(f"_{i}", mark), 3),
            ]
    return lines


def _totals(mark: str, offsets: Sequence[str], total: str, width: int) -> list[str]:
    """Assign ``total<mark>`` the sum of the words of ``tile_c`` at ``offsets``; for a vector, a sum per lane."""
    lines = []
    if width == 1:
        parts = [[f"tile_c[{offset}]" for offset in offsets]]
    else:
        for number, offset in enumerate(offsets):
            names = ", ".join(f"part{mark}_{number}_{lane}" for lane in range(width))
            lines.append(f"{names} = load_f32x{width}(tile_c, {offset})")
            parts = [[f"part{mark}_{number}_{lane}" for number in range(len(offsets))] for lane in range(width)]
    for lane, of_lane in enumerate(parts):
        value = " + ".join(total.format(part) for part in of_lane)
        value = f"int32({value})" if total != "{}" else value
        lines.append(f"total{mark}{f'_{lane}' if width > 1 else ''} = {value}")
    return lines


def indented(lines: Iterable[str], levels: int) -> list[str]:
    return ["    " * levels + line for line in lines]
