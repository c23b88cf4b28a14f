"""The steps of a program: elementwise steps (maps), row programs and contractions over strided tensors.

Operators append steps to the trace, passes fuse them, and emission generates their kernels. A step's expressions are
Scalars whose leaves are elements of its inputs. Unless a class says otherwise, the tensors of a step
broadcast to its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ...model.ir import HALVES, NARROW_FLOATS, DType, Node
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
"""An input of a step: (leaf, the tensor whose elements it stands for)."""
Output: TypeAlias = tuple[Scalar, Tensor]
"""An output of a step: (expression, the tensor that stores its values, converted to the tensor's type)."""
CODES_PER_WORD = 8
"""Number of codes in a word of a packed operand: words of 16, 32 or 64 bits for codes of 2, 4 or 8 (`Conversion`)."""


@dataclass(frozen=True, eq=False)
class Map(TensorFields):
    """An elementwise step. Its outputs are expressions of the inputs' elements at the same coordinates of ``shape``.

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
        """Return the step with ``function`` applied to the expression of each output."""
        return self.map_outputs(lambda outputs: ((function(value), y) for value, y in outputs))

    @cached_property
    def scalars(self) -> set[Scalar]:
        """Return all nodes of the outputs' expressions."""
        return reachable(value for value, _ in self.all_outputs)

    def with_scalars(self, scalars: set[Scalar]) -> Self:
        """Return this new step after setting its cached `scalars`, which the caller knows."""
        vars(self)["scalars"] = scalars
        return self

    @property
    def tensors_read(self) -> tuple[Tensor, ...]:
        """Return all tensors that the step reads: the operands of a contraction, then the other inputs."""
        others = self.tensors(without=("inputs", "parts", *self.output_fields))
        return (*others, *(x for _, x in self.inputs))

    @cached_property
    def reads(self) -> tuple[Buffer, ...]:
        return tuple(dict.fromkeys(x.buffer for x in self.tensors_read if x.buffer.kind is not BufferKind.HOST))

    @cached_property
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(dict.fromkeys(y.buffer for _, y in self.all_outputs))

    def reads_once(self, buffer: Buffer) -> bool:
        """Return whether exactly one of the tensors that the step reads is a view of ``buffer``."""
        return sum(x.buffer is buffer for x in self.tensors_read) == 1

    @property
    def node(self) -> Node | None:
        """Return the last of the step's nodes: error messages about the step's launch refer to it."""
        return self.nodes[-1] if self.nodes else None


@dataclass(frozen=True, eq=False)
class Rows(Map):
    """A row program: an elementwise step whose expressions may also reduce along ``axes`` (see `row_program`).

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
    """Operand prologue: a contraction multiplies ``value``, an expression of the element ``leaf`` and of ``inputs``.

    ``inputs`` broadcast to the operand's dimensions; each is a scalar, or varies along one dimension. With ``bits``,
    the operand is a matrix of codes with that many bits, and ``leaf`` is a code as int32. The operand's tensor then has
    words of `CODES_PER_WORD` codes, the first in the lowest bits, but the tensor's strides count codes. Codes are
    contiguous along k, and each column begins at a word. Each of ``inputs`` is then [blocks, n], with one element per
    column and block of ``block`` rows; ``block`` is a power of two of at least 16.
    """

    leaf: Scalar
    value: Scalar
    inputs: tuple[Input, ...]
    bits: int = 0
    block: int = 0


@dataclass(frozen=True, eq=False)
class LowRank(TensorFields):
    """A second product a [m..., rank] @ b [rank, n] that a GEMM adds to its accumulators, such as a LoRA adapter.

    With ``scale``, a tensor of one element, the second product is multiplied by it. The rank may be 0.
    """

    a: Tensor
    b: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sums(Map):
    """A contraction (GEMM, convolution or attention) with operand prologues ``conversions`` and an epilogue.

    In the epilogue, the leaf ``total`` stands for the accumulator, and has its type.
    """

    operands: tuple[Tensor, ...] = field(kw_only=True)
    total: Scalar = field(kw_only=True)
    conversions: tuple[Conversion | None, ...] = field(default=(None, None), kw_only=True)
    schedule: Schedule | None = field(default=None, kw_only=True)
    """The selected schedule; None before kernel selection."""
    why: str = field(default="", kw_only=True)
    """The reason for the schedule, as text for users."""
    column_parts: tuple[range, ...] = field(default=(), kw_only=True)
    """For each output, its columns of a GEMM or its channels of a convolution; empty if each output has all of them."""

    @property
    def is_converted(self) -> bool:
        return any(self.conversions)

    @property
    def summed(self) -> tuple[Tensor, ...]:
        """Return the tensors that the contraction multiplies: the operands and the inputs of their prologues."""
        return (*self.operands, *(x for _, x in self.converted))

    @property
    def converted(self) -> tuple[Input, ...]:
        """Return the inputs of the operands' prologues, without the operands."""
        return tuple(x for conversion in self.conversions if conversion is not None for x in conversion.inputs)


@dataclass(frozen=True, eq=False)
class Contract(Sums):
    """A GEMM a [batch..., m, k] @ b [batch..., k, n] with an elementwise epilogue.

    The result is [batch..., m, n], where n may be split into the last ``column_axes`` dimensions, and m into the
    ``row_axes`` dimensions before them. With ``low_rank`` b is a matrix, and the accumulators also sum the product of
    ``low_rank``.
    """

    row_axes: int = field(default=1, kw_only=True)
    column_axes: int = field(default=1, kw_only=True)
    low_rank: LowRank | None = field(default=None, kw_only=True)

    @property
    def summed(self) -> tuple[Tensor, ...]:
        return (*super().summed, *(() if self.low_rank is None else self.low_rank.tensors()))

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
    """Fused attention: two GEMMs and the row program between them; scores and softmax weights are not stored.

    ``operands`` are a [batch..., m, k], b [batch..., k, n] and c [batch..., n, d]. ``score`` is the leaf that stands
    for an element of a @ b; ``weight`` is the expression of a row program along n over scores and ``score_inputs``
    (broadcast to [batch..., m, n]). The result is the epilogue of weight @ c, [batch..., m, d].
    """

    score: Scalar = field(kw_only=True)
    score_inputs: tuple[Input, ...] = field(kw_only=True)
    weight: Scalar = field(kw_only=True)
    row: Row = field(kw_only=True)
    parts: tuple[Map, ...] = field(kw_only=True)
    """The three unfused steps; empty if passes have changed tensors of the attention step since the fusion."""

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
    layout propagation has changed it to NHWC. ``windows`` slide over x. In a ``transposed`` convolution they slide over
    the result, but ``windows.size`` is still the size of x.
    """

    windows: Windows = field(kw_only=True)
    groups: int = field(default=1, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    channel_axes: int = field(default=1, kw_only=True)

    @property
    def channels(self) -> range:
        """Return the channel axes of the result."""
        return range(1, 1 + self.channel_axes)

    @property
    def space(self) -> range:
        """Return the spatial axes of the result."""
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
    """Return those of ``inputs`` that the expressions depend on, directly or through reductions of row programs."""
    used = reachable(expressions)
    return tuple((leaf, x) for leaf, x in inputs if leaf in used)


_selections = frozenset({"where", "min", "max", "neg", "abs"})
"""Operations whose result is one of their operands, perhaps negated, so that it needs no rounding."""


def stored(x: Scalar) -> Scalar:
    """Return x as it would be loaded after being stored: 16-bit and smaller floats are rounded to their type."""
    if x.dtype not in NARROW_FLOATS or _is_rounded(x):
        return x
    return Scalar(x.dtype, "cast", (x,), (False, "up"))


def _is_rounded(x: Scalar) -> bool:
    """Return whether x is rounded to its type: a leaf, a cast, or a selection among rounded values, -1, 0 and 1."""
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
            if value.dtype not in HALVES or value.value not in (0.0, 1.0, -1.0):
                return False
        elif value.op != "cast" or value.operands[0].dtype is DType.BOOL:
            return False
    return True


class Substitution:
    """Replaces nodes of expressions by others; shared subexpressions stay shared.

    If a reduction depends on a replaced node, all its results come from one new reduction.
    """

    def __init__(self, replaced: Mapping[Scalar, Scalar]) -> None:
        self._new: dict[Scalar, Scalar] = dict(replaced)
        self._stages: dict[Stage, Stage] = {}

    def __call__(self, x: Scalar) -> Scalar:
        """Return x with the nodes replaced."""
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
    """Return whether x is the whole of its buffer, in row-major order."""
    return x.offset == 0 and x.is_contiguous and x.buffer.nbytes == x.nbytes
