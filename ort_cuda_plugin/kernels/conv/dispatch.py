"""Convolution launches: the kernels that the step's schedule selects, with their parameters."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import replace

import numpy as np

from ...model.ir import HALVES, DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, hint, le, product, select
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import copy_into
from ...program.lowering.shapes import aligned
from ...program.lowering.views import permute
from ...program.steps.schedule import Engine, Tile
from ...program.steps.steps import Contract, Convolve
from ..codegen.epilogue import Axes, make_epilogue
from ..codegen.launch_geometry import index_type
from ..codegen.simt_fragments import THREADS
from ..codegen.source import KernelBuilder
from ..contraction.prologue import make_element
from ..elementwise.index_map import IndexMap, gather_map
from .channels_last import with_channels_last_result
from .depthwise_conv import launch_depthwise
from .direct_conv import (
    ACCUMULATORS,
    EMULATED_THREADS,
    Phases,
    StripConv,
    rows_of_thread,
    strip_shape,
)
from .implicit_gemm_mma import launch_matrix_convolution
from .implicit_gemm_simt import TiledConv, packed_shape, patch_table
from .transposed_phases import phases


def launch_convolve(ctx: Lowering, step: Convolve) -> None:
    """Launch the kernels that the step's schedule selects; none for an empty result.

    If the choice between im2col and tiles depends on a size that only a Run knows, the plan launches both, one of them
    with an empty grid.
    """
    schedule = step.schedule
    assert schedule is not None
    if 0 in step.shape:
        return
    match schedule.engine:
        case Engine.MMA:
            launch_matrix_convolution(ctx, step)
        case Engine.PHASES:
            for phase in phases(ctx, replace(step, schedule=None)):
                ctx.record(phase)
        case Engine.DEPTHWISE:
            placed = with_channels_last_result(ctx, step)
            launch_depthwise(ctx, placed)
            if placed is not step:
                copy_into(ctx, step.outputs[0][1], placed.outputs[0][1])
        case Engine.DIRECT:
            _launch_direct(ctx, step)
        case Engine.IM2COL:
            ctx.record(_im2col(ctx, step, 1))
        case _:
            few_pixels = le(product(step.places), schedule.im2col_pixels) if schedule.im2col_pixels else 0
            if few_pixels != 0:
                ctx.record(_im2col(ctx, step, few_pixels))
            _launch_tiles(ctx, step, schedule.gemm_tile, few_pixels)


def _im2col(ctx: Lowering, step: Convolve, wanted: Dim) -> Contract:
    """Store the im2col matrix, a row per output pixel, and return its GEMM with the weights.

    If ``wanted`` is 0 in a Run, in which tiles compute the convolution, both have no rows.
    """
    x, w = step.operands
    flat, space = step.windows, len(step.space)
    weights = ctx.contiguous(w)
    rows, depth = w.shape[0], product(w.shape[1:])
    pixels = [select(wanted, dim, 0) if axis == 0 else dim for axis, dim in enumerate(step.shape[-space:])]
    strides = [step.shape[0], *pixels]

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source, at, inside = maps.source(x), [c[0], c[1 + space]], list[Scalar]()
        for axis in range(space):
            at.append(c[1 + axis] * flat.strides[axis] + c[2 + space + axis] * flat.dilations[axis])
            if flat.begin[axis] != 0 or flat.end[axis] != 0:
                at[-1] = at[-1] - maps.dim(flat.begin[axis])
                inside += [at[-1] >= 0, at[-1] < source.dim(2 + axis)]
        return source.at(at, functools.reduce(operator.and_, inside) if inside else None)

    is_whole = flat.kernel == flat.size and all(dim == 1 for dim in (*pixels, *flat.dilations))
    if is_whole and all(pad == 0 for pad in (*flat.begin, *flat.end)):
        a = ctx.view(x, [x.shape[0], depth], offset=x.offset)
    else:
        patches = gather_map(ctx, [*strides, x.shape[1], *flat.kernel], x.dtype, element)
        a = ctx.view(patches, [product(strides), depth])
    b = permute(ctx, ctx.view(weights, [rows, depth], offset=weights.offset), (1, 0))
    order = (0, *step.space, *step.channels)

    def placed(y: Tensor) -> Tensor:
        lead = len(step.shape) - y.rank
        y = permute(ctx, ctx.view(y, (*[1] * lead, *y.shape), (*[0] * lead, *y.strides), y.offset), order)
        first = y.shape[1] if y.shape[1] == 1 and step.shape[step.space[0]] != 1 else pixels[0]
        return ctx.view(y, (y.shape[0], first, *y.shape[2:]), y.strides, y.offset)

    return Contract(
        step.nodes,
        (*strides, *(step.shape[axis] for axis in step.channels)),
        tuple((leaf, placed(aligned(ctx, y, step.shape))) for leaf, y in step.inputs),
        tuple((value, placed(y)) for value, y in step.outputs),
        operands=(a, b),
        total=step.total,
        row_axes=1 + space,
        column_axes=len(step.channels),
    )


def _launch_tiles(ctx: Lowering, step: Convolve, tile: Tile, few_pixels: Dim) -> None:
    """Launch the SIMT implicit GEMM, with an empty grid in Runs in which ``few_pixels`` is true."""
    x, w = step.operands
    group, flat, pixels = step.groups, step.windows.planar, step.places
    outputs, channels, *_ = shape = w.static_shape
    rows, positions = outputs // group, product(pixels)
    packed = w.is_constant and step.conversions[1] is None  # pack_tiles pads with 0, which may not be the zero point
    if packed:
        weights = ctx.derived("tiles", (w,), (), packed_shape(shape, group, tile))
    else:
        weights = ctx.contiguous(w)
    sizes = [k for k in flat.kernel if isinstance(k, int)]
    table = ctx.constant(patch_table(channels, sizes, flat.dilations, tile.k))
    index = index_type(ctx, channels * product(x.shape[2:]), positions)
    outer = [Axes("image", [0]), Axes("channel", step.channels)]
    epilogue, more = make_epilogue(ctx, step, step.total, outer, Axes("column", step.space))
    element, of_x = make_element(x, step.conversions[0], 0, "px_")
    weight, of_w = make_element(w, step.conversions[1], 0, "pw_", first="int64(group) * rows")
    kernel = TiledConv((element, weight), epilogue, tile, len(sizes), packed, index)
    image = flat.size
    if flat.pointwise:  # treat each image as one row of pixels, so that all of them are adjacent
        image = pixels = (*[1] * (len(sizes) - 1), positions)
    axes = kernel.axes
    builder = KernelBuilder()
    builder.tensors(x=x, weights=weights, table=table)
    builder.integers(
        DType.INT32, rows=rows, positions=positions, k_end=channels * product(sizes), channels=channels, groups=group
    )
    builder.per_axis(axes, {"in": image})
    builder.per_axis(axes[1:], {"out": pixels[1:]})
    builder.per_axis(axes, {"stride": flat.strides, "pad": flat.begin})
    builder.include(of_x, of_w, more)
    blocks = select(few_pixels, 0, ceildiv(positions, tile.n) * ceildiv(rows, tile.m) * group * x.shape[0])
    builder.launch(ctx, kernel.name, (blocks, 1, 1), (tile.threads, 1, 1), body=kernel.body)


def _launch_direct(ctx: Lowering, step: Convolve) -> None:
    x, w = step.operands
    group, transposed, flat, pixels = step.groups, step.transposed, step.windows.planar, step.places
    sizes = tuple(size for size in flat.kernel if isinstance(size, int))
    outputs, inputs, *_ = w.static_shape
    channels, rows = (outputs // group, inputs) if transposed else (inputs, outputs // group)
    thread_rows = rows_of_thread(rows, emulated=ctx.device.emulated)
    if transposed:
        phases = Phases.transposed(sizes, flat.strides, flat.dilations)
        bases = [pad // stride for pad, stride in zip(flat.begin, flat.strides, strict=True)]
        counts = [
            (pixel + pad - 1) // stride - base + 1
            for pixel, pad, stride, base in zip(pixels, flat.begin, flat.strides, bases, strict=True)
        ]
    else:
        phases, bases, counts = Phases.plain(sizes, flat.dilations), [], list(pixels)
    is_padded = transposed or any(pad != 0 for pad in (flat.begin[-1], flat.end[-1]))
    width = _strip_width(ctx, thread_rows, counts[-1], step.total.dtype, is_padded=is_padded)
    strips = ceildiv(counts[-1], width)
    positions = product(counts[:-1]) * strips
    threads = EMULATED_THREADS if ctx.device.emulated else THREADS
    tiles, chunks = -(-rows // thread_rows), ceildiv(positions, threads)
    stride = flat.strides[-1] if flat.strides[-1] <= 2 else 0
    index = index_type(ctx, x.size)
    outer = [Axes("image_of_batch", [0]), Axes("channel", step.channels)]
    *lines, columns = step.space
    outer += [Axes(f"o{name}", [axis]) for name, axis in zip("zy"[2 - len(lines) :], lines, strict=True)]
    epilogue, more = make_epilogue(ctx, step, step.total, outer, Axes("column", [columns]))
    element, of_x = make_element(x, step.conversions[0], 0, "px_")
    kernel = StripConv(element, epilogue, thread_rows, width, len(sizes), transposed, stride, index)
    axes = kernel.axes
    builder = KernelBuilder()
    builder.tensors(
        x=x,
        weights=_strip_weights(ctx, w, group, thread_rows, phases, transposed),
        phases=ctx.constant(phases.array) if transposed else None,
    )
    builder.integers(DType.INT32, rows=rows, channels=channels, groups=group, tiles=tiles, taps=math.prod(sizes))
    # Numbers for one image and group: threads (positions), threads along x (strips), blocks (chunks).
    builder.integers(DType.INT32, positions=positions, strips=strips, chunks=chunks)
    windows = {"stride": flat.strides, "pad": flat.begin, "step": phases.steps}
    builder.per_axis(axes, {"in": flat.size, "out": pixels, **windows})
    if transposed:
        builder.integer(len(phases.table), DType.INT32, "num_phases")
        builder.per_axis(axes[:-1], {"count": counts[:-1]})
        builder.per_axis(axes, {"base": bases})
    else:
        builder.per_axis(axes, {"taps": sizes})
    builder.include(of_x, more)
    blocks = chunks * (tiles * len(phases.table) * group) * x.shape[0]
    builder.launch(ctx, kernel.name, (blocks, 1, 1), (threads, 1, 1), body=kernel.body)


def _strip_width(ctx: Lowering, rows: int, columns: Dim, dtype: DType, *, is_padded: bool) -> int:
    """Return the pixels per thread of `StripConv`: 1 on a GPU, 8 to 64 on the emulated device.

    In a padded image a strip may be as long as a row of ``columns`` pixels. Without padding about half a row suffices:
    the last strip is shifted back, and then reads nothing outside the image.
    """
    if not ctx.device.emulated:
        return 1
    width = ACCUMULATORS // (1 << (rows - 1).bit_length()) * 4 // max(dtype.itemsize, 4)
    most = hint(columns) - 1 if is_padded else hint(columns) // 2
    return max(8, min(width, 64, 1 << most.bit_length()))


def _strip_weights(ctx: Lowering, w: Tensor, group: int, rows: int, phases: Phases, transposed: bool) -> Tensor:
    """Return the weights packed for `StripConv` (`strip_shape`): once if they are constant, else in every Run."""
    shape = w.static_shape
    packed = strip_shape(shape, group, shape[1] if transposed else shape[0] // group, rows)
    dtype = DType.FLOAT32 if w.dtype in HALVES else w.dtype
    if w.is_constant:
        return ctx.derived("strips", (w,), (phases.taps, transposed), packed, dtype)
    taps = ctx.constant(np.array(phases.taps, np.int64))
    flat = ctx.contiguous(w)
    flat = ctx.view(flat, (*shape[:2], math.prod(shape[2:])), offset=flat.offset)
    inner = shape[0] // group if transposed else shape[1]

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row = c[1] * rows + c[4]
        limit = shape[1] if transposed else shape[0] // group
        tap = maps.source(taps).at([c[3]])
        index = [c[0] * inner + c[2], row, tap] if transposed else [c[0] * limit + row, c[2], tap]
        return s.cast(maps.source(flat).at(index, row < limit), dtype)

    return gather_map(ctx, packed, dtype, element)
