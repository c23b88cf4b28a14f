"""Implicit GEMM convolution on tensor cores for channels-last images, on GPUs of sm_80 or later.

A convolution is a GEMM of the im2col matrix and the weights. A row of this matrix is the patch of one output pixel: the
input elements in its window. The matrix is not stored: copies into shared memory gather the patches from the image. A
16-byte chunk is adjacent channels of one input pixel, or zeros.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, ceildiv, product
from ...program.lowering.context import Lowering
from ...program.lowering.views import permuted
from ...program.steps.schedule import WeightLayout
from ...program.steps.steps import Convolve
from ..codegen.block_mapping import count_tiles, split_tile_of_block
from ..codegen.epilogue import VECTOR, Axes, Epilogue, make_epilogue
from ..codegen.fragment import Fragment, join
from ..codegen.launch_geometry import extent, index_type
from ..codegen.simt_fragments import Element, Operand, indented, suffix
from ..codegen.source import KernelBuilder, register_type, text_property
from ..contraction.integer_operands import integer_form, integer_step
from ..gemm.gemm_mma import form_name, parts_epilogue, sum_of_parts
from ..gemm.mma_copies import OperandTile, is_compact
from ..gemm.mma_fragments import MatrixTile
from ..gemm.tf32_weights_as_f16 import compact_lines
from ..gemm.tile_shapes import INTEGERS
from .channels_last import (
    channels_last_weights,
    place_stride,
    places_first,
)
from .implicit_gemm_simt import OUTSIDE


@dataclass(frozen=True)
class PatchTile(MatrixTile):
    """Tile whose first operand is gathered from an image.

    ``axes`` are the spatial axes of the window, "" for a pointwise convolution. Elements outside the image are 0;
    if ``zero`` is set, they are the zero point of a quantized image. ``is_one_image`` tells that the batch is 1.
    """

    axes: str = ""
    zero: bool = False
    is_one_image: bool = False

    @property
    def has_contiguous_steps(self) -> bool:
        """Whether each sliced-K warp group has consecutive k steps. With a window, these mostly share a tap."""
        return bool(self.axes)

    def _copy_sources(self, lines: OperandTile) -> list[str]:
        return self._patches(lines) if lines.name == "a" else super()._copy_sources(lines)

    def _fill(self, lines: OperandTile, element: Element) -> list[str]:
        return self._gathered(lines) if lines.name == "a" else super()._fill(lines, element)

    def _patches(self, lines: OperandTile) -> list[str]:
        """Compute the offset in x of each patch that the thread copies, and the tap and channel of its first chunk."""
        index = self.index
        strides = " | ".join(f"int64(image_{axis})" for axis in ("n", *self.axes)) if self.axes else "int64(image_n)"
        result = [
            f"x_whole = opaque_i32(int32((address_of(x) & 15) | (({strides}) & {self.chunk_size - 1})))",
            f"group_first = {index}(group * channels)",
        ]
        if self.zero:
            result.append("outside = u32_as_f32(uint32((uint32(zero[0]) & uint32(255)) * uint32(0x01010101)))")
        for row in range(self._thread_chunks(lines)):
            line, _ = self._row_and_chunk(lines, f"(thread + {row * self.tile.threads})")
            result += [f"patch = int32(row0 + {line})", "inside = patch < m", "patch = min(patch, int32(m - 1))"]
            terms = []
            for axis in reversed(self.axes):
                own = "patch"
                if axis != self.axes[0] or not self.is_one_image:
                    result.append(f"quotient = quotient_i32(patch, by_{axis})")
                    own = f"(patch - quotient * out_{axis})"
                result.append(f"{axis}_at{row} = int32({own} * stride_{axis} - pad_{axis})")
                if own != "patch":
                    result.append("patch = int32(quotient)")
                terms.append(f"{index}({index}({axis}_at{row}) * image_{axis})")
            if not self.axes or not self.is_one_image:
                terms.append(f"{index}({index}(patch) * image_n)")
            terms.append("group_first")
            # An opaque value stays in a register; the compiler would recompute the offset in each k step.
            result.append(f"x_from{row} = opaque_{suffix(index)}({_sum(index, terms)})")
            if self.axes:
                first = f"{self.axes[0]}_at{row}"
                result.append(f"{first} = choose(inside, {first}, int32({OUTSIDE}))")
        chunk_of_row = f"(thread & {self.operands[0].row_chunks - 1})"
        result += [*self._targets(lines), f"channel = int32(k0 + {chunk_of_row} * {self.chunk_size})"]
        if self.axes:
            result += ["tap = quotient_i32(channel, by_channels)", "channel = int32(channel - tap * channels)"]
            for axis in reversed(self.axes[1:]):
                result += [
                    f"quotient = quotient_i32(tap, by_taps_{axis})",
                    f"tap_{axis} = int32(tap - quotient * taps_{axis})",
                    "tap = quotient",
                ]
            result += [f"tap_{self.axes[0]} = int32(tap)", *self._at_tap()]
        return result

    def _at_tap(self) -> list[str]:
        """Compute the tap's distance from the window's start, ``ahead_<axis>``, and offset in x, ``window_from``."""
        offset = [f"{self.index}({self.index}(ahead_{axis}) * image_{axis})" for axis in self.axes]
        ahead = [f"ahead_{axis} = int32(tap_{axis} * step_{axis})" for axis in self.axes]
        return [*ahead, f"window_from = {_sum(self.index, offset)}"]

    def _gathered(self, lines: OperandTile) -> list[str]:
        """Fill the pipeline stage at ``filled`` with the next chunk of each patch.

        Predicated copies need no branch, so that they issue back to back. Copies for windows of several taps go through
        the L1 cache, since windows overlap.
        """
        axes, index, chunks = self.axes, self.index, range(self._thread_chunks(lines))
        count = lines.bytes // 16
        # Offset in x from the start of a patch to the chunk, the same for all patches.
        from_tap = _sum(index, [*(["window_from"] if axes else []), f"{index}(channel)"])
        result = [*self._fill_addresses(lines), f"tap_from = {from_tap}"]
        inside = f"tap_{axes[0]} < taps_{axes[0]}" if axes else "channel < channels"
        copy = "copy_async_cached" if axes else "copy_async"
        copies, loads = [], []
        for number in chunks:
            at = [f"(uint32({axis}_at{number} + ahead_{axis}) < uint32(in_{axis}))" for axis in axes]
            condition = " & ".join([f"({inside})", *at])
            target = self._target(lines, number)
            to = f"(({target}) - tiles_at) >> 2"
            first = f"int64({index}(x_from{number} + tap_from))"
            filler = f"    store_f32x4(tile_c, {to}, {', '.join(['outside' if self.zero else 'float32(0)'] * 4)})"
            if self.zero:
                copies += [f"if {condition}:", f"    {copy}({target}, x, {first})", "else:", filler]
            else:
                copies.append(f"{copy}_where({target}, x, {first}, {condition})")
            source = f"{first} + int64(word * {4 // self.size})"
            word = f"x[{source}]"
            if self.size < 4:
                word = self._packed([self._bits(f"x[{source} + {i}]") for i in range(4 // self.size)])
            store = f"        tile_c[({to}) + int64(word)] = {word}"
            loads += [f"if {condition}:", "    for word in range(4):", store, "else:", filler]
        body = ["if x_whole == 0:", *indented(copies, 1), "else:", *indented(loads, 1)]
        result += [f"if thread < {count}:", *indented(body, 1)] if count < self.tile.threads else body
        result.append(f"channel = int32(channel + {self.step_distance})")
        if not axes:
            return result
        # Advance to the next tap, like an odometer. The first axis has no limit here: the predicate of the copies
        # excludes taps past the end of the window.
        result += ["while channel >= channels:", "    channel = int32(channel - channels)"]
        for level, axis in enumerate(reversed(axes[1:]), 1):
            pad = "    " * level
            result += [
                f"{pad}tap_{axis} = int32(tap_{axis} + 1)",
                f"{pad}if tap_{axis} == taps_{axis}:",
                f"{pad}    tap_{axis} = int32(0)",
            ]
        result.append(f"{'    ' * len(axes)}tap_{axes[0]} = int32(tap_{axes[0]} + 1)")
        return [*result, *indented(self._at_tap(), 1)]


def _sum(index: str, terms: Sequence[str]) -> str:
    """Return the source of the sum of ``terms``, each cast to type ``index``, so that int32 sums stay int32."""
    total = terms[0]
    for term in terms[1:]:
        total = f"{index}({total} + {term})"
    return total


@dataclass(frozen=True)
class MatrixConv:
    """Implicit GEMM kernel: each block computes a tile of pixels x output channels of a group, for one split of k.

    The grid is (tiles along channels * tiles along pixels * ``splits`` * groups, 1, 1). With several splits the
    epilogue is `parts_epilogue`. The epilogue's coordinates are ``row``, the pixel among those of all images, and
    ``column``, the output channel. ``is_alone``: see `split_tile_of_block`.
    """

    matrices: PatchTile
    epilogue: Epilogue
    splits: int = 1
    is_alone: bool = False

    @property
    def name(self) -> str:
        of = self.matrices
        compact = "_f16" if of.is_compact else ""
        return f"conv{len(of.axes)}d_mma{form_name(self.splits, of.sliced_k)}_{of.tile.name}_{of.kind}{compact}"

    @text_property
    def body(self) -> str:
        matrices = self.matrices
        columns = """
            column0 = int32(column0 + group * rows)
            column_end = int32(group * rows + rows)
            batch = int32(0)
            b_base = int64(0)
            """
        return join(
            [
                split_tile_of_block(matrices.tile, matrices.depth, self.splits, "group", is_alone=self.is_alone),
                Fragment("columns_of_group", columns, "column0 column_end batch b_base"),
                matrices.fragment("m", "column_end", self.epilogue),
            ]
        )


def gemm_sizes(step: Convolve) -> tuple[Dim, int, int]:
    """Return GEMM sizes (m, n, k) of one group: output pixels of all images, output channels, elements of a patch."""
    x, w = step.operands
    rows = w.static_shape[0]
    depth = operator.index(x.shape[1]) // step.groups * count_taps(step)
    return count_pixels(step), rows // step.groups, depth


def count_pixels(step: Convolve) -> Dim:
    """Return the number of output pixels of all images."""
    return step.shape[0] * product(step.places)


def count_taps(step: Convolve) -> int:
    """Return the number of taps of the window: the product of the kernel's spatial sizes."""
    return math.prod(step.operands[1].static_shape[2:])


def launch_matrix_convolution(ctx: Lowering, step: Convolve) -> None:
    """Launch the kernel for a channels-last image; with split-K also record the step that reduces the splits."""
    schedule = step.schedule
    assert schedule is not None
    kind, tile, splits, sliced_k = schedule.operands, schedule.gemm_tile, schedule.split_k, schedule.sliced_k
    form = integer_form(step) if kind in INTEGERS else None
    if form is not None:
        integers = integer_step(ctx, step, form)
        assert isinstance(integers, Convolve)
        step = integers
    x, w = step.operands
    m, n, k = gemm_sizes(step)
    windows = step.windows.planar
    if schedule.weights is WeightLayout.F16_ALONG_K:
        step, weights = compact_lines(ctx, step)
    else:
        weights = channels_last_weights(ctx, w, x.shape[1], step.groups)
    ordered = permuted(step, places_first(step))
    if splits == 1:
        rank = len(step.shape)
        columns = range(rank - step.channel_axes, rank)
        rows = [Axes("row", range(rank - step.channel_axes))]
        # The channels of each group must begin at a vector boundary.
        last, vectors = Axes("column", columns), n % VECTOR == 0
        epilogue, more = make_epilogue(ctx, ordered, step.total, rows, last, vectors=vectors)
    else:
        parts = ctx.empty((splits, m, n * step.groups), step.total.dtype if form is not None else DType.FLOAT32)
        epilogue, more = parts_epilogue(parts, n)
    axes = "" if windows.pointwise else "zyx"[3 - len(windows.size) :]
    # A pointwise convolution needs no zero point: it reads nothing outside the image, and the chunks past its last
    # channel are multiplied by zeros of the weights.
    zero = form.zero_codes if form is not None and axes else None
    pixel_pitch = place_stride(x)
    assert pixel_pitch is not None
    index = index_type(ctx, product([x.shape[0], *x.shape[2:]]) * pixel_pitch, product(weights.shape))
    elements = (Element(x.dtype.short), Element(weights.dtype.short))
    is_one_image, is_alone = x.shape[0] == 1, splits == step.groups == 1
    weights_pitch = "weights_pitch" if is_compact(kind, elements) else "k_end"
    a = Operand("a", "x", "row0", "m", "k_end", "0", "1", True)
    b = Operand("b", "weights", "column0", "column_end", "k_end", weights_pitch, "1", True)
    of_image = (axes, zero is not None, is_one_image)
    matrices = PatchTile(tile, kind, a, b, elements, register_type(index), sliced_k, *of_image)
    kernel = MatrixConv(matrices, epilogue, splits, is_alone)
    builder = KernelBuilder()
    builder.tensors(x=x, weights=weights, zero=zero)
    builder.integers(DType.INT32, m=m, n=n * step.groups, rows=n, k_end=k)
    if matrices.is_compact:
        builder.integers(DType.INT32, weights_pitch=weights.strides[0])
    count_tiles(builder, tile, m, n, is_alone=is_alone)
    _add_windows(builder, step, axes, index, is_one_image)
    builder.include(more)
    blocks = ceildiv(m, tile.m) * ceildiv(n, tile.n) * (splits * step.groups)
    builder.launch(
        ctx,
        kernel.name,
        (blocks, 1, 1),
        (tile.threads * sliced_k, 1, 1),
        shared_bytes=matrices.shared_bytes,
        body=kernel.body,
        resident=matrices.config.resident,
    )
    if splits > 1:
        ctx.record(sum_of_parts(ctx, ordered, parts, splits))


def _add_windows(builder: KernelBuilder, step: Convolve, axes: str, index: DType, is_one_image: bool) -> None:
    """Add the kernel parameters of the image and the windows; a pointwise convolution (no ``axes``) needs few."""
    x, windows = step.operands[0], step.windows.planar
    channels = x.shape[1] // step.groups
    if not axes:
        builder.integers(DType.INT32, channels=channels)
        stride = place_stride(x)
        assert stride is not None
        builder.integer(stride, index, "image_n")
        return
    strides: Sequence[Dim] = x.strides[2:] if len(x.strides) == 2 + len(axes) else (0, *x.strides[2:])
    builder.integer(x.strides[0], index, "image_n")
    for axis, stride, size in zip(axes, strides, step.places, strict=True):
        builder.integer(stride, index, f"image_{axis}")
        if axis != axes[0] or not is_one_image:
            extent(builder, size, DType.INT32, (f"out_{axis}", f"by_{axis}"))
    sizes = {"in": windows.size, "stride": windows.strides, "pad": windows.begin, "step": windows.dilations}
    builder.per_axis(axes, sizes)
    extent(builder, channels, DType.INT32, ("channels", "by_channels"))
    for axis, size in zip(axes, windows.kernel, strict=True):
        extent(builder, size, DType.INT32, (f"taps_{axis}", f"by_taps_{axis}"))
