"""Descriptions of tensors for applications' plugins: element types, formats, and sizes that may be expressions."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from ...model.ir import HALVES, DType
from ...program.expressions import symbolic as sym
from ...program.expressions.symbolic import Dim, Expr


class TensorFormat(enum.Enum):
    """Memory layout of a tensor. ``dims`` of a descriptor are in the model's order, N, C, H, W, for every format.

    LINEAR is the model's order. HWC... formats store channels last; the number of channels must be a multiple of the
    number in the name, and D is a third spatial dimension. CHW4 and similar formats pack channels into vectors, which
    are the last dimension: [N, ceil(C / 4), H, W, 4]. The last vectors of inputs are padded with 0.
    """

    LINEAR = "linear"
    HWC = "hwc"
    HWC4 = "hwc4"
    HWC8 = "hwc8"
    HWC16 = "hwc16"
    DHWC = "dhwc"
    DHWC8 = "dhwc8"
    CHW2 = "chw2"
    CHW4 = "chw4"
    CHW16 = "chw16"
    CHW32 = "chw32"
    CDHW32 = "cdhw32"


_CHANNELS_LAST: Final = {
    TensorFormat.HWC: (4, 1, None),
    TensorFormat.HWC4: (4, 4, HALVES),
    TensorFormat.HWC8: (4, 8, HALVES),
    TensorFormat.HWC16: (4, 16, HALVES),
    TensorFormat.DHWC: (5, 1, None),
    TensorFormat.DHWC8: (5, 8, HALVES),
}
"""For each format: rank, divisor of the number of channels, and element types (None: any)."""
_PACKED: Final = {
    TensorFormat.CHW2: (4, 2, frozenset({DType.FLOAT16})),
    TensorFormat.CHW4: (4, 4, frozenset({DType.FLOAT16, DType.INT8})),
    TensorFormat.CHW16: (4, 16, frozenset({DType.FLOAT16})),
    TensorFormat.CHW32: (4, 32, frozenset({DType.FLOAT32, DType.FLOAT16, DType.INT8})),
    TensorFormat.CDHW32: (5, 32, frozenset({DType.FLOAT16, DType.INT8})),
}
"""For each format: rank, number of channels in a vector, and element types."""


def packed_channels(format: TensorFormat) -> int:
    """Return the number of channels that a format packs into a vector; 1 for a format that packs none."""
    return _PACKED[format][1] if format in _PACKED else 1


def why_not(format: TensorFormat, dtype: DType, shape: tuple[Dim, ...]) -> str:
    """Return why a tensor of this type and shape cannot have a format; "" if it can."""
    if format is TensorFormat.LINEAR:
        return ""
    rank, multiple, types = _PACKED[format] if format in _PACKED else _CHANNELS_LAST[format]
    if len(shape) != rank:
        return f"{format.name} is for {rank} dimensions, not {len(shape)}"
    if types is not None and dtype not in types:
        return f"{format.name} is for {', '.join(sorted(x.name for x in types))}, not {dtype.name}"
    if format in _PACKED:
        known = isinstance(shape[1], int) and -1 not in shape
        return "" if known else f"{format.name} needs a known number of channels"
    if multiple > 1 and (not isinstance(shape[1], int) or shape[1] % multiple):
        return f"{format.name} needs a known number of channels that is a multiple of {multiple}"
    return ""


@dataclass(frozen=True)
class PluginTensorDesc:
    """A tensor: its sizes (ints, or `Size` if the plan serves several sizes), its element type and format."""

    dims: tuple[Any, ...]
    type: DType
    format: TensorFormat = TensorFormat.LINEAR


@dataclass(frozen=True)
class DynamicPluginTensorDesc:
    """A tensor whose unknown sizes are -1 in ``desc.dims``, with the range of each; ``opt`` is the expected size."""

    desc: PluginTensorDesc
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class Scope:
    """Makes and compares sizes for one plan. ``settle`` evaluates a condition and guards the plan with it.

    ``asked`` says whether `decide` was called with a condition that depends on the inputs' sizes.
    """

    def __init__(self, settle: Callable[[Dim], bool]) -> None:
        self._settle = settle
        self.asked = False

    def wrap(self, dim: Dim) -> Any:
        """Return the `Size` of an expression; return an int as it is."""
        return Size(self, dim) if isinstance(dim, Expr) else dim

    def decide(self, condition: Dim) -> bool:
        if isinstance(condition, Expr) and sym.truth(condition) is None:
            self.asked = True
        return self._settle(condition)


Operand: TypeAlias = "Size | int"


class Size:
    """A size that is an expression of the inputs' sizes. Arithmetic on a Size returns a Size.

    A comparison is evaluated at the sizes for which the plan is built, and guards the plan to sizes with the same
    result. Conversion to int guards the plan to that number.
    """

    __slots__ = ("dim", "scope")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, scope: Scope, dim: Dim) -> None:
        self.scope = scope
        self.dim = dim

    def _new(self, dim: Dim) -> Any:
        return self.scope.wrap(dim)

    def __add__(self, other: Operand) -> Any:
        return self._new(self.dim + dim_of(other))

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Any:
        return self._new(self.dim - dim_of(other))

    def __rsub__(self, other: Operand) -> Any:
        return self._new(dim_of(other) - self.dim)

    def __mul__(self, other: Operand) -> Any:
        return self._new(self.dim * dim_of(other))

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return self._new(0 - self.dim)

    def __truediv__(self, other: object) -> NoReturn:
        raise TypeError("sizes are whole numbers: use // or the expression builder's ceil_div in place of /")

    __rtruediv__ = __truediv__

    def __floordiv__(self, other: Operand) -> Any:
        return self._new(sym.floordiv(self.dim, dim_of(other)))

    def __rfloordiv__(self, other: Operand) -> Any:
        return self._new(sym.floordiv(dim_of(other), self.dim))

    def __mod__(self, other: Operand) -> Any:
        return self._new(sym.mod(self.dim, dim_of(other)))

    def __rmod__(self, other: Operand) -> Any:
        return self._new(sym.mod(dim_of(other), self.dim))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size | int) and self.scope.decide(sym.eq(self.dim, dim_of(other)))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Operand) -> bool:
        return self.scope.decide(sym.lt(self.dim, dim_of(other)))

    def __le__(self, other: Operand) -> bool:
        return self.scope.decide(sym.le(self.dim, dim_of(other)))

    def __gt__(self, other: Operand) -> bool:
        return self.scope.decide(sym.lt(dim_of(other), self.dim))

    def __ge__(self, other: Operand) -> bool:
        return self.scope.decide(sym.le(dim_of(other), self.dim))

    def __bool__(self) -> bool:
        return self.scope.decide(sym.ne(self.dim, 0))

    def __index__(self) -> int:
        number = sym.hint(self.dim)
        if not self.scope.decide(sym.eq(self.dim, number)):
            raise TypeError(f"the size {self!r} is not known when the plan is built: do not convert it to int")
        return number

    __int__ = __index__

    def __repr__(self) -> str:
        return f"{self.dim!r} (now {sym.hint(self.dim)})" if isinstance(self.dim, Expr) else repr(self.dim)


def dim_of(size: Operand) -> Dim:
    """Return the expression of a `Size`, or a number as an int. Raises TypeError for other values."""
    if isinstance(size, Size):
        return size.dim
    if isinstance(size, np.integer):
        return int(size)
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"size: got {size!r}, expected an int or a Size")
    return size


@dataclass(frozen=True)
class SizeTensor:
    """A size that a Run computes and stores in the scalar output ``output`` of the application's plugin.

    It can be a dimension of other outputs, but not an operand of an expression. ``upper`` bounds the size, and memory
    is allocated for ``upper``; ``opt`` is the expected size.
    """

    output: int
    opt: Dim
    upper: Dim


class ExprBuilder:
    """Makes sizes for `PluginBuild.get_output_shapes`."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def constant(self, value: int) -> int:
        """Return ``value``, a size that is a number."""
        return value

    def min(self, a: Operand, b: Operand) -> Any:
        return self._scope.wrap(sym.sym_min(dim_of(a), dim_of(b)))

    def max(self, a: Operand, b: Operand) -> Any:
        return self._scope.wrap(sym.sym_max(dim_of(a), dim_of(b)))

    def ceil_div(self, a: Operand, b: Operand) -> Any:
        return self._scope.wrap(sym.ceildiv(dim_of(a), dim_of(b)))

    def select(self, condition: Operand, a: Operand, b: Operand) -> Any:
        """Return ``a`` if the condition is not 0, else ``b``. `equal` and `less` make conditions."""
        return self._scope.wrap(sym.select(dim_of(condition), dim_of(a), dim_of(b)))

    def equal(self, a: Operand, b: Operand) -> Any:
        return self._scope.wrap(sym.eq(dim_of(a), dim_of(b)))

    def less(self, a: Operand, b: Operand) -> Any:
        return self._scope.wrap(sym.lt(dim_of(a), dim_of(b)))

    def declare_size_tensor(self, output_index: int, opt: Operand, upper: Operand) -> SizeTensor:
        """Declare a size that `PluginRuntime.enqueue` writes to a scalar output of type INT32 or INT64."""
        return SizeTensor(output_index, dim_of(opt), dim_of(upper))
