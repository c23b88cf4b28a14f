"""The steps of a program: elementwise maps, row programs and contractions over strided tensors.

Operators append steps to the trace; passes fuse them; the emitter generates kernels. A step's expressions are Scalars
whose leaves are elements of its inputs. Every tensor of a step broadcasts to the step's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ...model.ir import NARROW_FLOATS, DType, Node
from ..expressions.scalar import Scalar, operands_first, reachable
from ..expressions.symbolic import Dim
from .row_program import Row, Stage
from .schedule import Schedule
from .tensor import Buffer, BufferKind, Tensor
from .tensor_fields import TensorFields
from .windows import Windows

if TYPE_CHECKING:
    from typing import Self

Input: TypeAlias = tuple[Scalar, Tensor]
"""A leaf and the tensor whose elements it represents."""
Output: TypeAlias = tuple[Scalar, Tensor]
"""An expression and the tensor that stores its values, converted to the tensor's type."""
CODES_PER_WORD = 8
"""Number of 4-bit codes in a 32-bit word of a packed operand; see `Conversion`."""


@dataclass(frozen=True, eq=False)
class Map(TensorFields):
    """An elementwise step: outputs are expressions of the inputs' elements at the same coordinates of ``shape``.

    ``nodes`` are the ONNX nodes that the step computes, in the model's order.
    """

    nodes: tuple[Node, ...]
    shape: tuple[Dim, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]

    output_fields: ClassVar[tuple[str, ...]] = ("outputs",)
    """Names of the fields with the step's results."""

    @cached_property
    def all_outputs(self) -> tuple[Output, ...]:
        return tuple(output for name in self.output_fields for output in getattr(self, name))

    def map_outputs(self, function: Callable[[tuple[Output, ...]], Iterable[Output]]) -> Self:
        """Return the step with ``function`` applied to the outputs in each of its output fields."""
        changed: dict[str, Any] = {name: tuple(function(getattr(self, name))) for name in self.output_fields}
        return replace(self, **changed)

    def map_values(self, function: Callable[[Scalar], Scalar]) -> Self:
        """Return the step with ``function`` applied to each expression that it stores."""
        return self.map_outputs(lambda outputs: ((function(value), y) for value, y in outputs))

    @cached_property
    def scalars(self) -> set[Scalar]:
        """Return all Scalars in the outputs' expressions."""
        return reachable(value for value, _ in self.all_outputs)

    def with_scalars(self, scalars: set[Scalar]) -> Self:
        """Set the cached `scalars` of this new step, which the caller knows, and return the step."""
        vars(self)["scalars"] = scalars
        return self

    @property
    def tensors_read(self) -> tuple[Tensor, ...]:
        """Return all tensors that the step reads: operands of a contraction first, then inputs of the epilogue."""
        others = self.tensors(without=("inputs", "parts", *self.output_fields))
        return (*others, *(x for _, x in self.inputs))

    @cached_property
    def reads(self) -> tuple[Buffer, ...]:
        return tuple(dict.fromkeys(x.buffer for x in self.tensors_read if x.buffer.kind is not BufferKind.HOST))

    @cached_property
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(dict.fromkeys(y.buffer for _, y in self.all_outputs))

    @property
    def node(self) -> Node | None:
        """Return the node to name in error messages about the step's launch."""
        return self.nodes[-1] if self.nodes else None


@dataclass(frozen=True, eq=False)
class Rows(Map):
    """A Map whose expressions may also reduce along ``axes`` (`row_program`).

    ``outputs`` hold a value per element; ``row_outputs`` hold a value per row, with size 1 along ``axes``.
    """

    axes: frozenset[int] = frozenset()
    row: Row = field(default_factory=Row)
    row_outputs: tuple[Output, ...] = ()

    output_fields = ("outputs", "row_outputs")

    @property
    def row_shape(self) -> tuple[Dim, ...]:
        return tuple(1 if axis in self.axes else dim for axis, dim in enumerate(self.shape))


@dataclass(frozen=True, eq=False)
class Conversion(TensorFields):
    """Operand prologue: a contraction multiplies ``value``, an expression of the operand's element ``leaf`` and inputs.

    ``inputs`` broadcast to the operand's dimensions; each is a scalar, or varies along one dimension. With ``bits`` the
    operand is a matrix of codes with that many bits, and ``leaf`` is a code as int32. The operand's tensor then has
    words of `CODES_PER_WORD` codes, the first in the lowest bits, but the tensor's strides count codes; codes are
    contiguous along k, and columns begin at a word. Each of ``inputs`` is then [blocks, n], one element per column and
    block of ``block`` rows, a power of two of at least 16.
    """

    leaf: Scalar
    value: Scalar
    inputs: tuple[Input, ...]
    bits: int = 0
    block: int = 0


@dataclass(frozen=True, eq=False)
class Sums(Map):
    """A contraction (GEMM, convolution or attention) with operand prologues ``conversions`` and an epilogue.

    ``total`` is the leaf that stands for the accumulator in the epilogue. It has the accumulation type.
    """

    operands: tuple[Tensor, ...] = field(kw_only=True)
    total: Scalar = field(kw_only=True)
    conversions: tuple[Conversion | None, ...] = field(default=(None, None), kw_only=True)
    schedule: Schedule | None = field(default=None, kw_only=True)
    """None until a schedule is selected."""
    why: str = field(default="", kw_only=True)
    """The reason for the schedule, as readable text."""
    column_parts: tuple[range, ...] = field(default=(), kw_only=True)
    """The columns of a GEMM, or channels of a convolution, of each output; empty if each output has all."""

    @property
    def is_converted(self) -> bool:
        return any(self.conversions)

    @property
    def summed(self) -> tuple[Tensor, ...]:
        """Return the operands and the inputs of their prologues."""
        return (*self.operands, *(x for _, x in self.converted))

    @property
    def converted(self) -> tuple[Input, ...]:
        """Return the inputs of the prologues, besides the operands."""
        return tuple(x for conversion in self.conversions if conversion is not None for x in conversion.inputs)


@dataclass(frozen=True, eq=False)
class Contract(Sums):
    """A GEMM a [batch..., m, k] @ b [batch..., k, n] with an elementwise epilogue.

    The last ``column_axes`` dimensions of the result are n, the ``row_axes`` before them are m.
    """

    row_axes: int = field(default=1, kw_only=True)
    column_axes: int = field(default=1, kw_only=True)

    @property
    def a(self) -> Tensor:
        return self.operands[0]

    @property
    def b(self) -> Tensor:
        return self.operands[1]

    @property
    def batch(self) -> tuple[Dim, ...]:
        return self.shape[: -self.row_axes - self.column_axes]


@dataclass(frozen=True, eq=False)
class Attend(Sums):
    """Fused attention: a GEMM whose left operand is a row program over another GEMM's result, which is not stored.

    ``operands`` are a [batch..., m, k], b [batch..., k, n] and c [batch..., n, d]. ``score`` is the leaf of an element
    of a @ b; ``weight`` is the expression of a row program along n over scores and ``score_inputs`` (broadcast to
    [batch..., m, n]). The result is the epilogue of weight @ c, [batch..., m, d].
    """

    score: Scalar = field(kw_only=True)
    score_inputs: tuple[Input, ...] = field(kw_only=True)
    weight: Scalar = field(kw_only=True)
    row: Row = field(kw_only=True)
    parts: tuple[Map, ...] = field(kw_only=True)
    """The three fused steps; empty if passes have replaced their tensors since the fusion."""

    @property
    def batch(self) -> tuple[Dim, ...]:
        return self.shape[:-2]

    @property
    def score_shape(self) -> tuple[Dim, ...]:
        return (*self.shape[:-1], self.operands[1].shape[-1])


@dataclass(frozen=True, eq=False)
class Convolve(Sums):
    """A convolution with an epilogue; the result is [images, channels..., space...] with ``channel_axes`` channel axes.

    ``operands`` are x [images, channels, space...] and weights in ONNX's order of dimensions. x is contiguous unless
    layout propagation has moved it to NHWC. ``windows`` slide over x; for a ``transposed`` convolution they slide over
    the result, but ``windows.size`` is still the size of x.
    """

    windows: Windows = field(kw_only=True)
    groups: int = field(default=1, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    channel_axes: int = field(default=1, kw_only=True)

    @property
    def channels(self) -> range:
        """Return the axes of channels."""
        return range(1, 1 + self.channel_axes)

    @property
    def space(self) -> range:
        """Return the spatial axes."""
        return range(1 + self.channel_axes, len(self.shape))

    @property
    def places(self) -> tuple[Dim, ...]:
        """Return the spatial sizes of the result, one per dimension of `Windows.planar`."""
        sizes = tuple(self.shape[axis] for axis in self.space)
        return sizes if len(sizes) > 1 else (1, *sizes)


def joined_nodes(*steps: Map) -> tuple[Node, ...]:
    """Return the nodes of all ``steps`` in order, without duplicates."""
    return tuple(dict.fromkeys(chain.from_iterable(step.nodes for step in steps)))


def used_inputs(inputs: Iterable[Input], expressions: Iterable[Scalar]) -> tuple[Input, ...]:
    """Return the inputs that the expressions depend on, directly or through stages of row programs."""
    used = reachable(expressions)
    return tuple((leaf, x) for leaf, x in inputs if leaf in used)


_selections = frozenset({"where", "min", "max", "neg", "abs"})
"""Operations whose result is one of their operands, perhaps negated, and so needs no rounding."""


def stored(x: Scalar) -> Scalar:
    """Return x as a load returns it after a store: narrow floats are rounded to their type."""
    if x.dtype not in NARROW_FLOATS or _is_rounded(x):
        return x
    return Scalar(x.dtype, "cast", (x,), (False, "up"))


def _is_rounded(x: Scalar) -> bool:
    """Return whether x is already rounded to its type: a leaf, a cast, or a selection among rounded values."""
    seen: set[Scalar] = set()
    stack = [x]
    while stack:
        value = stack.pop()
        if value in seen or value.op == "leaf":
            continue
        seen.add(value)
        if value.op in _selections:
            stack += value.operands[1:] if value.op == "where" else value.operands
        elif value.op == "constant":
            if value.dtype not in (DType.FLOAT16, DType.BFLOAT16) or value.value not in (0.0, 1.0, -1.0):
                return False
        elif value.op != "cast" or value.operands[0].dtype is DType.BOOL:
            return False
    return True


class Substitution:
    """Substitution of Scalars in expressions; shared subexpressions stay shared.

    A stage of a row program that depends on a substituted Scalar becomes one new stage for all its results.
    """

    def __init__(self, replaced: Mapping[Scalar, Scalar]) -> None:
        self._new: dict[Scalar, Scalar] = dict(replaced)
        self._stages: dict[Stage, Stage] = {}

    def __call__(self, x: Scalar) -> Scalar:
        """Return x with the Scalars replaced."""
        for current in operands_first([x], self._new):
            self._new[current] = self._rebuilt(current)
        return self._new[x]

    def _rebuilt(self, x: Scalar) -> Scalar:
        operands = tuple(self._new[operand] for operand in x.operands)
        if all(new is old for new, old in zip(operands, x.operands, strict=True)):
            return x
        if x.op != "reduced":
            return Scalar(x.dtype, x.op, operands, x.value)
        stage, number = x.value
        if stage not in self._stages:
            self._stages[stage] = Stage(stage.reduction, stage.initial, operands)
        return Scalar(x.dtype, x.op, operands, (self._stages[stage], number))


def dense(x: Tensor) -> bool:
    """Return whether x is its whole buffer in row-major order."""
    return x.offset == 0 and x.is_contiguous and x.buffer.nbytes == x.nbytes


def same_place(x: Tensor, y: Tensor, strides: Sequence[Dim], other_strides: Sequence[Dim]) -> bool:
    """Return whether x with ``strides`` and y with ``other_strides`` view the same elements of one buffer."""
    return (
        x.buffer is y.buffer and x.dtype is y.dtype and x.offset == y.offset and tuple(strides) == tuple(other_strides)
    )
