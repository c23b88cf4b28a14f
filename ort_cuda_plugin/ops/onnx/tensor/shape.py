"""Shape operators: views, shape arithmetic, and generated tensors (Constant, Range, EyeLike)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....kernels.codegen.source import constant_number
from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import HALVES, Constant, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import (
    Dim,
    Expr,
    eq,
    floordiv,
    is_read_back,
    le,
    lt,
    mod,
    ne,
    product,
    select,
    sym_max,
)
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.host import HostArray, on_host
from ....program.lowering.views import expand, permute, reshape, squeeze, unsqueeze
from ... import requirements as require
from ...axes import axes_count, normalize_axes, normalize_axis
from ...registry import ALL_TENSORS, T1, HostTensor, T, op


@op("Identity", since=1, types={"T": ALL_TENSORS})
@op("Identity", since=14, types={"V": ALL_TENSORS})
def identity(ctx: Lowering, x: Tensor) -> Tensor:
    return x


@op("Shape", since=1, types={"T": ALL_TENSORS})
def shape(ctx: Lowering, data: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    dims = data.shape[slice(start, end)]
    return ctx.host_tensor(dims, (len(dims),), DType.INT64)


@op("Size", since=1, types={"T": ALL_TENSORS})
def size(ctx: Lowering, data: Tensor) -> Tensor:
    return ctx.host_tensor([data.size], (), DType.INT64)


@op("Reshape", since=1, types={"T": ALL_TENSORS})
def reshape_1(ctx: Lowering, data: Tensor, *, shape: tuple[int, ...] = ()) -> Tensor:
    return _reshape(ctx, data, shape, allow_zero=False)


@op("Reshape", since=5, types={"T": ALL_TENSORS})
def reshape_5(ctx: Lowering, data: T, shape: HostTensor, *, allowzero: int = 0) -> Tensor:
    require.rank(1, shape=shape)
    return _reshape(ctx, data, ctx.host_values(shape, "shape"), bool(allowzero))


def _reshape(ctx: Lowering, x: Tensor, values: Sequence[Dim], allow_zero: bool) -> Tensor:
    for value in values:
        require.least_dim(ctx, -1, shape=value)
    if any(is_read_back(value) for value in values):
        return _reshape_to_computed(ctx, x, values, allow_zero)
    dims: list[Dim] = []
    inferred = None
    for axis, value in enumerate(values):
        if _stands_for(ctx, value, -1):
            require.that(inferred is None, "shape", "have at most one -1", tuple(values))
            inferred = axis
            dims.append(1)
        elif not allow_zero and _stands_for(ctx, value, 0):
            require.that(axis < x.rank, "shape", f"have no 0 beyond the {x.rank} dimensions of data", tuple(values))
            dims.append(x.shape[axis])
        else:
            dims.append(value)
    if inferred is not None:
        dims[inferred] = _inferred_dim(ctx, x, dims, allow_zero)
    expected = f"have the product {x.size!r}, the number of elements of data"
    require.holds(ctx, eq(product(dims), x.size), "shape", expected, product(dims))
    return reshape(ctx, x, dims)


def _stands_for(ctx: Lowering, value: Dim, number: int) -> bool:
    """Return whether ``value`` is ``number``, Reshape's special value -1 (infer the size) or 0 (copy it); add a guard.

    Return False if this is unknown and sizes are guessed: a formula may yield -1 or 0 only for a guess that is invalid,
    for example the output size of a convolution whose guessed input is shorter than the window.
    """
    same = eq(value, number)
    if ctx.is_guess and ctx.known(same) is None:
        return False
    return ctx.guard(same)


def _inferred_dim(ctx: Lowering, x: Tensor, dims: Sequence[Dim], allow_zero: bool) -> Dim:
    """Return the size of the dimension that Reshape infers. It is -1 in the model, and 1 in ``dims``.

    If x is empty, the size follows from the dimensions other than 0, as in ONNX Runtime.
    """
    others = product(dims)
    if others != 0 and x.size != 0:
        quotient = floordiv(x.size, others)
        if quotient * others == x.size:
            return quotient
    no_elements, found = eq(others, 0), f"{list(dims)} with 1 in place of -1"
    if not allow_zero:
        expected = "have no -1 if another dimension of the result is 0"
        require.holds(ctx, ne(others, 0), "shape", expected, found)
    given, wanted = _size_of_filled(x.shape), _size_of_filled(dims)
    filled = floordiv(given, wanted)
    fits = select(no_elements, eq(filled * wanted, given), 1)
    expected = f"have nonzero dimensions whose product divides {given!r}, the product of the nonzero dimensions of data"
    require.holds(ctx, fits, "shape", expected, found)
    return select(no_elements, filled, floordiv(x.size, select(no_elements, 1, others)))


def _size_of_filled(shape: Sequence[Dim]) -> Dim:
    """Return the product of the dimensions that are not 0."""
    return product(select(eq(dim, 0), 1, dim) for dim in shape)


def _reshape_to_computed(ctx: Lowering, x: Tensor, values: Sequence[Dim], allow_zero: bool) -> Tensor:
    """Reshape to sizes that a Run reads back. Guards cannot test them, so plan expressions resolve -1 and 0."""
    copied = [
        value if allow_zero or axis >= x.rank else select(eq(value, 0), x.shape[axis], value)
        for axis, value in enumerate(values)
    ]
    others = product(select(eq(value, -1), 1, value) for value in copied)
    dims = [select(eq(value, -1), floordiv(x.size, sym_max(others, 1)), value) for value in copied]
    expected = f"have the product {x.size!r}, the number of elements of data"
    require.holds(ctx, eq(product(dims), x.size), "shape", expected, product(dims))
    return reshape(ctx, x, dims)


@op("Flatten", since=1, types={"T": ALL_TENSORS})
def flatten(ctx: Lowering, x: Tensor, *, axis: int = 1) -> Tensor:
    split = x.rank if axis == x.rank else normalize_axis(axis, x.rank) if x.rank else 0
    return reshape(ctx, x, [product(x.shape[:split]), product(x.shape[split:])])


def _squeeze(ctx: Lowering, x: Tensor, axes: Sequence[Dim] | None) -> Tensor:
    if axes is None:
        chosen: Sequence[int] = _axes_of_size_1(ctx, x)
    else:
        chosen = normalize_axes(axes, x.rank)
        for axis in chosen:
            require.dim(ctx, axis, 1, data=x)
    return squeeze(ctx, x, chosen)


def _axes_of_size_1(ctx: Lowering, x: Tensor) -> list[int]:
    """Return the axes of size 1; the plan holds only for inputs with the same axes of size 1."""
    flags = [eq(dim, 1) for dim in x.shape]
    certain = [axis for axis, flag in enumerate(flags) if flag == 1]
    possible = [axis for axis, flag in enumerate(flags) if isinstance(flag, Expr)]
    output = ctx.node.outputs[0] if ctx.node is not None else None
    # If sizes are unknown, assume that Squeeze drops as many axes as the declared rank of the output implies.
    dropped = len(certain) if output is None or output.shape is None else x.rank - len(output.shape)
    guess = (certain + possible)[:dropped]
    found = ctx.host_constants(
        ctx.host_tensor(flags, (x.rank,), DType.INT64),
        "the dimensions of size 1 that Squeeze drops",
        [int(axis in guess) for axis in range(x.rank)],
    )
    return [axis for axis, flag in enumerate(found) if flag]


@op("Squeeze", since=1, types={"T": ALL_TENSORS})
def squeeze_1(ctx: Lowering, data: Tensor, *, axes: tuple[int, ...] | None = None) -> Tensor:
    return _squeeze(ctx, data, axes)


@op("Squeeze", since=13, types={"T": ALL_TENSORS})
def squeeze_13(ctx: Lowering, data: T, axes: HostTensor | None = None) -> Tensor:
    if axes is None:
        return _squeeze(ctx, data, None)
    maybe_one = [axis for axis, dim in enumerate(data.shape) if ctx.known(eq(dim, 1)) is not False]
    return _squeeze(ctx, data, ctx.host_constants(axes, "axes", maybe_one[: axes_count(axes)]))


@op("Unsqueeze", since=1, types={"T": ALL_TENSORS})
def unsqueeze_1(ctx: Lowering, data: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    return unsqueeze(ctx, data, normalize_axes(axes, data.rank + len(axes)))


@op("Unsqueeze", since=13, types={"T": ALL_TENSORS})
def unsqueeze_13(ctx: Lowering, data: T, axes: HostTensor) -> Tensor:
    values = ctx.host_constants(axes, "axes", range(axes_count(axes)))
    return unsqueeze(ctx, data, normalize_axes(values, data.rank + len(values)))


@op("Transpose", since=1, types={"T": ALL_TENSORS})
def transpose(ctx: Lowering, data: Tensor, *, perm: tuple[int, ...] | None = None) -> Tensor:
    axes = tuple(reversed(range(data.rank))) if perm is None else normalize_axes(perm, data.rank)
    require.that(len(axes) == data.rank, "perm", f"have {data.rank} entries", perm)
    return permute(ctx, data, axes)


@op("Expand", since=8, types={"T": ALL_TENSORS})
def expand_8(ctx: Lowering, x: T, shape: HostTensor) -> Tensor:
    return expand(ctx, x, _sizes(ctx, shape))


def _sizes(ctx: Lowering, shape: HostTensor) -> tuple[Dim, ...]:
    sizes = ctx.host_values(shape, "shape")
    for size in sizes:
        require.least_dim(ctx, 0, shape=size)
    return sizes


@op("Constant", since=1)
def constant(
    ctx: Lowering,
    *,
    value: Constant | None = None,
    value_float: float | None = None,
    value_floats: tuple[float, ...] | None = None,
    value_int: int | None = None,
    value_ints: tuple[int, ...] | None = None,
) -> Tensor:
    choices: list[tuple[Any, type[np.generic]]] = [
        (value_float, np.float32),
        (value_floats, np.float32),
        (value_int, np.int64),
        (value_ints, np.int64),
    ]
    for number, dtype in choices:
        if number is not None:
            return ctx.constant(np.array(number, dtype))
    names = "one of value, value_float, value_floats, value_int and value_ints"
    return ctx.initializer(require.given(value, names))


@op("ConstantOfShape", since=9, types={"T2": ALL_TENSORS})
def constant_of_shape(ctx: Lowering, shape: HostTensor, *, value: Constant | None = None) -> Tensor:
    fill = Constant.of(np.zeros((1,), np.float32)) if value is None else value
    require.that(fill.size == 1, "value", "have one element", fill.size)
    dims = _sizes(ctx, shape)
    if all(isinstance(dim, int) for dim in dims):
        # A weight is uploaded once instead of filled in every Run.
        static = tuple(dim for dim in dims if isinstance(dim, int))
        return ctx.initializer(Constant(fill.dtype, static, lambda: np.full(static, fill.array.reshape(()))))
    return elementwise(ctx, lambda x: x, expand(ctx, ctx.initializer(fill), dims))


_RANGE_TYPES = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT16, DType.INT32, DType.INT64})
_MAX_RANGE = 2**62
"""Maximum elements of a floating-point Range; the allocation of so large a result fails anyway."""


@op("Range", since=11, types={"T": _RANGE_TYPES})
def range_11(ctx: Lowering, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return _range(ctx, start, limit, delta, start.dtype)


@op("Range", since=27, types={"T": _RANGE_TYPES | HALVES})
def range_27(ctx: Lowering, start: Tensor, limit: Tensor, delta: Tensor, *, stash_type: int = 1) -> Tensor:
    if start.dtype not in HALVES:
        return _range(ctx, start, limit, delta, start.dtype)
    require.one_of((DType.FLOAT32.onnx, DType.FLOAT64.onnx), stash_type=stash_type)
    return _range(ctx, start, limit, delta, DType(stash_type))


def _range(ctx: Lowering, start: Tensor, limit: Tensor, delta: Tensor, stash: DType) -> Tensor:
    """Return ``start + i * delta``, computed in ``stash``."""
    inputs = (start, limit, delta)
    sizes = [x.size for x in inputs]
    require.that(all(size == 1 for size in sizes), "start, limit and delta", "have one element each", sizes)
    dtype = start.dtype
    count = _count_of_floats(ctx, inputs, stash) if dtype.is_float else _count_of_integers(ctx, inputs)

    def on_device() -> Tensor:
        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            first, step = (s.cast(maps.number(x), stash) for x in (start, delta))
            return s.cast(first + s.cast(c[0], stash) * step, dtype)

        return gather_map(ctx, (count,), dtype, element)

    def on_symbols(first: HostArray, last: HostArray, step: HostArray) -> HostArray:
        values = np.empty((count,), dtype=object)
        values[:] = [first.item() + i * step.item() for i in range(len(values))]
        return values

    return on_host(ctx, on_symbols, inputs, (count,), dtype, on_device)


def _count_of_integers(ctx: Lowering, inputs: Sequence[Tensor]) -> Dim:
    first, last, step = map(ctx.host_number, inputs, ("start", "limit", "delta"))
    require.holds(ctx, ne(step, 0), "delta", "not be 0", step)
    require.holds(ctx, lt(-(2**63), step), "delta", "be above -2**63", step)
    # Select by the sign of delta in expressions instead of a guard, which values computed in the Run do not allow. The
    # difference high - low may overflow int64 although the count does not, so divide each by the step first.
    falls = lt(step, 0)
    step = select(falls, 0 - step, step)
    low, high = select(falls, last, first), select(falls, first, last)
    count = floordiv(high, step) - floordiv(low, step) + lt(mod(low, step), mod(high, step))
    return sym_max(count, 0)


_RANGE = ("start, limit and delta", "have a quotient (limit - start) / delta other than NaN, and delta must not be 0")


def _count_of_floats(ctx: Lowering, inputs: Sequence[Tensor], stash: DType) -> Dim:
    """Return the element count like ONNX Runtime: difference in type ``stash``, quotient in float64, on the device."""

    def count(first: Scalar, last: Scalar, step: Scalar) -> Scalar:
        distance = s.cast(last, stash) - s.cast(first, stash)
        steps = s.ceil(s.cast(distance, DType.FLOAT64) / s.cast(step, DType.FLOAT64))
        whole = s.cast(s.minimum(s.where(steps > 0, steps, 0.0), float(_MAX_RANGE)), DType.INT64)
        return s.where(s.equal(step, 0) | s.is_nan(steps), -1, whole)

    numbers = [constant_number(x) for x in inputs]
    if all(number is not None for number in numbers):
        first, last, step = (stash.numpy.type(number) for number in numbers)
        require.that(step != 0, *_RANGE, numbers)
        with np.errstate(all="ignore"):  # infinities and NaN propagate as on the device
            steps = np.ceil(np.float64(last - first) / np.float64(step))
        require.that(not np.isnan(steps), *_RANGE, numbers)
        return int(min(steps, _MAX_RANGE)) if steps > 0 else 0
    (found,) = ctx.read_back(elementwise(ctx, count, *inputs), "number of elements", -1, _MAX_RANGE)
    require.holds(ctx, le(0, found), *_RANGE, "a quotient of NaN or delta = 0")
    return sym_max(found, 0)


@op("EyeLike", since=9, types={"T1": ALL_TENSORS, "T2": ALL_TENSORS})
def eye_like(ctx: Lowering, x: T1, *, dtype: int | None = None, k: int = 0) -> Tensor:
    require.rank(2, input=x)
    result = x.dtype if dtype is None else DType.of_attribute(dtype)
    return gather_map(ctx, x.shape, result, lambda maps, c: s.cast(s.equal(c[0] + k, c[1]), result))
