"""Shared-memory layout and ``cp.async`` copies of Q, K and V in flash attention on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from ...program.steps.schedule import AttentionTile
from ..codegen.simt_fragments import indented, log2
from ..gemm.tile_shapes import SIZES, piece_of
from .flash_kernel import StreamKernel

MATRIX_ROWS = 16
"""Rows of an mma operand (m16)."""
GAP_BYTES = 16
"""Bytes of padding between rows in shared memory, to avoid bank conflicts."""
STRIDES = {"a": "a_m", "b": "b_n", "c": "c_n"}
"""Kernel parameter with the stride between rows of Q ("a"), K ("b") and V ("c")."""


@dataclass(frozen=True)
class StreamTiles(StreamKernel):
    """Copies of Q, K and V rows of ``size`` elements into shared memory.

    A pipeline stage is a tile of K rows, followed by a tile of V rows. In shared memory the Q rows follow all stages.
    """

    form: AttentionTile
    size: int = 0

    @property
    def kind(self) -> str:
        """Element type of the mma instruction."""
        return "tf32" if self.storage[0] == "f32" else self.storage[0]

    @property
    def itemsize(self) -> int:
        return SIZES[self.kind]

    @property
    def piece(self) -> int:
        """Elements of a 16-byte chunk, the unit of ``cp.async``."""
        return piece_of(self.kind)

    @property
    def pitch(self) -> int:
        return self.size + GAP_BYTES // self.itemsize

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of K rows in shared memory, which are also those of a tile of V rows."""
        return self.form.keys * self.pitch * self.itemsize

    @property
    def _row_chunks(self) -> int:
        return self.size // self.piece

    def copying(self) -> list[str]:
        """Compute which 16-byte chunk the thread copies in each pass, and whether all rows are 16-byte aligned."""
        chunks, shift = self._row_chunks, log2(self.itemsize)
        row = f"thread >> {log2(chunks)}" if chunks & (chunks - 1) == 0 else f"thread // {chunks}"
        lines = [
            f"line = int32({row})",
            f"piece = int32((thread - line * {chunks}) * {self.piece})",
            f"to_at = tile_at + int64(int32((line * {self.pitch} + piece) * {self.itemsize}))",
        ]
        lines += [f"{x}_first = {x}_start + int64(piece)" for x in "abc"]
        addresses = [f"int32(address_of({x})) + (int32({x}_start) << {shift})" for x in "abc"]
        addresses += [f"(int32({self._stride(STRIDES[x])}) << {shift})" for x in "abc"]
        lines.append(f"is_whole = opaque_i32(int32(({' | '.join(f'({x})' for x in addresses)}) & 15)) == 0")
        return lines

    def _passes(self, count: int, end: str, body: str) -> list[str]:
        """Repeat ``body`` for each pass over ``count`` rows, with the thread's bounds checks.

        In ``body``, ``{first}`` is the pass's first row and ``{to}`` the byte offset of this row in shared memory.
        Passes that begin at row ``end`` or later are skipped.
        """
        # In one pass each thread copies a 16-byte chunk; surplus threads copy nothing.
        lines, at_once = [], self.form.threads // self._row_chunks
        for number in range(-(-count // at_once)):
            first = number * at_once
            conditions = [f"line < {at_once}"] if self.form.threads % self._row_chunks else []
            conditions += [f"line < {count - first}"] if first + at_once > count else []
            conditions += [f"{end} > {first}"] if end and first else []
            each = body.format(first=first, to=first * self.pitch * self.itemsize).splitlines()
            lines += [f"if {' and '.join(conditions)}:", *indented(each, 1)] if conditions else each
        return lines

    def _one_by_one(self, x: str, count: int, last: str, start: str, to: str, *, zeros: bool) -> list[str]:
        """Copy ``count`` rows whose addresses are not 16-byte aligned, element by element.

        With ``zeros``, the tile's rows after row ``last`` become zeros; without, they become copies of row ``last``.
        """
        stride, chunks = self._stride(STRIDES[x]), self._row_chunks
        if self.kind == "tf32":
            words = [f"{x}[at + {i}]" for i in range(4)]
        else:
            halves = [f"uint32({x}[at + {i}])" for i in range(self.piece)]
            words = [f"u32_as_f32({halves[i]} | ({halves[i + 1]} << 16))" for i in range(0, self.piece, 2)]
        if zeros:
            words = [f"choose(own_line <= {last}, {word}, float32(0))" for word in words]
        return [
            # The opaque start keeps LLVM from hoisting these rarely executed computations.
            f"for number in range(opaque_i32(thread), {count * chunks}, {self.form.threads}):",
            f"    own_line = int32(number // {chunks})",
            f"    own_piece = int32((number - own_line * {chunks}) * {self.piece})",
            f"    source = int32(min(own_line, {last}))",
            f"    at = {start} + int64({self.index_type}(source * {stride})) + int64(own_piece)",
            f"    place = int32({to} + (own_line * {self.pitch} + own_piece) * {self.itemsize})",
            *(f"    word{i} = {word}" for i, word in enumerate(words)),
            f"    store_f32x4(tile_c, int64(place >> 2), {', '.join(f'word{i}' for i in range(4))})",
        ]

    def fill_rows(self) -> list[str]:
        """Issue the copies of the block's Q rows; tile rows past the end of Q become copies of its last row."""
        stride, offset = self._stride("a_m"), 2 * self.form.stages * self.tile_bytes
        body = "\n".join(
            (
                "source = int32(min(int32(row0 + line + {first}), int32(m - 1)))",
                f"copy_async(to_at + {{to}} + {offset}, a, a_first + int64({self.index_type}(source * {stride})))",
            )
        )
        start = f"a_start + int64({self.index_type}(row0 * {stride}))"
        slow = self._one_by_one("a", self.form.m, "int32(m - row0 - 1)", start, str(offset), zeros=False)
        return ["if is_whole:", *indented(self._passes(self.form.m, "", body), 1), "else:", *indented(slow, 1)]

    def fill(self, tile: str, stage: str) -> list[str]:
        """Issue the copies of a tile's K and V rows. Rows after the last key, up to a warp's whole slice, get zeros.

        Keys past the end have weight 0, but mma multiplies this weight by their value rows, and 0 times stale shared
        memory could be NaN.
        """
        form, last = self.form, "int32(left - 1)"
        offsets, strides = (0, self.tile_bytes), [self._stride(STRIDES[x]) for x in "bc"]
        starts = [f"int64({self.index_type}(key0 * {stride}))" for stride in strides]
        quick = [f"at_{x} = {x}_first + {start}" for x, start in zip("bc", starts, strict=True)]
        body = ["source = int32(line + {first})", "exists = source < left"]
        body += [
            f"copy_async_where(stage_to + {{to}} + {offset}, {x}, at_{x} + int64({self.index_type}(source * {stride})),"
            " exists)"
            for x, offset, stride in zip("bc", offsets, strides, strict=True)
        ]
        # A warp multiplies all keys of its slice or none: round the number of copied rows up to whole slices.
        quick.append(f"multiplied = int32(int32(left + {form.warp_keys - 1}) & -{form.warp_keys})")
        quick += self._passes(form.keys, "multiplied", "\n".join(body))
        slow = [
            line
            for x, start, offset in zip("bc", starts, offsets, strict=True)
            for line in self._one_by_one(x, form.keys, last, f"{x}_start + {start}", f"{stage} + {offset}", zeros=True)
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
