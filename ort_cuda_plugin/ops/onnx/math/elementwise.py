"""Elementwise operators: arithmetic, comparison, logic and type conversion."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Final

from ....kernels.codegen.source import constant_number
from ....model.ir import FLOATS_8, HALVES, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import eq, logical_or
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import unsqueeze
from ... import requirements as require
from ...axes import normalize_axis
from ...layouts import as_number
from ...registry import ALL_TENSORS, ARITHMETIC, BOOL, FLOATS, INTS, SIGNED, T1, T2, op, with_numbers


def unary(
    name: str,
    since: int,
    fn: Callable[..., Scalar],
    types: frozenset[DType] = FLOATS,
    constraint: str = "T",
    *,
    domain: str = "",
    until: int | None = None,
    **defaults: float,
) -> None:
    """Register an elementwise operator ``fn(x, **attributes)``; ``defaults`` are the attributes with their defaults."""

    def function(ctx: Lowering, x: Tensor, **attributes: float) -> Tensor:
        return elementwise(ctx, lambda a: fn(a, **(defaults | attributes)), x)

    op(name, domain=domain, since=since, until=until, types={constraint: types})(with_numbers(function, defaults))


def _erf(x: Scalar) -> Scalar:
    if x.dtype in HALVES:
        return s.half_erf(x)
    return s.cast(s.erf(s.cast(x, DType.FLOAT64) if x.dtype.is_integer else x), x.dtype)


unary("Abs", 1, s.absolute, ARITHMETIC)
unary("Neg", 1, lambda x: -x, SIGNED)
unary("Sign", 9, s.sign, ARITHMETIC)
unary("Reciprocal", 1, lambda x: 1.0 / x)
unary("Sqrt", 1, s.sqrt)
unary("Exp", 1, s.exp)
unary("Log", 1, s.log)
unary("Floor", 1, s.floor)
unary("Ceil", 1, s.ceil)
unary("Round", 11, s.round_half_even)
unary("Sin", 7, s.sin)
unary("Cos", 7, s.cos)
for _name, _since in (*((x, 7) for x in ("Tan", "Asin", "Acos", "Atan")),
                      *((x, 9) for x in ("Sinh", "Cosh", "Asinh", "Acosh", "Atanh"))):  # fmt: skip
    unary(_name, _since, functools.partial(s.unary_float, _name.lower()))
unary("Erf", 9, _erf, ARITHMETIC)
unary("Not", 1, lambda x: ~x, BOOL)
unary("BitwiseNot", 18, lambda x: ~x, INTS)
unary("IsNaN", 9, s.is_nan, FLOATS | FLOATS_8, "T1")


BROADCAST_SINCE = 7
"""First opset in which two inputs broadcast; earlier opsets align the second input by attributes."""


def aligned(ctx: Lowering, a: Tensor, b: Tensor, axis: int | None, broadcast: int) -> Tensor:
    """Align b to dimensions of a, as versions before `BROADCAST_SINCE` do.

    Without ``broadcast`` b must have a's shape; with it, b must broadcast to the dimensions of a from ``axis`` on.

    Without ``axis``, b is aligned to the last dimensions.
    """
    start = a.rank - b.rank if axis is None else normalize_axis(axis, a.rank)
    if start < 0 or start + b.rank > a.rank or (a.rank != b.rank and not broadcast):
        expected = f"have rank {a.rank}, as the first input has (broadcast = 0)"
        if broadcast:
            first = max(start, 0)
            expected = f"have at most rank {a.rank - first}, to broadcast to the first input from its axis {first} on"
        raise require.violation("the second input", expected, f"rank {b.rank}")
    for dim, wanted in zip(b.shape, a.shape[start:], strict=False):
        fits = logical_or(eq(dim, wanted), eq(dim, 1)) if broadcast else eq(dim, wanted)
        shape = f"{list(a.shape[start : start + b.rank])} of the first input"
        expected = f"broadcast to the dimensions {shape}" if broadcast else f"have the dimensions {shape}"
        require.holds(ctx, fits, "the second input", expected, list(b.shape))
    return unsqueeze(ctx, b, range(b.rank, a.rank - start))


def binary(name: str, since: int, fn: Callable[[Scalar, Scalar], Scalar], types: frozenset[DType]) -> None:
    """Register an elementwise operator with two inputs of one type, which broadcast.

    If ``since`` is 7, version 1 is registered as well, with the attributes of `aligned`.
    """

    @op(name, since=since, types={"T": types})
    def function(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
        return elementwise(ctx, fn, a, b)

    if since == BROADCAST_SINCE:

        @op(name, since=1, types={"T": types})
        def earlier(ctx: Lowering, a: Tensor, b: Tensor, *, axis: int | None = None, broadcast: int = 0) -> Tensor:
            return elementwise(ctx, fn, a, aligned(ctx, a, b, axis, broadcast))


def _divide(a: Scalar, b: Scalar) -> Scalar:
    return s.trunc_divide(a, b) if a.dtype.is_integer else a / b


binary("Add", 7, lambda a, b: a + b, ARITHMETIC)
binary("Sub", 7, lambda a, b: a - b, ARITHMETIC)
binary("Mul", 7, lambda a, b: a * b, ARITHMETIC)
binary("Div", 7, _divide, ARITHMETIC)
binary("Equal", 7, s.equal, ALL_TENSORS)
binary("Less", 7, lambda a, b: a < b, ARITHMETIC)
binary("Greater", 7, lambda a, b: a > b, ARITHMETIC)
binary("LessOrEqual", 12, lambda a, b: a <= b, ARITHMETIC)
binary("GreaterOrEqual", 12, lambda a, b: a >= b, ARITHMETIC)
binary("And", 7, lambda a, b: a & b, BOOL)
binary("Or", 7, lambda a, b: a | b, BOOL)
binary("Xor", 7, lambda a, b: a ^ b, BOOL)
binary("BitwiseAnd", 18, lambda a, b: a & b, INTS)
binary("BitwiseOr", 18, lambda a, b: a | b, INTS)
binary("BitwiseXor", 18, lambda a, b: a ^ b, INTS)


MAX_TOGETHER = 6
"""Maximum inputs of a variadic operator that one kernel combines."""


def variadic(
    name: str,
    since: int,
    step: Callable[[Scalar, Scalar], Scalar],
    types: frozenset[DType],
    finish: Callable[[Scalar, int], Scalar] = lambda total, count: total,
) -> None:
    """Register a variadic operator: for inputs a, b and c the result is ``finish(step(step(a, b), c), 3)``."""

    def function(ctx: Lowering, *inputs: Tensor) -> Tensor:
        require.that(bool(inputs), "the node", "have at least one input", "none")
        # A kernel has a limited number of parameters, so it combines at most MAX_TOGETHER inputs.
        rest = list(inputs)
        while len(rest) > MAX_TOGETHER:
            rest[:MAX_TOGETHER] = [elementwise(ctx, lambda *x: functools.reduce(step, x), *rest[:MAX_TOGETHER])]
        return elementwise(ctx, lambda *x: finish(functools.reduce(step, x), len(inputs)), *rest)

    op(name, since=since, types={"T": types})(function)


variadic("Sum", 1, lambda a, b: a + b, FLOATS)
variadic("Mean", 1, lambda a, b: a + b, FLOATS, lambda total, count: total / count)
variadic("Min", 1, s.minimum, ARITHMETIC)
variadic("Max", 1, s.maximum, ARITHMETIC)


def sum_like_first(ctx: Lowering, first: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of all inputs; ``others`` broadcast to the shape of ``first``."""
    for other in others:
        require.broadcast(ctx, first.shape, **{"an addend": other})
    return elementwise(ctx, lambda *x: functools.reduce(lambda a, b: a + b, x), first, *others)


@op("Pow", since=7, types={"T": ARITHMETIC, "T1": ARITHMETIC})
def pow_(ctx: Lowering, x: Tensor, y: T1) -> Tensor:
    exponent = constant_number(y)
    if exponent is not None and y.rank <= x.rank:
        if x.dtype.is_float and exponent in s.SIMPLE_EXPONENTS:
            return elementwise(ctx, s.SIMPLE_EXPONENTS[exponent], x)
        if exponent == 2:
            return elementwise(ctx, lambda a: a * a, x)
    # float64 represents integer powers up to 2**53 exactly.
    compute = DType.FLOAT64 if x.dtype.is_integer or x.dtype is DType.FLOAT64 else DType.FLOAT32
    return elementwise(ctx, lambda a, b: s.cast(s.power(s.cast(a, compute), s.cast(b, compute)), x.dtype), x, y)


@op("Pow", since=1, types={"T": FLOATS})
def pow_1(ctx: Lowering, x: Tensor, y: Tensor, *, axis: int | None = None, broadcast: int = 0) -> Tensor:
    return pow_(ctx, x, aligned(ctx, x, y, axis, broadcast))


@op("Mod", since=10, types={"T": ARITHMETIC})
def mod(ctx: Lowering, a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return elementwise(ctx, s.trunc_modulo if fmod else s.floor_modulo, a, b)


@op("BitShift", since=11, types={"T": INTS})
def bit_shift(ctx: Lowering, x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    require.one_of(("LEFT", "RIGHT"), direction=direction)
    width = 8 * x.dtype.itemsize

    def shift(a: Scalar, b: Scalar) -> Scalar:
        # A shift by the width or more, or by a negative count, shifts out every bit.
        some_stay = (b >= 0) & (b < width)
        count = s.where(some_stay, b, width - 1)
        if direction == "RIGHT" and a.dtype in SIGNED:
            return a >> count
        return s.where(some_stay, a << count if direction == "LEFT" else a >> count, 0)

    return elementwise(ctx, shift, x, y)


@op("IsInf", since=10, types={"T1": FLOATS | FLOATS_8})
def is_inf(ctx: Lowering, x: T1, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    def test(a: Scalar) -> Scalar:
        found = s.constant(False, DType.BOOL)
        if detect_positive:
            found = found | s.equal(a, float("inf"))
        if detect_negative:
            found = found | s.equal(a, float("-inf"))
        return found

    return elementwise(ctx, test, x)


def _at_least(a: Scalar, bound: Scalar | float) -> Scalar:
    """Return the maximum of ``a`` and ``bound``; ignore a NaN bound."""
    return s.where(a < bound, bound, a) if a.dtype.is_float else s.maximum(a, bound)


def _at_most(a: Scalar, bound: Scalar | float) -> Scalar:
    """Return the minimum of ``a`` and ``bound``; ignore a NaN bound."""
    return s.where(a > bound, bound, a) if a.dtype.is_float else s.minimum(a, bound)


unary("Clip", 1, lambda x, min, max: _at_most(_at_least(x, min), max), min=float("-inf"), max=float("inf"))

_LARGEST: Final = {
    DType.FLOAT16: 65504.0,
    DType.BFLOAT16: float.fromhex("0x1.fep127"),
    DType.FLOAT32: float.fromhex("0x1.fffffep127"),
    DType.FLOAT64: sys.float_info.max,
}
"""Largest finite value of each float type."""


@op("Clip", since=11, types={"T": ARITHMETIC})
def clip(ctx: Lowering, x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    """Clip to the bounds; the defaults are the float type's finite limits, so that infinities become finite."""
    bounds = [bound for bound in (min, max) if bound is not None]
    if not bounds and not x.dtype.is_float:
        return x
    scalars = [as_number(ctx, bound, "each of min and max") for bound in bounds]

    def clamp(a: Scalar, *limits: Scalar) -> Scalar:
        remaining = list(limits)
        if min is not None:
            a = _at_least(a, remaining.pop(0))
        elif x.dtype.is_float:
            a = _at_least(a, -_LARGEST[x.dtype])
        if max is not None:
            return _at_most(a, remaining[0])
        return _at_most(a, _LARGEST[x.dtype]) if x.dtype.is_float else a

    return elementwise(ctx, clamp, x, *scalars)


@op("Cast", since=1, types={"T1": ALL_TENSORS, "T2": ALL_TENSORS})
def cast_1(ctx: Lowering, x: T1, *, to: str) -> Tensor:
    """Cast to the type whose ONNX name is the string ``to``, such as FLOAT."""
    ours = {"FLOAT": "FLOAT32", "DOUBLE": "FLOAT64"}
    name = ours.get(to.upper(), to.upper())
    if name not in DType.__members__:
        known = (*ours, *(each.name for each in DType if each.is_supported and each.name not in ours.values()))
        raise require.unsupported("dtype", "to", repr(to), ", ".join(known))
    return cast(ctx, x, to=DType[name].onnx)


@op("Cast", since=6, types={"T1": ALL_TENSORS, "T2": ALL_TENSORS})
def cast(ctx: Lowering, x: T1, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    require.one_of(("up", "down", "nearest"), round_mode=round_mode)
    dtype = DType.of_attribute(to, "a cast to")
    if x.dtype is dtype:
        return x
    return elementwise(ctx, lambda a: s.cast(a, dtype, saturate=saturate != 0, round_mode=round_mode), x)


@op("CastLike", since=15, types={"T1": ALL_TENSORS, "T2": ALL_TENSORS})
def cast_like(ctx: Lowering, x: T1, target: T2, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return cast(ctx, x, to=target.dtype.onnx, saturate=saturate, round_mode=round_mode)


@op("BitCast", since=26, types={"T1": ALL_TENSORS, "T2": ALL_TENSORS})
def bit_cast(ctx: Lowering, x: T1, *, to: int) -> Tensor:
    """Copy x and reinterpret the bytes as elements of type ``to``, which must have as many bits.

    A view in place of the copy would share x's buffer, whose known contents are values of the type of x.
    """
    dtype = DType.of_attribute(to, "a cast to")
    require.that(dtype.bits == x.dtype.bits, "to", f"have the {x.dtype.bits} bits of {x.dtype.name}", dtype.name)
    # An element of a packed type takes a byte: sign-extended for signed integers, else the code itself.
    code = (DType.UINT2 if x.dtype.bits == 2 else DType.UINT4) if x.dtype.is_packed else None
    if code is not None and x.dtype.is_integer:
        x = cast(ctx, x, to=code.onnx)
    copy = ctx.empty(x.shape, x.dtype)
    ctx.copy(copy, ctx.contiguous(x))
    if code is not None and dtype.is_integer:
        return cast(ctx, Tensor(code, copy.shape, copy.buffer), to=dtype.onnx)
    return Tensor(dtype, copy.shape, copy.buffer)
