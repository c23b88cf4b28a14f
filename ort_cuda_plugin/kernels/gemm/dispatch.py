"""Kernels of matrix products and of what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ...model.ir import DType
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, divides, hint, is_const, le, lt, product, select
from ...program.lowering.context import DeviceProperties, Lowering, Tensor
from ...program.lowering.elementwise import rearranged
from ...program.lowering.shapes import broadcast_strides, collapse
from ...program.lowering.views import permute
from ...program.steps.steps import Contract, Conversion, Map
from ..codegen.block_mapping import count_tiles
from ..codegen.epilogue import Axes, Epilogue, make_epilogue
from ..codegen.guards import try_guard
from ..codegen.launch_geometry import index_type, reach
from ..codegen.simt_fragments import Element, Tile
from ..codegen.source import KernelBuilder, Parameters
from ..contraction.block_quantized import make_block_element
from ..contraction.epilogue_patterns import product_form
from ..contraction.integer_operands import MAX_DEPTH, PIECE, integer_form, integer_step
from ..contraction.prologue import make_element
from .cost_model import choose_parts, choose_team, finish_of, holds_for
from .gemm_mma import (
    MatrixProduct,
    choose_matrix_tile,
    choose_splits,
    matrix_kind,
    matrix_ways,
    multiplies_integers,
    parts_epilogue,
    sum_of_parts,
)
from .gemm_simt import FLAT, LONG, SQUARE, TALL, Product, TiledProduct
from .gemv import Gemv, VectorGemv, few_row_form, takes
from .gemv_emulated import EmulatedGemv
from .tf32_weights_as_f16 import compact_columns, compact_lines, has_compact_columns, has_compact_lines
from .tile_shapes import INTEGERS, Team, piece_of

__all__ = [
    "Folded",
    "choose_tile",
    "cut_along_k",
    "folded",
    "integer_product_kind",
    "launch_contract",
    "parts_along_k",
    "product_tactics",
    "try_gemv",
    "try_scaled_f16",
    "try_sliced_k",
]

MAX_ROWS = 4
"""Products of at most this many rows go to the kernel for few rows."""
MOST_TUNED_ROWS = 16
"""Products of more rows are not measured with that kernel."""
TILES = ((TALL, 1.0), (SQUARE, 1.1), (FLAT, 1.4))
"""Tiles with the relative time of one multiplication."""
EMULATED_TILES = tuple(
    (Tile(m, 64, thread_m=16, thread_n=16, chunk=16), cost) for m, cost in ((64, 1.0), (32, 1.2), (16, 1.6))
)
"""Those of the emulated device. Few threads do much each: each wait for the others costs it a switch of stacks."""


def choose_tile(device: DeviceProperties, rows: Dim, dtype: DType) -> Tile:
    """The tile that does the least work for a result of so many rows, padding included. All are as wide."""
    if dtype.itemsize == 8:
        return replace(LONG, gap=0) if device.emulated else LONG
    costs = EMULATED_TILES if device.emulated else TILES
    return min(costs, key=lambda entry: entry[1] * hint(ceildiv(rows, entry[0].m)) * entry[0].m)[0]


Form: TypeAlias = tuple[tuple[Element, Element], Epilogue, str, str, int, DType]
"""The members of `Product`."""


@dataclass(frozen=True)
class Folded:
    """One product as our kernels and cuBLASLt take it: a [m, k] and b [k, n], for each index of ``batch``."""

    a: Tensor
    b: Tensor
    batch: list[Dim]
    a_batch: tuple[Dim, ...]
    b_batch: tuple[Dim, ...]
    rows_folded: bool

    @property
    def sizes(self) -> tuple[Dim, Dim, Dim]:
        """m, n, k."""
        return self.a.shape[-2], self.b.shape[-1], self.a.shape[-1]

    @property
    def contiguous(self) -> tuple[str, str]:
        """The dimensions along which neighbours of a and of b lie."""
        return contiguous_axis(self.a, "m", "k"), contiguous_axis(self.b, "k", "n")


def contiguous_axis(x: Tensor, row: str, column: str) -> str:
    """The name of the dimension of matrices x along which neighbours in memory lie, "" for neither."""
    if x.strides[-1] == 1 or x.shape[-1] == 1:
        return column if x.strides[-1] == 1 else (row if x.strides[-2] == 1 else "")
    return row if x.strides[-2] == 1 else ""


def folded(ctx: Lowering, step: Contract) -> Folded:
    """The product with as few dimensions as it has."""
    a, b = _with_rows_folded(ctx, step.a, step.b), step.b
    batch = step.batch
    folded = a.rank == 2 and all(dim == 1 for dim in b.shape[:-2])
    if folded:
        b = ctx.view(b, b.shape[-2:], b.strides[-2:], b.offset)
        batch = ()
    dims, (a_batch, b_batch) = collapse(batch, [batch_strides(x, batch) for x in (a, b)])
    if not dims:
        dims, a_batch, b_batch = [1], (0,), (0,)
    return Folded(a, b, dims, a_batch, b_batch, folded)


def _with_rows_folded(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    """a [batch..., m, k] as [batch * m, k] where b is one matrix and a's memory allows it."""
    if a.rank == 2 or any(dim != 1 for dim in b.shape[:-2]):
        return a
    dims, (strides,) = collapse(a.shape[:-1], [a.strides[:-1]])
    if len(dims) > 1:
        return a
    rows, stride = (dims[0], strides[0]) if dims else (1, 0)
    return ctx.view(a, (rows, a.shape[-1]), (stride, a.strides[-1]), a.offset)


def batch_strides(x: Tensor, batch: Sequence[Dim]) -> tuple[Dim, ...]:
    leading = Tensor(x.dtype, x.shape[:-2], x.buffer, strides=x.strides[:-2])
    return broadcast_strides(leading, batch)


@dataclass(frozen=True)
class ProductTactic:
    """A kernel of ours for a product: in tiles, of k in so many parts; without a tile a block for each row."""

    tile: Tile | None
    splits: int = 1
    teams: int = 1

    @property
    def name(self) -> str:
        if self.tile is None:
            return "a block for each row"
        parts = f", k in {self.splits} parts" if self.splits > 1 else ""
        return f"tiles of {self.tile.name}{parts}{f', by {self.teams} teams' if self.teams > 1 else ''}"


def matrix_tactics(
    ctx: Lowering, kind: str, m: Dim, n: Dim, batches: Dim, k: Dim, team: Team | None
) -> list[ProductTactic]:
    """Ways by tensor cores that may be the fastest, first what rules prefer: the team, if there is one."""
    tile = choose_matrix_tile(ctx.device, kind, m, n, batches)
    splits = choose_splits(ctx.device, tile, m, n, batches, k)
    ways = [(tile, splits), *matrix_ways(ctx.device, kind, m, n, batches, k)]
    found = [ProductTactic(tile, parts) for tile, parts in dict.fromkeys(ways)]
    return found if team is None else [ProductTactic(team.tile, 1, team.teams), *found]


def _team(ctx: Lowering, step: Contract, kind: str, call: Folded, *, in_halves: bool = False) -> Team | None:
    """See `choose_team`; operands that are converted have none.

    Where cuBLASLt leaves a part of what follows the sums, that is a kernel of its own. ``in_halves`` the operands have
    16 bits, in place of those that a library would multiply.
    """
    m, n, k = call.sizes
    if step.is_converted:
        return None
    is_compact, along_k = has_compact_lines(ctx, step), _may_lie_along_k(call, kind)
    more = {**_beside_library(ctx, step, kind), **finish_of(step, n)}
    if in_halves:
        return choose_team(ctx.device, "f16", m, n, product(call.batch), k, along_k=True, **more)
    more |= {"is_compact": is_compact, "along_k": is_compact or along_k}
    return choose_team(ctx.device, kind, m, n, product(call.batch), k, **more)


def _beside_library(ctx: Lowering, step: Contract, kind: str) -> dict[str, Any]:
    """Whether cuBLASLt can do the product, and what it leaves, as parameters of `choose_team`."""
    if "cublaslt" not in ctx.device.libraries:
        return {}
    form = product_form(ctx, step)
    left = hint(product(step.shape)) * step.a.dtype.itemsize if form is None or form.leftover else 0
    return {"left": left, "library": kind if form else ""}


def parts_along_k(ctx: Lowering, step: Contract) -> int:
    """Into how many parts k is cut for a step after the product that adds them up, where it takes less time so."""
    call = folded(ctx, step)
    m, n, k = call.sizes
    kind = _kind(ctx, step, call)
    is_one = product(call.batch) == 1 and not step.is_converted and not step.column_parts and not step.tactic.name
    if kind not in ("f16", "bf16") or not is_one or not isinstance(k, int) or call.contiguous[0] != "k":
        return 1
    if hint(m) <= MAX_ROWS or step.b.rank != 2 or not _may_lie_along_k(call, kind):
        return 1
    more = {**_beside_library(ctx, step, kind), **finish_of(step, n)}
    return choose_parts(ctx.device, kind, m, n, k, along_k=True, **more)


def cut_along_k(ctx: Lowering, step: Contract, parts: int) -> tuple[Contract, Map]:
    """The product of each part of k, and the step that adds these up and finishes the sums."""
    call = folded(ctx, step)
    if _has_weights_along_n(call):
        call = _along_k(ctx, call)
    m, n, k = call.sizes
    assert isinstance(k, int)
    depth = k // parts
    a, b = call.a, call.b
    a = ctx.view(a, (parts, m, depth), (depth * a.strides[-1], *a.strides[-2:]), a.offset)
    b = ctx.view(b, (parts, depth, n), (depth * b.strides[-2], *b.strides[-2:]), b.offset)
    sums = ctx.empty((parts, m, n), step.total.dtype)
    total = Scalar(step.total.dtype, "leaf")
    part = Contract(step.nodes, sums.shape, (), ((total, sums),), operands=(a, b), total=total)
    return part, sum_of_parts(ctx, step, sums, parts)


def try_scaled_f16(ctx: Lowering, step: Contract) -> bool:
    """Return whether our kernel takes less than a library with a TF32 product's operands in 16 bits."""
    call = folded(ctx, step)
    kind = _kind(ctx, step, call)
    is_long = hint(call.sizes[0]) > MAX_ROWS and call.contiguous[0] == "k"
    return kind == "tf32" and is_long and _team(ctx, step, kind, call, in_halves=True) is not None


def product_tactics(ctx: Lowering, step: Contract) -> dict[str, ProductTactic]:
    """Our kernels that may be the fastest, by name; the first is what is taken unless the step says another."""
    call = folded(ctx, step)
    m, n, k = call.sizes
    batches, rows = product(call.batch), hint(call.sizes[0])
    found = []
    kind = _kind(ctx, step, call)
    if kind:
        found = matrix_tactics(ctx, kind, m, n, batches, k, _team(ctx, step, kind, call))
    else:
        first = choose_tile(ctx.device, m, step.total.dtype)
        tiles = EMULATED_TILES if ctx.device.emulated else TILES
        others = [] if step.total.dtype.itemsize == 8 else [tile for tile, _ in tiles if tile.m < 2 * rows]
        found = [ProductTactic(tile) for tile in dict.fromkeys([first, *others])]
    if call.contiguous[1] and rows <= MOST_TUNED_ROWS:
        found.insert(0 if rows <= MAX_ROWS else len(found), ProductTactic(None))
    return {tactic.name: tactic for tactic in found}


def integer_product_kind(ctx: Lowering, step: Contract) -> str:
    """As what tensor cores multiply the bytes that both operands are made of; "" where they do not.

    Few rows take as long as the weights' bytes do, which other kernels read as well.
    """
    a, b = step.operands
    depth = a.shape[-1]
    if not multiplies_integers(ctx.device) or not isinstance(depth, int) or depth % PIECE or depth > MAX_DEPTH:
        return ""
    if a.strides[-1] != 1 or not all(divides(PIECE, place) for place in (a.offset, *a.strides[:-1])):
        return ""
    form = integer_form(step) if all(dim == 1 for dim in b.shape[:-2]) else None
    rows = folded(ctx, step).sizes[0]
    return form.kind if form is not None and hint(rows) > MAX_ROWS and try_guard(ctx, lt(MAX_ROWS, rows)) else ""


def _with_integers(ctx: Lowering, step: Contract) -> Contract:
    """The step whose operands are codes, in whose weights those along k are neighbours."""
    form = integer_form(step)
    assert form is not None
    changed = integer_step(ctx, step, form)
    assert isinstance(changed, Contract)
    b = changed.b
    if b.strides[-2] != 1 or not divides(PIECE, b.strides[-1]):
        axes = (*range(b.rank - 2), b.rank - 1, b.rank - 2)
        b = permute(ctx, ctx.contiguous(permute(ctx, b, axes)), axes)
    return replace(changed, operands=(changed.a, b))


def _elements(step: Contract) -> tuple[tuple[Element, Element], tuple[Parameters, Parameters]]:
    """How the operands are read, and the parameters of that."""
    a_element, of_a = make_element(step.a, step.conversions[0], -2, "pa_")
    converted = step.conversions[1]
    b_element: Element
    if converted is not None and converted.bits:
        b_element, of_b = make_block_element(converted, "pb_")
    else:
        b_element, of_b = make_element(step.b, converted, -1, "pb_")
    return (a_element, b_element), (of_a, of_b)


def _kind(ctx: Lowering, step: Contract, call: Folded) -> str:
    """What tensor cores multiply, "" where they do not do the product."""
    integers = integer_product_kind(ctx, step)
    if integers:
        return integers
    return matrix_kind(ctx, _elements(step)[0]) if all(call.contiguous) else ""


def try_gemv(ctx: Lowering, step: Contract) -> bool:
    """Return whether the result is one row, of which a GPU's kernel for few rows takes the operands.

    Where one row is expected, a guard says that there are no more.
    """
    call = folded(ctx, step)
    if ctx.device.emulated or hint(call.sizes[0]) != 1 or not takes(_elements(step)[0], *call.contiguous):
        return False
    return try_guard(ctx, le(call.sizes[0], 1))


def try_sliced_k(ctx: Lowering, step: Contract) -> bool:
    """Return whether teams of warps take less for the product than a library's call, as `choose_team` has it.

    They copy pieces of 16 bytes: lines begin at multiples of these. A guard says that there are no more blocks.
    """
    call = folded(ctx, step)
    kind = _kind(ctx, step, call)
    if not kind or step.is_converted or hint(call.sizes[0]) <= MAX_ROWS or not is_const(call.sizes[2]):
        return False
    sizes = (*call.sizes[:2], product(call.batch))
    team = _team(ctx, step, kind, call)
    lines = [x.strides[-2 if x.strides[-1] == 1 else -1] for x in (call.a, call.b)]
    if team is None:
        return False
    if has_compact_lines(ctx, step) or _will_lie_along_k(call, kind, team):
        lines[1] = call.sizes[2]
    return all(divides(piece_of(kind), line) for line in lines) and holds_for(ctx, team, *sizes)


def _has_weights_along_n(call: Folded) -> bool:
    """Whether b are weights whose lines run along n, of which a copy may have them along k."""
    return call.contiguous[1] == "n" and call.b.is_constant and call.b.rank == 2


def _may_lie_along_k(call: Folded, kind: str) -> bool:
    """Whether lines of both operands run along k, or will where a team has to have them so."""
    a, b = call.contiguous
    return a == "k" and (b == "k" or (_has_weights_along_n(call) and divides(piece_of(kind), call.sizes[2])))


def _will_lie_along_k(call: Folded, kind: str, team: Team) -> bool:
    """Whether weights are copied: teams load float32 one by one that is not along k, and uneven tiles do not at all."""
    return _has_weights_along_n(call) and (not team.is_even or (kind == "tf32" and team.teams > 1))


def _along_k(ctx: Lowering, call: Folded) -> Folded:
    """The product with its weights along k: a copy, which the device makes once."""
    copy = rearranged(ctx, permute(ctx, call.b, (1, 0)))
    return replace(call, b=permute(ctx, copy, (1, 0)))


def _has_few_columns(ctx: Lowering, step: Contract) -> bool:
    """Whether tiles would have columns for nothing: those of the emulated device are all as wide."""
    rows, columns = product(step.a.shape[:-1]), step.b.shape[-1]
    is_plain = not step.column_parts and not any(conversion and conversion.bits for conversion in step.conversions)
    if not ctx.device.emulated or step.tactic.name or not is_plain:
        return False
    axis = contiguous_axis(step.a, "m", "k")
    if not isinstance(columns, int) or not columns <= MAX_ROWS < hint(rows):
        return False
    return axis == "k" or (axis == "m" and isinstance(step.a.shape[-2], int))


def _turned(ctx: Lowering, step: Contract) -> Contract:
    """The same product with rows for columns: those of the second operand times the first one's rows."""
    (a, b), rank, end = step.operands, len(step.batch), len(step.shape)
    columns = end - step.column_axes
    a = _with_rows_folded(ctx, a, b)
    if a.rank == 2 and all(dim == 1 for dim in b.shape[:-2]):
        b, rank = ctx.view(b, b.shape[-2:], b.strides[-2:], b.offset), 0
    order = (*range(rank), *range(columns, end), *range(rank, columns))

    def placed(x: Tensor) -> Tensor:
        lead = end - x.rank
        return permute(ctx, ctx.view(x, (*[1] * lead, *x.shape), (*[0] * lead, *x.strides), x.offset), order)

    def transposed(x: Tensor) -> Tensor:
        return permute(ctx, x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))

    def converted(conversion: Conversion | None, old: Tensor, x: Tensor) -> Conversion | None:
        """That of an operand which was ``old``. Along batches that became rows its inputs have one element."""
        if conversion is None:
            return None
        inputs = []
        for leaf, y in conversion.inputs:
            strides = broadcast_strides(y, old.shape)[-x.rank :]
            inputs.append((leaf, transposed(ctx.view(y, x.shape, strides, y.offset))))
        return replace(conversion, inputs=tuple(inputs))

    of_a, of_b = (converted(*each) for each in zip(step.conversions, step.operands, (a, b), strict=True))
    return replace(
        step,
        shape=tuple(step.shape[axis] for axis in order),
        inputs=tuple((leaf, placed(x)) for leaf, x in step.inputs),
        outputs=tuple((value, placed(y)) for value, y in step.outputs),
        operands=(transposed(b), transposed(a)),
        conversions=(of_b, of_a),
        row_axes=step.column_axes,
        column_axes=columns - rank,
    )


def launch_contract(ctx: Lowering, step: Contract) -> None:
    """Launches our kernels: where the number of rows is not known, both, one of them with an empty grid."""
    if _has_few_columns(ctx, step):
        step = _turned(ctx, step)
    tactic = product_tactics(ctx, step).get(step.tactic.name) if step.tactic.name else None
    call = folded(ctx, step)
    kind = _kind(ctx, step, call)
    integers = kind in INTEGERS and (tactic is None or tactic.tile is not None)
    few_rows = le(call.sizes[0], MAX_ROWS) if call.contiguous[1] and not integers else 0
    if tactic is not None:
        few_rows = int(tactic.tile is None)
    if integers:
        step = _with_integers(ctx, step)
        call = folded(ctx, step)
    elements, (of_a, of_b) = _elements(step)
    if few_rows == 0 and kind == "tf32" and has_compact_lines(ctx, step):
        step, lines = compact_lines(ctx, step)
        call = replace(call, b=permute(ctx, lines, (1, 0)))
        elements = (elements[0], Element(lines.dtype.short))
    elif few_rows != 0 and is_const(few_rows) and has_compact_columns(ctx, step):
        step, b = compact_columns(ctx, step)
        call = replace(call, b=b)
        elements = (elements[0], Element(b.dtype.short))
    elif kind and _has_weights_along_n(call) and not step.is_converted:
        batches, (m, n, k) = product(call.batch), call.sizes
        way = tactic or matrix_tactics(ctx, kind, m, n, batches, k, _team(ctx, step, kind, call))[0]
        if way.tile is not None and _will_lie_along_k(call, kind, Team(way.tile, way.teams)):
            call = _along_k(ctx, call)
    a, b, (m, n, _) = call.a, call.b, call.sizes
    ends = ((a, call.a_batch), (b, call.b_batch))
    index = index_type(ctx, *(reach((*call.batch, *x.shape[-2:]), (*strides, *x.strides[-2:])) for x, strides in ends))
    batch, end = len(step.batch), len(step.shape)
    columns = end - step.column_axes
    rows = [Axes("row", range(columns))]
    if not call.rows_folded:
        rows = [Axes("batch", range(batch)), Axes("row", range(batch, columns))]
    last = Axes("column", range(columns, end))

    def form_of(vectors: bool) -> tuple[Form, tuple[Parameters, Parameters, Parameters]]:
        epilogue, more = make_epilogue(ctx, step, step.total, rows, last, vectors=vectors)
        return (elements, epilogue, *call.contiguous, len(call.batch), index), (of_a, of_b, more)

    form, parameters = form_of(vectors=bool(kind) and few_rows == 0)
    if few_rows != 0:
        row = _row_product(ctx, call, Gemv(*form))
        blocks = select(few_rows, ceildiv(n, row.block_columns) * m, 0)
        _launch_kernel(ctx, call, row, parameters, blocks, row.threads)
    if few_rows != 0 and is_const(few_rows):
        return
    if kind:
        form, parameters = form_of(vectors=True) if few_rows != 0 else (form, parameters)
        _launch_matrices(ctx, step, call, form, kind, few_rows, parameters, tactic)
    else:
        tile = (tactic and tactic.tile) or choose_tile(ctx.device, m, step.total.dtype)
        blocks = select(few_rows, 0, ceildiv(m, tile.m) * ceildiv(n, tile.n))
        _launch_kernel(ctx, call, TiledProduct(*form, tile), parameters, blocks, tile.threads)


def _row_product(ctx: Lowering, call: Folded, general: Gemv) -> EmulatedGemv | Gemv | VectorGemv:
    """The kernel for few rows: the device's own, where the operands are what it takes."""
    m, n, k = call.sizes
    if not ctx.device.emulated:
        return few_row_form(ctx.device, general, product(call.batch) * m, n, k) or general
    if isinstance(n, int) or general.b_contiguous == "k":
        form = (general.elements, general.epilogue, general.a_contiguous, general.b_contiguous, general.batch_rank)
        lanes = EmulatedGemv(*form, general.index, n if isinstance(n, int) else 0)
        return lanes if lanes.is_possible else general
    return general


def _launch_matrices(
    ctx: Lowering,
    step: Contract,
    call: Folded,
    form: Form,
    kind: str,
    few_rows: Dim,
    parameters: tuple[Parameters, Parameters, Parameters],
    tactic: ProductTactic | None,
) -> None:
    """By tensor cores, where ``few_rows`` is 0: in one launch, or in parts along k and a step that adds them."""
    m, n, k = call.sizes
    batches = product(call.batch)
    if tactic is None or tactic.tile is None:
        tactic = matrix_tactics(ctx, kind, m, n, batches, k, _team(ctx, step, kind, call))[0]
    assert tactic.tile is not None
    tile, splits, teams = tactic.tile, tactic.splits if few_rows == 0 else 1, tactic.teams
    blocks = select(few_rows, 0, ceildiv(m, tile.m) * ceildiv(n, tile.n) * splits)
    if splits == 1:
        kernel = MatrixProduct(*form, tile, kind, splits, teams)
        _launch_kernel(ctx, call, kernel, parameters, blocks, kernel.threads)
        return
    parts = ctx.empty((splits, batches * m, n), step.total.dtype if kind in INTEGERS else DType.FLOAT32)
    epilogue, of_parts = parts_epilogue(parts, n)
    kernel = MatrixProduct(form[0], epilogue, *form[2:], tile, kind, splits, teams)
    _launch_kernel(ctx, call, kernel, (*parameters[:2], of_parts), blocks, kernel.threads)
    ctx.record(sum_of_parts(ctx, step, parts, splits))


def _launch_kernel(
    ctx: Lowering, call: Folded, kernel: Product, more: Sequence[Parameters], blocks: Dim, threads: int
) -> None:
    builder = KernelBuilder()
    builder.tensor(call.a, "a")
    builder.tensor(call.b, "b")
    m, n, k = call.sizes
    builder.integers(DType.INT32, m=m, n=n, k_end=k)
    for name, stride in zip(("a_m", "a_k", "b_k", "b_n"), (*call.a.strides[-2:], *call.b.strides[-2:]), strict=True):
        if name in kernel.strides:
            builder.integer(stride, kernel.index, name)
    if isinstance(kernel, MatrixProduct):
        count_tiles(builder, kernel.tile, m, n)
    add_batch(builder, call.batch, a=call.a_batch, b=call.b_batch)
    for parameters in more:
        builder.include(parameters)
    grid = (blocks * product(call.batch), 1, 1)
    shared, body = kernel.shared_bytes, kernel.body
    builder.launch(ctx, kernel.name, grid, (threads, 1, 1), shared_bytes=shared, body=body, resident=kernel.resident)


def add_batch(builder: Parameters, batch: Sequence[Dim], **strides: Sequence[Dim]) -> None:
    """What `batch_offsets` needs: batch sizes but the first, and the batch strides of each operand."""
    for number, dim in enumerate(batch[1:], 1):
        builder.integer(dim, DType.INT32, f"batch{number}")
    for operand, along in strides.items():
        for number, stride in enumerate(along):
            builder.integer(stride, name=f"{operand}_batch{number}")
