"""Matrix products: MatMul and Gemm."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.ir import DType
from ..graph.lowering import (
    Arg,
    Float32,
    Float64,
    Int32,
    Int64,
    InvalidModel,
    Lowering,
    Tensor,
    Unsupported,
    broadcast_shapes,
    broadcast_strides,
)
from ..graph.symbolic import Dim, ceildiv, eq, hint, is_const, le, logical_or, lt, product, select
from ..kernels.layout import collapse
from ..kernels.matmul import FLAT, SQUARE, TALL, Product, RowProduct, TiledProduct
from ..kernels.tiles import Tile
from ..runtime.libraries import MATMUL, WORKSPACE_BYTES, LibraryProblem, ProblemFlags
from .registry import FLOATS, T, op

PRODUCTS = FLOATS | {DType.INT32, DType.INT64, DType.UINT32, DType.UINT64}
MAX_ROWS = 4
"""Products of at most this many rows go to the kernel for few rows."""
_costs = ((TALL, 1.0), (SQUARE, 1.1), (FLAT, 1.4))
"""Tiles with the relative time of one multiplication."""


def choose_tile(rows: Dim, dtype: DType) -> Tile:
    """The tile that does the least work for a result of so many rows, padding included. All are as wide.

    Tiles of 8-byte elements are small: larger ones have too many registers and too much shared memory for a GPU.
    """
    if dtype.itemsize == 8:
        return FLAT
    return min(_costs, key=lambda entry: entry[1] * hint(ceildiv(rows, entry[0].m)) * entry[0].m)[0]


def _contiguous_axis(x: Tensor, row: str, column: str) -> str:
    """The name of the dimension of matrices x along which neighbours in memory lie, "" for neither."""
    if x.strides[-1] == 1 or x.shape[-1] == 1:
        return column if x.strides[-1] == 1 else (row if x.strides[-2] == 1 else "")
    return row if x.strides[-2] == 1 else ""


def _with_rows_folded(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    """a [batch..., m, k] as [batch * m, k] where b is one matrix and a's memory allows it."""
    if a.rank == 2 or any(dim != 1 for dim in b.shape[:-2]):
        return a
    dims, (strides,) = collapse(a.shape[:-1], [a.strides[:-1]])
    if len(dims) > 1:
        return a
    rows, stride = (dims[0], strides[0]) if dims else (1, 0)
    return ctx.view(a, (rows, a.shape[-1]), (stride, a.strides[-1]), a.offset)


def multiply(
    ctx: Lowering,
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """alpha * a @ b + beta * addend for a [batch..., m, k], b [batch..., k, n] of any strides, batches broadcast.

    addend broadcasts to [m, n]. Raises InvalidModel where the inner dimensions differ.
    """
    ctx.require(eq(a.shape[-1], b.shape[-2]), "the inner dimensions of the matrices differ")
    batch = broadcast_shapes(ctx, a.shape[:-2], b.shape[:-2])
    out = ctx.empty((*batch, a.shape[-2], b.shape[-1]), a.dtype)
    a = _with_rows_folded(ctx, a, b)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if a.rank == 2 and all(dim == 1 for dim in b.shape[:-2]):
        b = ctx.view(b, b.shape[-2:], b.strides[-2:], b.offset)
        batch = ()
    batch_strides = [_batch_strides(x, batch) for x in (a, b)]
    batch_dims, (a_batch, b_batch) = collapse(batch, batch_strides)
    if not batch_dims:
        batch_dims, a_batch, b_batch = [1], (0,), (0,)
    a_contiguous, b_contiguous = _contiguous_axis(a, "m", "k"), _contiguous_axis(b, "k", "n")
    reach = [x.shape[-2] * x.strides[-2] + x.shape[-1] * x.strides[-1] for x in (a, b)]
    scaled = alpha != 1.0 or (addend is not None and beta != 1.0)
    strides = (*a.strides[-2:], *b.strides[-2:])
    factor = Float64 if a.dtype is DType.FLOAT64 else Float32

    if _library_product(ctx, out, a, b, addend, scaled, (a_contiguous, b_contiguous), batch_dims, (a_batch, b_batch)):
        return out

    def launch(kernel: Product, blocks: Dim, threads: int) -> None:
        place = Int32 if kernel.index == "i32" else Int64
        names = dict(zip(("a_m", "a_k", "b_k", "b_n"), strides, strict=True))
        args: list[Arg] = [out, a, b]
        args += [addend] if addend is not None else []
        args += [Int32(m), Int32(n), Int32(k)]
        args += [place(names[name]) for name in kernel.strides]
        args += [Int32(dim) for dim in batch_dims[1:]]
        args += [Int64(stride) for stride in (*a_batch, *b_batch)]
        args += [place(stride) for stride in broadcast_strides(addend, (m, n))] if addend is not None else []
        args += [factor(alpha), factor(beta)] if scaled else []
        ctx.launch(kernel.spec, (blocks * product(batch_dims), 1, 1), (threads, 1, 1), args, writes=(out,))

    common = {
        "storage": a.dtype.short,
        "a_contiguous": a_contiguous,
        "b_contiguous": b_contiguous,
        "batch_rank": len(batch_dims),
        "addend": addend is not None,
        "scaled": scaled,
        "index": ctx.index_dtype(*reach),
    }
    few_rows = le(m, MAX_ROWS) if b_contiguous else 0
    if few_rows != 0:
        kernel = RowProduct(**common)  # type: ignore[arg-type]
        blocks = ceildiv(n, kernel.block_columns) * m
        launch(kernel, select(few_rows, blocks, 0), kernel.threads)
    if few_rows == 0 or not is_const(few_rows):
        tile = choose_tile(m, a.dtype)
        blocks = ceildiv(m, tile.m) * ceildiv(n, tile.n)
        launch(TiledProduct(**common, tile=tile), select(few_rows, 0, blocks), tile.threads)  # type: ignore[arg-type]
    return out


def _library_product(
    ctx: Lowering, out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None, scaled: bool,
    contiguous: tuple[str, str], batch_dims: Sequence[Dim], batch_strides: Sequence[Sequence[Dim]],
) -> bool:  # fmt: skip
    """Records a call of cuBLASLt for this product; False where it has none or the device does not offer it."""
    if "cublaslt" not in ctx.device.libraries or not a.dtype.is_float or scaled or len(batch_dims) > 1:
        return False
    if "" in contiguous:
        return False
    (m, k), n = a.shape[-2:], b.shape[-1]
    if addend is not None and broadcast_strides(addend, (m, n)) != (0, 1):
        return False
    flags = ProblemFlags(0)
    flags |= ProblemFlags.TF32 if ctx.options.use_tf32 else flags
    flags |= ProblemFlags.DETERMINISTIC if ctx.options.deterministic else flags
    flags |= ProblemFlags.BIAS if addend is not None else flags
    leading = []
    for x, transposed, flag in (
        (a, contiguous[0] == "m", ProblemFlags.A_TRANSPOSED),
        (b, contiguous[1] == "k", ProblemFlags.B_TRANSPOSED),
    ):
        lines, line = x.shape[-2:] if not transposed else x.shape[:-3:-1]
        stride = x.strides[-1 if transposed else -2]
        flags |= flag if transposed else ProblemFlags(0)
        # The library does not take lines that overlap, such as those of a broadcast matrix.
        if not ctx.guard(logical_or(le(lines, 1), le(line, stride))):
            return False
        leading.append(stride)
    if not ctx.guard(lt(0, k)):
        return False
    workspace = ctx.empty((WORKSPACE_BYTES,), DType.UINT8)
    tensors = [out, a, b, *([addend] if addend is not None else []), workspace]
    sizes = [m, n, k, *leading, batch_dims[0], *(strides[0] for strides in batch_strides), WORKSPACE_BYTES]
    problem = LibraryProblem(MATMUL, a.dtype.onnx, flags)
    ctx.library(problem, [*tensors, *map(Int64, sizes)], writes=(out, workspace))
    return True


def _batch_strides(x: Tensor, batch: Sequence[Dim]) -> tuple[Dim, ...]:
    leading = Tensor(x.dtype, x.shape[:-2], x.buffer, strides=x.strides[:-2])
    return broadcast_strides(leading, batch)


@op("MatMul", since=1, types={"T": PRODUCTS})
def matmul(ctx: Lowering, a: T, b: T) -> Tensor:
    if a.rank == 0 or b.rank == 0:
        raise InvalidModel("MatMul takes no scalars")
    left, right = a, b
    if a.rank == 1:
        left = ctx.view(a, (1, *a.shape), (a.shape[0] * a.strides[0], *a.strides), a.offset)
    if b.rank == 1:
        right = ctx.view(b, (*b.shape, 1), (*b.strides, b.shape[0] * b.strides[0]), b.offset)
    result = multiply(ctx, left, right)
    rows = () if a.rank == 1 else result.shape[-2:-1]
    columns = () if b.rank == 1 else result.shape[-1:]
    if a.rank == 1 or b.rank == 1:
        return ctx.view(result, (*result.shape[:-2], *rows, *columns))
    return result


@op("Gemm", since=7, types={"T": PRODUCTS})
def gemm(
    ctx: Lowering,
    a: T,
    b: T,
    c: T | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    if a.rank != 2 or b.rank != 2:
        raise InvalidModel(f"Gemm takes matrices, not tensors of ranks {a.rank} and {b.rank}")
    if transA:
        a = ctx.view(a, a.shape[::-1], a.strides[::-1], a.offset)
    if transB:
        b = ctx.view(b, b.shape[::-1], b.strides[::-1], b.offset)
    if not a.dtype.is_float and (alpha != 1.0 or (c is not None and beta != 1.0)):
        raise Unsupported("attribute", "Gemm of integers with alpha or beta other than 1")
    if c is None or beta == 0.0:
        return multiply(ctx, a, b, None, alpha)
    if c.rank > 2:
        raise InvalidModel(f"the addend C of Gemm has rank {c.rank}")
    target = (a.shape[0], b.shape[1])
    for dim, wanted in zip(c.shape, target[2 - c.rank :], strict=True):
        ctx.require(logical_or(eq(dim, 1), eq(dim, wanted)), "the addend C of Gemm does not broadcast to the result")
    return multiply(ctx, a, b, c, alpha, beta)


@op("Gemm", since=1, types={"T": FLOATS})
def gemm_1(
    ctx: Lowering,
    a: T,
    b: T,
    c: T,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    broadcast: int = 0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    return gemm(ctx, a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
