"""Matrix products: MatMul and Gemm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.ir import DType
from ..graph.lowering import (
    Arg,
    Float32,
    Float64,
    Int32,
    Int64,
    InvalidModel,
    Lowering,
    LoweringOptions,
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
from .registry import FLOATS, WIDE_INTS, T, op

PRODUCTS = FLOATS | WIDE_INTS
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


@dataclass(frozen=True)
class _Call:
    """One product as our kernels and cuBLASLt take it: a [m, k] and b [k, n], for each index of ``batch``."""

    out: Tensor
    a: Tensor
    b: Tensor
    addend: Tensor | None
    alpha: float
    beta: float
    batch: list[Dim]
    a_batch: tuple[Dim, ...]
    b_batch: tuple[Dim, ...]

    @property
    def sizes(self) -> tuple[Dim, Dim, Dim]:
        """m, n, k."""
        return self.a.shape[-2], self.b.shape[-1], self.a.shape[-1]

    @property
    def is_scaled(self) -> bool:
        return self.alpha != 1.0 or (self.addend is not None and self.beta != 1.0)

    @property
    def addend_strides(self) -> tuple[Dim, ...]:
        m, n, _ = self.sizes
        return () if self.addend is None else broadcast_strides(self.addend, (m, n))

    @property
    def contiguous(self) -> tuple[str, str]:
        """The dimensions along which neighbours of a and of b lie."""
        return _contiguous_axis(self.a, "m", "k"), _contiguous_axis(self.b, "k", "n")


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
    if a.rank == 2 and all(dim == 1 for dim in b.shape[:-2]):
        b = ctx.view(b, b.shape[-2:], b.strides[-2:], b.offset)
        batch = ()
    dims, (a_batch, b_batch) = collapse(batch, [_batch_strides(x, batch) for x in (a, b)])
    if not dims:
        dims, a_batch, b_batch = [1], (0,), (0,)
    call = _Call(out, a, b, addend, alpha, beta, dims, a_batch, b_batch)
    if not _call_library(ctx, call):
        _launch(ctx, call)
    return out


def _launch(ctx: Lowering, call: _Call) -> None:
    """Launches our kernels: where the number of rows is not known, both, one of them with an empty grid."""
    a, b, (m, n, _) = call.a, call.b, call.sizes
    reach = [x.shape[-2] * x.strides[-2] + x.shape[-1] * x.strides[-1] for x in (a, b)]
    index = ctx.index_dtype(*reach)
    form = (a.dtype.short, *call.contiguous, len(call.batch), call.addend is not None, call.is_scaled, index)
    few_rows = le(m, MAX_ROWS) if call.contiguous[1] else 0
    if few_rows != 0:
        row = RowProduct(*form)
        _launch_kernel(ctx, call, row, select(few_rows, ceildiv(n, row.block_columns) * m, 0), row.threads)
    if few_rows == 0 or not is_const(few_rows):
        tile = choose_tile(m, a.dtype)
        blocks = ceildiv(m, tile.m) * ceildiv(n, tile.n)
        _launch_kernel(ctx, call, TiledProduct(*form, tile), select(few_rows, 0, blocks), tile.threads)


def _launch_kernel(ctx: Lowering, call: _Call, kernel: Product, blocks: Dim, threads: int) -> None:
    place = Int32 if kernel.index == "i32" else Int64
    factor = Float64 if call.a.dtype is DType.FLOAT64 else Float32
    strides = dict(zip(("a_m", "a_k", "b_k", "b_n"), (*call.a.strides[-2:], *call.b.strides[-2:]), strict=True))
    args: list[Arg] = [call.out, call.a, call.b]
    args += [call.addend] if call.addend is not None else []
    args += [Int32(size) for size in call.sizes]
    args += [place(strides[name]) for name in kernel.strides]
    args += [Int32(dim) for dim in call.batch[1:]]
    args += [Int64(stride) for stride in (*call.a_batch, *call.b_batch)]
    args += [place(stride) for stride in call.addend_strides]
    args += [factor(call.alpha), factor(call.beta)] if call.is_scaled else []
    ctx.launch(kernel.spec, (blocks * product(call.batch), 1, 1), (threads, 1, 1), args, writes=(call.out,))


def _call_library(ctx: Lowering, call: _Call) -> bool:
    """Records a call of cuBLASLt for this product; False where it has none or the device does not offer it."""
    a, b, addend = call.a, call.b, call.addend
    if "cublaslt" not in ctx.device.libraries or not a.dtype.is_float or call.is_scaled or len(call.batch) > 1:
        return False
    if "" in call.contiguous or (addend is not None and call.addend_strides != (0, 1)):
        return False
    flags = ProblemFlags(0) if addend is None else ProblemFlags.BIAS
    flags |= precision_flags(ctx.options)
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
    workspace = ctx.empty((WORKSPACE_BYTES,), DType.UINT8)
    tensors = [call.out, a, b, *([addend] if addend is not None else []), workspace]
    sizes = [m, n, k, *leading, call.batch[0], call.a_batch[0], call.b_batch[0], WORKSPACE_BYTES]
    problem = LibraryProblem(MATMUL, a.dtype.onnx, flags)
    ctx.library(problem, [*tensors, *map(Int64, sizes)], writes=(call.out, workspace))
    return True


def precision_flags(options: LoweringOptions) -> ProblemFlags:
    """What the session's options say of the precision of library calls."""
    flags = ProblemFlags.TF32 if options.use_tf32 else ProblemFlags(0)
    return flags | (ProblemFlags.DETERMINISTIC if options.deterministic else ProblemFlags(0))


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
    """``broadcast`` allows what `gemm` does anyway."""
    return gemm(ctx, a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
