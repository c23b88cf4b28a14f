"""Rules of ai.onnx for growing tensors: elementwise operators, Concat, views, reductions, Softmax and MatMul."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from ...kernels.attention.kv_cache import CachePart, append
from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import DType, InvalidModel, Node, Unsupported
from ...ops import requirements as require
from ...ops.axes import normalize_axes, normalize_axis
from ...ops.onnx.tensor.slicing import slice_axis
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, le, product
from ...program.lowering.elementwise import elementwise
from ...program.lowering.reduce import reduce
from ...program.steps.row_program import MAX, MIN, SUM
from ...program.steps.tensor import Tensor
from .body import GrowingBody, known_integers, needed_input
from .sizes import arithmetic
from .values import PAST, Growing, after_past, has_past

TO_END: Final = 2**31 - 1
"""Values of Slice's ``ends`` from here on mean the end of the axis."""


def _mixed(what: str) -> Unsupported:
    return Unsupported("control-flow", f"it combines {what}")


def _axis(node: Node, default: int, rank: int) -> int:
    axis = node.attributes.get("axis", default)
    if not isinstance(axis, int):
        raise InvalidModel(f"axis: got {axis!r}, expected an integer")
    return normalize_axis(axis, rank)


def _merged(axes: dict[int, int], axis: int, extra: int) -> None:
    if axes.setdefault(axis, extra) != extra:
        raise _mixed("tensors of different numbers of keys")


# ---- elementwise ----


def broadcasting(body: GrowingBody, node: Node) -> None:
    """Elementwise operator whose inputs broadcast."""
    if arithmetic(body, node):
        return
    given = [value for value in node.inputs if value is not None]
    ranks = [body.tensor(value).rank for value in given]
    axes: dict[int, int] = {}
    for value, rank in zip(given, ranks, strict=True):
        for axis, extra in (x.axes if (x := body.growing(value)) is not None else {}).items():
            _merged(axes, axis - rank, extra)
    for value, rank in zip(given, ranks, strict=True):
        own = x.axes if (x := body.growing(value)) is not None else {}
        for axis in axes:
            if rank + axis >= 0 and rank + axis not in own and body.tensor(value).shape[rank + axis] != 1:
                raise _mixed("a growing dimension with a dimension of fixed size")
    (result,) = body.results(node)
    body.set(node.outputs[0], Growing(result, {result.rank + axis: extra for axis, extra in axes.items()}))


# ---- Concat, Slice, Gather ----


def concat(body: GrowingBody, node: Node) -> None:
    """Concat: appends rows to a growing tensor, or joins tensors that grow along other axes."""
    if arithmetic(body, node):
        return
    values = [needed_input(node, index) for index in range(len(node.inputs))]
    tensors = [body.tensor(value) for value in values]
    at = _axis(node, 1, tensors[0].rank)
    parts = [body.growing(value) for value in values]
    if not any(part is not None and at in part.axes for part in parts):
        axes: dict[int, int] = {}
        for part in parts:
            if part is None:
                raise _mixed("growing and other tensors")
            for axis, extra in part.axes.items():
                _merged(axes, axis, extra)
        if any(part is not None and part.axes.keys() != axes.keys() for part in parts):
            raise _mixed("tensors that grow along different axes")
        body.set(node.outputs[0], Growing(body.results(node)[0], axes))
        return
    past = parts[0]
    if past is None or at not in past.axes or len(values) != 2 or parts[1] is not None:
        raise Unsupported("control-flow", "it does not append elements to one growing tensor")
    new = tensors[1]
    if new.rank != past.x.rank or new.shape[at] != 1 or past.axes.keys() != {at}:
        raise Unsupported("control-flow", "it appends more than the keys of one token")
    body.set(node.outputs[0], Growing(appended(body, past, new, at), {at: past.axes[at] + 1}))


def appended(body: GrowingBody, past: Growing, new: Tensor, axis: int) -> Tensor:
    """Return ``past`` with ``new``, of size 1 along ``axis``, behind its valid elements. It may be updated in place."""
    ctx, old = body.ctx, past.x
    if old.rank == 4 and axis == 2:
        extra = past.axes[axis]
        first = gather_map(ctx, (old.shape[0],), DType.INT64, lambda maps, c: body.number(maps) + extra)
        part = CachePart(old, ctx.empty(old.shape, old.dtype), new)
        append(ctx, [part], first)
        return part.present
    flags = body.flags(past.axes[axis] + 1, old.rank, axis, only_last=True)
    return elementwise(ctx, lambda before, x, is_new: s.where(is_new, x, before), old, new, flags)


def slice_of(body: GrowingBody, node: Node) -> None:
    """Slice: a known number of elements at PAST, of a fixed or a growing tensor, or all elements of a growing axis."""
    if arithmetic(body, node):
        return
    data = needed_input(node, 0)
    x = body.tensor(data)
    growing = body.growing(data)
    axes = dict(growing.axes) if growing is not None else {}
    starts, ends = (body.sizes(needed_input(node, index)) for index in (1, 2))
    if starts is None or ends is None:
        raise Unsupported("control-flow", "shapes do not determine its starts and ends")
    chosen = known_integers(body, node, "axes", 3)
    steps = known_integers(body, node, "steps", 4)
    if steps is not None and any(step != 1 for step in steps):
        raise Unsupported("control-flow", "a step of Slice is not 1")
    numbers = normalize_axes(range(starts.size) if chosen is None else chosen, x.rank)
    require.count(len(numbers), starts=starts.reshape(-1), ends=ends.reshape(-1))
    row = growing.row if growing is not None and starts.size == 1 and numbers == (2,) else None
    for axis, start, end in zip(numbers, starts.reshape(-1), ends.reshape(-1), strict=True):
        x = _slice_axis(body, x, axes, axis, start, end, row)
    body.set(node.outputs[0], Growing(x, axes))


def _slice_axis(
    body: GrowingBody,
    x: Tensor,
    axes: dict[int, int],
    axis: int,
    start: Dim,
    end: Dim,
    row: Callable[[Dim], Tensor] | None,
) -> Tensor:
    """Return x[start:end] along ``axis``, and remove the axis from ``axes`` if the result does not grow along it.

    ``row`` as for `Growing`.
    """
    if axis in axes:
        size: Dim = PAST + axes[axis]
        if isinstance(start, int) and start < 0:
            start = size + start
        if isinstance(end, int):
            end = size if end >= TO_END else size + end if end < 0 else end
        if start == 0 and end == size:
            return x
    elif not has_past(start) and not has_past(end):
        return slice_axis(body.ctx, x, axis, start, end)
    first, count = after_past(start), end - start
    if first is None or not isinstance(count, int) or count < 1 or (isinstance(first, int) and first < -1):
        raise Unsupported("control-flow", f"its part from {start!r} to {end!r} is neither of fixed size nor the whole")
    if axis not in axes:
        _require_rows(body, x.shape[axis], first + count)
    axes.pop(axis, None)
    if row is not None and count == 1:
        return row(first)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        index = c[axis] + body.number(maps) + maps.dim(first)
        inside = (index >= 0) & (index < maps.dim(x.shape[axis]))
        return maps.source(x).at([*c[:axis], index, *c[axis + 1 :]], inside)

    return gather_map(body.ctx, (*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype, element)


def _require_rows(body: GrowingBody, rows: Dim, last: Dim) -> None:
    """Require that a table has a row for each step: the last step has capacity - 2 cached keys."""
    what = "max_length must be at most 1 more than the number of positions of the decoder"
    body.ctx.require(le(body.capacity - 2 + last, rows), what)


def gather(body: GrowingBody, node: Node) -> None:
    """Gather: of sizes, or of a table that does not grow, by sizes."""
    if arithmetic(body, node):
        return
    if body.growing(needed_input(node, 0)) is not None or body.growing(needed_input(node, 1)) is not None:
        raise Unsupported("control-flow", "it gathers from or by a tensor that grows in each iteration")
    body.results(node)


# ---- views ----


def transpose(body: GrowingBody, node: Node) -> None:
    x = _only_growing(body, node)
    perm = node.attributes.get("perm", tuple(range(x.x.rank))[::-1])
    (result,) = body.results(node)
    if not isinstance(perm, tuple):
        raise InvalidModel(f"perm: got {perm!r}, expected integers")
    order = [int(axis) for axis in perm if not isinstance(axis, str)]
    body.set(node.outputs[0], Growing(result, {order.index(axis): extra for axis, extra in x.axes.items()}))


def unsqueeze(body: GrowingBody, node: Node) -> None:
    if arithmetic(body, node):
        return
    x = _only_growing(body, node)
    (result,) = body.results(node)
    added = normalize_axes(known_integers(body, node, "axes", 1) or (), result.rank)
    kept = [axis for axis in range(result.rank) if axis not in added]
    body.set(node.outputs[0], Growing(result, {kept[axis]: extra for axis, extra in x.axes.items()}))


def squeeze(body: GrowingBody, node: Node) -> None:
    if arithmetic(body, node):
        return
    x = _only_growing(body, node)
    given = known_integers(body, node, "axes", 1)
    if given is None:
        raise Unsupported("control-flow", "Squeeze without axes reads a value that grows in each iteration")
    removed = normalize_axes(given, x.x.rank)
    if not x.axes.keys().isdisjoint(removed):
        raise InvalidModel("Squeeze: an axis has more than one element")
    kept = [axis for axis in range(x.x.rank) if axis not in removed]
    (result,) = body.results(node)
    body.set(node.outputs[0], Growing(result, {kept.index(axis): extra for axis, extra in x.axes.items()}))


def reshaped(body: GrowingBody, node: Node) -> None:
    """Reshape: each growing axis becomes an axis of the result."""
    if arithmetic(body, node):
        return
    target, x = body.sizes(needed_input(node, 1)), body.growing(needed_input(node, 0))
    if target is None or x is None or node.attributes.get("allowzero", 0) != 0:
        raise Unsupported("control-flow", "it reads a size that grows in each iteration")
    dims = [body.capacity if has_past(dim) else dim for dim in target.tolist()]
    (result,) = body.results(node, {1: body.ctx.host_tensor(dims, (len(dims),), DType.INT64)})
    axes = {}
    for axis, extra in x.axes.items():
        before = product(x.x.shape[:axis])
        candidates = [at for at, dim in enumerate(result.shape) if dim == body.capacity]
        at = next((at for at in candidates if product(result.shape[:at]) == before), None)
        if at is None or (has_past(target[at]) and target[at] != PAST + extra):
            raise Unsupported("control-flow", "it merges a dimension that grows in each iteration with others")
        axes[at] = extra
    if any(has_past(dim) and at not in axes for at, dim in enumerate(target.tolist())):
        raise Unsupported("control-flow", "it merges a dimension that grows in each iteration with others")
    body.set(node.outputs[0], Growing(result, axes))


def _only_growing(body: GrowingBody, node: Node) -> Growing:
    """Return the first input, which must be the only one that grows."""
    x = body.growing(needed_input(node, 0))
    if x is None or any(body.special(value) is not None for value in node.inputs[1:]):
        raise Unsupported("control-flow", "it reads a size that grows in each iteration")
    return x


# ---- reductions ----


def reduction(body: GrowingBody, node: Node) -> None:
    """ReduceMax, ReduceMean, ReduceMin or ReduceSum."""
    x = _only_growing(body, node)
    given = known_integers(body, node, "axes", 1)
    if not given:
        raise Unsupported("control-flow", "it reduces all axes of a value that grows in each iteration")
    axes = normalize_axes(given, x.x.rank)
    keeps = node.attributes.get("keepdims", 1) != 0
    left = {
        axis if keeps else axis - sum(other < axis for other in axes): extra
        for axis, extra in x.axes.items()
        if axis not in axes
    }
    over = [axis for axis in axes if axis in x.axes]
    if len(over) > 1:
        raise Unsupported("control-flow", "it reduces two growing axes")
    result = _reduced(body, node, x, axes, over[0], keeps) if over else body.results(node)[0]
    body.set(node.outputs[0], Growing(result, left))


def _reduced(body: GrowingBody, node: Node, x: Growing, axes: tuple[int, ...], over: int, keeps: bool) -> Tensor:
    ctx, dtype = body.ctx, x.x.dtype
    kind = node.op_type.removeprefix("Reduce")
    if not dtype.is_float:
        raise Unsupported("control-flow", f"it reduces a growing tensor of {dtype.short}; supported: floats")
    fill, how = {"Max": (-math.inf, MAX), "Min": (math.inf, MIN), "Sum": (0.0, SUM), "Mean": (0.0, SUM)}[kind]
    filled = body.filled(x, over, fill)
    result = reduce(ctx, lambda row, value: row.reduce(how, s.widen(value)), filled, axes, keeps)
    if kind != "Mean":
        return elementwise(ctx, lambda value: s.cast(value, dtype), result)
    others: Dim = 1
    for axis in axes:
        others = others if axis == over else others * x.x.shape[axis]
    extra = x.axes[over]

    def count(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return s.cast((body.number(maps) + extra) * maps.dim(others), DType.FLOAT32)

    counts = gather_map(ctx, (), DType.FLOAT32, count)
    return elementwise(ctx, lambda total, n: s.cast(total / s.cast(n, total.dtype), dtype), result, counts)


def softmax(body: GrowingBody, node: Node) -> None:
    """Softmax: elements behind the valid ones become 0."""
    x = _only_growing(body, node)
    rank = x.x.rank
    axis = _axis(node, -1 if node.since_version >= 13 else 1, rank)
    if node.since_version < 13 and axis != rank - 1:
        raise Unsupported("control-flow", "Softmax before version 13 along several axes")
    inputs = {0: body.filled(x, axis, -math.inf)} if axis in x.axes else {}
    body.set(node.outputs[0], Growing(body.results(node, inputs)[0], x.axes))


# ---- products ----


def matmul(body: GrowingBody, node: Node) -> None:
    """MatMul: growing rows and columns, or a sum over a growing axis, whose other elements become zeros."""
    values = [needed_input(node, index) for index in range(2)]
    tensors = [body.tensor(value) for value in values]
    if any(x.rank < 2 for x in tensors):
        raise Unsupported("control-flow", "it multiplies a vector by a value that grows in each iteration")
    axes: list[Mapping[int, int]] = []
    for value, x in zip(values, tensors, strict=True):
        growing = body.growing(value)
        axes.append({axis - x.rank: extra for axis, extra in growing.axes.items()} if growing is not None else {})
    (a, b), results = axes, dict[int, int]()
    summed = a.get(-1), b.get(-2)
    for extras, contracted in ((a, -1), (b, -2)):
        for axis, extra in extras.items():
            if axis != contracted:
                _merged(results, axis, extra)
    for x, extras in zip(tensors, axes, strict=True):
        for axis in results:
            if axis < -2 and axis not in extras and x.rank + axis >= 0 and x.shape[x.rank + axis] != 1:
                raise _mixed("a growing dimension with a dimension of fixed size")
    inputs: dict[int, Tensor] = {}
    if summed != (None, None):
        if summed[0] != summed[1]:
            raise _mixed("tensors of different numbers of keys")
        for index, (value, offset) in enumerate(zip(values, (-1, -2), strict=True)):
            growing = body.growing(value)
            assert growing is not None
            inputs[index] = body.filled(growing, growing.x.rank + offset, 0.0)
    (result,) = body.results(node, inputs)
    body.set(node.outputs[0], Growing(result, {result.rank + axis: extra for axis, extra in results.items()}))
