"""Source fragments of products by tensor cores: tiles of operands in shared memory, sums in fragments of warps.

A block of four warps computes a ``m`` x ``n`` tile, stepping through the inner dimension by 64 bytes. Tiles of the
operands are in shared memory three times: copies of those ahead (``cp.async``) run while one is multiplied, and a step
needs one barrier. Steps of 128 bytes take longer than a copy, so that two tiles do. A tile has lines of pieces of 16
bytes along the dimension in which numbers are neighbours in memory. Where a piece stands in its line depends on the
line, so that neither eight lines' pieces at one place, which a matrix is loaded from, nor neighbours, which are stored
together, share a bank.

A small product has several teams of warps in a block, which share the steps along k and have tiles of their own. Their
sums meet in shared memory at the end: so a block takes as many times fewer steps. A team of one warp waits for no
other warp in a step.

float32 is rounded to TF32 on the way from shared memory to the tensor cores. ``ldmatrix`` takes four such numbers of a
line for eight of 16 bits, but transposes none: where lines run along x, lanes load numbers one by one, eight
neighbours of each of four lines.

Weights that are multiplied as TF32 may stand in memory in 16 bits (`compact_weights`). Their lines run along k, each
eight numbers in the order 0, 4, 1, 5, 2, 6, 3, 7: what a lane loads at once are the two that it multiplies.

Bytes are loaded as pairs of them are, so their lines run along k. Their sums stand in shared memory as bits of floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..codegen.epilogue import Epilogue
from ..codegen.fragment import Fragment
from ..codegen.simt_fragments import Element, Operand, Tile, indented, log2, store_rows, suffix
from ..contraction.prologue import ConvertedElement
from .tile_shapes import DECLARED_BYTES, GAP, INTEGERS, SIZES, Team, block_bytes, operand_sizes, piece_of, stages_of

MOST_SUMS = 128
"""Accumulators of a thread above which addresses would spill: several blocks of one team are resident."""


def is_compact(kind: str, elements: Sequence[Element]) -> bool:
    """Whether the second operand is weights of float32 in 16 bits, all of whose pieces are whole."""
    return kind == "tf32" and elements[1].storage == "f16"


@dataclass(frozen=True)
class Lines:
    """How a tile of an operand stands in shared memory; x is its own dimension, ``first`` its first byte in a stage.

    ``depth`` numbers stand along k, of ``size`` bytes each.
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
    def piece(self) -> int:
        """Numbers of a piece."""
        return 16 // self.size

    @property
    def pieces(self) -> int:
        """Of a line, which runs along k, or along x."""
        return (self.depth if self.operand.inner_major else self.extent) * self.size // 16

    @property
    def is_loaded_by_matrices(self) -> bool:
        return self.operand.inner_major or self.size == 2

    def turn(self, line: str) -> str:
        """What the numbers of a line's pieces are changed by."""
        if self.is_loaded_by_matrices:
            return {2: f"(({line} >> 2) & 1)", 4: f"(({line} >> 1) & 3)"}.get(self.pieces, f"({line} & 7)")
        # Two neighbours in each of four lines are read together.
        return f"({line} & 2)" if self.pieces == 4 else f"(({line} & 3) << 1)"

    @property
    def period(self) -> int:
        """Lines after which `turn` repeats."""
        return 4 if not self.is_loaded_by_matrices else 8

    def unit(self, line: str, piece: str) -> str:
        """Where a piece stands, in pieces."""
        return f"({line} * {self.pieces} + (({piece}) ^ {self.turn(line)}))"


@dataclass(frozen=True)
class MatrixTile:
    """The fragments for operands whose numbers are multiplied as ``kind``, one of `SIZES`; ``tile`` is one of its."""

    tile: Tile
    kind: str
    a: Operand
    b: Operand
    elements: tuple[Element, Element]
    index: str
    teams: int = 1

    @property
    def depth(self) -> int:
        """Numbers along k that the block's teams multiply in a step."""
        return self.tile.k * self.teams

    @property
    def is_compact(self) -> bool:
        return is_compact(self.kind, self.elements)

    @property
    def stages(self) -> int:
        return stages_of(self.kind, self.tile)

    @property
    def block_bytes(self) -> int:
        """Of shared memory."""
        return block_bytes(self.kind, operand_sizes(self.kind, self.is_compact), self.tile, self.teams)

    @property
    def is_in_row(self) -> bool:
        """Whether a team's steps follow each other along k. Else they are in turn with those of the others."""
        return False

    @property
    def pace(self) -> int:
        """Numbers along k from one step of a team to its next."""
        return self.tile.k if self.is_in_row else self.depth

    @property
    def shared_bytes(self) -> int:
        """That a launch asks for, where a kernel may not declare as many."""
        return self.block_bytes if self.teams > 1 or self.block_bytes > DECLARED_BYTES else 0

    @property
    def lines(self) -> tuple[Lines, Lines]:
        tile, (a_size, b_size) = self.tile, operand_sizes(self.kind, self.is_compact)
        a = Lines(self.a, tile.m, tile.k, 0, a_size)
        return a, Lines(self.b, tile.n, tile.k, a.bytes, b_size)

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return SIZES[self.kind]

    @property
    def piece(self) -> int:
        """Numbers of a piece."""
        return piece_of(self.kind)

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return sum(lines.bytes for lines in self.lines)

    @property
    def team(self) -> Team:
        return Team(self.tile, self.teams)

    def fragment(self, rows: str, columns: str, epilogue: Epilogue) -> Fragment:
        """The block's tile of a result of ``rows`` x ``columns``: accumulators, pipeline, epilogue."""
        lines = [*self._declare(), *self._pipeline(), *self._store(rows, columns, epilogue)]
        return Fragment("mma_tile", "\n".join(lines))

    def _declare(self) -> list[str]:
        rows, columns = self.team.warp
        warp_columns = self.team.warp_columns
        floats = 0 if self.shared_bytes else self.block_bytes // 4
        lines = [
            f"tile_c = array_pointer(cuda.shared.array({floats}, float32, 16))",
            "tiles_at = shared_address(tile_c)",
            *self._team(),
            "lane = int32(thread & 31)",
            f"warp_row = int32((thread >> {5 + log2(warp_columns)}) * {rows})",
            f"warp_column = int32(((thread >> 5) & {warp_columns - 1}) * {columns})",
            f"sums = registers_{'i32' if self.kind in INTEGERS else 'f32'}({rows * columns // 32})",
        ]
        for of, element in zip(self.lines, self.elements, strict=True):
            lines += [] if isinstance(element, ConvertedElement) else self._copied(of)
        for of, warp, number, x_first in self._loads:
            lines += self._lanes(of, warp, number, x_first) if of.is_loaded_by_matrices else []
        return lines

    def _team(self) -> list[str]:
        """The thread's number in its team, and what the team begins with."""
        if self.teams == 1:
            return ["thread = int32(cuda.threadIdx.x)", "first_stage = int32(0)"]
        lines = [
            "block_thread = int32(cuda.threadIdx.x)",
            f"team = int32(uint32(block_thread) // uint32({self.tile.threads}))",
            f"thread = int32(block_thread - team * {self.tile.threads})",
            f"first_stage = opaque_i32(team * {self.stages * self.stage})",
            f"k0 = int32(k0 + team * {f'steps * {self.pace}' if self.is_in_row else self.tile.k})",
        ]
        if self.team.warps == 1:  # no other waits for it in a step
            own = f"int32(int32(k_end - k0 + {self.pace - 1}) >> {log2(self.pace)})"
            lines.append(f"steps = int32(min(steps, {own}))")
        return lines

    def _copied(self, lines: Lines) -> list[str]:
        """Whether pieces can be copied as they are, and for each of the thread's from where at k = 0, and to where.

        What is outside the result has any numbers: those of another piece.
        """
        operand, name = lines.operand, lines.name
        outer = operand.stride if operand.inner_major else operand.inner_stride
        odd = lines.piece - 1
        whole = "" if operand.inner_major else f" | (int64({operand.bound}) & {odd})"
        start = f"address_of({operand.pointer}) + {name}_base * {lines.size}"
        result = [f"{name}_whole = opaque_i32(int32((({start}) & 15) | (int64({outer}) & {odd}){whole}))"]
        if self._is_whole(lines):
            result = []
        for piece in range(self._pieces(lines)):
            line, place = self._place(lines, f"(thread + {piece * self.tile.threads})")
            if operand.inner_major:
                x, along = (
                    f"min(int32({operand.origin} + {line}), int32({operand.bound} - 1))",
                    f"{place} * {lines.piece}",
                )
            else:
                x = f"min(int32({operand.origin} + {place} * {lines.piece}), int32({operand.bound} - {lines.piece}))"
                along = line
            places = (f"{operand.row.format(x)} * {operand.stride}", f"{self.index}({along}) * {operand.inner_stride}")
            at = " + ".join(f"{self.index}({place})" for place in places)
            first = f"{self.index}({name}_base + int64({self.index}({at})))"
            # An opaque number is kept, not computed again in each step, as far as registers last.
            is_kept = self.teams > 1 or self.tile.m * self.tile.n < MOST_SUMS * self.tile.threads
            kept = f"opaque_{suffix(self.index)}({first})" if is_kept else first
            result.append(f"{name}_from{piece} = {kept}")
        return [*result, *self._targets(lines)]

    def _targets(self, lines: Lines) -> list[str]:
        """Where in a stage the thread's pieces go. An opaque number is kept, not computed again."""
        result = []
        for piece in range(self._distinct(lines)):
            line, place = self._place(lines, f"(thread + {piece * self.tile.threads})")
            unit = f"int32({lines.first} + {lines.unit(line, place)} * 16)"
            result.append(f"{lines.name}_to{piece} = opaque_i32({unit})")
        return result

    def _filled(self, lines: Lines) -> list[str]:
        """``<operand>_fill*``: addresses of the thread's first pieces in the stage that is filled."""
        return [
            f"{lines.name}_fill{piece} = tiles_at + int64(int32(filled + {lines.name}_to{piece}))"
            for piece in range(self._distinct(lines))
        ]

    def _target(self, lines: Lines, piece: int) -> str:
        """The address of a piece in that stage."""
        first = piece % self._distinct(lines)
        return f"{lines.name}_fill{first} + {(piece - first) * self.tile.threads * 16}"

    def _distinct(self, lines: Lines) -> int:
        """Pieces of a thread whose places in their lines differ; after so many they repeat."""
        return min(self._pieces(lines), max(1, lines.period * lines.pieces // self.tile.threads))

    def _pieces(self, lines: Lines) -> int:
        """Of a thread; some threads have none where there are more threads than pieces."""
        return -(-lines.bytes // 16 // self.tile.threads)

    def _among(self, lines: Lines, number: int, line: str) -> list[str]:
        """A line for the threads that have a piece of that number."""
        left = lines.bytes // 16 - number * self.tile.threads
        return [f"if thread < {left}:", f"    {line}"] if left < self.tile.threads else [line]

    def _is_whole(self, lines: Lines) -> bool:
        """Whether all pieces of an operand can be copied as they are, which need not be asked."""
        return self.is_compact and lines.name == self.b.name

    def _place(self, lines: Lines, chunk: str) -> tuple[str, str]:
        """The line and the place in it of a piece."""
        return f"({chunk} >> {log2(lines.pieces)})", f"({chunk} & {lines.pieces - 1})"

    def _pipeline(self) -> list[str]:
        """The loop over ``steps`` steps, the first of which is at ``k0``; k ends at ``k_end``.

        The tiles at ``k_first`` are filled, and those that were filled first are multiplied. What a step fills, the one
        before it has multiplied: there are as many stages.
        """
        last = (self.stages - 1) * self.stage
        fills = [
            line
            for lines, element in zip(self.lines, self.elements, strict=True)
            for line in self._fill(lines, element)
        ]
        return [
            f"last_stage = opaque_i32(int32(first_stage + {last}))",
            "filled = int32(first_stage)",
            f"multiplied = int32(first_stage + {self.stage})",
            # Opaque numbers are counted in 32 bits, and as they are.
            "k_first = opaque_i32(k0)",
            f"k_filled = opaque_i32(k0 + {self.stages - 1} * {self.pace})",
            f"k_stop = opaque_i32(k0 + steps * {self.pace})",
            f"while k_first < int32(k_stop + {(self.stages - 1) * self.pace}):",
            "    if k_first >= k_filled:",
            f"        copy_async_wait({self.stages - 2})",
            f"        cuda.{'syncwarp' if self.team.warps == 1 else 'syncthreads'}()",
            "    if k_first < k_stop:",
            *indented(fills, 2),
            "    copy_async_commit()",
            "    filled = int32(multiplied)",
            "    if k_first >= k_filled:",
            "        stage_at = tiles_at + int64(multiplied)",
            *indented(self._multiply(), 2),
            f"    multiplied = choose(multiplied == last_stage, first_stage, int32(multiplied + {self.stage}))",
            f"    k_first = opaque_i32(k_first + {self.pace})",
        ]

    def _store(self, rows: str, columns: str, epilogue: Epilogue) -> list[str]:
        height, width = self.team.warp
        pitch = self.tile.n + GAP
        placed = [
            "copy_async_wait(0)",
            "cuda.syncthreads()",
            f"to = int64(int32((warp_row + (lane >> 2)) * {pitch} + warp_column + (lane & 3) * 2))",
        ]
        if self.teams > 1:
            placed.append(f"to += int64(int32(team * {self.tile.m * pitch}))")
        for i in range(height // 16):
            for j in range(width // 8):
                for half in (0, 1):
                    at = (16 * i + 8 * half) * pitch + 8 * j
                    first = 4 * (i * (width // 8) + j) + 2 * half
                    pair = [f"sums[{first + i}]" for i in (0, 1)]
                    if self.kind in INTEGERS:
                        pair = [f"i32_as_f32({one})" for one in pair]
                    placed.append(f"store_f32x2(tile_c, to + {at}, {', '.join(pair)})")
        if self.teams > 1:
            placed.append("thread = block_thread")
        total = "f32_as_i32({})" if self.kind in INTEGERS else "{}"
        return store_rows(self.tile, rows, columns, total, epilogue, placed, pitch, self.teams)

    # ---- operands ----

    def _fill(self, lines: Lines, element: Element) -> list[str]:
        """Fills the stage at ``filled`` with k from ``k_first`` on; zeros stand outside the matrix."""
        operand, name, numbers, index = lines.operand, lines.name, lines.piece, self.index
        inner = operand.inner_major
        count = lines.bytes // 16
        threads = self.tile.threads
        if self._is_whole(lines):
            # Teams that wait for each other may have steps past the last k.
            is_asked = self.teams > 1 and self.team.warps > 1
            return self._copies(lines, f"k_first < {operand.inner_bound}" if is_asked else "")
        line, place = self._place(lines, "chunk")
        row = f"{name}_x_at" if operand.row == "{}" else f"min({name}_x_at, int32({operand.bound} - 1))"
        x, k = ("line", f"place * {numbers}") if inner else (f"place * {numbers}", "line")
        last_x, last_k = (0, numbers - 1) if inner else (numbers - 1, 0)
        converted = isinstance(element, ConvertedElement)
        whole = f"{name}_x_at + {last_x} < {operand.bound} and {name}_k_at + {last_k} < {operand.inner_bound}"
        step = operand.inner_stride if inner else operand.stride

        def coordinates(i: str) -> tuple[str, str]:
            return (f"{name}_x_at", f"{name}_k_at + {i}") if inner else (f"{name}_x_at + {i}", f"{name}_k_at")

        # What is computed of an opaque number stays here: nearly no step comes here.
        first = f"chunk = int32(opaque_i32(thread) + piece * {threads})"
        body = [
            f"line = int32{line}",
            f"place = int32{place}",
            f"{name}_x_at = int32({operand.origin} + {x})",
            f"{name}_k_at = int32(k_first + {k})",
            f"{name}_from = {name}_base + int64({index}({index}({operand.row.format(row)} * {operand.stride})"
            f" + {index}({name}_k_at * {operand.inner_stride})))",
            f"to = int32(filled + {lines.first} + {lines.unit('line', 'place')} * 16)",
        ]
        if converted:
            body.append(f"if {whole}:")
            if inner and step == "1":
                before, values = element.neighbours(
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
        zero = "float32(0)" if converted or self.size == 4 else "uint32(0)"
        edge = []
        for part in range(4 // self.size):
            at = f"int32(word * {4 // self.size} + {part})"
            outer, along = coordinates(at)
            place_of = f"{name}_from + int64({at} * {step})"
            value = (
                element.load(operand.pointer, place_of, outer, along)
                if converted or self.size == 4
                else self._bits(f"{operand.pointer}[{place_of}]")
            )
            edge += [
                f"part{part} = {zero}",
                f"if {outer} < {operand.bound} and {along} < {operand.inner_bound}:",
                f"    part{part} = {value}",
            ]
        parts = [f"part{part}" for part in range(4 // self.size)]
        word = self._word(parts) if converted or self.size == 4 else self._packed(parts)
        one_by_one = [
            "for word in range(4):",
            *indented(edge, 1),
            f"    tile_c[int64((to >> 2) + word)] = {word}",
        ]
        if not converted:
            copy = f"copy_async(tiles_at + int64(to), {operand.pointer}, {name}_from)"
            body += [f"if {name}_whole == 0 and {whole}:", f"    {copy}", f"elif {name}_k_at >= {operand.inner_bound}:"]
            body.append(f"    store_f32x4(tile_c, int64(to >> 2), {', '.join(['float32(0)'] * 4)})")
        body += ["else:", *indented(one_by_one, 1)]
        if count % threads:  # some threads have fewer pieces
            body = [f"if chunk < {count}:", *indented(body, 1)]
        result = [f"for piece in range({self._pieces(lines)}):", *indented([first, *body], 1)]
        if converted:
            return result
        copies = self._copies(lines)
        return [
            f"if {name}_whole == 0 and int32(k_first + {self.tile.k}) <= {operand.inner_bound}:",
            *indented(copies, 1),
            "else:",
            *indented(result, 1),
        ]

    def _copies(self, lines: Lines, condition: str = "") -> list[str]:
        """Copies the thread's pieces of the step at ``k_first``, all of which are whole, to the stage at ``filled``.

        Without the ``condition``, if there is one, they are zeros.
        """
        operand, index = lines.operand, self.index
        result = [f"ahead_at = {index}({index}(k_first) * {operand.inner_stride})", *self._filled(lines)]
        copy, more = ("copy_async_where", f", {condition}") if condition else ("copy_async", "")
        for number in range(self._pieces(lines)):
            source = f"int64({index}({lines.name}_from{number} + ahead_at))"
            copied = f"{copy}({self._target(lines, number)}, {operand.pointer}, {source}{more})"
            result += self._among(lines, number, copied)
        return result

    def _word(self, values: Sequence[str]) -> str:
        """The float whose bits are those of numbers, 4 bytes of them, of the kind that is multiplied."""
        return values[0] if self.size == 4 else f"u32_as_f32(pair_{self.kind}({', '.join(values)}))"

    def _bits(self, value: str) -> str:
        """The bits of a number in memory, of 2 bytes or one, as a uint32."""
        return f"(uint32({value}) & uint32(255))" if self.size == 1 else f"uint32({value})"

    def _packed(self, parts: Sequence[str]) -> str:
        """The float whose bits are those of numbers, 4 bytes of them, each in the lowest bits of a uint32."""
        shifted = [f"({part} << uint32({8 * self.size * i}))" if i else part for i, part in enumerate(parts)]
        return f"u32_as_f32(uint32({' | '.join(shifted)}))"

    # ---- products ----

    @property
    def _loads(self) -> tuple[tuple[Lines, str, int, bool], tuple[Lines, str, int, bool]]:
        """The arguments of `_loaded` for both operands."""
        a, b = self.lines
        height, width = self.team.warp
        return (a, "warp_row", height // 16, True), (b, "warp_column", width // 16, False)

    def _multiply(self) -> list[str]:
        body = []
        for half in range(self.tile.k * self.size // 32):
            for of, warp, number, x_first in self._loads:
                body += self._loaded(of, warp, number, x_first, half)
            (_, _, rows, _), (_, _, pairs, _) = self._loads
            for i in range(rows):
                of_a = ", ".join(f"a{i}_{r}" for r in range(4))
                for j in range(2 * pairs):
                    at = 4 * (i * 2 * pairs + j)
                    of_b = f"b{j // 2}_{2 * (j % 2)}, b{j // 2}_{2 * (j % 2) + 1}"
                    body.append(f"multiply_add_matrix_{self.kind}(sums, {at}, {of_a}, {of_b})")
        return body

    def _lanes(self, lines: Lines, warp: str, number: int, x_first: bool) -> list[str]:
        """The places in a stage that the lane gives to the loads of `_loaded`, of which others are so many bytes on.

        Opaque numbers stay in registers: of what else they are computed is not computed in each step.
        """
        low, high = "((lane >> 3) & 1)", "(lane >> 4)"
        x_bit, k_bit = (low, high) if x_first else (high, low)
        inner = lines.operand.inner_major
        result = []
        for i in range(lines.pieces // 2 if inner else number):
            if inner:
                line, piece = f"({warp} + (lane & 7) + 8 * {x_bit})", f"{k_bit} + {2 * i}"
            else:
                line, piece = f"((lane & 7) + 8 * {k_bit})", f"({warp} >> 3) + {x_bit} + {2 * i}"
            unit = lines.unit(f"{lines.name}_line", piece)
            result += [
                f"{lines.name}_line = int32{line}",
                f"{lines.name}_lane{i} = opaque_i32(int32({lines.first} + {unit} * 16))",
            ]
        return result

    def _loaded(self, lines: Lines, warp: str, number: int, x_first: bool, half: int) -> list[str]:
        """The registers of ``number`` times four matrices of a step; with ``x_first`` the second is next along x.

        A matrix has eight rows of 16 bytes. ``half`` counts 32 bytes along k, which are half a step or less.
        """
        if not lines.is_loaded_by_matrices:
            return self._loaded_one_by_one(lines, warp, number, x_first, half)
        if self._is_whole(lines):
            return self._unpacked(lines, number, half)
        name, inner = lines.name, lines.operand.inner_major
        load = "load_matrices" if inner else "load_matrices_transposed"
        result = []
        for i in range(number):
            lane, sixteens = (half, i) if inner else (i, half)
            words = [f"{name}{i}_{r}" for r in range(4)]
            at = f"stage_at + int64({name}_lane{lane}) + {sixteens * 16 * lines.pieces * 16}"
            result.append(f"{', '.join(words)} = {load}({at})")
            if self.kind == "tf32":
                result += [f"{word} = round_tf32(u32_as_f32({word}))" for word in words]
        return result

    def _unpacked(self, lines: Lines, number: int, half: int) -> list[str]:
        """As `_loaded`, of weights in 16 bits: what each other half loads has the numbers of the next as well."""
        name, result = lines.name, []
        for i in range(number):
            words = [f"{name}{i}_pair{r}" for r in range(4)]
            if half % 2 == 0:
                at = f"stage_at + int64({name}_lane{half // 2}) + {i * 16 * lines.pieces * 16}"
                result.append(f"{', '.join(words)} = load_matrices({at})")
            for eight in (0, 1):
                for r, shift in enumerate(("", " >> uint32(16)")):
                    bits = f"uint16({words[2 * eight + half % 2]}{shift})"
                    result.append(f"{name}{i}_{2 * eight + r} = f32_as_u32(f16_to_f32({bits}))")
        return result

    def _loaded_one_by_one(self, lines: Lines, warp: str, number: int, x_first: bool, half: int) -> list[str]:
        """As `_loaded`, of numbers of 4 bytes that are neighbours along x."""
        name, pitch = lines.name, lines.extent
        result = [
            f"{name}_line = int32((lane & 3) + {half * 8})",
            f"{name}_at = int32(((multiplied + {lines.first}) >> 2) + {name}_line * {pitch} + ((lane >> 2) & 3))",
        ]
        for eight in range(2 * number):
            piece = f"(({warp} >> 2) + (lane >> 4) + {2 * eight})"
            result.append(f"{name}_x{eight} = int32({name}_at + ({piece} ^ {lines.turn(f'{name}_line')}) * 4)")
        for i in range(number):
            for r in range(4):
                along_x, along_k = (r & 1, r >> 1) if x_first else (r >> 1, r & 1)
                place = f"int64({name}_x{2 * i + along_x} + {4 * along_k * pitch})"
                result.append(f"{name}{i}_{r} = round_tf32(tile_c[{place}])")
        return result
