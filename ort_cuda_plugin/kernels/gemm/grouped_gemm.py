"""Grouped GEMM for mixtures of experts: one launch multiplies each row by its own expert's weights.

Weights of experts without rows are not read. For few rows, each block computes columns of one row (a GEMV). Many rows
are first sorted by expert, as a list of indices without a copy, so that a tile of the result has rows of one expert and
reads its weights once. Kernels compute each weight by a scalar expression of expert, column and k, so that packed or
scaled weights need no conversion pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, floordiv, le, select, sym_max, sym_min
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.row_program import SUM
from ...program.steps.trace import Use
from ..codegen.epilogue import Epilogue
from ..codegen.fragment import Fragment, join
from ..codegen.plain_function import plain_kernel
from ..codegen.simt_fragments import Element, Operand, Tile, log2
from ..codegen.source import KernelBuilder, Parameters, load_text, text_property
from ..contraction.prologue import INNER, OUTER, ConvertedElement, Inline, conversion_setup, shared_name
from ..elementwise.index_map import IndexMap, Loads, gather_map
from .gemm_mma import kind_of
from .gemm_simt import Product
from .gemv import Gemv
from .mma_fragments import MatrixTile
from .tile_shapes import TileConfig, choose_tile, matrix_tiles

if TYPE_CHECKING:
    from numba import cuda, int32, int64

    from ...compiler.intrinsics import Pointer

MAX_FEW_ROWS = 16
"""Maximum rows for the GEMV kernel; rows of the same expert then share its weights in the L2."""
THREADS = 128  # threads per block of the kernel that sorts rows

Shared: TypeAlias = tuple[Scalar, ...]
WeightElement: TypeAlias = Callable[[Loads, Scalar, Scalar, Scalar, Shared], Scalar]
WeightBlock: TypeAlias = Callable[[Loads, Scalar, Scalar, Scalar], Shared]

BLOCK: Final = 16
"""Consecutive elements along k that have the same `Weights.shared` values (scale, zero point)."""


def _nothing(loads: Loads, expert: Scalar, column: Scalar, k: Scalar) -> Shared:
    return ()


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of all experts: [columns, k] each.

    ``element(loads, expert, column, k, shared)`` returns the float32 expression of a weight; its coordinates are int64
    and in range. ``shared(loads, expert, column, k)`` returns the values that `BLOCK` aligned elements along k have in
    common; they are loaded once per `BLOCK`. ``read`` are the tensors that the two functions load; their first
    dimension is the expert. ``bias`` is None or [experts, columns].
    """

    columns: Dim
    element: WeightElement
    read: tuple[Tensor, ...]
    bias: Tensor | None = None
    shared: WeightBlock = _nothing


@dataclass(frozen=True, eq=False)
class Choices:
    """The expert of each row: ``experts``, int32 [rows], numbers below ``count``.

    ``sorted`` is empty or has three tensors: the row indices sorted by expert, the position of each expert's first row
    among these indices, and the number of each expert's first tile among the tiles of all experts. A tile has
    ``tile.m`` rows. ``few`` is the condition under which the GEMV kernel for few rows runs, which reads none of the
    three tensors: 0, 1, or an expression that each Run evaluates.
    """

    experts: Tensor
    count: Dim
    few: Dim
    tile: Tile
    sorted: tuple[Tensor, ...] = field(default=())

    @property
    def rows(self) -> Dim:
        return self.experts.shape[0]


@plain_kernel
def _group(order: Pointer[int], starts: Pointer[int], experts: Pointer[int], n: int, *, threads: int) -> None:
    expert = int64(cuda.blockIdx.x)
    lane = int64(cuda.threadIdx.x)
    counts = cuda.shared.array(2 * threads, int64)
    # A block finds the rows of one expert. Each thread scans its share of consecutive rows twice, to count and then to
    # store, so that the rows of an expert stay in order.
    share = (n + threads - 1) // threads
    start = min(lane * share, n)
    end = min(start + share, n)
    less = int64(0)
    same = int64(0)
    for i in range(start, end):
        chosen = int64(experts[i])
        if chosen < expert:
            less += 1
        if chosen == expert:
            same += 1
    counts[lane] = less
    counts[threads + lane] = same
    cuda.syncthreads()
    place = int64(0)
    for other in range(threads):
        place += counts[other]
    for other in range(lane):
        place += counts[threads + other]
    for i in range(start, end):
        if int64(experts[i]) == expert:
            order[place] = int32(i)
            place += 1
    if lane == threads - 1:
        starts[expert + 1] = int32(place)
        if expert == 0:
            starts[0] = int32(0)


def group_rows(ctx: Lowering, experts: Tensor, count: Dim) -> Choices:
    """Sort the rows by ``experts``, int32 [rows] below ``count``, and return the result for `grouped_product`."""
    rows = experts.shape[0]
    few = le(rows, MAX_FEW_ROWS)
    settled = ctx.settled(few)
    if settled is not None:
        few = int(settled)
    tile = choose_tile(ctx.device, ceildiv(rows, sym_max(count, 1)), DType.FLOAT32)
    if few == 1:
        return Choices(experts, count, few, tile)
    order, starts = ctx.empty((rows,), DType.INT32), ctx.empty((count + 1,), DType.INT32)
    blocks = select(few, 0, count)
    _group.launch(ctx, "group_rows", blocks, THREADS, order=order, starts=starts, experts=experts, n=rows)

    def tiles_before(maps: IndexMap, c: list[Scalar]) -> Scalar:
        at = maps.source(starts).at
        more = tile.m - 1
        return maps.fold(SUM, c[0], lambda i: [s.trunc_divide(at([i + 1]) - at([i]) + more, tile.m)])[0]

    # In a Run with few rows nothing is sorted, and ``starts`` must not be read: launch no blocks.
    tiles = gather_map(ctx, (select(few, 0, count + 1),), DType.INT32, tiles_before)
    return Choices(experts, count, few, tile, (order, starts, tiles))


@dataclass(frozen=True)
class GroupedRows(Gemv):
    """Grouped GEMV kernel: a block computes 4 columns of one row, with the dot product of `Gemv`."""

    @property
    def name(self) -> str:
        return f"grouped_row_{self.types}"

    def setup(self) -> list[Fragment]:
        text = f"""
            block = int32(cuda.blockIdx.x)
            rest = int32(block // m)
            row = int32(block - rest * m)
            column0 = int32(rest * {self.block_columns})
            thread = int32(cuda.threadIdx.x)
            expert = int64(experts[row])
            a_base = int64(row // share) * a_m
            b_base = int64(0)
            b_n = int32(0)
            """
        return [Fragment("columns_of_row", text, "row column0 thread expert a_base b_base b_n")]


@dataclass(frozen=True)
class GroupedTiles(Product):
    """SIMT grouped GEMM kernel: one block per tile of an expert's rows and columns.

    The grid has enough blocks for any distribution of rows over experts; surplus blocks return at once.
    """

    tile: Tile = field(kw_only=True)

    @property
    def name(self) -> str:
        return f"grouped_{self.tile.name}_{self.types}"

    @text_property
    def body(self) -> str:
        a = Operand("a", "a", "row0", "row_end", "k_end", "0", "1", True)
        b = Operand("b", "a", "column0", "n", "k_end", "0", "1", True)
        fragments = self.tile_fragments(self.tile, a, b)
        return join([conversion_setup(*self.elements), _tile_of_rows(self.tile), *fragments])


def _tile_of_rows(tile: Tile) -> Fragment:
    """Find the block's ``expert`` by a binary search in ``tiles``, and compute the bounds of its rows and columns."""
    text = f"""
        tiles_n = int32((n + {tile.n - 1}) >> {log2(tile.n)})
        block = int32(cuda.blockIdx.x)
        number = int32(block // tiles_n)
        if number >= tiles[count]:
            return
        column0 = int32((block - number * tiles_n) * {tile.n})
        # The last expert whose tiles start at or before the block's; an expert without rows has no tiles.
        low = int32(0)
        high = int32(count)
        while high - low > 1:
            middle = int32((low + high) >> 1)
            if tiles[middle] <= number:
                low = middle
            else:
                high = middle
        expert = int64(low)
        row0 = int32(starts[expert] + (number - tiles[expert]) * {tile.m})
        row_end = int32(starts[expert + 1])
        steps = int32((k_end + {tile.k - 1}) >> {log2(tile.k)})
        a_base = int64(0)
        b_base = int64(0)
        """
    return Fragment("tile_of_expert", text, "column0 expert row0 row_end steps a_base b_base")


@dataclass(frozen=True)
class GroupedMatrices(Product):
    """Grouped GEMM kernel on tensor cores, with mma operand type ``kind``.

    ``a_row`` is the format string of the row of x that belongs to a row in the order of experts.
    """

    tile: Tile = field(kw_only=True)
    kind: str = field(kw_only=True)
    a_row: str = field(kw_only=True)

    @property
    def resident(self) -> int:
        return TileConfig(self.tile, 1).resident

    @property
    def name(self) -> str:
        return f"grouped_mma_{self.tile.name}_{self.types}"

    @text_property
    def body(self) -> str:
        a = Operand("a", "a", "row0", "row_end", "k_end", "a_m", "1", True, self.a_row)
        b = Operand("b", "a", "column0", "n", "k_end", "0", "1", True)
        matrices = MatrixTile(self.tile, self.kind, a, b, self.elements, "int64")
        return join(
            [
                conversion_setup(*self.elements),
                _tile_of_rows(self.tile),
                Fragment("first_k", "k0 = int32(0)", "k0"),
                matrices.fragment("row_end", "n", self.epilogue),
            ]
        )


def grouped_product(
    ctx: Lowering, choices: Choices, x: Tensor, share: Dim, weights: Weights, real: DType = DType.FLOAT32
) -> Tensor:
    """Return float32 [rows, columns]: row i is row i // ``share`` of x [.., k] times the weights of row i's expert.

    Tensor cores may round the operands to type ``real``, or to TF32 if ``real`` is float32.
    """
    x = ctx.contiguous(x)
    result = ctx.empty((choices.rows, weights.columns), DType.FLOAT32)
    element, of_weights, loaded = _weight_element(weights)
    few, rows, count, tile = choices.few, choices.rows, choices.count, choices.tile
    chosen = sym_min(rows, count)
    of_experts = {t.buffer for t in weights.read}
    uses = {t: Use(elements=floordiv(t.size, sym_max(count, 1)) * chosen) for t in loaded if t.buffer in of_experts}
    if few != 0:
        form = (_row_element(x, f"a_base + int64({INNER})"), element)
        kernel = GroupedRows(form, _epilogue(weights.bias, "row#"), "k", "k")
        builder = _builder(x, result, share, weights, of_weights, experts=choices.experts)
        builder.integers(DType.INT32, m=rows)
        blocks = select(few, ceildiv(weights.columns, kernel.block_columns) * rows, 0)
        builder.launch(ctx, kernel.name, (blocks, 1, 1), (kernel.threads, 1, 1), uses, body=kernel.body)
    if few != 1:
        order, starts, tiles = choices.sorted
        grouped = _tiles_of_rows(ctx, x, element, _epilogue(weights.bias, "order[int64(row#)]"), tile, real)
        builder = _builder(x, result, share, weights, of_weights, order=order, starts=starts, tiles=tiles)
        builder.integers(DType.INT32, count=count)
        most = (floordiv(rows, tile.m) + chosen) * ceildiv(weights.columns, tile.n)
        blocks = select(few, 0, most)
        builder.launch(
            ctx,
            grouped.name,
            (blocks, 1, 1),
            (grouped.tile.threads, 1, 1),
            uses,
            body=grouped.body,
            resident=grouped.resident,
        )
    return result


def _tiles_of_rows(
    ctx: Lowering, x: Tensor, element: Element, epilogue: Epilogue, tile: Tile, real: DType
) -> GroupedTiles | GroupedMatrices:
    row, kind = "int32(order[int64({})] // share)", kind_of(ctx.device, ctx.options, real.short)
    of_rows = _row_element(x, f"int64({row.format(OUTER)}) * a_m + int64({INNER})")
    if not kind:
        return GroupedTiles((of_rows, element), epilogue, tile=tile)
    of_rows = Element(real.short) if x.dtype is real else of_rows
    (matrix_tile,) = (y for y in matrix_tiles(kind) if y.m == tile.m)
    return GroupedMatrices((of_rows, element), epilogue, tile=matrix_tile, kind=kind, a_row=row)


def _builder(
    x: Tensor, result: Tensor, share: Dim, weights: Weights, of_weights: Parameters, **named: Tensor
) -> KernelBuilder:
    builder = KernelBuilder()
    builder.tensor(x, "a")
    builder.tensor(result, "y", written=True)
    for name, tensor in named.items():
        builder.tensor(tensor, name)
    builder.tensors(bias=weights.bias)
    builder.integers(DType.INT32, n=weights.columns, k_end=x.shape[-1], share=share)
    builder.integers(a_m=x.shape[-1])
    builder.include(of_weights)
    return builder


def _weight_element(weights: Weights) -> tuple[Element, Parameters, list[Tensor]]:
    """Return the loader of the weights' elements, the kernel parameters that it needs, and the tensors it loads."""
    emit = Inline("w_", indent=0)
    builder = KernelBuilder("w_", emit)
    loads = Loads(builder)
    coordinates = [Scalar(DType.INT64, "coordinate") for _ in range(3)]
    for coordinate, text in zip(coordinates, ("expert", f"int64({OUTER})", f"int64({INNER})"), strict=True):
        emit.bind(coordinate, text)
    shared = weights.shared(loads, coordinates[0], coordinates[1], coordinates[2])
    texts = tuple(emit.value(x) for x in shared)
    leaves = tuple(Scalar(x.dtype, "leaf") for x in shared)
    for number, leaf in enumerate(leaves):
        emit.bind(leaf, shared_name(number))
    value = emit.value(weights.element(loads, coordinates[0], coordinates[1], coordinates[2], leaves))
    element = ConvertedElement("f32", weights.read[0].dtype, value, tuple(emit.taken()), texts)
    return element, builder, loads.tensors


def _row_element(x: Tensor, offset: str) -> Element:
    return ConvertedElement("f32", x.dtype, load_text("a", offset, x.dtype))


def _epilogue(bias: Tensor | None, row: str) -> Epilogue:
    columns, value = [], "total@#"
    if bias is not None:
        columns.append(f"bias@ = {load_text('bias', 'expert * int64(n) + int64(column@)', bias.dtype)}")
        value += " + bias@"
    rows, stores = [f"y_base# = int64({row}) * int64(n)"], ["y[y_base# + int64(column@)] = value@#"]
    return Epilogue(tuple(rows), (f"value@# = {value}",), tuple(stores), tuple(columns))
