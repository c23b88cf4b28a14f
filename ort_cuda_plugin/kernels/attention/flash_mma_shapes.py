"""Sizes of the blocks and warps of attention by tensor cores (`matrix_stream`).

Blocks of many rows read keys and values less often, and warps of many rows load them less often from shared memory. But
where there are few rows in all, smaller blocks give all multiprocessors work, and warps share the keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...program.expressions.symbolic import Dim, ceildiv, hint, le
from ...program.lowering.context import Lowering
from .multi_pass import Form

MATRIX_ROWS, WARPS = 16, 4
SMALL_WIDTH = 64
"""Columns up to which a warp's registers have room for the sums of two matrices of rows."""
MOST_WARP_KEYS = 32
"""Maximum keys of a tile for which the scores of a warp with many rows fit its registers."""


@dataclass(frozen=True)
class MatrixForm(Form):
    """Warps have ``warp_rows`` rows each; those that have the same ones share the keys of a tile.

    Where a tile has all keys there is one of it, else there are two ``stages``.
    """

    warp_rows: int = MATRIX_ROWS
    stages: int = 2

    @property
    def parts(self) -> int:
        """Warps that have the same rows."""
        return self.threads // 32 * self.warp_rows // self.m

    @property
    def warp_keys(self) -> int:
        """Keys of a tile that a warp has."""
        return self.keys // self.parts

    @property
    def is_alone(self) -> bool:
        """Whether blocks have a multiprocessor each, and so many warps."""
        return self.threads > 32 * WARPS

    @property
    def name(self) -> str:
        ending = f"_{self.parts}" if self.parts > 1 else ""
        return f"{super().name}{ending}{'_once' if self.stages == 1 else ''}"


def _form(m: int, keys: int, columns: int, warps: int = WARPS, warp_rows: int = MATRIX_ROWS) -> MatrixForm:
    return MatrixForm(m, keys, columns, 32 * warps, resident=False, warp_rows=warp_rows)


SMALL_FORMS = {
    2: (
        _form(16, 128, SMALL_WIDTH, 8),
        _form(32, 128, SMALL_WIDTH, 8, 2 * MATRIX_ROWS),
        _form(96, 128, SMALL_WIDTH, 12, 2 * MATRIX_ROWS),
    ),
    4: (
        _form(16, 64, SMALL_WIDTH),
        _form(32, 64, SMALL_WIDTH, 8),
        _form(96, 64, SMALL_WIDTH, 12, 2 * MATRIX_ROWS),
    ),
}
"""Blocks of which each has a multiprocessor for itself, the smallest one first, by the bytes of an element."""
TILES_OF_ALL_KEYS = {2: (128, 256), 4: (128,)}


def small_form(batches: Dim, rows: Dim, width: Dim, itemsize: int, multiprocessors: int) -> MatrixForm | None:
    """The form whose blocks, by what is expected, are no more than multiprocessors; None where there is none."""
    if hint(width) > SMALL_WIDTH or hint(rows) <= MATRIX_ROWS:
        return None
    fits = (form for form in SMALL_FORMS[itemsize] if hint(batches) * hint(ceildiv(rows, form.m)) <= multiprocessors)
    return next(fits, None)


def matrix_form(
    ctx: Lowering, batches: Dim, rows: Dim, keys: Dim, width: Dim, itemsize: int, is_masked: bool
) -> MatrixForm:
    """For so many rows, by what is expected, and results of up to 128 columns. A guard may say that keys are few.

    Where more than a factor makes weights of scores (``is_masked``), registers hold fewer scores.
    """
    columns = SMALL_WIDTH if hint(width) <= SMALL_WIDTH else 2 * SMALL_WIDTH
    if hint(rows) <= MATRIX_ROWS:
        return _form(MATRIX_ROWS, 64, columns)
    form = small_form(batches, rows, width, itemsize, ctx.device.multiprocessors)
    if form is None:
        m = WARPS * MATRIX_ROWS
        # Keys and values of 4 bytes take as long to load as to multiply, so that warps have more rows for each.
        is_long = itemsize == 4 and hint(rows) > m
        return _form(2 * m, 32, columns, warp_rows=2 * MATRIX_ROWS) if is_long else _form(m, 32, columns)
    for tile in TILES_OF_ALL_KEYS[itemsize]:
        fits = tile // form.parts <= MOST_WARP_KEYS and hint(keys) <= tile
        if fits and ctx.settled(le(keys, tile)):
            return replace(form, keys=tile, stages=1)
    return replace(form, keys=16 * form.parts) if is_masked else form
