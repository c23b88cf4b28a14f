"""Calls of cuBLASLt and cuDNN for GEMMs and convolutions, with the part of the epilogue that they can fuse."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...model.ir import DType
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, le, logical_or, lt, product
from ...program.lowering.context import Arg, Int64, Lowering, LoweringOptions, Tensor
from ...program.lowering.shapes import collapse
from ...program.steps.libraries import (
    CONV,
    LARGE_WORKSPACE_BYTES,
    MATMUL,
    WORKSPACE_BYTES,
    LibraryProblem,
    ProblemFlags,
)
from ...program.steps.steps import Contract, Convolve, Map, Output, Substitution, Sums, used_inputs
from ...program.steps.tensor import BufferKind, contiguous_strides
from ..contraction.epilogue_patterns import GELU, RELU, RELU6, SILU, LibraryForm, convolution_form, product_form
from ..conv.channels_last import (
    channels_last_strides,
    channels_last_weights,
    empty_channels_last,
    is_channels_last,
    place_stride,
    prefers_channels_last,
)
from ..gemm.dispatch import Folded, folded

MIN_TENSOR_CHANNELS = 16  # minimum input and output channels for which cuDNN's run-time compilation pays off
_activations = {
    "": ProblemFlags(0),
    RELU: ProblemFlags.RELU,
    GELU: ProblemFlags.GELU,
    SILU: ProblemFlags.SWISH,
    RELU6: ProblemFlags.RELU6,
}


def call_cublaslt(ctx: Lowering, step: Contract) -> bool:
    """Record a cuBLASLt call, and a Map for the rest of the epilogue; False if cuBLASLt cannot compute the step."""
    call, dtype = folded(ctx, step), step.a.dtype
    if "cublaslt" not in ctx.device.libraries or not dtype.is_float or len(call.batch) > 1 or "" in call.contiguous:
        return False
    form = product_form(ctx, step)
    if form is None:
        return False
    flags = _flags(ctx.options, form)
    leading = []
    for x, transposed, flag in (
        (call.a, call.contiguous[0] == "m", ProblemFlags.A_TRANSPOSED),
        (call.b, call.contiguous[1] == "k", ProblemFlags.B_TRANSPOSED),
    ):
        lines, line = x.shape[:-3:-1] if transposed else x.shape[-2:]
        stride = x.strides[-1 if transposed else -2]
        flags |= flag if transposed else ProblemFlags(0)
        # cuBLASLt needs rows that do not overlap, unlike those of a broadcast matrix (stride 0).
        if not ctx.try_guard(logical_or(le(lines, 1), le(line, stride))):
            return False
        leading.append(stride)
    m, n, k = call.sizes
    if not ctx.try_guard(lt(0, k)):
        return False

    def sizes(out: Tensor) -> list[Dim] | None:
        strides = _product_strides(step, call, out)
        if strides is None:
            return None
        row, matrix = strides
        return [m, n, k, *leading, row, call.batch[0], call.a_batch[0], call.b_batch[0], matrix]

    limit = 0
    if ctx.options.tunable_op_enable and ctx.options.tunable_op_tuning_enable:
        flags, limit = flags | ProblemFlags.MEASURED, max(0, ctx.options.tunable_op_max_tuning_duration_ms)
    problem = LibraryProblem(MATMUL, dtype.onnx, flags, alpha=form.alpha, beta=form.beta, measuring_ms=limit)
    return _record(ctx, step, problem, form, "cuBLASLt: product", (call.a, call.b), sizes, WORKSPACE_BYTES)


def _product_strides(step: Contract, call: Folded, out: Tensor) -> tuple[Dim, Dim] | None:
    """Return the strides of ``out`` from row to row and from matrix to matrix; None if its rows are not contiguous."""
    columns = len(step.shape) - step.column_axes
    rows = 0 if call.rows_folded else len(step.batch)
    found: list[Dim] = []
    m, n, _ = call.sizes
    for axes, default in ((slice(columns, None), 1), (slice(rows, columns), n), (slice(rows), m * n)):
        dims, (strides,) = collapse(step.shape[axes], [out.strides[axes]])
        if len(dims) > 1:
            return None
        found.append(strides[0] if dims else default)
    return (found[1], found[2]) if found[0] == 1 else None


def _cudnn_layout(ctx: Lowering, step: Convolve) -> tuple[bool, tuple[Dim, ...]]:
    """Return whether cuDNN's result is channels-last, and the strides of a contiguous result."""
    last = prefers_channels_last(ctx, step) and is_channels_last(step.operands[0])
    return last, channels_last_strides(step.shape) if last else contiguous_strides(step.shape)


def cudnn_form(ctx: Lowering, step: Convolve) -> LibraryForm | None:
    """Match the part of the epilogue that cuDNN can fuse, for a result in the layout that `call_cudnn` selects.

    Returns None as `convolution_form` does.
    cuDNN may take seconds to compile a tensor-core engine with a fused epilogue, which pays off for many channels.
    """
    last, dense = _cudnn_layout(ctx, step)
    channels, rows = step.operands[0].shape[1], step.operands[1].shape[0]
    has_many = isinstance(channels, int) and isinstance(rows, int) and min(channels, rows) >= MIN_TENSOR_CHANNELS
    is_plain = step.groups == 1 and len(step.windows.size) == 2
    compiles = last and has_many and is_plain and ctx.options.cudnn_conv_algo_search != "DEFAULT"
    return convolution_form(ctx, step, dense, compiles)


def call_cudnn(ctx: Lowering, step: Convolve) -> bool:
    """Record a cuDNN call, and a Map for the rest of the epilogue; return False if cuDNN cannot compute the step."""
    (x, weights), w, dtype = step.operands, step.windows.planar, step.operands[0].dtype
    if "cudnn" not in ctx.device.libraries or not dtype.is_float or step.transposed:
        return False
    if w.begin != w.end:
        # cuDNN has one padding per axis, which it applies at both ends.
        return False
    axes = list(zip(w.size, w.kernel, step.places, w.strides, w.dilations, w.begin, w.end, strict=True))
    if len(step.windows.size) == 1 and not ctx.options.cudnn_conv1d_pad_to_nc1d:
        axes.reverse()
    spatial: list[Dim] = [number for axis in axes for number in axis]
    last, dense = _cudnn_layout(ctx, step)
    form = cudnn_form(ctx, step)
    if form is None:
        return False
    weights = channels_last_weights(ctx, weights, x.shape[1], step.groups) if last else ctx.contiguous(weights)
    rows = product(step.shape[axis] for axis in step.channels)
    if form.bias is None and (form.residual is not None or form.activation):
        # cuDNN fuses a residual or an activation only together with a bias.
        form = replace(form, bias=ctx.constant(np.zeros(operator.index(rows), dtype.numpy), dtype))
    has_residual = form.residual is not None

    def sizes(out: Tensor) -> list[Dim] | None:
        pairs = zip(step.shape, out.strides, dense, strict=True)
        loose = [axis for axis, (dim, stride, expected) in enumerate(pairs) if dim != 1 and stride != expected]
        apart = place_stride(out) if last else None if loose and loose != [0] else out.strides[0]
        if apart is None or (loose and has_residual):
            return None
        return [step.shape[0], x.shape[1], rows, step.groups, apart, *spatial]

    def new() -> Tensor:
        return empty_channels_last(ctx, step.shape, dtype) if last else ctx.empty(step.shape, dtype)

    search = {"DEFAULT": ProblemFlags.BRIEF, "EXHAUSTIVE": ProblemFlags.MEASURED}
    flags = _flags(ctx.options, form) | (ProblemFlags.CHANNELS_LAST if last else ProblemFlags(0))
    flags |= search.get(ctx.options.cudnn_conv_algo_search, ProblemFlags(0))
    problem = LibraryProblem(CONV, dtype.onnx, flags, len(w.size), form.alpha, form.beta)
    workspace = LARGE_WORKSPACE_BYTES if ctx.options.cudnn_conv_use_max_workspace else WORKSPACE_BYTES
    what = "cuDNN: convolution, channels last" if last else "cuDNN: convolution"
    return _record(ctx, step, problem, form, what, (x, weights), sizes, workspace, new)


def _flags(options: LoweringOptions, form: LibraryForm) -> ProblemFlags:
    flags = _activations[form.activation]
    for flag, is_set in (
        (ProblemFlags.TF32, options.use_tf32),
        (ProblemFlags.DETERMINISTIC, options.deterministic),
        (ProblemFlags.BIAS, form.bias is not None),
        (ProblemFlags.RESIDUAL, form.residual is not None),
    ):
        flags |= flag if is_set else ProblemFlags(0)
    return flags


def _record(
    ctx: Lowering,
    step: Sums,
    problem: LibraryProblem,
    form: LibraryForm,
    what: str,
    operands: Sequence[Tensor],
    sizes: Callable[[Tensor], list[Dim] | None],
    workspace_bytes: int,
    new: Callable[[], Tensor] | None = None,
) -> bool:
    """Record the call, and a Map for the rest of the epilogue; return False if the library is known to refuse it.

    ``sizes(out)`` returns the call's size arguments for a result tensor; None if the library cannot write its strides.
    ``new`` allocates a result that the library can write, by default a contiguous one.
    """
    dtype = form.value.dtype
    direct = next((y for x, y in step.outputs if x is form.value and y.dtype is dtype and sizes(y) is not None), None)
    out = direct if direct is not None else new() if new is not None else ctx.empty(step.shape, dtype)
    numbers = sizes(out)
    assert numbers is not None
    if ctx.device.refusals.matches(problem, numbers):
        return False
    for condition in form.guards:
        ctx.guard(condition)
    leaf = Scalar(out.dtype, "leaf")
    with_leaf = Substitution({form.value: leaf})
    outputs: tuple[Output, ...] = tuple((with_leaf(x), y) for x, y in step.outputs if y is not direct)
    leftover = form.leftover or ("the library cannot write its strides" if outputs else "")
    parts = form.parts
    if problem.kind == MATMUL and form.bias is not None and form.bias.buffer.kind is BufferKind.INPUT:
        parts = parts.replace("bias", "input bias (copied if not 16-byte aligned)")
    note = f"{what}{' + ' if parts else ''}{parts}{f'; a map follows: {leftover}' if leftover else ''}"
    workspace = ctx.empty((workspace_bytes,), DType.UINT8)
    addends = [x for x in (form.bias, form.residual) if x is not None]
    args: list[Arg] = [out, *operands, *addends, workspace, *map(Int64, [*numbers, workspace_bytes])]
    ctx.library(problem, args, writes=(out, workspace), note=note)
    if outputs:
        inputs = used_inputs([(leaf, out), *step.inputs], [x for x, _ in outputs])
        ctx.record(Map(step.nodes, step.shape, inputs, outputs))
    return True
