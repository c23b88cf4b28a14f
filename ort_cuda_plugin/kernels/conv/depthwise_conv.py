"""Depthwise convolution of channels-last images: adjacent threads process adjacent channels.

cuDNN has no tensor-core engine for depthwise convolutions and uses a generic one, which the cost model estimates to be
slower than this kernel. A thread computes a vector of channels for several adjacent output pixels along the last two
dimensions: their windows share loads of the image, and all pixels of the thread share the weights.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, divides, hint, le, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import rearranged
from ...program.lowering.shapes import broadcast_strides
from ...program.lowering.views import permute
from ...program.steps.steps import Convolve, Input
from ...program.steps.tensor import contiguous_strides
from ..codegen.launch_geometry import Plane, coordinates, extent, index_type, reach
from ..codegen.source import KernelBuilder, kernel_name, load_text, offset_text, register_type
from ..codegen.vectors import begins_at_vectors, vector_threads
from .adjacent_windows import batches_of, reads_of

MAX_TAPS = 49
"""Maximum taps (elements of a window per channel); the kernel unrolls the loop over them."""
WIDTH, PIXELS, ROWS = 4, 4, 2
"""Maximum channels per thread, and output pixels per thread along the last dimension and the second-to-last."""
FEW_TAPS = 25
"""Maximum taps for which a thread computes several pixels; the weights of more taps need too many registers."""
SIDE, LEAST_SIDE = 32, 16
"""Maximum and minimum number of adjacent threads on the channel vectors of the same pixels (`_side`)."""
BLOCKS = 8
"""Wanted blocks per multiprocessor: a launch with fewer gets smaller blocks, which balance the last wave better."""
THREADS = 256
"""Wanted threads per multiprocessor; a launch with fewer gives each thread fewer pixels and channels."""


def is_depthwise(ctx: Lowering, step: Convolve) -> bool:
    """Tell whether the kernel supports a convolution.

    The convolution must be depthwise with one filter per channel, a small window and one output tensor, and
    `depthwise_guards` must be able to become guards.
    """
    rows, channels, *kernel = step.operands[1].static_shape
    return (
        not step.transposed
        and step.channel_axes == 1
        and step.groups == rows > 1 == channels
        and product(kernel) <= MAX_TAPS
        and len(step.outputs) == 1
        and all(ctx.may_settle(condition) for condition in depthwise_guards(step))
    )


def depthwise_guards(step: Convolve) -> tuple[Dim, ...]:
    """Return the guards of a plan with the depthwise kernel: no spatial dimension of the image is empty."""
    return tuple(le(1, size) for size in step.windows.size)


@dataclass(frozen=True)
class _Form:
    """What one thread computes: ``width`` channels of ``rows`` x ``pixels`` adjacent output pixels."""

    width: int
    pixels: int
    rows: int = 1

    @property
    def sums(self) -> int:
        return self.width * self.pixels * self.rows


def _choose_form(ctx: Lowering, step: Convolve, strides: Sequence[Sequence[Dim]]) -> _Form:
    """Choose the channels and pixels per thread. ``strides`` are those of the tensors with contiguous channels."""
    channels = step.shape[1]
    width = WIDTH
    while width > 1 and not all(divides(width, size) for size in (channels, *itertools.chain(*strides)) if size != 1):
        width //= 2
    taps, stride = product(step.windows.kernel), step.windows.strides[-1]
    pixels = PIXELS if taps <= FEW_TAPS and stride <= 2 else 1
    rows = ROWS if pixels > 1 and len(step.windows.kernel) > 1 else 1
    wanted = THREADS * ctx.device.multiprocessors
    elements = hint(product(step.shape))
    if rows > 1 and (not divides(rows, step.shape[-2]) or elements < wanted * width * pixels * rows):
        rows = 1
    while pixels > 1 and elements < wanted * width * pixels:
        pixels //= 2
    while width > 2 and elements < wanted * width:
        width //= 2
    return _Form(width, pixels, rows)


def _side(vectors: int) -> int:
    """Return how many adjacent threads process channel vectors of the same pixels; a pixel has ``vectors`` in total.

    With fewer such threads a thread block covers more pixels, whose overlapping windows share loads. At least half a
    warp must load contiguously: if no number from `LEAST_SIDE` to `SIDE` divides ``vectors``, return ``vectors``.
    """
    side = next(size for size in range(min(SIDE, vectors), 0, -1) if vectors % size == 0)
    return side if side >= LEAST_SIDE else vectors


def launch_depthwise(ctx: Lowering, step: Convolve) -> None:
    """Launch the kernel of a depthwise convolution, including the step's epilogue."""
    x, w = step.operands
    out = step.outputs[0][1]
    weights = rearranged(ctx, permute(ctx, w, (*range(1, w.rank), 0)))
    inputs = [(leaf, ctx.materialize(y)) for leaf, y in step.inputs]
    moved = [y for y in (x, out, *(y for _, y in inputs)) if y.size != 1]
    vectors = [strides for strides in (broadcast_strides(y, step.shape) for y in moved) if strides[1] == 1]
    _Depthwise(ctx, step, _choose_form(ctx, step, vectors), inputs).launch(x, weights, out)


class _Depthwise:
    """Generator of the kernel of one convolution."""

    def __init__(self, ctx: Lowering, step: Convolve, form: _Form, inputs: Sequence[Input]) -> None:
        self.ctx, self.step, self.form, self.inputs = ctx, step, form, inputs
        self.builder = KernelBuilder()
        self.emit = self.builder.emit
        self.value = s.cast(step.outputs[0][0], step.outputs[0][1].dtype)

    def launch(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        ctx, builder, emit, form, shape = self.ctx, self.builder, self.emit, self.form, self.step.shape
        vectors = -(-operator.index(shape[1]) // form.width)
        side = _side(vectors)
        dims = [shape[0], vectors // side, *shape[2:-1], ceildiv(shape[-1], form.pixels), side]
        if form.rows > 1:
            dims[-3] = ceildiv(shape[-2], form.rows)
        items = product(dims)
        plane = Plane(ctx, builder, [items], vector_threads(ctx.device, items, BLOCKS))
        dtype = index_type(ctx, items, *(reach(y.shape, y.strides) for y in (x, out, *(y for _, y in self.inputs))))
        self.index = register_type(dtype)
        extents = [extent(builder, dim, dtype) for dim in dims[1:]]
        with emit.block(f"if {plane.inside}:"):
            flat = "column" if dtype is DType.INT64 else emit.assign("int32(column)")
            image, group, *pixels, strip, beside = coordinates(emit, flat, extents, dtype)
            if form.rows > 1:
                pixels[-1] = emit.assign(f"{pixels[-1]} * {form.rows}")
            first = [image, emit.assign(f"({group} * {side} + {beside}) * {form.width}"), *pixels]
            first.append(emit.assign(f"{strip} * {form.pixels}"))
            loaded = builder.to_load(self.inputs)
            self.tensors = _Tensors(builder, dtype, self.step, x, weights, out, loaded)
            anywhere = self.tensors.anywhere(form.width)
            tests = [f"is_aligned({pointer}, {form.width})" for pointer in anywhere]
            with emit.block(f"if {' & '.join(tests) or 'True'}:"):
                self._sums(first)
                self._results(first)
            if anywhere:
                with emit.block("else:"):
                    self._one_by_one(first)
        builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block)

    def _sums(self, first: Sequence[str]) -> None:
        """Emit the loads and FMAs that accumulate the thread's pixels in ``total``; each window adds its taps in order.

        Each loaded row of the image is used by all windows that contain it. Elements outside the image are zero.
        """
        emit, form, tensors, windows = self.emit, self.form, self.tensors, self.step.windows
        kernel = [operator.index(size) for size in windows.kernel]
        emit.line(f"total = registers_f32({form.sums})")
        with emit.block(f"for e in range({form.sums}):"):
            emit.line("total[e] = float32(0)")
        # By offset of an element from the first window's start, the pairs (window, tap) that read the element, along
        # the last dimension (``reads``) and the second-to-last (``lines``).
        reads = reads_of(form.pixels, kernel[-1], windows.strides[-1], windows.dilations[-1])
        lines = {0: [(0, 0)]}
        if len(kernel) > 1:
            lines = reads_of(form.rows, kernel[-2], windows.strides[-2], windows.dilations[-2])
        starts = [
            self._index(f"{pixel} * {stride} - {begin}")
            for pixel, stride, begin in zip(first[2:], windows.strides, tensors.begins, strict=True)
        ]
        columns = {}
        for offset in sorted(reads):
            inside, at = self._inside(starts[-1], offset, tensors.limits[-1])
            columns[offset] = inside, self._index(f"{at} * {tensors.steps[-1]}")
        batches = batches_of(sorted(lines), len(reads))
        emit.line(f"picture = lanes_of({tensors.x}, {form.width * len(reads) * len(batches[0])})")
        emit.line(f"taps = lanes_of({tensors.weights}, {form.width * kernel[-1]})")
        for number in range(kernel[-2] if len(kernel) > 1 else 1):
            emit.line(f"weights{number} = registers_f32({form.width * kernel[-1]})")
        base = self._index(f"{first[0]} * {tensors.steps[0]} + {first[1]}")
        for outer in itertools.product(*(range(size) for size in kernel[:-2])):
            loaded: set[int] = set()
            for batch in batches:
                for number, line in enumerate(batch):
                    offsets = [pixel * apart for pixel, apart in zip(outer, windows.dilations, strict=False)]
                    within, row = [], base
                    for start, offset, limit, step in zip(
                        starts[:-1], (*offsets, line), tensors.limits, tensors.steps[2:], strict=False
                    ):
                        inside, at = self._inside(start, offset, limit)
                        within.append(inside)
                        row = self._index(f"{row} + {at} * {step}")
                    for _, tap in lines[line]:
                        if tap not in loaded:
                            loaded.add(tap)
                            needed = within if form.rows == 1 else ()
                            self._load_weights(first[1], (*outer, tap) if len(kernel) > 1 else (), needed)
                    for beside, offset in enumerate(sorted(reads)):
                        valid, column = columns[offset]
                        at = self._index(f"{row} + {column}")
                        valid = " & ".join([*within, valid])
                        lane = (number * len(reads) + beside) * form.width
                        emit.line(
                            f"load_lanes_inside(picture, {lane}, {tensors.x}, int64({at}), {valid}, {form.width})"
                        )
                for number, line in enumerate(batch):
                    for beside, offset in enumerate(sorted(reads)):
                        lane = (number * len(reads) + beside) * form.width
                        self._multiply(lane, lines[line], reads[offset])

    def _multiply(self, lane: int, lines: Sequence[tuple[int, int]], along: Sequence[tuple[int, int]]) -> None:
        """Emit the FMAs of the image vector at ``lane`` of ``picture``, for all windows that contain it."""
        emit, form = self.emit, self.form
        with emit.block(f"for e in range({form.width}):"):
            emit.line(f"value = {load_text('picture', f'{lane} + e', self.tensors.x_type)}")
            for (number, tap), (pixel, beside) in itertools.product(lines, along):
                total = f"total[{(number * form.pixels + pixel) * form.width} + e]"
                emit.line(f"{total} = fma_f32(value, weights{tap}[{beside * form.width} + e], {total})")

    def _index(self, text: str) -> str:
        """Assign ``text``, cast to the index type, to a variable and return it."""
        return self.emit.assign(f"{self.index}({text})")

    def _inside(self, start: str, offset: int, limit: str) -> tuple[str, str]:
        """Return variables for the test that position ``start + offset`` is inside the image, and for the position."""
        at = self._index(f"{start} + {offset}")
        return self.emit.assign(f"({at} >= 0) & ({at} < {limit})"), at

    def _load_weights(self, channel: str, outer: Sequence[int], within: Sequence[str]) -> None:
        """Emit loads of one row of the window's weights for the thread's channels.

        The predicates ``within`` test that the image row that these weights multiply is inside the image; if it is not,
        the weights become zeros. Without a predicate, NVVM and ptxas sink the loads below the preceding FMAs, which
        exposes the latency of the loads.
        """
        emit, tensors, width = self.emit, self.tensors, self.form.width
        count, needed = operator.index(self.step.windows.kernel[-1]), " & ".join(within) or "True"
        for tap in range(count):
            numbers = zip((*outer, tap), tensors.taps, strict=True)
            terms = [(str(number), step) for number, step in numbers if number]
            at = self._index(" + ".join([channel, offset_text(terms)]))
            emit.line(f"load_lanes_inside(taps, {tap * width}, {tensors.weights}, int64({at}), {needed}, {width})")
        with emit.block(f"for e in range({width * count}):"):
            emit.line(f"weights{outer[-1] if outer else 0}[e] = {load_text('taps', 'e', tensors.weights_type)}")

    def _results(self, first: Sequence[str]) -> None:
        """Emit the epilogue and the stores of the thread's pixels."""
        emit, form, tensors = self.emit, self.form, self.tensors
        lanes: dict[Scalar, str] = {}
        for more in tensors.more:
            if more.is_vector:
                lanes[more.leaf] = emit.lanes(more.pointer, form.width)
                if more.is_of_channels:
                    self._load(lanes[more.leaf], more, self._index(more.offset(first)))
        emit.line(f"stored = lanes_of({tensors.out.pointer}, {form.width})")
        moved = [tensors.out, *(more for more in tensors.more if more.is_vector and not more.is_of_channels)]
        begins = {one.leaf: self._index(one.offset(first)) for one in moved}
        for row, pixel in itertools.product(range(form.rows), range(form.pixels)):
            at = list(first)
            at[-1] = emit.assign(f"{first[-1]} + {pixel}")
            inside = [f"{at[-1]} < {tensors.ends[-1]}"] if pixel else []
            if row:
                at[-2] = emit.assign(f"{first[-2]} + {row}")
                inside.append(f"{at[-2]} < {tensors.ends[-2]}")
            with emit.block(f"if {' & '.join(f'({one})' for one in inside) or 'True'}:"):
                to = {
                    one.leaf: self._index(
                        f"{begins[one.leaf]} + {row} * {one.strides[-2]} + {pixel} * {one.strides[-1]}"
                    )
                    for one in moved
                }
                for more in moved[1:]:
                    self._load(lanes[more.leaf], more, to[more.leaf])
                with emit.block(f"for e in range({form.width}):"):
                    self._bind(at, lanes)
                    number = (row * form.pixels + pixel) * form.width
                    emit.bind(self.step.total, emit.assign(f"total[{number} + e]"))
                    emit.store("stored", "e", self.value)
                offset = f"int64({to[tensors.out.leaf]})"
                emit.line(
                    f"store_lanes(stored, 0, {tensors.out.pointer}, {offset}, 0, {offset} + {form.width}, True,"
                    f" {form.width}, 1)"
                )

    def _load(self, lanes: str, more: _Operand, offset: str) -> None:
        self.emit.line(f"load_lanes_inside({lanes}, 0, {more.pointer}, int64({offset}), True, {self.form.width})")

    def _bind(self, at: Sequence[str], lanes: Mapping[Scalar, str]) -> None:
        """Bind the leaves of the epilogue's inputs to their elements for channel ``e`` at coordinates ``at``."""
        emit = self.emit
        for more in self.tensors.more:
            text = load_text(lanes[more.leaf], "e", more.dtype) if more.leaf in lanes else ""
            if not text:
                beside = "" if more.strides[1] == "0" else f" + e * {more.strides[1]}"
                text = load_text(more.pointer, f"{more.offset(at)}{beside}", more.dtype)
            emit.bind(more.leaf, emit.assign(text))

    def _one_by_one(self, first: Sequence[str]) -> None:
        """Emit the code for unaligned tensors: loops over single elements, which are slow but keep the code small."""
        emit, builder, form, tensors, windows = self.emit, self.builder, self.form, self.tensors, self.step.windows
        counts = [builder.integer(count) for count in (form.rows, form.pixels, form.width)]
        kernel = [builder.integer(size) for size in windows.kernel]
        with ExitStack() as stack:
            at = list(first)
            for axis, count in ((-2, counts[0]), (-1, counts[1])):
                if len(kernel) + axis >= 0:
                    number = emit.fresh()
                    stack.enter_context(emit.block(f"for {number} in range({count}):"))
                    at[axis] = emit.assign(f"{first[axis]} + {number}")
                    stack.enter_context(emit.block(f"if {at[axis]} < {tensors.ends[axis]}:"))
            stack.enter_context(emit.block(f"for e in range({counts[2]}):"))
            emit.line("one = float32(0)")
            with ExitStack() as inner:
                image, weight = [f"{at[0]} * {tensors.steps[0]} + {at[1]} + e"], [f"{at[1]} + e"]
                for axis, size in enumerate(kernel):
                    tap = emit.fresh()
                    inner.enter_context(emit.block(f"for {tap} in range({size}):"))
                    position = emit.assign(
                        f"{at[2 + axis]} * {windows.strides[axis]} - {tensors.begins[axis]}"
                        f" + {tap} * {windows.dilations[axis]}"
                    )
                    limit = tensors.limits[axis]
                    inner.enter_context(emit.block(f"if ({position} >= 0) & ({position} < {limit}):"))
                    image.append(f"{position} * {tensors.steps[2 + axis]}")
                    weight.append(f"{tap} * {tensors.taps[axis]}")
                element = load_text(tensors.x, " + ".join(image), tensors.x_type)
                weight_of = load_text(tensors.weights, " + ".join(weight), tensors.weights_type)
                emit.line(f"one = fma_f32({element}, {weight_of}, one)")
            self._bind(at, {})
            emit.bind(self.step.total, "one")
            emit.store(tensors.out.pointer, f"{tensors.out.offset(at)} + e", self.value)


class _Operand:
    """A tensor that broadcasts to the result (an epilogue input or the output), with its kernel parameters."""

    def __init__(
        self, builder: KernelBuilder, dtype: DType, shape: Sequence[Dim], leaf: Scalar, x: Tensor, written: bool = False
    ) -> None:
        self.leaf, self.dtype = leaf, x.dtype
        self.pointer = builder.tensor(x, written=written)
        placed = broadcast_strides(x, shape)
        self.is_vector = placed[1] == 1
        self.is_of_channels = all(stride == 0 for axis, stride in enumerate(placed) if axis != 1)
        self.strides = [builder.stride(stride, dtype) for stride in placed]

    def offset(self, at: Sequence[str]) -> str:
        """Return the offset of the element at coordinates ``at``."""
        return offset_text(list(zip(at, self.strides, strict=True)))


class _Tensors:
    """Kernel parameters for all tensors and sizes, added to the builder.

    ``steps`` are the image's strides, ``limits`` and ``begins`` its spatial sizes and pads, ``taps`` the strides of the
    weights, ``ends`` the spatial sizes of the result.
    """

    def __init__(
        self,
        builder: KernelBuilder,
        dtype: DType,
        step: Convolve,
        x: Tensor,
        weights: Tensor,
        out: Tensor,
        loaded: Sequence[Input],
    ) -> None:
        self.x, self.x_type = builder.tensor(x), x.dtype
        self.weights, self.weights_type = builder.tensor(weights), weights.dtype
        self.more = [_Operand(builder, dtype, step.shape, leaf, y) for leaf, y in loaded]
        self.out = _Operand(builder, dtype, step.shape, step.total, out, written=True)
        operands = zip((*self.more, self.out), (*(y for _, y in loaded), out), strict=True)
        self._moved = [(self.x, x), (self.weights, weights)]
        self._moved += [(one.pointer, y) for one, y in operands if one.is_vector]
        lists = (
            x.strides,
            step.windows.size,
            step.windows.begin,
            contiguous_strides(weights.shape)[1:-1],
            step.shape[2:],
        )
        numbers = [[builder.stride(number, dtype) for number in some] for some in lists]
        self.steps, self.limits, self.begins, self.taps, self.ends = numbers

    def anywhere(self, width: int) -> list[str]:
        """Return the pointers of vectorized tensors that may be unaligned: inputs and outputs of the cluster."""
        return [name for name, y in self._moved if not begins_at_vectors(y, width)]
