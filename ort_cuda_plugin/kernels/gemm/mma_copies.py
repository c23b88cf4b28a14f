"""Operand tiles of tensor-core kernels in shared memory: swizzled rows, and the copies that fill a pipeline stage.

A row of a tile runs along the operand's contiguous axis and consists of 16-byte chunks. A swizzle permutes the chunks
of a row: it XORs their index with bits of the row's index, so that neither the eight rows of an ``ldmatrix`` nor
adjacent stores conflict in shared memory banks. ``cp.async`` copies aligned chunks of elements that need no conversion;
other chunks are loaded element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..codegen.simt_fragments import Element, Operand, Tile, indented, log2, suffix
from ..contraction.prologue import ConvertedElement
from .tile_shapes import SIZES, TileConfig, operand_sizes, piece_of, stages_of

MOST_SUMS = 128
"""Minimum accumulators per thread with which a kernel recomputes source addresses, because registers would spill."""


def is_compact(kind: str, elements: Sequence[Element]) -> bool:
    """Tell whether the second operand is TF32 weights stored as float16 (`tf32_weights_as_f16`)."""
    return kind == "tf32" and elements[1].storage == "f16"


@dataclass(frozen=True)
class OperandTile:
    """An operand's tile in a stage of shared memory: ``extent`` elements along x (m or n), ``depth`` along k.

    An element has ``size`` bytes; the tile begins at byte ``first`` of the stage. Its rows run along k or along x.
    """

    operand: Operand
    extent: int
    depth: int
    first: int
    size: int

    @property
    def name(self) -> str:
        return self.operand.name

    @property
    def bytes(self) -> int:
        return self.extent * self.depth * self.size

    @property
    def chunk_size(self) -> int:
        """Elements of a 16-byte chunk."""
        return 16 // self.size

    @property
    def row_chunks(self) -> int:
        """Chunks per row."""
        return (self.depth if self.operand.inner_major else self.extent) * self.size // 16

    @property
    def is_loaded_by_matrices(self) -> bool:
        return self.operand.inner_major or self.size == 2

    def swizzle(self, line: str) -> str:
        """Return the expression with which the chunk indices of tile row ``line`` are XORed."""
        if self.is_loaded_by_matrices:
            return {2: f"(({line} >> 2) & 1)", 4: f"(({line} >> 1) & 3)"}.get(self.row_chunks, f"({line} & 7)")
        # Plain loads of a warp read two adjacent chunks of each of four consecutive rows (`MatrixTile._load_words`).
        return f"({line} & 2)" if self.row_chunks == 4 else f"(({line} & 3) << 1)"

    @property
    def period(self) -> int:
        """Number of rows after which `swizzle` repeats."""
        return 4 if not self.is_loaded_by_matrices else 8

    def chunk_index(self, line: str, chunk: str) -> str:
        """Return the index in the tile at which chunk ``chunk`` of row ``line`` is stored."""
        return f"({line} * {self.row_chunks} + (({chunk}) ^ {self.swizzle(line)}))"


@dataclass(frozen=True)
class OperandCopies:
    """Copies of both operands' tiles into a pipeline stage.

    ``kind``, a key of `SIZES`, is the mma operand type, and ``tile`` a tile for this type (`matrix_tiles`). ``index``
    is the type of offsets in an operand.
    """

    tile: Tile
    kind: str
    a: Operand
    b: Operand
    elements: tuple[Element, Element]
    index: str
    sliced_k: int = 1

    @property
    def depth(self) -> int:
        """k elements per step of the block: ``tile.k`` for each of its sliced-K warp groups."""
        return self.tile.k * self.sliced_k

    @property
    def is_compact(self) -> bool:
        return is_compact(self.kind, self.elements)

    @property
    def stages(self) -> int:
        return stages_of(self.kind, self.tile)

    @property
    def has_contiguous_steps(self) -> bool:
        """Whether each sliced-K warp group has consecutive k steps; else k steps are distributed round-robin."""
        return False

    @property
    def step_distance(self) -> int:
        """Distance in k elements from a step of a warp group to its next one."""
        return self.tile.k if self.has_contiguous_steps else self.depth

    @property
    def operands(self) -> tuple[OperandTile, OperandTile]:
        tile, (a_size, b_size) = self.tile, operand_sizes(self.kind, self.is_compact)
        a = OperandTile(self.a, tile.m, tile.k, 0, a_size)
        return a, OperandTile(self.b, tile.n, tile.k, a.bytes, b_size)

    @property
    def size(self) -> int:
        """Bytes of an element in shared memory, except of compact weights."""
        return SIZES[self.kind]

    @property
    def chunk_size(self) -> int:
        """Elements of a 16-byte chunk."""
        return piece_of(self.kind)

    @property
    def stage(self) -> int:
        """Bytes of a pipeline stage: both operands' tiles."""
        return sum(of.bytes for of in self.operands)

    @property
    def config(self) -> TileConfig:
        return TileConfig(self.tile, self.sliced_k)

    def _copy_sources(self, of: OperandTile) -> list[str]:
        """Test whether ``cp.async`` can copy the operand's chunks; compute source and target of the thread's chunks.

        Sources are offsets at k = 0. A chunk past the end of the matrix along x is clamped to the last one.
        """
        operand, name = of.operand, of.name
        outer = operand.stride if operand.inner_major else operand.inner_stride
        odd = of.chunk_size - 1
        whole = "" if operand.inner_major else f" | (int64({operand.bound}) & {odd})"
        start = f"address_of({operand.pointer}) + {name}_base * {of.size}"
        result = [f"{name}_whole = opaque_i32(int32((({start}) & 15) | (int64({outer}) & {odd}){whole}))"]
        if self._is_whole(of):
            result = []
        for number in range(self._thread_chunks(of)):
            line, chunk = self._row_and_chunk(of, f"(thread + {number * self.tile.threads})")
            if operand.inner_major:
                x, along = (
                    f"min(int32({operand.origin} + {line}), int32({operand.bound} - 1))",
                    f"{chunk} * {of.chunk_size}",
                )
            else:
                first = f"int32({operand.origin} + {chunk} * {of.chunk_size})"
                x = f"min({first}, int32({operand.bound} - {of.chunk_size}))"
                along = line
            offsets = (f"{operand.row.format(x)} * {operand.stride}", f"{self.index}({along}) * {operand.inner_stride}")
            at = " + ".join(f"{self.index}({offset})" for offset in offsets)
            first = f"{self.index}({name}_base + int64({self.index}({at})))"
            # An opaque value stays in a register. The compiler recomputes others in each k step to save registers.
            is_kept = self.sliced_k > 1 or self.tile.m * self.tile.n < MOST_SUMS * self.tile.threads
            kept = f"opaque_{suffix(self.index)}({first})" if is_kept else first
            result.append(f"{name}_from{number} = {kept}")
        return [*result, *self._targets(of)]

    def _targets(self, of: OperandTile) -> list[str]:
        """Compute the offsets of the thread's chunks in a stage. As opaque values, they stay in registers."""
        result = []
        for number in range(self._distinct_chunks(of)):
            line, chunk = self._row_and_chunk(of, f"(thread + {number * self.tile.threads})")
            unit = f"int32({of.first} + {of.chunk_index(line, chunk)} * 16)"
            result.append(f"{of.name}_to{number} = opaque_i32({unit})")
        return result

    def _fill_addresses(self, of: OperandTile) -> list[str]:
        """Compute ``<operand>_fill<i>``: the addresses of the thread's distinct chunks in the stage at ``filled``."""
        return [
            f"{of.name}_fill{number} = tiles_at + int64(int32(filled + {of.name}_to{number}))"
            for number in range(self._distinct_chunks(of))
        ]

    def _target(self, of: OperandTile, number: int) -> str:
        """Return the address of the thread's chunk ``number`` in the stage at ``filled``."""
        first = number % self._distinct_chunks(of)
        return f"{of.name}_fill{first} + {(number - first) * self.tile.threads * 16}"

    def _distinct_chunks(self, of: OperandTile) -> int:
        """Return the number of a thread's first chunks, before the swizzle repeats.

        The address of a later chunk is the address of one of these plus a constant.
        """
        return min(self._thread_chunks(of), max(1, of.period * of.row_chunks // self.tile.threads))

    def _thread_chunks(self, of: OperandTile) -> int:
        """Return the maximum number of chunks that a thread copies; some threads may copy one fewer, or none."""
        return -(-of.bytes // 16 // self.tile.threads)

    def _among(self, of: OperandTile, number: int, line: str) -> list[str]:
        """Return ``line`` with a predicate, unless all threads have a chunk ``number``."""
        left = of.bytes // 16 - number * self.tile.threads
        return [f"if thread < {left}:", f"    {line}"] if left < self.tile.threads else [line]

    def _is_whole(self, of: OperandTile) -> bool:
        """Tell whether ``cp.async`` can copy all chunks of an operand without tests: compact weights are padded."""
        return self.is_compact and of.name == self.b.name

    def _row_and_chunk(self, of: OperandTile, chunk: str) -> tuple[str, str]:
        """Return the row of chunk ``chunk`` of the tile, and its index in the row."""
        return f"({chunk} >> {log2(of.row_chunks)})", f"({chunk} & {of.row_chunks - 1})"

    def _fill(self, of: OperandTile, element: Element) -> list[str]:
        """Fill an operand's tile in the stage at ``filled`` from ``k_first`` on, with zeros outside the matrix."""
        operand, name, numbers, index = of.operand, of.name, of.chunk_size, self.index
        inner = operand.inner_major
        count = of.bytes // 16
        threads = self.tile.threads
        if self._is_whole(of):
            # Warp groups of several warps share barriers, so that all have equally many steps, some past the end of k.
            is_asked = self.sliced_k > 1 and self.config.warps > 1
            return self._copies(of, f"k_first < {operand.inner_bound}" if is_asked else "")
        line, place = self._row_and_chunk(of, "chunk")
        row = f"{name}_x_at" if operand.row == "{}" else f"min({name}_x_at, int32({operand.bound} - 1))"
        x, k = ("line", f"place * {numbers}") if inner else (f"place * {numbers}", "line")
        last_x, last_k = (0, numbers - 1) if inner else (numbers - 1, 0)
        converted = isinstance(element, ConvertedElement)
        whole = f"{name}_x_at + {last_x} < {operand.bound} and {name}_k_at + {last_k} < {operand.inner_bound}"
        step = operand.inner_stride if inner else operand.stride

        def coordinates(i: str) -> tuple[str, str]:
            return (f"{name}_x_at", f"{name}_k_at + {i}") if inner else (f"{name}_x_at + {i}", f"{name}_k_at")

        # The opaque start keeps LLVM from hoisting these rarely executed computations.
        first = f"chunk = int32(opaque_i32(thread) + piece * {threads})"
        body = [
            f"line = int32{line}",
            f"place = int32{place}",
            f"{name}_x_at = int32({operand.origin} + {x})",
            f"{name}_k_at = int32(k_first + {k})",
            f"{name}_from = {name}_base + int64({index}({index}({operand.row.format(row)} * {operand.stride})"
            f" + {index}({name}_k_at * {operand.inner_stride})))",
            f"to = int32(filled + {of.first} + {of.chunk_index('line', 'place')} * 16)",
        ]
        if converted:
            body.append(f"if {whole}:")
            if inner and step == "1":
                before, values = element.neighbors(
                    operand.pointer, f"{name}_from", f"{name}_x_at", f"{name}_k_at", numbers, f"{name}_near"
                )
            else:
                before = []
                values = [
                    element.load(operand.pointer, f"{name}_from + int64({i} * {step})", *coordinates(str(i)))
                    for i in range(numbers)
                ]
            words = [self._word(values[i : i + 4 // self.size]) for i in range(0, numbers, 4 // self.size)]
            body += indented(before, 1)
            body += [f"    {name}_word{i} = {word}" for i, word in enumerate(words)]
            names = ", ".join(f"{name}_word{i}" for i in range(4))
            body.append(f"    store_f32x4(tile_c, int64(to >> 2), {names})")
        if not converted:
            copy = f"copy_async(tiles_at + int64(to), {operand.pointer}, {name}_from)"
            body += [f"if {name}_whole == 0 and {whole}:", f"    {copy}", f"elif {name}_k_at >= {operand.inner_bound}:"]
            body.append(f"    store_f32x4(tile_c, int64(to >> 2), {', '.join(['float32(0)'] * 4)})")
        body += ["else:", *indented(self._load_elements(of, element, coordinates), 1)]
        if count % threads:  # some threads have fewer chunks
            body = [f"if chunk < {count}:", *indented(body, 1)]
        result = [f"for piece in range({self._thread_chunks(of)}):", *indented([first, *body], 1)]
        if converted:
            return result
        copies = self._copies(of)
        return [
            f"if {name}_whole == 0 and int32(k_first + {self.tile.k}) <= {operand.inner_bound}:",
            *indented(copies, 1),
            "else:",
            *indented(result, 1),
        ]

    def _load_elements(
        self, of: OperandTile, element: Element, coordinates: Callable[[str], tuple[str, str]]
    ) -> list[str]:
        """Load one chunk element by element, with zeros outside the matrix, and store words of 4 bytes.

        ``coordinates(i)`` returns the coordinates of the chunk's element i along x and along k.
        """
        operand, is_loaded = of.operand, isinstance(element, ConvertedElement) or self.size == 4
        step = operand.inner_stride if operand.inner_major else operand.stride
        zero = "float32(0)" if is_loaded else "uint32(0)"
        edge = []
        for part in range(4 // self.size):
            at = f"int32(word * {4 // self.size} + {part})"
            outer, along = coordinates(at)
            offset = f"{of.name}_from + int64({at} * {step})"
            value = (
                element.load(operand.pointer, offset, outer, along)
                if is_loaded
                else self._bits(f"{operand.pointer}[{offset}]")
            )
            edge += [
                f"part{part} = {zero}",
                f"if {outer} < {operand.bound} and {along} < {operand.inner_bound}:",
                f"    part{part} = {value}",
            ]
        parts = [f"part{part}" for part in range(4 // self.size)]
        word = self._word(parts) if is_loaded else self._packed(parts)
        return ["for word in range(4):", *indented(edge, 1), f"    tile_c[int64((to >> 2) + word)] = {word}"]

    def _copies(self, of: OperandTile, condition: str = "") -> list[str]:
        """Copy the thread's chunks of the k step at ``k_first`` to the stage at ``filled`` with ``cp.async``.

        If a ``condition`` is given and false, the copies write zeros.
        """
        operand, index = of.operand, self.index
        result = [f"ahead_at = {index}({index}(k_first) * {operand.inner_stride})", *self._fill_addresses(of)]
        copy, more = ("copy_async_where", f", {condition}") if condition else ("copy_async", "")
        for number in range(self._thread_chunks(of)):
            source = f"int64({index}({of.name}_from{number} + ahead_at))"
            copied = f"{copy}({self._target(of, number)}, {operand.pointer}, {source}{more})"
            result += self._among(of, number, copied)
        return result

    def _word(self, values: Sequence[str]) -> str:
        """Return the source that packs ``values``, float32 or operand type, into 4 bytes, as a float32 word."""
        return values[0] if self.size == 4 else f"u32_as_f32(pair_{self.kind}({', '.join(values)}))"

    def _bits(self, value: str) -> str:
        """Return the bits of an element of 1 or 2 bytes as a uint32."""
        return f"(uint32({value}) & uint32(255))" if self.size == 1 else f"uint32({value})"

    def _packed(self, parts: Sequence[str]) -> str:
        """Return the source that packs elements, each in the low bits of a uint32, into 4 bytes, as a float32 word."""
        shifted = [f"({part} << uint32({8 * self.size * i}))" if i else part for i, part in enumerate(parts)]
        return f"u32_as_f32(uint32({' | '.join(shifted)}))"
