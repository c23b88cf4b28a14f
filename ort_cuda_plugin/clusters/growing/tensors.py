"""Rules of ai.onnx for growing tensors: elementwise operators, Concat, views, reductions, Softmax and MatMul."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from ...kernels.attention.kv_cache import CachePart, append
from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import DType, InvalidModel, Node, Unsupported, Value
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
from .values import PAST, WHAT_PAST, Growing, after_past, elements, has_past

TO_END: Final = 2**31 - 1
"""Values of Slice's ``ends`` from here on mean the end of the axis."""


def _mixed(what: str) -> Unsupported:
    return Unsupported("control-flow", f"it combines {what}")


def _fixed(value: Value, axis: int, dim: Dim) -> Unsupported:
    return _mixed(
        f"an axis that grows in each iteration with axis {axis} of {value.name!r}, whose size {dim!r} is fixed; "
        "supported: size 1"
    )


def _axis(node: Node, default: int, rank: int) -> int:
    axis = node.attributes.get("axis", default)
    if not isinstance(axis, int):
        raise InvalidModel(f"axis: got {axis!r}, expected an integer")
    return normalize_axis(axis, rank)


def _merged(axes: dict[int, int], axis: int, extra: int) -> None:
    if (other := axes.setdefault(axis, extra)) != extra:
        raise _mixed(
            f"tensors of {elements(other)} and {elements(extra)} elements along axis {axis}; supported: equal numbers"
        )


# ---- elementwise ----


def broadcasting(body: GrowingBody, node: Node) -> None:
    """Lower an elementwise operator whose inputs broadcast."""
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
            if rank + axis >= 0 and rank + axis not in own and (dim := body.tensor(value).shape[rank + axis]) != 1:
                raise _fixed(value, rank + axis, dim)
    (result,) = body.results(node)
    body.set(node.outputs[0], Growing(result, {result.rank + axis: extra for axis, extra in axes.items()}))


# ---- Concat, Slice, Gather ----


def concat(body: GrowingBody, node: Node) -> None:
    """Lower Concat, which appends one element to a growing axis, or joins tensors that grow along other axes."""
    if arithmetic(body, node):
        return
    values = [needed_input(node, index) for index in range(len(node.inputs))]
    tensors = [body.tensor(value) for value in values]
    at = _axis(node, 1, tensors[0].rank)
    parts = [body.growing(value) for value in values]
    if not any(part is not None and at in part.axes for part in parts):
        axes: dict[int, int] = {}
        for value, part in zip(values, parts, strict=True):
            if part is None:
                raise _mixed(
                    f"tensors that grow in each iteration with {value.name!r}, which does not grow; supported: growth "
                    "of all inputs"
                )
            for axis, extra in part.axes.items():
                _merged(axes, axis, extra)
        if any(part is not None and part.axes.keys() != axes.keys() for part in parts):
            found = [sorted(part.axes) for part in parts if part is not None]
            raise _mixed(f"tensors that grow along the axes {found}; supported: the same axes for all inputs")
        body.set(node.outputs[0], Growing(body.results(node)[0], axes))
        return
    past = parts[0]
    if past is None or at not in past.axes or len(values) != 2 or parts[1] is not None:
        raise Unsupported(
            "control-flow",
            f"it joins {len(values)} inputs along axis {at}, which grows in each iteration; supported: two inputs, and "
            "only the first one grows",
        )
    new = tensors[1]
    if new.rank != past.x.rank or new.shape[at] != 1 or past.axes.keys() != {at}:
        raise Unsupported(
            "control-flow",
            f"input 0 grows along the axes {sorted(past.axes)}, and input 1 ({values[1].name!r}) of shape "
            f"{list(new.shape)} is appended along axis {at}; supported: growth along axis {at} only, and an input 1 of "
            f"rank {past.x.rank} with one element along axis {at}",
        )
    body.set(node.outputs[0], Growing(appended(body, past, new, at), {at: past.axes[at] + 1}))


def appended(body: GrowingBody, past: Growing, new: Tensor, axis: int) -> Tensor:
    """Return ``past`` with ``new``, of size 1 along ``axis``, after its valid elements.

    Loops may then give ``past`` and the result the same memory (`InPlace`).
    """
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
    """Lower Slice of a known number of elements at PAST, of a fixed or a growing axis, or of all of a growing axis."""
    if arithmetic(body, node):
        return
    data = needed_input(node, 0)
    x = body.tensor(data)
    growing = body.growing(data)
    axes = dict(growing.axes) if growing is not None else {}
    starts, ends = (body.sizes(needed_input(node, index)) for index in (1, 2))
    if starts is None or ends is None:
        which = "starts (input 1)" if starts is None else "ends (input 2)"
        raise Unsupported(
            "control-flow", f"{which} depends on contents of tensors; supported: numbers that follow from shapes"
        )
    chosen = known_integers(body, node, "axes", 3)
    steps = known_integers(body, node, "steps", 4)
    if steps is not None and any(step != 1 for step in steps):
        raise Unsupported("control-flow", f"an input grows in each iteration, and steps is {list(steps)}; supported: 1")
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
        kind = "that grows in each iteration" if axis in axes else "of fixed size"
        raise Unsupported(
            "control-flow",
            f"slice [{start!r}:{end!r}] of an axis {kind} ({WHAT_PAST}); supported: a constant number of elements from "
            "past - 1 or later on, or the whole axis",
        )
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
    """Require that a table has all rows that the decoder's steps read: PAST + ``last`` rows in the last step.

    The last step has capacity - 2 cached keys.
    """
    what = f"max_length must be at most {2 - last!r} more than the number of rows in the decoder's table of positions"
    body.ctx.require(le(body.capacity - 2 + last, rows), what)


def gather(body: GrowingBody, node: Node) -> None:
    """Lower Gather from sizes, or from a table that does not grow, with sizes as the indices."""
    if arithmetic(body, node):
        return
    for index in range(2):
        if body.growing(value := needed_input(node, index)) is not None:
            raise Unsupported(
                "control-flow",
                f"input {index} ({value.name!r}) is a tensor that grows in each iteration; supported: sizes, or a "
                "tensor that does not grow",
            )
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
        raise Unsupported(
            "control-flow", "axes is missing, and input 0 grows in each iteration; supported: constant axes"
        )
    removed = normalize_axes(given, x.x.rank)
    if not x.axes.keys().isdisjoint(removed):
        raise InvalidModel(f"axes: got {list(removed)}, but the axes {sorted(x.axes)} grow; expected axes of size 1")
    kept = [axis for axis in range(x.x.rank) if axis not in removed]
    (result,) = body.results(node)
    body.set(node.outputs[0], Growing(result, {kept.index(axis): extra for axis, extra in x.axes.items()}))


def reshaped(body: GrowingBody, node: Node) -> None:
    """Lower Reshape, in which each growing axis becomes an axis of the result."""
    if arithmetic(body, node):
        return
    target, x = body.sizes(needed_input(node, 1)), body.growing(needed_input(node, 0))
    if target is None:
        raise Unsupported(
            "control-flow", "shape (input 1) depends on contents of tensors; supported: numbers that follow from shapes"
        )
    if x is None:
        raise Unsupported(
            "control-flow", "shape (input 1) grows in each iteration, and input 0 does not; supported: both grow"
        )
    if (allowzero := node.attributes.get("allowzero", 0)) != 0:
        raise Unsupported(
            "control-flow", f"input 0 grows in each iteration, and allowzero is {allowzero}; supported: 0"
        )
    dims = [body.capacity if has_past(dim) else dim for dim in target.tolist()]
    (result,) = body.results(node, {1: body.ctx.host_tensor(dims, (len(dims),), DType.INT64)})
    axes = {}
    for axis, extra in x.axes.items():
        before = product(x.x.shape[:axis])
        candidates = [at for at, dim in enumerate(result.shape) if dim == body.capacity]
        at = next((at for at in candidates if product(result.shape[:at]) == before), None)
        if at is None or (has_past(target[at]) and target[at] != PAST + extra):
            raise _reshaping(target.tolist(), f"axis {axis} of input 0, of {PAST + extra!r} elements,")
        axes[at] = extra
    for at, dim in enumerate(target.tolist()):
        if has_past(dim) and at not in axes:
            raise _reshaping(target.tolist(), f"axis {at} of the result")
    body.set(node.outputs[0], Growing(result, axes))


def _reshaping(target: list[Dim], axis: str) -> Unsupported:
    return Unsupported(
        "control-flow",
        f"it reshapes to {target} ({WHAT_PAST}), and {axis} grows in each iteration; supported: reshapes that "
        "keep each growing axis as an axis of the result and do not merge it with others",
    )


def _only_growing(body: GrowingBody, node: Node) -> Growing:
    """Return the first input, which must be the only one that grows."""
    x = body.growing(needed_input(node, 0))
    if x is None or any(body.special(value) is not None for value in node.inputs[1:]):
        grown = [index for index, value in enumerate(node.inputs) if body.special(value) is not None]
        raise Unsupported(
            "control-flow",
            f"the inputs with the indices {grown} depend on the number of cached keys; supported: only input 0 does, "
            "and is a tensor that grows in each iteration",
        )
    return x


# ---- reductions ----


def reduction(body: GrowingBody, node: Node) -> None:
    """Lower ReduceMax, ReduceMean, ReduceMin or ReduceSum over a list of axes; at most one of them grows."""
    x = _only_growing(body, node)
    given = known_integers(body, node, "axes", 1)
    if not given:
        raise Unsupported(
            "control-flow", "axes is missing or empty, and input 0 grows in each iteration; supported: a list of axes"
        )
    axes = normalize_axes(given, x.x.rank)
    keeps = node.attributes.get("keepdims", 1) != 0
    left = {
        axis if keeps else axis - sum(other < axis for other in axes): extra
        for axis, extra in x.axes.items()
        if axis not in axes
    }
    over = [axis for axis in axes if axis in x.axes]
    if len(over) > 1:
        raise Unsupported(
            "control-flow", f"it reduces the axes {over}, which grow in each iteration; supported: one growing axis"
        )
    result = _reduced(body, node, x, axes, over[0], keeps) if over else body.results(node)[0]
    body.set(node.outputs[0], Growing(result, left))


def _reduced(body: GrowingBody, node: Node, x: Growing, axes: tuple[int, ...], over: int, keeps: bool) -> Tensor:
    ctx, dtype = body.ctx, x.x.dtype
    kind = node.op_type.removeprefix("Reduce")
    if not dtype.is_float:
        raise Unsupported(
            "control-flow",
            f"it reduces axis {over}, which grows in each iteration, of input 0 of type {dtype.short}; supported: "
            "floating-point types",
        )
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
    """Lower Softmax. Along a growing axis, the results after the valid elements are 0."""
    x = _only_growing(body, node)
    rank = x.x.rank
    axis = _axis(node, -1 if node.since_version >= 13 else 1, rank)
    if node.since_version < 13 and axis != rank - 1:
        raise Unsupported(
            "control-flow",
            f"input 0 grows in each iteration, axis is {axis}, and Softmax before version 13 flattens the axes from "
            f"there on; supported: the last axis, {rank - 1}",
        )
    inputs = {0: body.filled(x, axis, -math.inf)} if axis in x.axes else {}
    body.set(node.outputs[0], Growing(body.results(node, inputs)[0], x.axes))


# ---- products ----


def matmul(body: GrowingBody, node: Node) -> None:
    """Lower MatMul with growing rows or columns, or with a sum over a growing axis, whose invalid elements become 0."""
    values = [needed_input(node, index) for index in range(2)]
    tensors = [body.tensor(value) for value in values]
    if any(x.rank < 2 for x in tensors):
        ranks = " and ".join(str(x.rank) for x in tensors)
        raise Unsupported(
            "control-flow", f"an input grows in each iteration, and the ranks are {ranks}; supported: rank 2 or more"
        )
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
    for value, x, extras in zip(values, tensors, axes, strict=True):
        for axis in results:
            if axis < -2 and axis not in extras and x.rank + axis >= 0 and x.shape[x.rank + axis] != 1:
                raise _fixed(value, x.rank + axis, x.shape[x.rank + axis])
    inputs: dict[int, Tensor] = {}
    if summed != (None, None):
        if summed[0] != summed[1]:
            raise _mixed(
                f"{elements(summed[0])} columns of input 0 with {elements(summed[1])} rows of input 1; supported: "
                "equal numbers"
            )
        for index, (value, offset) in enumerate(zip(values, (-1, -2), strict=True)):
            growing = body.growing(value)
            assert growing is not None
            inputs[index] = body.filled(growing, growing.x.rank + offset, 0.0)
    (result,) = body.results(node, inputs)
    body.set(node.outputs[0], Growing(result, {result.rank + axis: extra for axis, extra in results.items()}))
