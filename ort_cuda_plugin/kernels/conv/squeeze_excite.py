"""Fused squeeze-and-excitation: two pointwise convolutions of one pixel per image, in one kernel.

Networks with squeeze-and-excitation multiply a vector per image by two small matrices. With a library each
multiplication is a launch with more latency than work, often followed by an elementwise kernel. Here each block
computes the whole first matrix-vector product of its image, into shared memory, and some rows of the second. The
weights' addresses do not depend on computed values, so that the loads of both matrices are in flight at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import hint
from ...program.lowering.context import Lowering
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.steps import Convolve, joined_nodes, stored
from ...program.steps.trace import Launch, Step
from ..codegen.source import KernelBuilder, kernel_name, load_text, offset_text
from ..codegen.vectors import VECTOR_BYTES

THREADS, WARP = 512, 32  # threads per block, and per warp
MOST_BYTES = 1 << 18
"""Maximum bytes of each weight matrix, since every block reads the whole first one."""
MOST_VECTORS = 12
"""Maximum number of vector loads per thread from the image's pixel, and also from the second matrix."""
MOST_KEPT = 24
"""Maximum vectors in registers for which a thread prefetches the second matrix; those of the image count twice."""
AT_ONCE = 15
"""Vectors of the first matrix that a thread loads before it multiplies them."""
LEAST_ROWS = 64
"""Minimum output channels of the second convolution per block, unless it has fewer in total."""
IMAGES_PER_MULTIPROCESSOR = 2
"""Maximum images per multiprocessor; with more, a library reads the weights less often."""
MULTIPROCESSORS_PER_BLOCK = 2
"""Multiprocessors per block of the launch: with more blocks, the first matrix would be read more often."""
SUMS = 4
"""Independent accumulators per thread, to hide the latency of additions."""
NOTE = "two pointwise convolutions of one output pixel: one kernel"


@dataclass(frozen=True)
class _Product:
    """A block's matrix-vector product with ``rows`` x ``columns`` weights.

    ``lanes`` adjacent threads share a row of weights; a thread loads vectors of ``width`` weights.
    """

    rows: int
    columns: int
    width: int
    lanes: int

    @property
    def vectors(self) -> int:
        """Vectors per row of weights."""
        return self.columns // self.width

    @property
    def count(self) -> int:
        """Vectors per row of weights that one thread loads."""
        return -(-self.vectors // self.lanes)

    @property
    def own(self) -> int:
        """Weights per row that one thread loads, including padding past the row's end."""
        return self.count * self.width

    @property
    def groups(self) -> int:
        """Rows that the block computes at a time, in one round."""
        return THREADS // self.lanes

    @property
    def rounds(self) -> int:
        return -(-self.rows // self.groups)


def _product(rows: int, columns: int, itemsize: int) -> _Product:
    width = VECTOR_BYTES // itemsize
    while columns % width:
        width //= 2
    lanes = 1
    while lanes < min(columns // width, WARP):
        lanes *= 2
    return _Product(rows, columns, width, lanes)


@dataclass(frozen=True)
class ChainForm:
    """What a block computes: the whole ``first`` matrix-vector product, and a share of the rows of the ``second``.

    An image has ``parts`` blocks, each with another share.
    """

    parts: int
    first: _Product
    second: _Product


def choose_form(ctx: Lowering, first: Convolve, second: Convolve) -> ChainForm | None:
    """Choose the blocks per image and the threads per row; None if a library is faster (estimate) or sizes are 0."""
    multiprocessors, itemsize = ctx.device.multiprocessors, first.operands[0].dtype.itemsize
    hidden, channels = first.operands[1].static_shape[:2]
    rows = second.operands[1].static_shape[0]
    images = max(hint(first.shape[0]), 1)
    if images > IMAGES_PER_MULTIPROCESSOR * multiprocessors or 0 in (hidden, channels, rows):
        return None
    if max(hidden * channels, rows * hidden) * itemsize > MOST_BYTES:
        return None
    parts = max(min(multiprocessors // (MULTIPROCESSORS_PER_BLOCK * images), -(-rows // LEAST_ROWS)), 1)
    form = ChainForm(parts, _product(hidden, channels, itemsize), _product(-(-rows // parts), hidden, itemsize))
    return form if max(form.first.count, form.second.count * form.second.rounds) <= MOST_VECTORS else None


def launch_chain(ctx: Lowering, form: ChainForm, first: Convolve, second: Convolve) -> Step:
    with ctx.recording(joined_nodes(first, second)) as steps:
        _Chain(ctx, form, first, second).launch()
    (launch,) = steps
    assert isinstance(launch, Launch)
    launch.note = NOTE
    return launch


@dataclass
class _Half:
    """A thread's variables for one of the two matrix-vector products.

    ``vectors`` are the offsets of the thread's vectors in a row. Each of the other lists has a variable for each round
    (`_Product.groups` rows): ``rows``, the thread's row of weights; ``starts``, the row's offset; ``inside``, whether
    the thread stores the row's result; ``beside``, the elements of the epilogue's inputs, by leaf; ``totals``, the
    thread's partial dot product.
    """

    step: Convolve
    product: _Product
    pointer: str
    vectors: list[str]
    rows: list[str]
    starts: list[str]
    inside: list[str]
    beside: list[dict[Scalar, str]]
    totals: list[str]


class _Chain:
    """Generator of the fused kernel for two convolutions."""

    def __init__(self, ctx: Lowering, form: ChainForm, first: Convolve, second: Convolve) -> None:
        self.ctx, self.form, self.first, self.second = ctx, form, first, second
        self.builder = KernelBuilder()
        self.emit = self.builder.emit

    def launch(self) -> None:
        """Emit and launch the kernel."""
        builder, emit, form = self.builder, self.emit, self.form
        x = self.first.operands[0]
        image = builder.tensor(x)
        out = self.second.outputs[0][1]
        target = builder.tensor(out, written=True)
        emit.line("thread = int64(cuda.threadIdx.x)")
        emit.line("block = int64(cuda.blockIdx.x)")
        emit.line(f"image = quotient_i64(block, int64({form.parts}))")
        emit.line(f"hidden = array_pointer(cuda.shared.array({form.first.rows}, float32, 16))")
        begin = emit.assign(f"(block - image * {form.parts}) * {form.second.rows}")
        halves = [self._half(self.first, form.first, "int64(0)"), self._half(self.second, form.second, begin)]
        tests = [f"is_aligned({image}, {form.first.width})"]
        tests += [f"is_aligned({half.pointer}, {half.product.width})" for half in halves]
        strides = [builder.stride(stride) for stride in out.strides[:2]]
        for header, is_whole in ((f"if {' & '.join(tests)}:", True), ("else:", False)):
            with emit.block(header):
                self._products(image, halves, is_whole)
                for row in self._results(halves[1]):
                    at = offset_text(list(zip(("image", row), strides, strict=True)))
                    emit.store(target, at, s.cast(self.second.outputs[0][0], out.dtype))
        block = THREADS, 1, 1
        builder.launch(self.ctx, kernel_name(self.ctx), (x.shape[0] * form.parts, 1, 1), block, bounded=True)

    def _products(self, image: str, halves: Sequence[_Half], is_whole: bool) -> None:
        """Emit both matrix-vector products and the first epilogue.

        With ``is_whole`` all tensors are aligned: weights are loaded as vectors, and prefetched if registers suffice.
        """
        emit, (first, second) = self.emit, halves
        base = f"image * {first.product.columns}"
        loaded: list[str] = []
        if is_whole:
            kept = 2 * first.product.count + second.product.count * second.product.rounds
            if kept <= MOST_KEPT:
                loaded = [self._loaded(second, second.pointer, row) for row in second.starts]
            picture, values = self._loaded(first, image, base), emit.fresh("r")
            emit.line(f"{values} = registers_f32({first.product.own})")
            with emit.block(f"for e in range({first.product.own}):"):
                emit.line(f"{values}[e] = {load_text(picture, 'e', first.step.operands[0].dtype)}")
        at_once = max(AT_ONCE // first.product.count, 1)
        for number, row in enumerate(first.starts):
            if is_whole:
                if number and number % at_once == 0:
                    # The barrier keeps the compiler from hoisting more loads than there are registers for.
                    emit.line("cuda.syncthreads()")
                self._add_up(first, number, values, self._loaded(first, first.pointer, row))
            else:
                factor = load_text(image, f"{base} + k", first.step.operands[0].dtype)
                self._add_up_slowly(first, number, factor)
        result, y = first.step.outputs[0]
        for row in self._results(first):
            emit.line(f"hidden[{row}] = {emit.value(stored(s.cast(result, y.dtype)))}")
        emit.line("cuda.syncthreads()")
        if is_whole:
            values = emit.fresh("r")
            emit.line(f"{values} = registers_f32({second.product.own})")
            for number, vector in enumerate(second.vectors):
                with emit.block(f"for e in range({second.product.width}):"):
                    emit.line(f"{values}[{number * second.product.width} + e] = hidden[{vector} + e]")
        for number in range(second.product.rounds):
            if is_whole:
                row = loaded[number] if loaded else self._loaded(second, second.pointer, second.starts[number])
                self._add_up(second, number, values, row)
            else:
                self._add_up_slowly(second, number, "hidden[k]")

    def _half(self, step: Convolve, product: _Product, begin: str) -> _Half:
        """Emit the offsets of the thread's weights, and loads of the epilogue's inputs. ``begin`` is the first row."""
        builder, emit = self.builder, self.emit
        w = step.operands[1]
        pointer = builder.tensor(w)
        shift, last = product.lanes.bit_length() - 1, w.static_shape[0] - 1
        lane, group = emit.assign(f"thread & {product.lanes - 1}"), emit.assign(f"thread >> {shift}")
        vectors, rows, inside = [], [], []
        for number in range(product.count):
            vector = emit.assign(f"{lane} + {number * product.lanes}")
            vectors.append(emit.assign(f"min({vector}, int64({product.vectors - 1})) * {product.width}"))
        for number in range(product.rounds):
            own = emit.assign(f"{group} + {number * product.groups}")
            row = emit.assign(f"{begin} + {own}")
            rows.append(emit.assign(f"min({row}, int64({last}))"))
            inside.append(emit.assign(f"({lane} == 0) & ({own} < {product.rows}) & ({row} <= {last})"))
        beside: list[dict[Scalar, str]] = [{} for _ in rows]
        for leaf, y in builder.to_load(step.inputs):
            name = builder.tensor(y)
            strides = [builder.stride(stride) for stride in broadcast_strides(y, step.shape)[:2]]
            for row, known in zip(rows, beside, strict=True):
                at = offset_text(list(zip(("image", row), strides, strict=True)))
                known[leaf] = emit.assign(load_text(name, at, y.dtype))
        totals = [emit.fresh("total") for _ in rows]
        starts = [emit.assign(f"{row} * {product.columns}") for row in rows]
        return _Half(step, product, pointer, vectors, rows, starts, inside, beside, totals)

    def _loaded(self, half: _Half, pointer: str, begin: str) -> str:
        """Emit loads of the thread's vectors in the row at offset ``begin``; return the variable that holds them."""
        emit, width = self.emit, half.product.width
        lanes = emit.lanes(pointer, half.product.own)
        for number, vector in enumerate(half.vectors):
            at = emit.assign(f"{begin} + {vector}")
            emit.line(f"load_lanes({lanes}, {number * width}, {pointer}, {at}, 0, {at}, True, {width}, 1)")
        return lanes

    def _add_up(self, half: _Half, number: int, values: str, lanes: str) -> None:
        """Emit the thread's partial dot product of ``values`` and the weights in ``lanes``, in round ``number``."""
        emit, p, dtype = self.emit, half.product, half.step.operands[1].dtype
        sums = emit.fresh("sums")
        emit.line(f"{sums} = registers_f32({SUMS})")
        emit.line(f"for e in range({SUMS}):")
        emit.line(f"    {sums}[e] = float32(0)")
        for vector in range(p.count):
            with emit.block(f"for e in range({p.width}):"):
                term = emit.assign(
                    f"{values}[{vector * p.width} + e] * {load_text(lanes, f'{vector * p.width} + e', dtype)}"
                )
                if vector == p.count - 1 and p.vectors % p.lanes:
                    # Threads past the end of the row have loaded its last vector again: do not add their products.
                    is_in_row = f"(thread & {p.lanes - 1}) + {vector * p.lanes} < {p.vectors}"
                    term = emit.assign(f"choose({is_in_row}, {term}, float32(0))")
                emit.line(f"{sums}[e & {SUMS - 1}] += {term}")
        emit.line(f"{half.totals[number]} = {' + '.join(f'{sums}[{i}]' for i in range(SUMS))}")

    def _add_up_slowly(self, half: _Half, number: int, factor: str) -> None:
        """Emit the partial dot product with loads of single weights; ``factor`` is the source of element k."""
        p, total = half.product, half.totals[number]
        weight = load_text(half.pointer, f"{half.starts[number]} + k", half.step.operands[1].dtype)
        self.emit.line(f"{total} = float32(0)")
        self.emit.line(f"for k in range(thread & {p.lanes - 1}, {p.columns}, {p.lanes}):")
        self.emit.line(f"    {total} += {factor} * {weight}")

    def _results(self, half: _Half) -> Iterator[str]:
        """Reduce the threads' partial dot products by shuffles.

        For each round, open a branch for the thread that stores the row, bind the epilogue's leaves, and yield the row.
        """
        emit, totals, apart = self.emit, half.totals, half.product.lanes // 2
        while apart:
            totals = [emit.assign(f"{total} + shfl_xor_f32({total}, int32({apart}))") for total in totals]
            apart //= 2
        for row, inside, known, total in zip(half.rows, half.inside, half.beside, totals, strict=True):
            with emit.block(f"if {inside}:"):
                for leaf, name in known.items():
                    emit.bind(leaf, name)
                emit.bind(half.step.total, total)
                yield row
