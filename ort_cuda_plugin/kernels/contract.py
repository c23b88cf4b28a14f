"""Matrix products with what follows them: records them as steps, and launches our kernels or calls cuBLASLt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..model.ir import DType
from ..program import scalar as s
from ..program.libraries import MATMUL, WORKSPACE_BYTES, LibraryProblem, ProblemFlags
from ..program.lowering import (
    Arg,
    Int32,
    Int64,
    Lowering,
    LoweringOptions,
    Tensor,
    broadcast_shapes,
    broadcast_strides,
)
from ..program.scalar import Scalar
from ..program.steps import Contract, Input, Map, Output, Substitution, Sums, used_inputs
from ..program.symbolic import Dim, ceildiv, eq, hint, is_const, le, logical_or, lt, product, select
from .elementwise import launch_map, loadable, record
from .epilogue import Axes, make_epilogue
from .layout import collapse
from .matmul import FLAT, SQUARE, TALL, Product, RowProduct, TiledProduct
from .tiles import Tile

__all__ = ["choose_tile", "launch_contract", "launch_rest", "multiply", "precision_flags"]

MAX_ROWS = 4
"""Products of at most this many rows go to the kernel for few rows."""
_costs = ((TALL, 1.0), (SQUARE, 1.1), (FLAT, 1.4))
"""Tiles with the relative time of one multiplication."""


def multiply(
    ctx: Lowering,
    a: Tensor,
    b: Tensor,
    *others: Tensor,
    finish: Callable[..., Scalar] | None = None,
) -> Tensor:
    """a @ b for a [batch..., m, k], b [batch..., k, n] of any strides, batches broadcast.

    ``finish(total, *elements)`` gives the result from the sum, which is of the type that sums are made in, and from the
    elements of ``others``, which broadcast to the result; by default it is the sum. Raises InvalidModel where the inner
    dimensions differ.
    """
    ctx.require(eq(a.shape[-1], b.shape[-2]), "the inner dimensions of the matrices differ")
    shape = (*broadcast_shapes(ctx, a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = Scalar(s.accumulation_type(a.dtype) if a.dtype.is_float else a.dtype, "leaf")
    leaves = [Scalar(x.dtype, "leaf") for x in others]
    value = total if finish is None else finish(total, *leaves)
    core = s.cast(value, a.dtype)
    out = ctx.empty(shape, a.dtype)
    inputs = loadable(ctx, used_inputs(zip(leaves, others, strict=True), [core]))
    a, b = ctx.materialize(a), ctx.materialize(b)
    step = Contract(ctx.nodes, shape, inputs, ((core, out),), operands=(a, b), total=total, core=core)
    record(ctx, step, launch_contract)
    return out


def choose_tile(rows: Dim, dtype: DType) -> Tile:
    """The tile that does the least work for a result of so many rows, padding included. All are as wide.

    Tiles of 8-byte elements are small: larger ones have too many registers and too much shared memory for a GPU.
    """
    if dtype.itemsize == 8:
        return FLAT
    return min(_costs, key=lambda entry: entry[1] * hint(ceildiv(rows, entry[0].m)) * entry[0].m)[0]


def precision_flags(options: LoweringOptions) -> ProblemFlags:
    """What the session's options say of the precision of library calls."""
    flags = ProblemFlags.TF32 if options.use_tf32 else ProblemFlags(0)
    return flags | (ProblemFlags.DETERMINISTIC if options.deterministic else ProblemFlags(0))


@dataclass(frozen=True)
class _Call:
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
        return _contiguous_axis(self.a, "m", "k"), _contiguous_axis(self.b, "k", "n")


def _contiguous_axis(x: Tensor, row: str, column: str) -> str:
    """The name of the dimension of matrices x along which neighbours in memory lie, "" for neither."""
    if x.strides[-1] == 1 or x.shape[-1] == 1:
        return column if x.strides[-1] == 1 else (row if x.strides[-2] == 1 else "")
    return row if x.strides[-2] == 1 else ""


def _call(ctx: Lowering, step: Contract) -> _Call:
    a, b = _with_rows_folded(ctx, step.a, step.b), step.b
    batch = step.batch
    folded = a.rank == 2 and all(dim == 1 for dim in b.shape[:-2])
    if folded:
        b = ctx.view(b, b.shape[-2:], b.strides[-2:], b.offset)
        batch = ()
    dims, (a_batch, b_batch) = collapse(batch, [_batch_strides(x, batch) for x in (a, b)])
    if not dims:
        dims, a_batch, b_batch = [1], (0,), (0,)
    return _Call(a, b, dims, a_batch, b_batch, folded)


def _with_rows_folded(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    """a [batch..., m, k] as [batch * m, k] where b is one matrix and a's memory allows it."""
    if a.rank == 2 or any(dim != 1 for dim in b.shape[:-2]):
        return a
    dims, (strides,) = collapse(a.shape[:-1], [a.strides[:-1]])
    if len(dims) > 1:
        return a
    rows, stride = (dims[0], strides[0]) if dims else (1, 0)
    return ctx.view(a, (rows, a.shape[-1]), (stride, a.strides[-1]), a.offset)


def _batch_strides(x: Tensor, batch: Sequence[Dim]) -> tuple[Dim, ...]:
    leading = Tensor(x.dtype, x.shape[:-2], x.buffer, strides=x.strides[:-2])
    return broadcast_strides(leading, batch)


def launch_contract(ctx: Lowering, step: Contract) -> None:
    """Launches a product with its epilogue: cuBLASLt's and a map, or our own kernel."""
    call = _call(ctx, step)
    if not _call_library(ctx, step, call):
        _launch(ctx, step, call)


# ---- our kernels ----


def _launch(ctx: Lowering, step: Contract, call: _Call) -> None:
    """Launches our kernels: where the number of rows is not known, both, one of them with an empty grid."""
    a, b, (m, n, _) = call.a, call.b, call.sizes
    reach = [x.shape[-2] * x.strides[-2] + x.shape[-1] * x.strides[-1] for x in (a, b)]
    index = ctx.index_dtype(*reach)
    batch, end = len(step.batch), len(step.shape)
    columns = end - step.column_axes
    rows = [Axes("row", range(columns))]
    if not call.rows_folded:
        rows = [Axes("batch", range(batch)), Axes("row", range(batch, columns))]
    epilogue, args = make_epilogue(ctx, step, step.total, rows, Axes("column", range(columns, end)))
    form = (a.dtype.short, epilogue, *call.contiguous, len(call.batch), index)
    few_rows = le(m, MAX_ROWS) if call.contiguous[1] else 0
    if few_rows != 0:
        row = RowProduct(*form)
        blocks = select(few_rows, ceildiv(n, row.block_columns) * m, 0)
        _launch_kernel(ctx, step, call, row, args, blocks, row.threads)
    if few_rows == 0 or not is_const(few_rows):
        tile = choose_tile(m, a.dtype)
        blocks = select(few_rows, 0, ceildiv(m, tile.m) * ceildiv(n, tile.n))
        _launch_kernel(ctx, step, call, TiledProduct(*form, tile), args, blocks, tile.threads)


def _launch_kernel(
    ctx: Lowering, step: Contract, call: _Call, kernel: Product, epilogue: Sequence[Arg], blocks: Dim, threads: int
) -> None:
    place = Int32 if kernel.index == "i32" else Int64
    strides = dict(zip(("a_m", "a_k", "b_k", "b_n"), (*call.a.strides[-2:], *call.b.strides[-2:]), strict=True))
    args: list[Arg] = [call.a, call.b, *(Int32(size) for size in call.sizes)]
    args += [place(strides[name]) for name in kernel.strides]
    args += [Int32(dim) for dim in call.batch[1:]]
    args += [Int64(stride) for stride in (*call.a_batch, *call.b_batch)]
    grid = (blocks * product(call.batch), 1, 1)
    ctx.launch(kernel.spec, grid, (threads, 1, 1), [*args, *epilogue], writes=[y for _, y in step.outputs])


# ---- cuBLASLt ----


def _call_library(ctx: Lowering, step: Contract, call: _Call) -> bool:
    """Records a call of cuBLASLt for this product; False where it has none or the device does not offer it."""
    a, b = call.a, call.b
    if "cublaslt" not in ctx.device.libraries or not a.dtype.is_float or len(call.batch) > 1 or "" in call.contiguous:
        return False
    bias = _bias(step)
    if bias is None and not step.is_plain:
        return False
    flags = precision_flags(ctx.options) | (ProblemFlags(0) if bias is None else ProblemFlags.BIAS)
    leading = []
    for x, transposed, flag in (
        (a, call.contiguous[0] == "m", ProblemFlags.A_TRANSPOSED),
        (b, call.contiguous[1] == "k", ProblemFlags.B_TRANSPOSED),
    ):
        lines, line = x.shape[:-3:-1] if transposed else x.shape[-2:]
        stride = x.strides[-1 if transposed else -2]
        flags |= flag if transposed else ProblemFlags(0)
        # The library does not take lines that overlap, such as those of a broadcast matrix.
        if not ctx.guard(logical_or(le(lines, 1), le(line, stride))):
            return False
        leading.append(stride)
    m, n, k = call.sizes
    if not ctx.guard(lt(0, k)):
        return False
    direct = next((y for x, y in step.outputs if x is step.core and y.is_contiguous and y.offset == 0), None)
    out = direct if direct is not None else ctx.empty(step.shape, a.dtype)
    workspace = ctx.empty((WORKSPACE_BYTES,), DType.UINT8)
    tensors = [out, a, b, *([bias] if bias is not None else []), workspace]
    sizes = [m, n, k, *leading, call.batch[0], call.a_batch[0], call.b_batch[0], WORKSPACE_BYTES]
    problem = LibraryProblem(MATMUL, a.dtype.onnx, flags)
    ctx.library(problem, [*tensors, *map(Int64, sizes)], writes=(out, workspace))
    leaf = Scalar(out.dtype, "leaf")
    launch_rest(ctx, step, {step.core: leaf}, (leaf, out))
    return True


def launch_rest(ctx: Lowering, step: Sums, replaced: Mapping[Scalar, Scalar], known: Input) -> None:
    """Launches as a map what follows the values of ``known``, which a library wrote."""
    new = Substitution(replaced)
    outputs: tuple[Output, ...] = tuple((new(x), y) for x, y in step.outputs if y is not known[1])
    if outputs:
        inputs = used_inputs([known, *step.inputs], [x for x, _ in outputs])
        launch_map(ctx, Map(step.nodes, step.shape, inputs, outputs))


def _bias(step: Contract) -> Tensor | None:
    """The vector that ``step.core`` adds to each row of sums, where it does that and no more."""
    core = step.core.operands[0] if step.core.op == "cast" else step.core
    if core.op != "add" or core.operands[0] is not step.total:
        return None
    added = core.operands[1].operands[0] if core.operands[1].op == "cast" else core.operands[1]
    for leaf, x in step.inputs:
        if leaf is added and x.dtype is step.a.dtype:
            strides = broadcast_strides(x, step.shape)
            dims, (along,) = collapse(step.shape[-step.column_axes :], [strides[-step.column_axes :]])
            if all(stride == 0 for stride in strides[: -step.column_axes]) and (not dims or along == (1,)):
                return x
    return None
