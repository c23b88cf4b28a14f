"""Makers of shape arithmetic: integers on the host and on the device, and operators that read integers as sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import numpy_helper

from fuzzing.network import BOOL, FLOAT, INT32, INT64, Grower, Value

INTEGERS = (INT64, INT32)


def is_integer(value: Value) -> bool:
    return value.kind in INTEGERS


def is_list(value: Value) -> bool:
    """Return whether a value is an integer vector of at most 8 elements, so that it can be a shape."""
    return is_integer(value) and value.rank == 1 and all(shape[0] <= 8 for shape in value.shapes)


def is_number(value: Value) -> bool:
    return is_integer(value) and value.rank == 0


def as_kind(g: Grower, value: Value, kind: int) -> Value | None:
    if value.kind == kind:
        return value
    made = g.add("Cast", [value], [kind], to=kind)
    return made[0] if made else None


def int64_list(g: Grower) -> Value | None:
    """Return an int64 vector: an existing one, a scalar with an added axis, or a constant."""
    if g.random.random() < 0.2:
        return g.constant(g.rng.integers(-2, 4, g.random.randint(1, 3)), INT64)
    value = g.pick(lambda value: is_list(value) or is_number(value))
    if value is None or (value := as_kind(g, value, INT64)) is None:
        return None
    if value.rank == 0:
        made = g.add("Unsqueeze", [value, g.constant([0])], [INT64])
        return made[0] if made else None
    return value


def shape(g: Grower) -> object:
    x = g.pick()
    if x is None:
        return None
    if g.random.random() < 0.3 and x.rank:
        start = g.random.randrange(-x.rank, x.rank)
        end: dict[str, Any] = {"end": x.rank} if g.random.random() < 0.5 else {}
        return g.add("Shape", [x], [INT64], start=start, **end)
    return g.add("Shape", [x], [INT64])


def size(g: Grower) -> object:
    x = g.pick()
    return x and g.add("Size", [x], [INT64])


def size_of_axis(g: Grower) -> object:
    """Add Shape and Gather, the exporters' form of a dimension."""
    x = g.pick(lambda value: value.rank > 0)
    made = x and g.add("Shape", [x], [INT64])
    if not x or not made:
        return None
    axis = g.random.randrange(-x.rank, x.rank)
    return g.add("Gather", [made[0], g.constant(axis if g.random.random() < 0.5 else [axis])], [INT64])


def arithmetic(g: Grower) -> object:
    a = g.pick(is_integer)
    b = g.pick(lambda value: a is not None and value.kind == a.kind)
    if a is None or b is None:
        return None
    if g.random.random() < 0.35:
        b = g.constant(g.random.choice([1, 2, 3, -1, 4, 0]), a.kind)
    if g.random.random() < 0.3:
        a, b = b, a
    return g.add(g.random.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "Add", "Sub", "Mod"]), [a, b], [a.kind])


def unary(g: Grower) -> object:
    x = g.pick(is_integer)
    return x and g.add(g.random.choice(["Neg", "Abs", "Sign", "Identity"]), [x], [x.kind])


def cast(g: Grower) -> object:
    x = g.pick(is_integer)
    return x and g.add("Cast", [x], [kind := g.random.choice([INT32, INT64, FLOAT, BOOL])], to=kind)


def floor_of_float(g: Grower) -> object:
    """Add a size that is scaled in float32 and rounded, the exporters' form of a resized dimension."""
    x = g.pick(is_integer)
    made = x and g.add("Cast", [x], [FLOAT], to=FLOAT)
    scaled = made and g.add("Mul", [made[0], g.constant(g.random.choice([0.5, 2.0, 1.5, 0.25]), FLOAT)], [FLOAT])
    rounded = scaled and g.add(g.random.choice(["Floor", "Ceil", "Round"]), [scaled[0]], [FLOAT])
    return rounded and g.add("Cast", [rounded[0]], [INT64], to=INT64)


def compare(g: Grower) -> object:
    a = g.pick(is_integer)
    b = g.pick(lambda value: a is not None and value.kind == a.kind)
    if a is None or b is None:
        return None
    if g.random.random() < 0.4:
        b = g.constant(g.random.randrange(-1, 4), a.kind)
    return g.add(g.random.choice(["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"]), [a, b], [BOOL])


def logic(g: Grower) -> object:
    a, b = (g.pick(lambda value: value.kind == BOOL) for _ in range(2))
    if a is None or b is None:
        return None
    if g.random.random() < 0.4:
        return g.add("Not", [a], [BOOL])
    return g.add(g.random.choice(["And", "Or", "Xor"]), [a, b], [BOOL])


def where(g: Grower) -> object:
    condition = g.pick(lambda value: value.kind == BOOL)
    a = g.pick(is_integer)
    b = g.pick(lambda value: a is not None and value.kind == a.kind)
    return condition and a and b and g.add("Where", [condition, a, b], [a.kind])


def concat(g: Grower) -> object:
    """Add a Concat of one to four integer vectors; one may occur twice."""
    first = g.pick(is_list)
    if first is None:
        return None
    parts = [first]
    for _ in range(g.random.choice([0, 1, 1, 2, 3])):
        other = g.pick(lambda value: is_list(value) and value.kind == first.kind)
        parts.append(other if other is not None and g.random.random() < 0.8 else g.constant([g.random.randint(-1, 4)]))
        if parts[-1].kind != first.kind:
            parts.pop()
    g.random.shuffle(parts)
    return g.add("Concat", parts, [first.kind], axis=0)


def split(g: Grower) -> object:
    x = g.pick(lambda value: is_list(value) and (value.same_size(0) or 0) >= 2)
    if x is None:
        return None
    number = x.same_size(0) or 0
    first = g.random.randrange(1, number)
    return g.add("Split", [x, g.constant([first, number - first])], [x.kind] * 2, axis=0)


def pick_elements(g: Grower) -> object:
    x = g.pick(is_list)
    number = x and x.same_size(0)
    if x is None or not number:
        return None
    if g.random.random() < 0.5:
        indices = g.rng.integers(-number, number, g.random.choice([(), (1,), (2,), (3,)]))
        return g.add("Gather", [x, g.constant(indices, INT64)], [x.kind], axis=0)
    start, end = g.random.randint(-number, number), g.random.choice([number, -1, 2, 2**31 - 1])
    step = g.random.choice([1, 1, 2, -1])
    return g.add("Slice", [x, *(g.constant([value]) for value in (start, end, 0, step))], [x.kind])


def unsqueeze(g: Grower) -> object:
    x = g.pick(is_number)
    return x and g.add("Unsqueeze", [x, g.constant([0])], [x.kind])


def squeeze(g: Grower) -> object:
    x = g.pick(lambda value: is_integer(value) and value.rank == 1 and value.same_size(0) == 1)
    return x and g.add("Squeeze", [x, g.constant([0])] if g.random.random() < 0.5 else [x], [x.kind])


def reduce(g: Grower) -> object:
    x = g.pick(lambda value: is_integer(value) and value.rank >= 1)
    op_type = g.random.choice(["ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin"])
    return x and g.add(op_type, [x], [x.kind], keepdims=g.random.randrange(2))


def cumulative_sum(g: Grower) -> object:
    x = g.pick(lambda value: is_integer(value) and value.rank == 1)
    flags: dict[str, Any] = {"exclusive": g.random.randrange(2), "reverse": g.random.randrange(2)}
    return x and g.add("CumSum", [x, g.constant(0)], [x.kind], **flags)


def scatter(g: Grower) -> object:
    """Add a scatter that replaces one element of a vector, the exporters' form of changing one size of a shape."""
    x = g.pick(lambda value: is_list(value) and value.same_size(0))
    kind = x.kind if x is not None else None
    updates = g.pick(lambda value: value.kind == kind and value.rank == 1 and value.same_size(0) == 1)
    if x is None or updates is None:
        return None
    index = g.random.randrange(x.same_size(0) or 1)
    if g.random.random() < 0.5:
        return g.add("ScatterElements", [x, g.constant([index]), updates], [x.kind], axis=0)
    return g.add("ScatterND", [x, g.constant(np.array([[index]])), updates], [x.kind])


def arg(g: Grower) -> object:
    x = g.pick(lambda value: is_integer(value) and value.rank == 1 and all(shape[0] for shape in value.shapes))
    return x and g.add(g.random.choice(["ArgMax", "ArgMin"]), [x], [INT64], axis=0, keepdims=g.random.randrange(2))


# ---- operators that read integers as sizes ----


def range_(g: Grower) -> object:
    limit = g.pick(is_number)
    if limit is None:
        return None
    return g.add("Range", [g.constant(0, limit.kind), limit, g.constant(1, limit.kind)], [limit.kind])


def constant_of_shape(g: Grower) -> object:
    sizes = int64_list(g)
    if sizes is None:
        return None
    kind = g.random.choice([INT64, FLOAT])
    value = np.array([g.random.randrange(3)], np.int64 if kind == INT64 else np.float32)
    return g.add("ConstantOfShape", [sizes], [kind], value=numpy_helper.from_array(value))


def reshape(g: Grower) -> object:
    """Add a Reshape: to an integer vector of the network, or to the tensor's own sizes with one replaced by -1."""
    x = g.pick()
    if x is None:
        return None
    if g.random.random() < 0.4:
        sizes = int64_list(g)
        return sizes and g.add("Reshape", [x, sizes], [x.kind])
    made = g.add("Shape", [x], [INT64])
    if made is None or x.rank == 0:
        return None
    axis = g.random.randrange(x.rank)
    head = g.add("Slice", [made[0], *(g.constant([value]) for value in (0, axis, 0))], [INT64])
    tail = g.add("Slice", [made[0], *(g.constant([value]) for value in (axis + 1, x.rank + 1, 0))], [INT64])
    parts = [*(head or []), g.constant([-1]), *(tail or []), g.constant([1])]
    target = g.add("Concat", parts[: g.random.choice([3, 4])], [INT64], axis=0)
    return target and g.add("Reshape", [x, target[0]], [x.kind])


def expand(g: Grower) -> object:
    x, sizes = g.pick(), int64_list(g)
    return x and sizes and g.add("Expand", [x, sizes], [x.kind])


def slice_(g: Grower) -> object:
    """Add a Slice whose bounds are integer vectors of the network."""
    x = g.pick(lambda value: value.rank > 0)
    if x is None:
        return None
    start = g.constant([g.random.randint(-3, 3)]) if g.random.random() < 0.5 else int64_list(g)
    end = int64_list(g)
    if start is None or end is None or start.same_size(0) != 1 or end.same_size(0) != 1:
        return None
    axis = g.constant([g.random.randrange(-x.rank, x.rank)])
    return g.add("Slice", [x, start, end, axis, g.constant([g.random.choice([1, 1, 2, -1])])], [x.kind])


def tile(g: Grower) -> object:
    x, repeats = g.pick(lambda value: value.rank in (1, 2)), int64_list(g)
    return x and repeats and g.add("Tile", [x, repeats], [x.kind])


def pad(g: Grower) -> object:
    x = g.pick(lambda value: value.rank == 1 and value.kind != BOOL)
    pads = int64_list(g)
    return x and pads and g.add("Pad", [x, pads], [x.kind])


def gather(g: Grower) -> object:
    x = g.pick(lambda value: value.rank > 0)
    indices = g.pick(is_integer)
    return x and indices and g.add("Gather", [x, indices], [x.kind], axis=g.random.randrange(-x.rank, x.rank))


def compute(g: Grower) -> object:
    """Add device work in between: floats and integers that are not sizes."""
    x = g.pick(lambda value: value.kind in (FLOAT, INT64, INT32))
    y = g.pick(lambda value: x is not None and value.kind == x.kind)
    if x is None or y is None:
        return None
    if g.random.random() < 0.4:
        return g.add("Relu" if x.kind == FLOAT else "Neg", [x], [x.kind])
    return g.add(g.random.choice(["Add", "Max", "Sub"]), [x, y], [x.kind], "element")


def nonzero(g: Grower) -> object:
    """Add NonZero, whose size only the device knows."""
    x = g.pick(lambda value: value.rank > 0 and value.kind in (BOOL, INT64))
    return x and g.add("NonZero", [x], [INT64])


MAKERS = {
    shape: 4,
    size: 1,
    size_of_axis: 4,
    arithmetic: 5,
    unary: 2,
    cast: 2,
    floor_of_float: 1,
    compare: 1,
    logic: 1,
    where: 2,
    concat: 5,
    split: 1,
    pick_elements: 3,
    unsqueeze: 2,
    squeeze: 1,
    reduce: 2,
    cumulative_sum: 1,
    scatter: 1,
    arg: 1,
    range_: 1,
    constant_of_shape: 1,
    reshape: 3,
    expand: 2,
    slice_: 2,
    tile: 1,
    pad: 1,
    gather: 2,
    compute: 3,
    nonzero: 1,
}
