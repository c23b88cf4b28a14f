"""Scalar expressions: the computation of one element by an operator, as a graph of typed operations.

An operator is defined by a Python function of scalars. Lowering calls the function with `Scalar` leaves, and gets the
graph of operations as the result; no numbers are computed. `codegen` turns the graph into kernel source, and `fold`
evaluates it on symbolic integers. The operations are Python's operators for arithmetic and order (``a + b``, ``a < b``)
and the functions of this module. Both operands of an operation have one type; Python numbers take the type of the other
operand.

Float16, bfloat16 and smaller floats are storage types: arithmetic on them is float32, and rounds when an element is
stored or cast. Integer arithmetic wraps around.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...model.ir import HALVES, DType
from .polynomial import Expr

Number: TypeAlias = "int | float | bool"
Operand: TypeAlias = "Scalar | int | float | bool"


class _Sameness:
    """The result of ``==`` and ``!=`` on Scalars, which compare object identity. Expressions reject it as an operand.

    Without this class, a test ``x == y`` meant for elements would silently become a constant.
    """

    __slots__ = ("_answer",)

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def __bool__(self) -> bool:
        return self._answer

    def __repr__(self) -> str:
        return "the result of == or !="


def _operator(function: Callable[[Operand, Operand], Scalar]) -> Callable[[Scalar, Operand], Scalar]:
    """Return the method of a binary operator with an expression on its left."""
    return lambda self, other: function(self, other)


def _operators(
    function: Callable[[Operand, Operand], Scalar],
) -> tuple[Callable[[Scalar, Operand], Scalar], Callable[[Scalar, Number], Scalar]]:
    """Return the methods of a binary operator with an expression on its left, and with a number on its left."""
    return _operator(function), lambda self, other: function(other, self)


@dataclass(frozen=True, eq=False)
class Scalar:
    """A node of an expression: a leaf, or an operation on operands. ``==`` compares identity; `equal` compares values.

    ``op`` names the operation. ``value`` is the number of an ``op="constant"``, or the parameters of an operation,
    such as the rounding mode of a cast. Code generators may store data of their own in the ``value`` of a leaf.
    """

    dtype: DType
    op: str
    operands: tuple[Scalar, ...] = ()
    value: Any = None

    __add__, __radd__ = _operators(lambda a, b: _arithmetic("add", a, b))
    __sub__, __rsub__ = _operators(lambda a, b: _arithmetic("sub", a, b))
    __mul__, __rmul__ = _operators(lambda a, b: _arithmetic("mul", a, b))
    __truediv__, __rtruediv__ = _operators(lambda a, b: _divided(a, b))
    __floordiv__, __rfloordiv__ = _operators(lambda a, b: floor_divide(a, b))
    __mod__, __rmod__ = _operators(lambda a, b: floor_modulo(a, b))
    __pow__, __rpow__ = _operators(lambda a, b: power(a, b))
    __and__ = _operator(lambda a, b: _bitwise("and", a, b))
    __or__ = _operator(lambda a, b: _bitwise("or", a, b))
    __xor__ = _operator(lambda a, b: _bitwise("xor", a, b))
    __lshift__ = _operator(lambda a, b: _bitwise("shl", a, b, booleans=False))
    __rshift__ = _operator(lambda a, b: _bitwise("shr", a, b, booleans=False))
    __lt__ = _operator(lambda a, b: _compare("lt", a, b))
    __le__ = _operator(lambda a, b: _compare("le", a, b))
    __gt__ = _operator(lambda a, b: _compare("gt", a, b))
    __ge__ = _operator(lambda a, b: _compare("ge", a, b))

    def __neg__(self) -> Scalar:
        return _arithmetic("neg", self)

    def __abs__(self) -> Scalar:
        return absolute(self)

    def __invert__(self) -> Scalar:
        return _bitwise("not", self)

    def __eq__(self, other: object) -> Any:
        return _Sameness(self is other)

    def __ne__(self, other: object) -> Any:
        return _Sameness(self is not other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("an expression has no value yet: use `where()`, `&`, `|` instead of `if`, `and`, `or`")


def reachable(expressions: Iterable[Scalar]) -> set[Scalar]:
    """Return all nodes of the expressions: the expressions themselves, their operands, and so on."""
    return set(in_order(expressions))


def reachable_beyond(expressions: Iterable[Scalar], known: set[Scalar], roots: Iterable[Scalar]) -> set[Scalar]:
    """Return `reachable` of the expressions; ``known`` is the `reachable` set of ``roots``, computed earlier.

    If the expressions contain all roots, the function does not visit the nodes in ``known`` again.
    """
    beyond: set[Scalar] = set()
    met: set[Scalar] = set()
    stack = list(expressions)
    while stack:
        x = stack.pop()
        if x in known:
            met.add(x)
        elif x not in beyond:
            beyond.add(x)
            stack.extend(x.operands)
    beyond.update(known if met.issuperset(roots) else reachable(met))
    return beyond


def in_order(expressions: Iterable[Scalar]) -> list[Scalar]:
    """Return the nodes of `reachable` in an order that depends on the expressions alone, and so is reproducible."""
    seen: dict[Scalar, None] = {}
    stack = list(expressions)
    while stack:
        x = stack.pop()
        if x not in seen:
            seen[x] = None
            stack.extend(x.operands)
    return list(seen)


def operands_first(expressions: Iterable[Scalar], done: Container[Scalar] = ()) -> Iterator[Scalar]:
    """Yield the nodes of `reachable`, each after its operands. Skip nodes in ``done``, and nodes that only they need.

    The traversal does not recurse, since chains are as long as models are deep. It visits a shared node once, since
    following every path would take exponential time.
    """
    seen: set[Scalar] = set()
    stack = list(expressions)
    while stack:
        current = stack[-1]
        if current in seen or current in done:
            stack.pop()
            continue
        pending = [operand for operand in current.operands if operand not in seen and operand not in done]
        if pending:
            stack.extend(pending)
            continue
        stack.pop()
        seen.add(current)
        yield current


def constant(value: Number, dtype: DType) -> Scalar:
    """Return ``value`` as a constant of ``dtype``; an integer out of range wraps around.

    Raises TypeError for a fraction in an integer type.
    """
    if dtype is DType.BOOL:
        return Scalar(dtype, "constant", (), bool(value))
    if dtype.is_float:
        return Scalar(dtype, "constant", (), float(value))
    if value != int(value):
        raise TypeError(f"constant: expected a number of {dtype.name}, got {value}")
    bits = dtype.bits
    wrapped = int(value) & ((1 << bits) - 1)
    if dtype.short[0] == "i" and wrapped >> (bits - 1):
        wrapped -= 1 << bits
    return Scalar(dtype, "constant", (), wrapped)


def expression(value: object) -> Scalar:
    """Return ``value``, the result of a caller's scalar function. Raises TypeError if it is not a Scalar."""
    if isinstance(value, Scalar):
        return value
    raise TypeError(
        f"expected an expression, got {value!r}: "
        + (
            "== and != compare Python's objects, use equal() and not_equal()"
            if isinstance(value, _Sameness)
            else "constant() converts a number to an expression"
            if isinstance(value, int | float)
            else "maps.dim() converts a size to an expression"
            if isinstance(value, Expr)
            else "use the operators of Python and the functions of scalar"
        )
    )


def _unify(operands: Sequence[Operand]) -> tuple[Scalar, ...]:
    """Return the operands as Scalars; a number becomes a constant of the Scalars' type, which must be the same."""
    dtypes = {x.dtype for x in operands if isinstance(x, Scalar)}
    for x in operands:
        if not isinstance(x, Scalar | int | float | np.number | np.bool_):
            expression(x)
    if not dtypes:
        given = " and ".join(map(repr, operands))
        raise TypeError(f"operands: expected at least one expression, got {given}. constant() converts a number")
    if len(dtypes) != 1:
        raise TypeError(f"operands: expected one type, got {sorted(d.name for d in dtypes)}. cast() them to one type")
    (dtype,) = dtypes
    return tuple(x if isinstance(x, Scalar) else constant(x, dtype) for x in operands)


INFIX: Mapping[str, str] = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
"""Python's operators for operations with two operands."""
_right_identities: Mapping[str, int] = {
    "add": 0, "sub": 0, "mul": 1, "truncdiv": 1, "or": 0, "xor": 0, "shl": 0, "shr": 0
}  # fmt: skip
_left_identities: Mapping[str, int] = {"add": 0, "mul": 1, "or": 0, "xor": 0}
_of_constants: Mapping[str, Callable[[int, int], int]] = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__}


def _operation(op: str, scalars: tuple[Scalar, ...]) -> Scalar:
    """Return the operation; for integers, evaluate it on constants, and drop neutral operands (``x * 1``, ``x + 0``).

    Index arithmetic has many neutral operands: strides of 1 and pads of 0.
    """
    dtype = scalars[0].dtype
    if len(scalars) == 2 and not dtype.is_float:
        a, b = scalars
        if a.op == b.op == "constant" and op in _of_constants:
            return constant(_of_constants[op](a.value, b.value), dtype)
        if b.op == "constant" and b.value == _right_identities.get(op):
            return a
        if a.op == "constant" and a.value == _left_identities.get(op):
            return b
        if op == "and" and a.op == "constant" and a.value is True:
            return b
    return Scalar(dtype, op, scalars)


def _arithmetic(op: str, *operands: Operand) -> Scalar:
    scalars = _unify(operands)
    if scalars[0].dtype is DType.BOOL:
        raise TypeError(f"{op}: expected numbers, got booleans")
    return _operation(op, scalars)


def _divided(a: Operand, b: Operand) -> Scalar:
    scalars = _unify((a, b))
    if not scalars[0].dtype.is_float:
        raise TypeError(f"/ of {scalars[0].dtype.name}: expected floats. Divide integers by //, or cast them to floats")
    return Scalar(scalars[0].dtype, "div", scalars)


def _bitwise(op: str, *operands: Operand, booleans: bool = True) -> Scalar:
    scalars = _unify(operands)
    if scalars[0].dtype.is_float or (scalars[0].dtype is DType.BOOL and not booleans):
        expected = "integers or booleans" if booleans else "integers"
        raise TypeError(f"{op}: expected {expected}, got {scalars[0].dtype.name}. cast() them")
    return _operation(op, scalars)


def _compare(op: str, a: Operand, b: Operand) -> Scalar:
    return Scalar(DType.BOOL, op, _unify((a, b)))


def _float_function(op: str, *operands: Operand) -> Scalar:
    scalars = _unify(operands)
    if not scalars[0].dtype.is_float:
        raise TypeError(f"{op}: expected floats, got {scalars[0].dtype.name}. cast() them")
    return Scalar(scalars[0].dtype, op, scalars)


def equal(a: Operand, b: Operand) -> Scalar:
    """Return ``a == b``; false if an operand is NaN."""
    return _compare("eq", a, b)


def not_equal(a: Operand, b: Operand) -> Scalar:
    """Return ``a != b``; true if an operand is NaN."""
    return _compare("ne", a, b)


def where(condition: Scalar, a: Operand, b: Operand) -> Scalar:
    """Return ``a`` if the boolean ``condition`` holds, else ``b``. Both operands are evaluated."""
    if expression(condition).dtype is not DType.BOOL:
        raise TypeError(f"where: expected a condition of BOOL, got {condition.dtype.name}")
    scalars = _unify((a, b))
    return Scalar(scalars[0].dtype, "where", (condition, *scalars))


def minimum(a: Operand, b: Operand) -> Scalar:
    """Return the smaller operand; NaN if one operand is NaN."""
    return _extreme("min", a, b)


def maximum(a: Operand, b: Operand) -> Scalar:
    """Return the larger operand; NaN if one operand is NaN."""
    return _extreme("max", a, b)


def _extreme(op: str, a: Operand, b: Operand) -> Scalar:
    scalars = _unify((a, b))
    if scalars[0].dtype is DType.BOOL:
        return Scalar(DType.BOOL, "and" if op == "min" else "or", scalars)
    # Constants become the second operand: code generators omit the NaN test of a constant second operand.
    if scalars[0].op == "constant":
        scalars = (scalars[1], scalars[0])
    return Scalar(scalars[0].dtype, op, scalars)


def trunc_divide(a: Operand, b: Operand) -> Scalar:
    """Return the integer quotient rounded toward zero, as C's ``/``; 0 if ``b == 0``."""
    return _bitwise("truncdiv", a, b, booleans=False)


def floor_divide(a: Operand, b: Operand) -> Scalar:
    """Return the quotient rounded down, as Python's ``//``. For integers, a division by 0 gives 0."""
    a, b = _unify((a, b))
    if a.dtype.is_float:
        return floor(_divided(a, b))
    q = trunc_divide(a, b)
    inexact = not_equal(trunc_modulo(a, b), 0) & ((a < 0) ^ (b < 0))
    return q if _is_unsigned(a.dtype) else where(inexact, q - 1, q)


def trunc_modulo(a: Operand, b: Operand) -> Scalar:
    """Return the remainder with the sign of ``a``, as C's ``%`` and ``fmod``. For integers, a division by 0 gives 0."""
    scalars = _unify((a, b))
    return Scalar(scalars[0].dtype, "fmod" if scalars[0].dtype.is_float else "truncmod", scalars)


def floor_modulo(a: Operand, b: Operand) -> Scalar:
    """Return the remainder with the sign of ``b``, as Python's ``%``. For integers, a division by 0 gives 0."""
    m = trunc_modulo(a, b)
    _, b = _unify((a, b))
    return m if _is_unsigned(m.dtype) else where(not_equal(m, 0) & ((m < 0) ^ (b < 0)), m + b, m)


def _is_unsigned(dtype: DType) -> bool:
    return dtype.short[0] == "u"


def power(a: Operand, b: Operand) -> Scalar:
    """Return ``a ** b`` of floats. The exponents in `SIMPLE_EXPONENTS` do not need the general power function."""
    if isinstance(b, (int, float)) and isinstance(a, Scalar) and b in SIMPLE_EXPONENTS:
        return SIMPLE_EXPONENTS[b](a)
    return _float_function("pow", a, b)


def cast(x: Scalar, dtype: DType, *, saturate: bool = True, round_mode: str = "up") -> Scalar:
    """Convert ``x`` to ``dtype``: floats to integers toward zero, nonzero to True, wide to narrow integers by wrapping.

    The integer of an out-of-range float is undefined. Numbers beyond an 8-bit float's range become its largest number
    with ``saturate``, else infinity, or NaN in a type without infinity. ``round_mode`` ("up", "down", "nearest") is for
    FLOAT8E8M0, whose values are powers of two.
    """
    if not isinstance(dtype, DType):
        raise TypeError(f"cast: expected an element type such as DType.FLOAT32, got {dtype!r}")
    if expression(x).dtype is dtype:
        return x
    exact = not dtype.is_float or dtype in (DType.FLOAT32, DType.FLOAT64)
    if x.op == "constant" and math.isfinite(x.value) and exact:
        return constant(int(x.value) if dtype.is_integer else x.value, dtype)
    return Scalar(dtype, "cast", (x,), (saturate, round_mode))


def accumulation_type(dtype: DType) -> DType:
    """Return the float type that accumulates elements of ``dtype``: float64 for float64, else float32."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32


def widen(x: Scalar) -> Scalar:
    """Convert float16 and bfloat16 to float32, the type of their arithmetic; return x of any other type as it is."""
    return cast(x, DType.FLOAT32) if x.dtype in HALVES else x


def absolute(x: Scalar) -> Scalar:
    return x if _is_unsigned(x.dtype) else _arithmetic("abs", x)


def sign(x: Scalar) -> Scalar:
    """Return -1, 0 or 1; NaN for NaN."""
    if _is_unsigned(x.dtype):
        return where(x > 0, constant(1, x.dtype), 0)
    return where(x > 0, constant(1, x.dtype), where(x < 0, constant(-1, x.dtype), x))


def is_nan(x: Scalar) -> Scalar:
    return not_equal(x, x)


def _float_functions(*names: str) -> Iterator[Callable[[Operand], Scalar]]:
    """Yield the functions of a float that C's math library has under these names."""
    for name in names:
        function = functools.partial(_float_function, name)
        function.__doc__ = f"Return {name}(x) of a float x."
        yield function


exp, log, log1p, expm1, sqrt, erf = _float_functions("exp", "log", "log1p", "expm1", "sqrt", "erf")
tanh, sin, cos, floor, ceil, round_half_even = _float_functions("tanh", "sin", "cos", "floor", "ceil", "rint")


def half_erf(x: Operand) -> Scalar:
    """Return erf with the accuracy of 16-bit floats, in about half the time of `erf`, for results stored in 16 bits."""
    return _float_function("half_erf", x)


def unary_float(name: str, x: Operand) -> Scalar:
    """Return the function ``name`` of C's math library, such as tan, asin, sinh, exp2 or log2, of a float."""
    return _float_function(name, x)


def sigmoid(x: Scalar) -> Scalar:
    return 1.0 / (1.0 + exp(-x))


SIMPLE_EXPONENTS: Mapping[float, Callable[[Scalar], Scalar]] = {
    0.5: sqrt,
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: lambda x: 1.0 / x,
}
"""Functions that compute a power without the general power function, by exponent."""
