"""Evaluates scalar expressions and element types in NumPy.

Floats of every element type are float64 here, so that the order of additions does not matter. With `Reading.EXACT`
nothing is rounded to the element type. With `Reading.ROUNDED` a value is rounded when it is stored in, or cast to, a
type narrower than float32. Integers have their own type and wrap around. A cast to powers of two (FLOAT8E8M0) rounds in
both readings.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ort_cuda_plugin.model.ir import NARROW_FLOATS, DType
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.steps.row_program import MAX, MIN, PRODUCT, SUM, Stage

Array: TypeAlias = NDArray[Any]
Handler: TypeAlias = "Callable[[Scalar, list[Array]], Array]"


class Reading(enum.StrEnum):
    """Whether floats of types narrower than float32 are evaluated exactly or rounded."""

    EXACT = "exact"
    ROUNDED = "rounded"


NARROW: Mapping[DType, np.dtype[Any]] = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.FLOAT8E4M3FNUZ: np.dtype(ml_dtypes.float8_e4m3fnuz),
    DType.FLOAT8E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.FLOAT8E5M2FNUZ: np.dtype(ml_dtypes.float8_e5m2fnuz),
    DType.FLOAT4E2M1: np.dtype(ml_dtypes.float4_e2m1fn),
    DType.FLOAT8E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
}


def decoded(array: Array, dtype: DType) -> Array:
    """Convert stored elements (type ``dtype.numpy``) to numbers: floats of any type to float64."""
    if dtype in NARROW:
        return array.view(NARROW[dtype]).astype(np.float64)
    return array.astype(np.float64) if dtype.is_float else array


def encoded(array: Array, dtype: DType) -> Array:
    """Convert numbers to stored elements (type ``dtype.numpy``); the inverse of `decoded`."""
    if dtype in NARROW:
        return array.astype(np.float32).astype(NARROW[dtype]).view(dtype.numpy)
    return array.astype(dtype.numpy)


def rounded(array: Array, dtype: DType, reading: Reading, saturate: bool = True, mode: str = "up") -> Array:
    """Round floats to the type ``dtype`` if the reading rounds; the result is float64."""
    if dtype is DType.FLOAT8E8M0:
        with np.errstate(all="ignore"):
            exponents = np.log2(array)
            round_exponent = {"down": np.floor, "up": np.ceil, "nearest": np.rint}[mode]
            powers: Array = np.where(array > 0, np.exp2(np.clip(round_exponent(exponents), -127, 127)), np.nan)
            return powers
    if reading is Reading.EXACT or dtype not in NARROW:
        return array
    if saturate and dtype not in (DType.FLOAT16, DType.BFLOAT16):
        largest = float(ml_dtypes.finfo(NARROW[dtype]).max)
        array = np.clip(array, -largest, largest)
    with np.errstate(over="ignore"):
        narrow: Array = array.astype(np.float32).astype(NARROW[dtype]).astype(np.float64)
    return narrow


def numpy_type(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type in which elements of ``dtype`` are evaluated."""
    return np.dtype(np.float64) if dtype.is_float else dtype.numpy


def _cast(x: Array, source: DType, target: DType, reading: Reading, saturate: bool, mode: str) -> Array:
    if target is DType.BOOL:
        return np.not_equal(x, 0)
    if target.is_float:
        return rounded(x.astype(np.float64), target, reading, saturate, mode)
    if source.is_float:
        x = np.asarray(np.clip(np.trunc(np.nan_to_num(x)), -(2.0**63), 2.0**63 - 1024), np.int64)
    x = x.astype(target.numpy)
    if target.is_packed:
        x = x & target.numpy.type((1 << target.bits) - 1)
        if target.numpy.kind == "i":
            sign = target.numpy.type(1 << (target.bits - 1))
            x = (x ^ sign) - sign
    return x


def _truncdiv(a: Array, b: Array) -> Array:
    quotient = np.floor_divide(a, np.where(b == 0, b.dtype.type(1), b))
    inexact: Array = np.logical_and(quotient * b != a, (a < 0) ^ (b < 0))
    found: Array = np.where(b == 0, quotient.dtype.type(0), quotient + inexact.astype(quotient.dtype))
    return found


_erf = np.frompyfunc(math.erf, 1, 1)
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": np.left_shift,
    "shr": np.right_shift, "where": np.where, "min": np.minimum, "max": np.maximum, "truncdiv": _truncdiv,
    "truncmod": lambda a, b: np.where(b == 0, b.dtype.type(0), a - _truncdiv(a, b) * b), "fmod": np.fmod,
    "erf": lambda x: np.asarray(_erf(x), np.float64), "half_erf": lambda x: np.asarray(_erf(x), np.float64),
    "pow": np.power, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "rsqrt": lambda x: 1.0 / np.sqrt(x),
    **{name: getattr(np, name) for name in (
        "exp", "log", "log1p", "expm1", "sqrt", "tanh", "sin", "cos", "tan", "sinh", "cosh", "exp2", "log2", "log10",
        "floor", "ceil", "rint",
    )},
}  # fmt: skip


class UnknownOperation(Exception):
    """An expression contains an operation that only the kernel generator can evaluate."""


class Evaluation:
    """Evaluates expressions for all elements of ``shape``.

    ``known`` has the values of leaves, which broadcast to ``shape``. ``axes`` are the axes along which the stages of a
    row program reduce. ``handlers`` evaluate further operations, by name.
    """

    def __init__(
        self,
        known: Mapping[Scalar, Array],
        reading: Reading,
        shape: Sequence[int] = (),
        axes: Sequence[int] = (),
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        self._values = dict(known)
        self._handlers = {} if handlers is None else handlers
        self._reading, self._shape, self._axes = reading, tuple(shape), sorted(axes)
        self._stages: dict[Stage, list[Array]] = {}

    def value(self, x: Scalar) -> Array:
        """Return the value of an expression. It does not recurse, because expressions may be very deep."""
        stack = [x]
        with np.errstate(all="ignore"):
            while stack:
                current = stack[-1]
                pending = [operand for operand in current.operands if operand not in self._values]
                if current in self._values or not pending:
                    stack.pop()
                    if current not in self._values:
                        self._values[current] = self._computed(current)
                stack += pending
        return self._values[x]

    def _computed(self, x: Scalar) -> Array:
        operands = [self._values[operand] for operand in x.operands]
        if x.op == "constant":
            return np.asarray(x.value, numpy_type(x.dtype))
        if x.op == "cast":
            return _cast(operands[0], x.operands[0].dtype, x.dtype, self._reading, *x.value)
        if x.op == "reduced":
            stage: Stage = x.value[0]
            number: int = x.value[1]
            if stage not in self._stages:
                self._stages[stage] = self._reduced(stage)
            return self._stages[stage][number]
        if x.op in ("index", "count"):
            return self._position(x.op)
        if x.op in self._handlers:
            return self._handlers[x.op](x, operands)
        if x.op not in _FUNCTIONS:
            raise UnknownOperation(x.op)
        result = np.asarray(_FUNCTIONS[x.op](*operands))
        return result if x.dtype is DType.BOOL else result.astype(numpy_type(x.dtype), copy=False)

    def _row_sizes(self) -> list[int]:
        return [self._shape[axis] for axis in self._axes]

    def _position(self, op: str) -> Array:
        sizes = self._row_sizes()
        if op == "count":
            return np.asarray(math.prod(sizes), np.int64)
        shape = [size if axis in self._axes else 1 for axis, size in enumerate(self._shape)]
        return np.arange(math.prod(sizes), dtype=np.int64).reshape(shape)

    def _reduced(self, stage: Stage) -> list[Array]:
        """Return the final accumulators of a stage for each row; reduced axes have size 1."""
        initial = [self.value(x) for x in stage.initial]
        elements = [np.broadcast_to(self._values[x], self._shape) for x in stage.elements]
        kept = [1 if axis in self._axes else size for axis, size in enumerate(self._shape)]
        axes = tuple(self._axes)
        functions = {SUM: np.add, PRODUCT: np.multiply, MAX: np.maximum, MIN: np.minimum}
        function = functions.get(stage.reduction)
        if function is not None:
            result = function.reduce(elements[0], axis=axes, keepdims=True, dtype=elements[0].dtype, initial=initial[0])
            return [np.asarray(result, elements[0].dtype)]
        outer = [size for axis, size in enumerate(self._shape) if axis not in axes]
        ordered = [np.moveaxis(x, axes, range(-len(axes), 0)) for x in elements]
        rows = [x.reshape(*outer, math.prod(self._row_sizes())) for x in ordered]
        accumulators = tuple(Scalar(x.dtype, "leaf") for x in stage.initial)
        leaves = tuple(Scalar(x.dtype, "leaf") for x in stage.elements)
        new = stage.reduction.step(accumulators, leaves)
        totals = [np.broadcast_to(x, rows[0].shape[:-1]) for x in initial]
        for column in range(rows[0].shape[-1]):
            known = dict(zip(accumulators, totals, strict=True))
            known |= dict(zip(leaves, (x[..., column] for x in rows), strict=True))
            step = Evaluation(known, self._reading)
            totals = [step.value(x) for x in new]
        return [np.broadcast_to(x, rows[0].shape[:-1]).reshape(kept) for x in totals]


def is_narrow(dtype: DType) -> bool:
    """Return whether numbers of a type are rounded with `Reading.ROUNDED`."""
    return dtype in NARROW_FLOATS
