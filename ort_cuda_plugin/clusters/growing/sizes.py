"""Shape arithmetic with the number of cached keys: Shape of a growing tensor, and values computed from it.

Integer arithmetic stays symbolic. If an operator has no rule for symbolic integers, the device computes its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import DType, InvalidModel, Node, Unsupported
from ...ops.axes import normalize_axes, normalize_axis
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim
from ...program.lowering.host import HostArray
from .body import GrowingBody, known_integers, needed_input
from .values import PAST, WHAT_PAST, Growing, Sizes, after_past, has_past

_INTEGERS: Final = (DType.INT32, DType.INT64)
_LARGEST: Final = 2**31
"""Coefficients from this magnitude on could overflow. The device computes such integers, which wrap around."""
Compute: TypeAlias = "Callable[[GrowingBody, Node, list[HostArray]], HostArray | None]"
"""Returns the result as symbolic integers; None if they cannot express it."""


def shape(body: GrowingBody, node: Node) -> None:
    x = body.growing(needed_input(node, 0))
    if x is None or x.is_shared:
        body.results(node)
        return
    dims: list[Dim] = [PAST + x.axes[axis] if axis in x.axes else dim for axis, dim in enumerate(x.x.shape)]
    start, end = node.attributes.get("start", 0), node.attributes.get("end", len(dims))
    if not isinstance(start, int) or not isinstance(end, int):
        raise InvalidModel(f"Shape: start and end: got {start!r} and {end!r}, expected integers")
    body.set(node.outputs[0], Sizes(_array(dims[start:end]), DType.INT64))


def arithmetic(body: GrowingBody, node: Node) -> bool:
    """Set the result of a node that computes integers from sizes; return False if the device must compute it."""
    compute = _ARITHMETIC.get(node.op_type)
    if compute is None or node.domain or node.inputs[0] is None:
        return False
    values = [value for value in node.inputs if value is not None]
    arrays = [body.sizes(value) for value in values]
    known = [array for array in arrays if array is not None]
    try:
        result = compute(body, node, known) if len(known) == len(arrays) else None
    except (IndexError, ValueError) as error:
        shapes = " and ".join(str(list(array.shape)) for array in known)
        raise InvalidModel(f"inputs of the shapes {shapes} do not fit together: {error}") from error
    if result is None or not all(abs(number) < _LARGEST for dim in result.reshape(-1) for number in _numbers(dim)):
        return False
    own = next((x.dtype for value in values if isinstance(x := body.special(value), Sizes)), DType.INT64)
    dtype = node.outputs[0].dtype if node.outputs[0] is not None else None
    body.set(node.outputs[0], Sizes(result, dtype or own))
    return True


def range_of_sizes(body: GrowingBody, node: Node) -> None:
    """Lower Range of a known number of elements at PAST, or of as many elements as a growing axis has."""
    arrays = [body.sizes(needed_input(node, index)) for index in range(3)]
    for number, array in enumerate(arrays):
        if array is None or array.size != 1:
            raise Unsupported(
                "control-flow",
                f"input {number} ({needed_input(node, number).name!r}) depends on contents of tensors, or is not one "
                "number; supported: one number that follows from shapes",
            )
    start, limit, delta = (array.reshape(-1)[0] for array in arrays if array is not None)
    dtype = body.tensor(needed_input(node, 0)).dtype
    if not isinstance(delta, int) or delta != 1 or dtype not in _INTEGERS:
        raise Unsupported(
            "control-flow",
            f"an input depends on the number of cached keys, delta is {delta!r}, and the type is {dtype.short}; "
            "supported: a delta of 1, of type i32 or i64",
        )
    count: Dim = limit - start
    first, extra = after_past(start), after_past(limit)
    if first is not None and isinstance(count, int) and count > 0:

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            return s.cast(body.number(maps) + maps.dim(first) + c[0], dtype)

        body.set(node.outputs[0], gather_map(body.ctx, (count,), dtype, element))
        return
    if not isinstance(start, int) or not isinstance(extra, int):
        raise _range(start, limit)

    def index(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return s.cast(maps.dim(start) + c[0], dtype)

    indices = gather_map(body.ctx, (body.capacity,), dtype, index)
    body.set(node.outputs[0], Growing(indices, {0: extra - start}))


def _range(start: Dim, limit: Dim) -> Unsupported:
    return Unsupported(
        "control-flow",
        f"its elements are from {start!r} to {limit!r} ({WHAT_PAST}); supported: a constant number of elements, or a "
        "constant start and a limit of past plus a constant",
    )


def _numbers(dim: Dim) -> Iterator[int]:
    """Yield the coefficients of a polynomial."""
    if isinstance(dim, int):
        yield dim
        return
    yield dim.const
    for _, coefficient in dim.terms:
        yield coefficient


def _array(dims: list[Dim]) -> HostArray:
    array = np.empty(len(dims), dtype=object)
    array[:] = dims
    return array


def _same(body: GrowingBody, node: Node, arrays: list[HostArray]) -> HostArray | None:
    wanted = node.outputs[0].dtype if node.outputs[0] is not None else None
    return arrays[0] if wanted in _INTEGERS else None


def _product(body: GrowingBody, node: Node, arrays: list[HostArray]) -> HostArray | None:
    a, b = np.broadcast_arrays(*arrays)
    pairs = zip(a.reshape(-1), b.reshape(-1), strict=True)
    if any((has_past(x) and not isinstance(y, int)) or (has_past(y) and not isinstance(x, int)) for x, y in pairs):
        return None
    return np.asarray(a * b, dtype=object)


def _gathered(body: GrowingBody, node: Node, arrays: list[HostArray]) -> HostArray | None:
    data, indices = arrays
    if not all(isinstance(x, int) for x in indices.reshape(-1)) or data.ndim == 0:
        return None
    axis = node.attributes.get("axis", 0)
    at = normalize_axis(axis if isinstance(axis, int) else 0, data.ndim)
    count = data.shape[at]
    numbers = indices.astype(np.int64)
    if ((numbers < -count) | (numbers >= count)).any():
        raise InvalidModel(f"Gather: got indices {numbers.tolist()}, expected {-count} to {count - 1}")
    return np.asarray(np.take(data, numbers, axis=at), dtype=object)


def _sliced(body: GrowingBody, node: Node, arrays: list[HostArray]) -> HostArray | None:
    numbers = [known_integers(body, node, name, index) for index, name in enumerate(("starts", "ends", "axes"), 1)]
    steps = known_integers(body, node, "steps", 4)
    starts, ends, axes = numbers
    if starts is None or ends is None or (steps is not None and any(step != 1 for step in steps)):
        return None
    chosen = normalize_axes(range(len(starts)) if axes is None else axes, arrays[0].ndim)
    parts = [slice(None)] * arrays[0].ndim
    for axis, start, end in zip(chosen, starts, ends, strict=True):
        parts[axis] = slice(start, end)
    return arrays[0][tuple(parts)]


def _concatenated(body: GrowingBody, node: Node, arrays: list[HostArray]) -> HostArray | None:
    return np.concatenate(arrays) if all(array.ndim == 1 for array in arrays) else None


def _without_axes(body: GrowingBody, node: Node, arrays: list[HostArray]) -> HostArray | None:
    return arrays[0].reshape(()) if arrays[0].size == 1 and arrays[0].ndim <= 1 else None


def _with_axis(body: GrowingBody, node: Node, arrays: list[HostArray]) -> HostArray | None:
    return arrays[0].reshape((1,)) if arrays[0].ndim == 0 else None


def _as_list(body: GrowingBody, node: Node, arrays: list[HostArray]) -> HostArray | None:
    shape = arrays[1].tolist() if len(arrays) == 2 else None
    return arrays[0].reshape(-1) if shape in ([-1], [arrays[0].size]) else None


_ARITHMETIC: Final[Mapping[str, Compute]] = {
    "Add": lambda body, node, arrays: np.asarray(arrays[0] + arrays[1], dtype=object),
    "Sub": lambda body, node, arrays: np.asarray(arrays[0] - arrays[1], dtype=object),
    "Neg": lambda body, node, arrays: np.asarray(-arrays[0], dtype=object),
    "Mul": _product,
    "Cast": _same,
    "Identity": _same,
    "Concat": _concatenated,
    "Gather": _gathered,
    "Reshape": _as_list,
    "Slice": _sliced,
    "Squeeze": _without_axes,
    "Unsqueeze": _with_axis,
}
