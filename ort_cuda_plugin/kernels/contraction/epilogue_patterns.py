"""Epilogue matching: finds the part of an epilogue that a vendor library can fuse into its GEMM or convolution.

A library computes the epilogue in the accumulators' type and rounds once, at the store. So a float16 or bfloat16 result
may differ from that of unfused operators, each of which rounds its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from ...model.ir import NARROW_FLOATS, Array, DType
from ...program.expressions.scalar import Scalar, operands_first, reachable
from ...program.expressions.symbolic import Dim, eq, logical_or
from ...program.lowering.context import Lowering
from ...program.lowering.shapes import broadcast_strides, collapse
from ...program.steps.row_program import Reduction
from ...program.steps.steps import Contract, Convolve, Sums, stored
from ...program.steps.tensor import Tensor, contiguous_strides
from ..codegen.source import constant_number

RELU, GELU, SILU, RELU6 = "ReLU", "GELU", "SiLU", "ReLU6"
MAX_ACTIVATION = 80
"""Maximum number of direct and indirect users of a value up to which `_Search` looks for the value's activation."""


@dataclass(frozen=True)
class Offer:
    """What a library can fuse: constant factors, then a residual and a bias, then an activation.

    A bias is a vector along ``bias_axes`` of the result. A residual has the strides ``residual_strides``, by default
    those of a contiguous tensor. ``addends`` tells whether a residual and a bias are supported; ``factors`` whether
    constants may multiply the accumulator and the residual.
    """

    library: str
    bias_axes: Sequence[int]
    addends: bool = True
    factors: bool = False
    activations: frozenset[str] = frozenset()
    residual_strides: Sequence[Dim] = ()


@dataclass(frozen=True)
class LibraryForm:
    """Matched epilogue: ``value`` = activation(alpha * accumulator + beta * residual + bias).

    The bias and the residual are None, and the activation is "", if the epilogue has none.
    ``leftover`` says why an elementwise kernel must follow the library's call, "" if none does. The plan must guard on
    the conditions ``guards``: under them the residual has the strides that the library needs.
    """

    value: Scalar
    alpha: float = 1.0
    beta: float = 0.0
    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str = ""
    leftover: str = ""
    guards: tuple[Dim, ...] = ()

    @property
    def parts(self) -> str:
        """Description of the fused operations for reports, such as "times 0.5, bias, ReLU"."""
        factor = "" if self.beta in (0.0, 1.0) else f" times {self.beta:g}"
        parts = [
            "" if self.alpha == 1.0 else f"times {self.alpha:g}",
            "" if self.residual is None else f"residual{factor}",
            "" if self.bias is None else "bias",
            self.activation,
        ]
        return ", ".join(part for part in parts if part)


def find_form(ctx: Lowering, step: Sums, offer: Offer) -> LibraryForm | None:
    """Match the longest prefix of the step's epilogue that the library can fuse.

    The library rounds the value that it stores, so this must be a value that the step rounds as well. Returns None if
    the library can compute no such value.
    """
    return _Search(ctx, step, offer).run()


def product_form(ctx: Lowering, step: Contract) -> LibraryForm | None:
    """Match the part of the epilogue that cuBLASLt can fuse (`find_form`); None for a GEMM with a low-rank product."""
    if step.low_rank is not None:
        return None
    columns = range(len(step.shape) - step.column_axes, len(step.shape))
    # No GELU for float64: NVIDIA does not document the accuracy of cuBLASLt's.
    activations = frozenset({RELU} if step.a.dtype is DType.FLOAT64 else {RELU, GELU})
    return find_form(ctx, step, Offer("cuBLASLt", columns, factors=True, activations=activations))


def convolution_form(
    ctx: Lowering, step: Convolve, residual_strides: Sequence[Dim] = (), compiles: bool = False
) -> LibraryForm | None:
    """Match the part of the epilogue that cuDNN can fuse (`find_form`); None if cuDNN can fuse none of it.

    cuDNN's prebuilt engines support a residual, a bias and ReLU. With ``compiles`` cuDNN may compile an engine at run
    time, which also supports SiLU and ReLU6.
    """
    finishes = step.operands[0].dtype is not DType.FLOAT64 and ctx.options.fuse_conv_bias
    activations = frozenset({RELU, *({SILU, RELU6} if compiles else ())} if finishes else ())
    offer = Offer("cuDNN", step.channels, finishes, activations=activations, residual_strides=residual_strides)
    return find_form(ctx, step, offer)


class _Search:
    def __init__(self, ctx: Lowering, step: Sums, offer: Offer) -> None:
        self.ctx, self.step, self.offer = ctx, step, offer
        self.dtype = step.operands[0].dtype
        self.tensors = dict(step.inputs)
        numbers = ((leaf, constant_number(x)) for leaf, x in step.inputs)
        self.numbers = {leaf: float(number) for leaf, number in numbers if number is not None}
        self.results = [x for x, _ in step.outputs]
        self.users: dict[Scalar, list[Scalar]] = {}
        for x in reachable(self.results):
            for operand in dict.fromkeys(x.operands):
                self.users.setdefault(operand, []).append(x)

    def run(self) -> LibraryForm | None:
        form = LibraryForm(self.step.total)
        best = form if self._is_storable(form.value) else None
        while form.value not in self.results:
            extended = self._extended(form)
            if extended is None:
                break
            form = extended
            if self._is_storable(form.value):
                best = form
        return best and replace(best, leftover=self._leftover(best.value))

    def _is_storable(self, x: Scalar) -> bool:
        """Tell whether a library may store x in the operands' type: the step rounds x to this type as well."""
        if x.dtype is not self.dtype:
            return False
        if x.dtype not in NARROW_FLOATS or stored(x) is x:
            return True
        return x in self.results and all(user.op == "cast" for user in self.users.get(x, ()))

    def _extended(self, form: LibraryForm) -> LibraryForm | None:
        """Extend ``form`` by one more operation; None if the library cannot fuse it.

        No other operation may use ``form.value``, since the library does not store it.
        """
        x = form.value
        users = self.users.get(x, [])
        if len(users) == 1:
            (user,) = users
            if user.op == "cast" and user.dtype in (self.dtype, self.step.total.dtype):
                return replace(form, value=user)
            if form.activation:
                return None
            if user.op == "add" and self.offer.addends:
                return self._with_addend(replace(form, value=user), _other(user, x))
            if user.op == "mul" and self.offer.factors and form.bias is None and form.residual is None:
                factor = form.alpha * (self._number(_other(user, x)) or 0.0)
                return replace(form, value=user, alpha=factor) if _is_factor(factor) else None
        if form.activation == RELU and RELU6 in self.offer.activations:
            end = next((end for end in self._ends(x) if self._is_clipped(end, x, "min", 6.0)), None)
            return None if end is None else replace(form, value=end, activation=RELU6)
        if form.activation:
            return None
        for activation, end in self._activations(x):
            if activation in self.offer.activations:
                return replace(form, value=end, activation=activation)
        return None

    def _with_addend(self, form: LibraryForm, addend: Scalar) -> LibraryForm | None:
        addend, factor = _without_casts(addend), 1.0
        if addend.op == "mul":
            for number, rest in (addend.operands, addend.operands[::-1]):
                known = self._number(number)
                if known is not None:
                    addend, factor = _without_casts(rest), known
                    break
        x = self.tensors.get(addend)
        if x is None or x.dtype is not self.dtype:
            return None
        strides = broadcast_strides(x, self.step.shape)
        # Only a tensor at the start of its buffer becomes the library's bias. Elsewhere it may be unaligned, and
        # libraries have few algorithms for unaligned addresses.
        if form.bias is None and factor == 1.0 and x.offset == 0 and self._is_bias(strides):
            return replace(form, bias=x)
        takes = form.residual is None and (factor == 1.0 or (self.offer.factors and _is_factor(factor)))
        if not takes or x.rank != len(strides):
            return None
        wanted = self.offer.residual_strides or contiguous_strides(self.step.shape)
        axes = zip(self.step.shape, strides, wanted, strict=True)
        dense = [logical_or(eq(dim, 1), eq(stride, needed)) for dim, stride, needed in axes]
        if not all(map(self.ctx.holds, dense)):
            return None
        return replace(form, residual=x, beta=factor, guards=(*form.guards, *dense))

    def _is_bias(self, strides: Sequence[Dim]) -> bool:
        axes = self.offer.bias_axes
        if any(stride != 0 for axis, stride in enumerate(strides) if axis not in axes and self.step.shape[axis] != 1):
            return False
        dims, (along,) = collapse([self.step.shape[axis] for axis in axes], [tuple(strides[axis] for axis in axes)])
        return not dims or along == (1,)

    def _number(self, x: Scalar) -> float | None:
        """Return the constant value of x; None if x is not a constant."""
        x = _without_casts(x)
        return float(x.value) if x.op == "constant" else self.numbers.get(x)

    def _activations(self, x: Scalar) -> Iterator[tuple[str, Scalar]]:
        """Yield (name, result) for each value that is an activation of x, if nothing else uses x (`_ends`)."""
        known: dict[Scalar, Array | float] = {x: _points, **self.numbers}
        tolerance, types = _tolerances.get(self.dtype, 0.0), (self.dtype, self.step.total.dtype)
        for end in self._ends(x):
            if self._is_clipped(end, x, "max", 0.0):
                yield RELU, end
            elif all(part.op != "cast" or part.dtype in types for part in reachable([end]) - reachable([x])):
                yield from ((name, end) for name in (GELU, SILU) if _is_smooth(name, end, known, tolerance))

    def _ends(self, x: Scalar) -> Iterator[Scalar]:
        """Yield each value through which every path from x to a result of the step goes.

        Yields nothing if x has more than `MAX_ACTIVATION` direct and indirect users.
        """
        above: dict[Scalar, None] = {}
        stack = [x]
        while stack:
            for user in self.users.get(stack.pop(), ()):
                if user not in above:
                    above[user] = None
                    stack.append(user)
            if len(above) > MAX_ACTIVATION:
                return
        for end in above:
            inside = {y for y in reachable([end]) if y in above and y is not end} | {x}
            uses = (user for y in inside for user in self.users.get(y, ()))
            if inside.isdisjoint(self.results) and all(user in inside or user is end for user in uses):
                yield end

    def _is_clipped(self, y: Scalar, x: Scalar, op: str, limit: float) -> bool:
        """Tell whether y is ``op`` (min or max) of x and ``limit``, perhaps written as a comparison and a selection."""
        if y.op == op:
            return x in y.operands and self._number(_other(y, x)) == limit
        if y.op != "where" or y.operands[0].op not in _orders:
            return False
        condition, *values = y.operands
        if condition.operands[0] is not x:
            return False
        own, other = values if (condition.op in ("lt", "le")) == (op == "min") else reversed(values)
        return own is x and self._number(condition.operands[1]) == limit == self._number(other)

    def _leftover(self, value: Scalar) -> str:
        if all(x is value for x in self.results):
            return "" if len(self.results) == 1 else "the call's result is stored twice"
        if value in self.results:
            return "the call's result is stored as well"
        above = reachable(self.results) - reachable([value])
        operations = sorted({x.op for x in above} - {"leaf", "constant", "cast"})
        if not operations:
            return "another element type"
        return f"{self.offer.library}'s call cannot include {', '.join(operations)}"


def _without_casts(x: Scalar) -> Scalar:
    """Return the operand of x beneath casts that change no value, such as from float16 to float32."""
    while x.op == "cast" and (x.operands[0].dtype is x.dtype or x.operands[0].dtype in _narrower.get(x.dtype, ())):
        x = x.operands[0]
    return x


def _is_factor(x: float) -> bool:
    """Tell whether x is a normal float32 number. For a factor of 0 a library would ignore NaN in the operand."""
    return 2.0**-126 <= abs(x) < 2.0**127


def _other(x: Scalar, operand: Scalar) -> Scalar:
    """Return the other operand of the binary operation x."""
    first, second = x.operands
    return second if first is operand else first


_tolerances = {DType.FLOAT32: 1e-6, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}
"""Maximum error relative to max(abs(x), 1), by type, up to which a function with rounded constants is GELU or SiLU."""
_narrower = {
    DType.FLOAT32: (DType.FLOAT16, DType.BFLOAT16),
    DType.FLOAT64: (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32),
}
_orders = frozenset({"lt", "le", "gt", "ge"})
_points = np.concatenate([np.linspace(-12.0, 12.0, 97), [1e-3, -1e-3, 1e3, -1e3]])
_smooth: Mapping[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "tanh": np.tanh,
    "exp": np.exp, "cast": lambda x: x,
}  # fmt: skip
"""Smooth operations. A function composed of these is considered GELU or SiLU if their values agree at `_points`."""


def _is_smooth(name: str, y: Scalar, known: Mapping[Scalar, Array | float], tolerance: float) -> bool:
    """Tell whether y is the GELU (tanh approximation) or the SiLU of x, in any algebraic form, up to ``tolerance``.

    ``name`` is GELU or SILU. ``known`` are values of leaves and of x: ``_points`` for x, a number for each leaf.
    """
    with np.errstate(all="ignore"):
        value = evaluate(y, known, _smooth)
        cubic = np.sqrt(2.0 / np.pi) * (_points + 0.044715 * _points**3)
        wanted = 0.5 * _points * (1.0 + np.tanh(cubic)) if name == GELU else _points / (1.0 + np.exp(-_points))
    return value is not None and bool(np.all(np.abs(value - wanted) <= tolerance * np.maximum(np.abs(_points), 1.0)))


def evaluate(
    y: Scalar,
    leaves: Mapping[Scalar, Array | float],
    functions: Mapping[str, Callable[..., Array]],
    reductions: Mapping[Reduction, Callable[..., Array]] = MappingProxyType({}),
) -> Array | float | None:
    """Evaluate y at sample points: ``leaves`` are arrays or numbers. Reductions of y run along the last axis.

    Returns None if y depends on other leaves, has operations other than ``functions`` and ``reductions``, or converts a
    number that is not a float.
    """
    known = dict(leaves)
    for part in operands_first([y], leaves):
        operands = [known[operand] for operand in part.operands]
        if part.op == "constant":
            known[part] = part.value
        elif part.op == "reduced" and (fold := reductions.get(part.value[0].reduction)):
            known[part] = np.asarray(fold(np.asarray(operands[0]), axis=-1, keepdims=True))
        elif part.op in functions and (part.op != "cast" or (part.dtype.is_float and part.operands[0].dtype.is_float)):
            known[part] = np.asarray(functions[part.op](*operands))
        else:
            return None
    return known[y]
