"""Checks of inputs and attributes, with one form of error message.

==============================  ===========================================  ===========================================
functions                       what they check                              message
==============================  ===========================================  ===========================================
``that``, ``rank``              facts that are known at lowering             ``<subject> must <expected>, got <found>``
``holds``, ``shape``            sizes; unknown ones are checked in each Run  the same, raised at lowering or by the Run
``supported``, ``unsupported``  valid models that the plugin declines        ``<subject> is <found>; supported: <what>``
==============================  ===========================================  ===========================================

The subject is an input or attribute under its ONNX name. `NodeError` and `Operator.lower` prepend the node and its
operator. None stands for an omitted input, and passes every check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from typing import TypeVar

import numpy as np

from ..model.ir import DType, InvalidModel, Unsupported
from ..program.expressions.symbolic import Dim, eq, floordiv, le, logical_or
from ..program.lowering.context import Lowering, Tensor

Value = TypeVar("Value")


def unsupported(kind: str, subject: str, got: object, supported: str) -> Unsupported:
    """Return the reason to decline a node of a valid model; ``kind`` is one of `Unsupported.kinds`."""
    return Unsupported(kind, f"{subject} is {got}; supported: {supported}")


def violation(subject: str, expected: str, got: object) -> InvalidModel:
    """Return the error for an input or attribute that violates ``expected``, which is text such as "have rank 2"."""
    return InvalidModel(_message(subject, expected, got))


def _message(subject: str, expected: str, got: object) -> str:
    return f"{subject} must {expected}, got {got}"


def that(condition: bool | np.bool, subject: str, expected: str, got: object) -> None:
    """Raise InvalidModel unless the condition holds; other arguments as in `violation`."""
    if not condition:
        raise violation(subject, expected, got)


def supported(condition: bool, kind: str, subject: str, got: object, supported: str) -> None:
    """Decline a node of a valid model unless the condition holds; other arguments as in `unsupported`."""
    if not condition:
        raise unsupported(kind, subject, got, supported)


def _given(inputs: Mapping[str, Value | None]) -> Iterator[tuple[str, Value]]:
    return ((name, x) for name, x in inputs.items() if x is not None)


def given(x: Value | None, subject: str, expected: str = "be given") -> Value:
    """Return x. Raise InvalidModel if it is omitted."""
    if x is None:
        raise violation(subject, expected, "none")
    return x


def static(value: Dim | None, subject: str) -> int:
    """Return the value. Decline a node whose value only a Run knows (None, or an expression)."""
    if not isinstance(value, int):
        raise unsupported(
            "shape", subject, "known only when the model runs", "values known when the session is created"
        )
    return value


def rank(rank: int | Sequence[int], **inputs: Tensor | None) -> None:
    """Raise InvalidModel if an input's rank is not ``rank``, or not one of several."""
    ranks = (rank,) if isinstance(rank, int) else rank
    for name, x in _given(inputs):
        that(x.rank in ranks, name, f"have rank {' or '.join(map(str, ranks))}", f"rank {x.rank}")


def least_rank(rank: int, **inputs: Tensor | None) -> None:
    """Raise InvalidModel if an input has a lower rank."""
    for name, x in _given(inputs):
        that(x.rank >= rank, name, f"have at least rank {rank}", f"rank {x.rank}")


def least(minimum: float, **attributes: float) -> None:
    """Raise InvalidModel if an attribute is below the minimum."""
    for name, value in attributes.items():
        that(value >= minimum, name, f"be at least {minimum}", value)


def one_of(choices: Collection[object], **attributes: object) -> None:
    """Raise InvalidModel if an attribute is not among the choices; None is an omitted attribute."""
    expected = f"be {'one of ' if len(choices) > 1 else ''}{', '.join(map(repr, choices))}"
    for name, value in _given(attributes):
        that(value in choices, name, expected, repr(value))


def all_or_none(**inputs: object) -> None:
    """Raise InvalidModel if some of the inputs are given and others are omitted."""
    given = [name for name, _ in _given(inputs)]
    found = f"{' and '.join(given)} alone"
    that(len(given) in (0, len(inputs)), " and ".join(inputs), "be given together or left out together", found)


def named(**inputs: object) -> str:
    """Return the names of the given inputs, as the end of a message that several inputs must be given."""
    given = [name for name, _ in _given(inputs)]
    return f"only {', '.join(given)}" if given else "none of them"


def heads(num_heads: int, kv_num_heads: int) -> None:
    """Raise InvalidModel unless each head of keys and values serves the same positive number of query heads."""
    if num_heads <= 0 or kv_num_heads <= 0 or num_heads % kv_num_heads:
        found = f"num_heads = {num_heads} and kv_num_heads = {kv_num_heads}"
        raise violation("num_heads", "be a positive multiple of kv_num_heads", found)


def block(block_size: int) -> None:
    """Raise InvalidModel unless quantization blocks have a power of two of at least 16 elements."""
    if block_size < 16 or block_size & (block_size - 1):
        raise violation("block_size", "be a power of two of at least 16", block_size)


def one_type(**inputs: Tensor | None) -> None:
    """Decline a node whose given inputs differ in their element types.

    The schema of a newer ORT may allow this, with several type constraints for inputs that shared one.
    """
    types = {name: x.dtype for name, x in _given(inputs)}
    first, wanted = next(iter(types.items()))
    for name, dtype in types.items():
        supported(dtype is wanted, "dtype", f"the type of {name}", dtype.short, f"{wanted.short}, that of {first}")


def element_type(types: Collection[DType], **inputs: Tensor) -> None:
    """Raise InvalidModel if an input's element type is not one of ``types``."""
    for name, x in inputs.items():
        that(x.dtype in types, name, f"have the type {' or '.join(sorted(t.short for t in types))}", x.dtype.short)


def count(count: int | Collection[int], **attributes: Sized) -> None:
    """Raise InvalidModel if an attribute's number of entries is not ``count``, or not one of several."""
    counts = (count,) if isinstance(count, int) else count
    for name, values in attributes.items():
        that(len(values) in counts, name, f"have {' or '.join(map(str, counts))} entries", len(values))


def multiple_count(divisor: int, **attributes: Sized) -> None:
    """Raise InvalidModel unless the number of entries is a positive multiple of the divisor."""
    for name, values in attributes.items():
        is_whole = len(values) > 0 and len(values) % divisor == 0
        that(is_whole, name, f"have a positive multiple of {divisor} entries", len(values))


def within(least: float, most: float, **attributes: float) -> None:
    """Raise InvalidModel if an attribute is outside [least, most]."""
    for name, value in attributes.items():
        that(least <= value <= most, name, f"be in [{least}, {most}]", value)


def holds(ctx: Lowering, condition: Dim, subject: str, expected: str, got: object) -> None:
    """Raise InvalidModel if the condition is 0 for all sizes; let each Run check an unproven one. See `violation`."""
    if ctx.known(condition) is not True:
        ctx.require(condition, _message(subject, expected, got))


def shape(ctx: Lowering, shape: Sequence[Dim], **inputs: Tensor | None) -> None:
    """Check that the inputs have this shape; raise InvalidModel for another rank."""
    for name, x in _given(inputs):
        that(x.rank == len(shape), name, f"have the shape {list(shape)}", list(x.shape))
        for dim, wanted in zip(x.shape, shape, strict=True):
            holds(ctx, eq(dim, wanted), name, f"have the shape {list(shape)}", list(x.shape))


def dim(ctx: Lowering, axis: int, size: Dim, **inputs: Tensor | None) -> None:
    """Check that the inputs have this size in one dimension."""
    for name, x in _given(inputs):
        holds(ctx, eq(x.shape[axis], size), name, f"have the size {size!r} in dimension {axis}", list(x.shape))


def size(ctx: Lowering, size: Dim, **inputs: Tensor | None) -> None:
    """Check that the inputs have this number of elements."""
    expected = "have one element" if size == 1 else f"have {size!r} elements"
    for name, x in _given(inputs):
        holds(ctx, eq(x.size, size), name, expected, list(x.shape))


def scalar(ctx: Lowering, **inputs: Tensor | None) -> None:
    """Check that each input has one element."""
    size(ctx, 1, **inputs)


def broadcast(ctx: Lowering, shape: Sequence[Dim], **inputs: Tensor | None) -> None:
    """Check that the inputs broadcast to this shape; raise InvalidModel for a greater rank."""
    for name, x in _given(inputs):
        that(x.rank <= len(shape), name, f"have at most rank {len(shape)}", f"rank {x.rank}")
        for dim, wanted in zip(x.shape, shape[len(shape) - x.rank :], strict=True):
            holds(ctx, logical_or(eq(dim, 1), eq(dim, wanted)), name, f"broadcast to {list(shape)}", list(x.shape))


def multiple_of(ctx: Lowering, size: Dim, divisor: Dim, subject: str, name: str = "") -> None:
    """Check that the size ``subject`` is a multiple of the divisor; ``name`` names the divisor, "" if it is fixed."""
    expected = f"be a multiple of {name} ({divisor!r})" if name else f"be a multiple of {divisor!r}"
    holds(ctx, eq(floordiv(size, divisor) * divisor, size), subject, expected, size)


def least_dim(ctx: Lowering, minimum: Dim, **numbers: Dim) -> None:
    """Check that no number is below the minimum."""
    for name, number in numbers.items():
        holds(ctx, le(minimum, number), name, f"be at least {minimum!r}", number)


def most_dim(ctx: Lowering, maximum: Dim, **numbers: Dim) -> None:
    """Check that no number is above the maximum."""
    for name, number in numbers.items():
        holds(ctx, le(number, maximum), name, f"be at most {maximum!r}", number)


def one_or_size(ctx: Lowering, size: Dim, **inputs: Tensor) -> None:
    """Check that the inputs have one element or ``size`` elements."""
    for name, x in inputs.items():
        holds(ctx, logical_or(eq(x.size, 1), eq(x.size, size)), name, f"have 1 or {size!r} elements", x.size)
