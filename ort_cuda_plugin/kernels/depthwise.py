"""Convolutions of each channel by itself, for images with channels last: neighbouring threads take neighbouring ones.

cuDNN has no tensor cores for these, and takes the engine that it has for all else. That ours is faster is an estimate.
A thread has a vector of channels at some places that lie side by side along the last dimension, so that what it reads
of the image serves several windows, and what it reads of the weights serves all of its places.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ..model.ir import DType
from ..program import scalar as s
from ..program.elementwise import copy_of
from ..program.lowering import Lowering, Tensor
from ..program.scalar import Scalar
from ..program.shapes import broadcast_strides
from ..program.steps import Convolve, Input
from ..program.symbolic import Dim, ceildiv, divides, hint, le, product
from ..program.tensor import contiguous_strides
from ..program.views import permute
from .codegen import KernelBuilder, kernel_name, load_text, offset_text
from .layout import Plane, coordinates, extent, index_type
from .vector_map import VECTOR_BYTES, vector_threads

__all__ = ["is_depthwise", "launch_depthwise"]

MAX_TAPS = 49
"""Elements of a window that the kernel has written out."""
PLACES = 4
"""Of a thread, at most."""
FEW_TAPS = 25
"""With more a thread has one place: its weights take the registers."""
SIDE, LEAST_SIDE = 32, 16
"""Vectors of channels that neighbouring threads take before they go on to the next places, at most and at least."""
LITTLE_TAPS = 9
"""With more, and vectors of halves, a thread has two places: more threads at once are worth more than fewer loads."""
THREADS = 256
"""For each multiprocessor; a thread has less where there would be fewer of them."""


def is_depthwise(ctx: Lowering, step: Convolve) -> bool:
    """Whether each channel of the result is made of one channel, by a small window."""
    rows, channels, *kernel = step.operands[1].static_shape
    return (
        not step.transposed
        and step.groups == rows > 1 == channels
        and product(kernel) <= MAX_TAPS
        and len(step.outputs) == 1
        and all(ctx.settled(le(1, size)) for size in step.windows.size)
    )


@dataclass(frozen=True)
class _Form:
    """A thread has ``width`` channels at ``places`` neighbouring places."""

    width: int
    places: int


def _choose_form(ctx: Lowering, step: Convolve, strides: Sequence[Sequence[Dim]], itemsize: int) -> _Form:
    """``strides`` are those of what vectors move; they count channels by 1."""
    channels = step.shape[1]
    width = VECTOR_BYTES // itemsize
    while width > 1 and not all(divides(width, size) for size in (channels, *itertools.chain(*strides)) if size != 1):
        width //= 2
    taps, stride = product(step.windows.kernel), step.windows.strides[-1]
    places = PLACES if taps <= FEW_TAPS else 1
    if itemsize == 2 and taps > LITTLE_TAPS and stride == 1:
        places = min(places, 2)
    wanted = THREADS * ctx.device.multiprocessors
    elements = hint(product(step.shape))
    if stride > 2:
        places = 1
    while places > 1 and elements < wanted * width * places:
        places //= 2
    while width * itemsize > 4 and elements < wanted * width:
        width //= 2
    return _Form(width, places)


def _side(blocks: int) -> int:
    """How many of a place's ``blocks`` of channels neighbouring threads take, before they go on to the next places.

    With few, the windows of a block of threads overlap, and it reads less. About a warp's threads go the same way.
    """
    side = next(size for size in range(min(SIDE, blocks), 0, -1) if blocks % size == 0)
    return side if side >= LEAST_SIDE else blocks


def launch_depthwise(ctx: Lowering, step: Convolve) -> None:
    """Launches our kernel for such a convolution and what follows it."""
    x, w = step.operands
    out = step.outputs[0][1]
    turned = permute(ctx, w, (*range(1, w.rank), 0))
    # Weights are turned once; see `library_calls`.
    weights = turned if turned.is_contiguous else copy_of(ctx, turned) if ctx.options.fusion else ctx.contiguous(turned)
    inputs = [(leaf, ctx.materialize(y)) for leaf, y in step.inputs]
    moved = [y for y in (x, out, *(y for _, y in inputs)) if y.size != 1]
    vectors = [strides for strides in (broadcast_strides(y, step.shape) for y in moved) if strides[1] == 1]
    itemsize = max(y.dtype.itemsize for y in moved)
    _Depthwise(ctx, step, _choose_form(ctx, step, vectors, itemsize), inputs).launch(x, weights, out)


class _Depthwise:
    """Emits the kernel of one convolution."""

    def __init__(self, ctx: Lowering, step: Convolve, form: _Form, inputs: Sequence[Input]) -> None:
        self.ctx, self.step, self.form, self.inputs = ctx, step, form, inputs
        self.builder = KernelBuilder()
        self.emit = self.builder.emit
        self.whole = ""

    def launch(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        ctx, builder, emit, form = self.ctx, self.builder, self.emit, self.form
        blocks = -(-operator.index(self.step.shape[1]) // form.width)
        # Kernels of halves wait for instructions: warps that go the same way are worth more there than less to read.
        side = _side(blocks) if max(y.dtype.itemsize for y in (x, out)) > 2 else blocks
        dims = [self.step.shape[0], blocks // side, *self.step.shape[2:-1]]
        dims += [ceildiv(self.step.shape[-1], form.places), side]
        items = product(dims)
        plane = Plane(ctx, builder, [items], vector_threads(ctx.device, items))
        dtype = index_type(ctx, items)
        extents = [extent(builder, dim, dtype) for dim in dims[1:]]
        with emit.block(f"if {plane.inside}:"):
            flat = "column" if dtype is DType.INT64 else emit.assign("int32(column)")
            image, group, *places, strip, beside = coordinates(emit, flat, extents, dtype)
            first = emit.assign(f"{strip} * {form.places}")
            channel = emit.assign(f"({group} * {side} + {beside}) * {form.width}")
            loaded = builder.to_load(self.inputs)
            tensors = [x, weights, *(y for _, y in loaded)]
            pointers = [builder.tensor(y) for y in tensors]
            target = builder.tensor(out, written=True)
            moved = [name for name, y in zip(pointers, tensors, strict=True) if y is weights or self._is_vector(y)]
            aligned = [f"is_aligned({name}, {form.width})" for name in (*moved, target)]
            self.whole = emit.assign(" & ".join(aligned))
            self._sums(x, pointers[0], pointers[1], weights, image, channel, places, first)
            self._results(loaded, pointers[2:], target, out, [image, channel, *places], first)
        builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block)

    def _is_vector(self, y: Tensor) -> bool:
        return y.size != 1 and broadcast_strides(y, self.step.shape)[1] == 1

    def _load(self, lanes: str, number: int, pointer: str, at: str) -> None:
        width = self.form.width
        self.emit.line(
            f"load_lanes({lanes}, {number * width}, {pointer}, {at}, 0, {at} + {width - 1}, {self.whole}, {width}, 1)"
        )

    def _sums(
        self,
        x: Tensor,
        pointer: str,
        weights_pointer: str,
        weights: Tensor,
        image: str,
        channel: str,
        places: Sequence[str],
        first: str,
    ) -> None:
        """The sums of the thread's places, in ``total``; each window's elements come in order."""
        builder, emit, form, windows = self.builder, self.emit, self.form, self.step.windows
        kernel = [operator.index(size) for size in windows.kernel]
        stride, dilation = windows.strides[-1], windows.dilations[-1]
        steps = [builder.stride(stride) for stride in x.strides]
        limits = [builder.integer(size) for size in windows.size]
        begins = [builder.stride(begin) for begin in windows.begin]
        taps = [builder.stride(stride) for stride in contiguous_strides(weights.shape)[1:-1]]
        emit.line(f"total = registers_f32({form.width * form.places})")
        with emit.block(f"for e in range({form.width * form.places}):"):
            emit.line("total[e] = float32(0)")
        # Places along the last dimension: outside of the image a neighbour is read in their place, and not used.
        reads: dict[int, list[tuple[int, int]]] = {}
        for place, tap in itertools.product(range(form.places), range(kernel[-1])):
            reads.setdefault(place * stride + tap * dilation, []).append((place, tap))
        columns = {}
        origin = emit.assign(f"{first} * {stride} - {begins[-1]}")
        for offset in sorted(reads):
            at = emit.assign(f"{origin} + {offset}")
            inside = emit.assign(f"({at} >= 0) & ({at} < {limits[-1]})")
            columns[offset] = inside, emit.assign(f"choose({inside}, {at}, int64(0)) * {steps[-1]}")
        emit.line(f"picture = lanes_of({pointer}, {form.width})")
        emit.line(f"taps = lanes_of({weights_pointer}, {form.width * kernel[-1]})")
        emit.line(f"weights = registers_f32({form.width * kernel[-1]})")
        base = emit.assign(f"{image} * {steps[0]} + {channel}")
        for outer in itertools.product(*(range(size) for size in kernel[:-1])):
            rows = [
                emit.assign(f"{place} * {step} - {begin} + {number * apart}")
                for place, step, begin, number, apart in zip(
                    places, windows.strides, begins, outer, windows.dilations, strict=False
                )
            ]
            inside = " & ".join(f"({at} >= 0) & ({at} < {limit})" for at, limit in zip(rows, limits, strict=False))
            with emit.block(f"if {inside or 'True'}:"):
                terms = list(zip(rows, steps[2:], strict=False))
                row = emit.assign(" + ".join([base, offset_text(terms)]))
                for tap in range(kernel[-1]):
                    terms = [(str(number), step) for number, step in zip((*outer, tap), taps, strict=True) if number]
                    self._load("taps", tap, weights_pointer, emit.assign(" + ".join([channel, offset_text(terms)])))
                with emit.block(f"for e in range({form.width * kernel[-1]}):"):
                    emit.line(f"weights[e] = {load_text('taps', 'e', weights.dtype)}")
                for offset, windows_of in sorted(reads.items()):
                    valid, column = columns[offset]
                    self._load("picture", 0, pointer, emit.assign(f"{row} + {column}"))
                    with emit.block(f"for e in range({form.width}):"):
                        emit.line(f"value = choose({valid}, {load_text('picture', 'e', x.dtype)}, float32(0))")
                        for place, tap in windows_of:
                            number = f"{place * form.width} + e"
                            emit.line(f"total[{number}] = total[{number}] + value * weights[{tap * form.width} + e]")

    def _results(
        self,
        loaded: Sequence[Input],
        pointers: Sequence[str],
        target: str,
        out: Tensor,
        outer: Sequence[str],
        first: str,
    ) -> None:
        """What follows the sums, and the stores."""
        builder, emit, form, shape = self.builder, self.emit, self.form, self.step.shape
        value = s.cast(self.step.outputs[0][0], out.dtype)
        placed = [broadcast_strides(y, shape) for _, y in loaded]
        texts = [[builder.stride(stride) for stride in strides] for strides in (*placed, broadcast_strides(out, shape))]
        last = builder.integer(shape[-1])
        lanes: dict[Scalar, str] = {}
        for (leaf, y), pointer, strides in zip(loaded, pointers, placed, strict=True):
            if all(stride == 0 for stride in strides):
                emit.bind(leaf, emit.assign(load_text(pointer, "0", y.dtype)))
            elif strides[1] == 1:
                lanes[leaf] = emit.fresh("r")
                emit.line(f"{lanes[leaf]} = lanes_of({pointer}, {form.width})")
        emit.line(f"stored = lanes_of({target}, {form.width})")
        for place in range(form.places):
            with emit.block(f"if {first} + {place} < {last}:" if place else "if True:"):
                at = [*outer, emit.assign(f"{first} + {place}")]
                places = [emit.assign(offset_text(list(zip(at, mine, strict=True)))) for mine in texts]
                for (leaf, _), pointer, where in zip(loaded, pointers, places, strict=False):
                    if leaf in lanes:
                        self._load(lanes[leaf], 0, pointer, where)
                with emit.block(f"for e in range({form.width}):"):
                    for (leaf, y), pointer, where, mine in zip(loaded, pointers, places, texts, strict=False):
                        if leaf in lanes:
                            emit.bind(leaf, emit.assign(load_text(lanes[leaf], "e", y.dtype)))
                        elif emit.bound(leaf) is None:
                            more = "" if mine[1] == "0" else f" + e * {mine[1]}"
                            emit.bind(leaf, emit.assign(load_text(pointer, f"{where}{more}", y.dtype)))
                    emit.bind(self.step.total, emit.assign(f"total[{place * form.width} + e]"))
                    emit.store("stored", "e", value)
                moved = f"{places[-1]}, 0, {places[-1]} + {form.width}, {self.whole}, {form.width}, 1"
                emit.line(f"store_lanes(stored, 0, {target}, {moved})")
