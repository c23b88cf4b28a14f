"""Top-k by radix select, on a GPU: blocks select in parts of a row, until a single block can hold what is left of it.

Elements are mapped to unsigned keys, so that the first element of the result has the greatest key. A block holds the
keys of its part in registers and finds the k-th greatest key from the highest bits down, two bits at a time: it counts
the keys that reach each of three thresholds. The block keeps the keys above the k-th, and the first of those equal to
it, in their order. The next launch selects among the kept keys of all blocks of a row, and the last launch sorts the
keys that are left. No result depends on the order of blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, ceildiv, hint, le, sym_min
from ...program.lowering.context import Lowering, Tensor
from ..codegen.simt_fragments import indent
from ..codegen.source import KernelBuilder, load_text, text_property

WARP = 32
MOST = 2048
"""Maximum k: the number of elements that a block sorts."""
MOST_LAUNCHES = 6  # maximum launches before the last one
MOST_PARTS = 65535  # maximum parts of a row: the maximum gridDim.y
_INT32_MAX = 2**31 - 1
_BITS = {DType.FLOAT16: 20, DType.BFLOAT16: 16}
"""Number of high bits of a float32 that distinguish all values of the type; even, since keys have pairs of bits."""


@dataclass(frozen=True)
class SelectKernel:
    """Kernel that selects in a part of ``threads * lanes`` elements.

    The first launch (``is_first``) reads elements, later ones kept keys; the last one (``is_last``) sorts at most
    ``most`` keys.
    """

    dtype: DType
    threads: int
    lanes: int
    most: int
    largest: bool
    is_first: bool
    is_last: bool

    @property
    def part(self) -> int:
        return self.threads * self.lanes

    @property
    def key_dtype(self) -> DType:
        return DType.UINT64 if self.dtype.itemsize == 8 else DType.UINT32

    @property
    def bits(self) -> int:
        return _BITS.get(self.dtype, self.dtype.itemsize * 8)

    @property
    def name(self) -> str:
        return f"{'top' if self.is_last else 'select'}_{self.dtype.short}_{self.part}"

    @text_property
    def body(self) -> str:
        key, bits = self.key_dtype.numpy.name, self.bits
        if self.is_first:
            key_lines = _key_lines(self.dtype, load_text("x", "base + at", self.dtype), key, bits, self.largest)
        else:
            key_lines = "key = keys_in[base + at]"
        number = "start + at" if self.is_first else "int64(numbers_in[base + at])"
        keep, begin = indent(_keep.format(number=number), 3), ""
        if self.is_last:
            begin = _shared.format(most=self.most, key=key, threads=self.threads).strip("\n")
            keep = indent("kept[place] = keys[e]\nplaces[place] = int32(at)", 3)
        text = _source.format(
            key=key,
            short=self.key_dtype.short,
            threads=self.threads,
            warps=self.threads // WARP,
            two=2 * self.threads // WARP,
            four=4 * self.threads // WARP,
            lanes=self.lanes,
            steps=(self.threads // WARP).bit_length() - 1,
            part=self.part,
            bits=bits,
            make_key=indent(key_lines, 2),
            begin=begin,
            keep=keep,
        )
        return text if not self.is_last else text + _sort_source.format(number=number, threads=self.threads)


def _key_lines(dtype: DType, element: str, key: str, bits: int, largest: bool) -> str:
    """Return lines that compute ``key`` (type, ``bits``) of an element. NaN exceeds all numbers; zeros are equal."""
    unsigned = 64 if dtype.itemsize == 8 else 32
    sign, ones = 1 << (unsigned - 1), (1 << unsigned) - 1
    if dtype.is_float:
        float_type = "f64" if dtype is DType.FLOAT64 else "f32"
        lines = [
            f"value = {element}",
            f"seen = {float_type}_as_u{unsigned}(value)",
            f"seen = choose(value == 0, {key}(0), seen)",
            f"key = choose(seen >= {key}({sign}), {key}(~seen), {key}(seen | {key}({sign})))",
            f"key = choose(value != value, {key}({ones}), key)",
        ]
        if bits < unsigned:
            lines.append(f"key = {key}(key >> {key}({unsigned - bits}))")
    else:
        offset = 0 if dtype.numpy.kind == "u" else 1 << (bits - 1)
        wide = "uint64" if unsigned == 64 else "int64"
        lines = [f"key = {key}({wide}({element}) + {wide}({offset}))"]
    if not largest:
        lines.append(f"key = {key}({key}({(1 << bits) - 1}) - key)")
    return "\n".join(lines)


_source = """
    row = int64(cuda.blockIdx.x)
    thread = int64(cuda.threadIdx.x)
    lane = thread & 31
    warp = thread >> 5
    part = int64(cuda.blockIdx.y)
    start = part * {part}
    count = min(n - start, int64({part}))
    wanted = min(k, count)
    base = row * n + start
    first = warp * {lanes} * 32 + lane
    keys = registers_{short}({lanes})
    for e in range({lanes}):
        at = min(first + e * 32, count - 1)
{make_key}
        keys[e] = choose(first + e * 32 < count, key, {key}(0))
    # The largest threshold that at least ``wanted`` keys reach, two bits at a time, until exactly that many reach it.
    sums = array_pointer(cuda.shared.array({four}, int32))
    least = {key}(0)
    reached = count
    shift = int32({bits})
    turn = int64(0)
    while shift > 0 and reached > wanted:
        shift -= int32(2)
        low = {key}(least + ({key}(1) << {key}(shift)))
        middle = {key}(least + ({key}(2) << {key}(shift)))
        high = {key}(least + ({key}(3) << {key}(shift)))
        two = int32(0)
        one = int32(0)
        for e in range({lanes}):
            two = int32(two + choose(keys[e] >= low, int32(1), int32(0)))
            two = int32(two + choose(keys[e] >= middle, int32(65536), int32(0)))
            one = int32(one + choose(keys[e] >= high, int32(1), int32(0)))
        for d in range(5):
            two = int32(two + shfl_xor_i32(two, int32(16 >> d)))
            one = int32(one + shfl_xor_i32(one, int32(16 >> d)))
        place = turn * {two}
        if lane == 0:
            sums[place + warp] = two
            sums[place + {warps} + warp] = one
        cuda.syncthreads()
        two = choose(lane < {warps}, sums[place + min(lane, int64({warps} - 1))], int32(0))
        one = choose(lane < {warps}, sums[place + {warps} + min(lane, int64({warps} - 1))], int32(0))
        for d in range({steps}):
            two = int32(two + shfl_xor_i32(two, int32({warps} >> 1 >> d)))
            one = int32(one + shfl_xor_i32(one, int32({warps} >> 1 >> d)))
        two = shfl_i32(two, int32(0))
        one = shfl_i32(one, int32(0))
        turn = 1 - turn
        at_low = int64(two & int32(65535))
        at_middle = int64(two >> int32(16))
        at_high = int64(one)
        reached = choose(at_low >= wanted, at_low, reached)
        least = choose(at_low >= wanted, low, least)
        reached = choose(at_middle >= wanted, at_middle, reached)
        least = choose(at_middle >= wanted, middle, least)
        reached = choose(at_high >= wanted, at_high, reached)
        least = choose(at_high >= wanted, high, least)
    # Keep greater keys, and the first of equal ones. Their target index counts both kinds in earlier warps.
    above = int32(0)
    equal = int32(0)
    for e in range({lanes}):
        above = int32(above + choose(keys[e] > least, int32(1), int32(0)))
        equal = int32(equal + choose(keys[e] == least, int32(1), int32(0)))
    for d in range(5):
        above = int32(above + shfl_xor_i32(above, int32(16 >> d)))
        equal = int32(equal + shfl_xor_i32(equal, int32(16 >> d)))
    cuda.syncthreads()
    if lane == 0:
        sums[warp] = above
        sums[{warps} + warp] = equal
    cuda.syncthreads()
    in_all = int64(0)
    above_before = int64(0)
    equal_before = int64(0)
    for other in range({warps}):
        in_all += int64(sums[other])
        above_before += choose(other < warp, int64(sums[other]), int64(0))
        equal_before += choose(other < warp, int64(sums[{warps} + other]), int64(0))
    missing = wanted - in_all
    below = uint32((uint32(1) << uint32(lane)) - uint32(1))
{begin}
    for e in range({lanes}):
        is_above = keys[e] > least
        is_equal = keys[e] == least
        above_mask = ballot(is_above)
        equal_mask = ballot(is_equal)
        rank = equal_before + int64(libdevice.popc(int32(equal_mask & below)))
        place = above_before + int64(libdevice.popc(int32(above_mask & below))) + min(rank, missing)
        at = first + e * 32
        if is_above or (is_equal and rank < missing):
{keep}
        above_before += int64(libdevice.popc(int32(above_mask)))
        equal_before += int64(libdevice.popc(int32(equal_mask)))
"""
_keep = """
keys_out[row * m + part * k + place] = keys[e]
numbers_out[row * m + part * k + place] = int32({number})
"""
_shared = """
    kept = array_pointer(cuda.shared.array({most}, {key}))
    places = array_pointer(cuda.shared.array({most}, int32))
    size = int64(1)
    while size < wanted:
        size *= 2
    for i in range(wanted + thread, size, {threads}):
        kept[i] = {key}(0)
        places[i] = int32(2147483647)
"""
_sort_source = """
    cuda.syncthreads()
    width = int64(2)
    while width <= size:
        distance = width >> 1
        while distance > 0:
            for i in range(thread, size >> 1, {threads}):
                a = 2 * i - (i & (distance - 1))
                b = a + distance
                a_key, b_key = kept[a], kept[b]
                a_place, b_place = places[a], places[b]
                is_late = b_key > a_key or (b_key == a_key and b_place < a_place)
                if is_late == ((a & width) == 0):
                    kept[a], kept[b] = b_key, a_key
                    places[a], places[b] = b_place, a_place
            cuda.syncthreads()
            distance >>= 1
        width *= 2
    for i in range(thread, wanted, {threads}):
        at = int64(places[i])
        # An estimate may run only some blocks, with uninitialized memory in place of the numbers: clamp them.
        number = min(max({number}, int64(0)), n_all - 1)
        order[row * k + i] = number
        values[row * k + i] = x[row * n_all + number]
"""
_FORMS = ((32, 4), (128, 8), (512, 8), (1024, 8))
"""Block shapes (threads, elements per thread) for a whole row, smallest first."""
_PART_FORMS = _FORMS[2:]
"""Block shapes (threads, elements per thread) for a part of a row: for small k, and for large k."""


def top_rows(ctx: Lowering, x: Tensor, k: Dim, *, largest: bool) -> tuple[Tensor, Tensor] | None:
    """Return the ``largest`` (or smallest) k elements of each row of x [rows, n] in order, and their int64 indices.

    Both results are [rows, k]. NaN is greater than every number; of equal elements, the lower index comes first.
    Returns None if the rows must be sorted instead: on the emulated device, for bool and packed types, if k may be
    0 or exceed `MOST`, and for rows that need too many launches or blocks.
    """
    rows, n = x.shape
    if ctx.device.emulated or not (x.dtype.is_float or x.dtype.is_integer) or x.dtype.is_packed:
        return None
    if not all(ctx.settled(known) for known in (le(1, k), le(k, MOST), le(n, _INT32_MAX))):
        return None
    x = ctx.contiguous(x)
    sizes: list[Dim] = [n]
    left: Dim = n
    forms: list[tuple[int, int, Dim]] = []
    while (form := _whole(ctx, left)) is None:
        form = _PART_FORMS[0 if 4 * hint(k) <= math.prod(_PART_FORMS[0]) else 1]
        part = form[0] * form[1]
        parts = ceildiv(left, part)
        if len(forms) == MOST_LAUNCHES or not ctx.settled(le(parts, MOST_PARTS)):
            return None
        left = (parts - 1) * k + sym_min(k, left - (parts - 1) * part)
        sizes.append(left)
        forms.append((*form, parts))
    kept: tuple[Tensor, Tensor] | None = None
    for number, (threads, lanes, parts) in enumerate([*forms, (*form, 1)]):
        is_last = number == len(forms)
        kernel = SelectKernel(x.dtype, threads, lanes, min(MOST, threads * lanes), largest, kept is None, is_last)
        builder = KernelBuilder()
        keys_in, numbers_in = (None, None) if kept is None else kept
        builder.tensors(x=x if kept is None or is_last else None, keys_in=keys_in, numbers_in=numbers_in)
        builder.integers(n=sizes[number], k=k)
        if is_last:
            made = ctx.empty((rows, k), x.dtype), ctx.empty((rows, k), DType.INT64)
            builder.tensors(written=True, values=made[0], order=made[1])
            builder.integers(n_all=n)
        else:
            m = sizes[number + 1]
            made = ctx.empty((rows, m), kernel.key_dtype), ctx.empty((rows, m), DType.INT32)
            builder.tensors(written=True, keys_out=made[0], numbers_out=made[1])
            builder.integers(m=m)
        builder.launch(ctx, kernel.name, (rows, parts, 1), (threads, 1, 1), body=kernel.body)
        kept = made
    return kept


def _whole(ctx: Lowering, n: Dim) -> tuple[int, int] | None:
    """Return (threads, elements per thread) of the smallest block that holds n elements; None if there is none."""
    for threads, lanes in _FORMS:
        if hint(n) <= threads * lanes:
            return (threads, lanes) if ctx.settled(le(n, threads * lanes)) else None
    return None
