"""Shared-memory layout and ``cp.async`` copies of Q, K and V in flash attention on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from ...program.steps.schedule import AttentionTile
from ..codegen.simt_fragments import indented, log2
from ..gemm.tile_shapes import SIZES, piece_of
from .flash_kernel import StreamKernel

MATRIX_ROWS = 16
"""Rows of the smallest matrix that tensor cores multiply."""
GAP_BYTES = 16
"""Between rows, so that neighbouring rows begin in other banks."""
STRIDES = {"a": "a_m", "b": "b_n", "c": "c_n"}
"""The stride between lines of an operand."""


@dataclass(frozen=True)
class StreamTiles(StreamKernel):
    """The part of a kernel that copies lines of ``size`` elements, of the block's rows and of tiles of keys and values.

    A stage is a tile of keys and then that of their values; the rows stand behind all stages.
    """

    form: AttentionTile
    size: int = 0

    @property
    def kind(self) -> str:
        """As what tensor cores multiply elements."""
        return "tf32" if self.storage[0] == "f32" else self.storage[0]

    @property
    def itemsize(self) -> int:
        return SIZES[self.kind]

    @property
    def piece(self) -> int:
        """Elements that are copied at once."""
        return piece_of(self.kind)

    @property
    def pitch(self) -> int:
        return self.size + GAP_BYTES // self.itemsize

    @property
    def tile_bytes(self) -> int:
        """Of the keys of a tile, or of its values."""
        return self.form.keys * self.pitch * self.itemsize

    @property
    def _line_pieces(self) -> int:
        return self.size // self.piece

    @property
    def _lines_at_once(self) -> int:
        """Lines that the block's threads copy in one pass; threads that are left over copy nothing."""
        return self.form.threads // self._line_pieces

    def copying(self) -> list[str]:
        """The thread's piece of the lines of a pass, and whether lines begin at multiples of 16 bytes."""
        pieces, shift = self._line_pieces, log2(self.itemsize)
        line = f"thread >> {log2(pieces)}" if pieces & (pieces - 1) == 0 else f"thread // {pieces}"
        lines = [
            f"line = int32({line})",
            f"piece = int32((thread - line * {pieces}) * {self.piece})",
            f"to_at = tile_at + int64(int32((line * {self.pitch} + piece) * {self.itemsize}))",
        ]
        lines += [f"{x}_first = {x}_start + int64(piece)" for x in "abc"]
        places = [f"int32(address_of({x})) + (int32({x}_start) << {shift})" for x in "abc"]
        places += [f"(int32({self._stride(STRIDES[x])}) << {shift})" for x in "abc"]
        lines.append(f"is_whole = opaque_i32(int32(({' | '.join(f'({place})' for place in places)}) & 15)) == 0")
        return lines

    def _passes(self, count: int, end: str, body: str) -> list[str]:
        """``body`` of each pass over ``count`` lines, whose ``{pass}`` copies the thread's line ``{line}``.

        Passes from the line ``end`` on are left out.
        """
        lines, at_once = [], self._lines_at_once
        for number in range(-(-count // at_once)):
            first = number * at_once
            conditions = [f"line < {at_once}"] if self.form.threads % self._line_pieces else []
            conditions += [f"line < {count - first}"] if first + at_once > count else []
            conditions += [f"{end} > {first}"] if end and first else []
            each = body.format(first=first, to=first * self.pitch * self.itemsize).splitlines()
            lines += [f"if {' and '.join(conditions)}:", *indented(each, 1)] if conditions else each
        return lines

    def _one_by_one(self, x: str, count: int, last: str, start: str, to: str, *, zeros: bool) -> list[str]:
        """Loads and stores ``count`` lines that do not begin at multiples of 16 bytes.

        With ``zeros`` the lines behind the last one are zero, else they repeat it.
        """
        stride, pieces = self._stride(STRIDES[x]), self._line_pieces
        if self.kind == "tf32":
            words = [f"{x}[at + {i}]" for i in range(4)]
        else:
            halves = [f"uint32({x}[at + {i}])" for i in range(self.piece)]
            words = [f"u32_as_f32({halves[i]} | ({halves[i + 1]} << 16))" for i in range(0, self.piece, 2)]
        if zeros:
            words = [f"choose(own_line <= {last}, {word}, float32(0))" for word in words]
        return [
            # What is computed of an opaque number stays here: nearly no step comes here.
            f"for number in range(opaque_i32(thread), {count * pieces}, {self.form.threads}):",
            f"    own_line = int32(number // {pieces})",
            f"    own_piece = int32((number - own_line * {pieces}) * {self.piece})",
            f"    source = int32(min(own_line, {last}))",
            f"    at = {start} + int64({self.index_type}(source * {stride})) + int64(own_piece)",
            f"    place = int32({to} + (own_line * {self.pitch} + own_piece) * {self.itemsize})",
            *(f"    word{i} = {word}" for i, word in enumerate(words)),
            f"    store_f32x4(tile_c, int64(place >> 2), {', '.join(f'word{i}' for i in range(4))})",
        ]

    def fill_rows(self) -> list[str]:
        """Begins to copy the block's rows; the last one stands for those behind it."""
        stride, place = self._stride("a_m"), 2 * self.form.stages * self.tile_bytes
        body = "\n".join(
            (
                "source = int32(min(int32(row0 + line + {first}), int32(m - 1)))",
                f"copy_async(to_at + {{to}} + {place}, a, a_first + int64({self.index_type}(source * {stride})))",
            )
        )
        start = f"a_start + int64({self.index_type}(row0 * {stride}))"
        slow = self._one_by_one("a", self.form.m, "int32(m - row0 - 1)", start, str(place), zeros=False)
        return ["if is_whole:", *indented(self._passes(self.form.m, "", body), 1), "else:", *indented(slow, 1)]

    def fill(self, tile: str, stage: str) -> list[str]:
        """Begins to copy a tile's keys and values. Behind the last key there are zeros, up to the end of a warp's part.

        A key that does not exist has the weight 0. Its values are multiplied nevertheless, and 0 times what an earlier
        block left there, or times the values of another key, could be NaN.
        """
        form, last = self.form, "int32(left - 1)"
        places, strides = (0, self.tile_bytes), [self._stride(STRIDES[x]) for x in "bc"]
        starts = [f"int64({self.index_type}(key0 * {stride}))" for stride in strides]
        quick = [f"at_{x} = {x}_first + {start}" for x, start in zip("bc", starts, strict=True)]
        body = ["source = int32(line + {first})", "exists = source < left"]
        body += [
            f"copy_async_where(stage_to + {{to}} + {place}, {x}, at_{x} + int64({self.index_type}(source * {stride})),"
            " exists)"
            for x, place, stride in zip("bc", places, strides, strict=True)
        ]
        # A warp multiplies all keys of its part of a tile, or none.
        quick.append(f"multiplied = int32(int32(left + {form.warp_keys - 1}) & -{form.warp_keys})")
        quick += self._passes(form.keys, "multiplied", "\n".join(body))
        slow = [
            line
            for x, start, place in zip("bc", starts, places, strict=True)
            for line in self._one_by_one(x, form.keys, last, f"{x}_start + {start}", f"{stage} + {place}", zeros=True)
        ]
        return [
            f"key0 = int32({tile} * {form.keys})",
            "left = int32(n - key0)",
            "if is_whole:",
            f"    stage_to = to_at + int64({stage})",
            *indented(quick, 1),
            "else:",
            *indented(slow, 1),
            "copy_async_commit()",
        ]
