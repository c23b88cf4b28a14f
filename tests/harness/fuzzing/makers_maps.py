"""Makers of elementwise operators and data movement, over tensors of any rank and type."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzzing.network import BFLOAT16, BOOL, FLOAT, FLOAT16, FLOATS, INT32, INT64, UINT8, Grower, Value

UNARY = (
    *("Relu", "Tanh", "Sigmoid", "Erf", "Exp", "Softplus", "Softsign", "Elu", "Selu", "LeakyRelu", "HardSigmoid"),
    *("HardSwish", "Mish", "Gelu", "Celu", "ThresholdedRelu", "Sin", "Cos", "Atan", "Sqrt", "Reciprocal", "Log"),
)
EXACT_UNARY = ("Neg", "Abs", "Sign", "Floor", "Ceil", "Round", "Identity", "Relu")
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Add", "Mul")
CHOICES = ("Max", "Min")
COMPARISONS = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Elu": {"alpha": 0.7},
    "LeakyRelu": {"alpha": 0.2},
    "Celu": {"alpha": 1.5},
    "ThresholdedRelu": {"alpha": 0.3},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
}


def is_float(value: Value) -> bool:
    return value.is_float


def two(g: Grower, condition: Any = is_float) -> tuple[Value, Value] | None:
    """Pick two tensors of one type, sometimes the same one twice or a constant."""
    a = g.pick(condition)
    if a is None:
        return None
    chance = g.random.random()
    if chance < 0.15:
        return a, a
    if chance < 0.35:
        sizes = tuple(a.same_size(axis) or 1 for axis in range(a.rank))
        shape = g.random.choice([(), sizes[-1:], sizes, (1, *sizes[-1:])])
        return a, g.constant(g.rng.integers(-3, 4, shape) if a.kind not in FLOATS else _floats(g, shape), a.kind)
    b = g.pick(lambda value: value.kind == a.kind)
    assert b is not None
    return (a, b) if g.random.random() < 0.5 else (b, a)


def _floats(g: Grower, shape: tuple[int, ...]) -> Any:
    return g.random.choice([g.rng.standard_normal(shape), np.ones(shape), np.full(shape, 0.5), np.zeros(shape)])


def unary(g: Grower) -> object:
    x = g.pick(is_float)
    if x is None:
        return None
    if g.random.random() < 0.3:
        return g.add(g.random.choice(EXACT_UNARY), [x], [x.kind])
    op_type = g.random.choice(UNARY)
    return g.add(op_type, [x], [x.kind], "element", **ATTRIBUTES.get(op_type, {}))


def binary(g: Grower) -> object:
    if pair := two(g):
        if g.random.random() < 0.25:
            return g.add(g.random.choice(CHOICES), pair, [pair[0].kind])
        return g.add(g.random.choice(ARITHMETIC), pair, [pair[0].kind], "element")
    return None


def residual(g: Grower) -> object:
    """Add y = f(x) + x."""
    x = g.pick(is_float)
    made = x and g.add(g.random.choice(("Tanh", "Sigmoid", "Relu")), [x], [x.kind], "element")
    return made and g.add(g.random.choice(("Add", "Mul")), [made[0], x], [x.kind], "element") if x else None


def integers(g: Grower) -> object:
    pair = two(g, lambda value: value.kind in (INT64, INT32))
    return pair and g.add(g.random.choice(("Add", "Sub", "Mul", "Max", "Min")), pair, [pair[0].kind])


def variadic(g: Grower) -> object:
    a = g.pick(is_float)
    others = [g.pick(lambda value: a is not None and value.kind == a.kind) for _ in range(g.random.randint(0, 3))]
    return a and g.add(g.random.choice(("Sum", "Mean", "Max", "Min")), [a, *others], [a.kind], "element")


def compare(g: Grower) -> object:
    pair = two(g, lambda value: value.kind in (FLOAT, FLOAT16, INT64, INT32))
    return pair and g.add(g.random.choice(COMPARISONS), pair, [BOOL])


def logic(g: Grower) -> object:
    pair = [g.pick(lambda value: value.kind == BOOL) for _ in range(2)]
    if None in pair:
        return None
    return g.add("Not", pair[:1], [BOOL]) if g.random.random() < 0.3 else g.add("And", pair, [BOOL])


def where(g: Grower) -> object:
    condition, pair = g.pick(lambda value: value.kind == BOOL), two(g)
    return condition and pair and g.add("Where", [condition, *pair], [pair[0].kind])


def clip(g: Grower) -> object:
    x = g.pick(lambda value: value.kind in (FLOAT, FLOAT16))
    if x is None:
        return None
    low, high = g.constant(-0.75, x.kind), g.constant(0.5, x.kind)
    bounds: list[list[Value | None]] = [[low, high], [low], [None, high]]
    return g.add("Clip", [x, *g.random.choice(bounds)], [x.kind])


def cast(g: Grower) -> object:
    x = g.pick()
    kind = g.random.choice((FLOAT, FLOAT, FLOAT16, FLOAT16, BFLOAT16, INT32, INT64, BOOL))
    return x and g.add("Cast", [x], [kind], "element" if kind in FLOATS else "exact", to=kind)


def scaled(g: Grower) -> object:
    """Add a Mul and an Add with constants along an axis, the form of a folded BatchNormalization."""
    x = g.pick(lambda value: value.is_float and value.rank >= 2 and value.same_size(1))
    if x is None:
        return None
    shape = (x.same_size(1) or 1, *[1] * (x.rank - 2))
    made = g.add("Mul", [x, g.constant(g.rng.uniform(0.5, 1.5, shape), x.kind)], [x.kind], "element")
    return made and g.add("Add", [made[0], g.constant(g.rng.standard_normal(shape), x.kind)], [x.kind], "element")


# ---- data movement ----


def transpose(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 2)
    return x and g.add("Transpose", [x], [x.kind], perm=g.random.sample(range(x.rank), x.rank))


def reshape(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1)
    if x is None:
        return None
    sizes = [0] * x.rank
    axis = g.random.randrange(x.rank)
    size = x.same_size(axis)
    if size and g.random.random() < 0.5:
        factors = [factor for factor in range(1, size + 1) if size % factor == 0]
        factor = g.random.choice(factors)
        sizes = [*sizes[:axis], factor, size // factor] + [-1] * (axis + 1 < x.rank)
    else:
        sizes = [*sizes[:axis], -1]
    return g.add("Reshape", [x, g.constant(sizes)], [x.kind])


def flatten(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1)
    return x and g.add("Flatten", [x], [x.kind], axis=g.random.randrange(-x.rank, x.rank + 1))


def unsqueeze(g: Grower) -> object:
    x = g.pick(lambda value: value.rank <= 4)
    return x and g.add("Unsqueeze", [x, g.constant([g.random.randint(0, x.rank)])], [x.kind])


def squeeze(g: Grower) -> object:
    x = g.pick(lambda value: any(value.same_size(axis) == 1 for axis in range(value.rank)))
    if x is None:
        return None
    axes = [axis for axis in range(x.rank) if x.same_size(axis) == 1]
    return g.add("Squeeze", [x, g.constant([g.random.choice(axes)])], [x.kind])


def concat(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1)
    if x is None:
        return None
    axis = g.random.randrange(x.rank)

    def fits(value: Value) -> bool:
        pairs = zip(value.shapes, x.shapes, strict=True)
        return value.kind == x.kind and all(
            len(a) == len(b) and all(p == q for i, (p, q) in enumerate(zip(a, b, strict=True)) if i != axis)
            for a, b in pairs
        )

    others = [other for _ in range(g.random.choice([0, 1, 1, 2, 3])) if (other := g.pick(fits)) is not None]
    parts = [x, *others]
    g.random.shuffle(parts)
    return g.add("Concat", parts, [x.kind], axis=axis - x.rank * g.random.randrange(2))


def split(g: Grower) -> object:
    x = g.pick(lambda value: any((value.same_size(axis) or 0) >= 2 for axis in range(value.rank)))
    if x is None:
        return None
    axis = g.random.choice([axis for axis in range(x.rank) if (x.same_size(axis) or 0) >= 2])
    size = x.same_size(axis) or 0
    cuts = sorted(g.random.sample(range(1, size), min(size - 1, g.random.choice([1, 1, 2]))))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    return g.add("Split", [x, g.constant(sizes)], [x.kind] * len(sizes), axis=axis)


def slice_(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1)
    if x is None:
        return None
    axes = g.random.sample(range(x.rank), g.random.randint(1, min(2, x.rank)))
    starts = [g.random.randint(-3, 3) for _ in axes]
    ends = [g.random.choice([2, 4, -1, 2**31 - 1, -(2**31)]) for _ in axes]
    steps = [g.random.choice([1, 1, 2, -1, -2]) for _ in axes]
    return g.add("Slice", [x, *map(g.constant, (starts, ends, axes, steps))], [x.kind])


def gather(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1)
    if x is None:
        return None
    axis = g.random.randrange(x.rank)
    size = min(shape[axis] for shape in x.shapes)
    if size == 0:
        return None
    if g.random.random() < 0.3:
        indices = g.pick(lambda value: value.kind in (INT64, INT32) and value.rank <= 2)
    else:
        indices = g.constant(g.rng.integers(-size, size, g.random.choice([(), (1,), (3,), (2, 2)])), INT64)
    return indices and g.add("Gather", [x, indices], [x.kind], axis=axis)


def gather_elements(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1)
    if x is None:
        return None
    axis = g.random.randrange(x.rank)
    size = min(shape[axis] for shape in x.shapes)
    shape = tuple(1 if i != axis else 3 for i in range(x.rank))
    return size and g.add("GatherElements", [x, g.constant(g.rng.integers(-size, size, shape))], [x.kind], axis=axis)


def scatter(g: Grower) -> object:
    x = g.pick(lambda value: value.is_float and value.rank >= 1)
    if x is None:
        return None
    axis = g.random.randrange(x.rank)
    size = min(shape[axis] for shape in x.shapes)
    if not size:
        return None
    shape = tuple(1 if i != axis else min(2, size) for i in range(x.rank))
    indices = g.constant(np.argsort(g.rng.random(shape), axis))
    return g.add("ScatterElements", [x, indices, g.constant(g.rng.standard_normal(shape), x.kind)], [x.kind], axis=axis)


def pad(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1 and value.kind in (FLOAT, FLOAT16, INT64))
    if x is None:
        return None
    smallest = [min(shape[axis] for shape in x.shapes) for axis in range(x.rank)]
    pads = [g.random.choice([0, 0, 1, 2, -1 if size > 1 else 0]) for size in smallest * 2]
    mode = g.random.choice(["constant", "constant", "edge", "reflect", "wrap"])
    return g.add("Pad", [x, g.constant(pads), g.constant(1, x.kind)], [x.kind], mode=mode)


def tile(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1)
    return x and g.add("Tile", [x, g.constant([g.random.choice([1, 1, 2, 3]) for _ in range(x.rank)])], [x.kind])


def expand(g: Grower) -> object:
    a, b = g.pick(), g.pick()
    made = b and g.add("Shape", [b], [INT64])
    return a and made and g.add("Expand", [a, made[0]], [a.kind])


def trilu(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 2 and value.kind in (FLOAT, INT64, BOOL))
    upper = g.random.randrange(2)
    return x and g.add("Trilu", [x, g.constant(g.random.randint(-1, 2))], [x.kind], upper=upper)


def depth_to_space(g: Grower) -> object:
    x = g.pick(lambda value: value.kind == FLOAT and value.rank == 4)
    if x is None:
        return None
    if g.random.random() < 0.5:
        return g.add("DepthToSpace", [x], [x.kind], blocksize=2, mode=g.random.choice(["DCR", "CRD"]))
    return g.add("SpaceToDepth", [x], [x.kind], blocksize=2)


def one_hot(g: Grower) -> object:
    x = g.pick(lambda value: value.kind in (INT64, INT32) and value.rank <= 3)
    values = g.constant(g.rng.standard_normal(2), FLOAT)
    return x and g.add("OneHot", [x, g.constant([4]), values], [FLOAT], axis=g.random.randint(-1, x.rank))


def resize(g: Grower) -> object:
    x = g.pick(lambda value: value.kind in (FLOAT, UINT8) and value.rank in (3, 4))
    if x is None:
        return None
    mode = g.random.choice(["nearest", "linear", "cubic"])
    factors, transforms = [0.5, 2.0, 1.5], ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    if mode != "nearest" and not x.is_float:
        # Resize truncates integers. With interpolation weights that are not exact in binary, rounding would decide the
        # truncated value.
        factors, transforms = [0.5, 2.0], ["half_pixel", "asymmetric"]
    scales = [1.0, 1.0, *(g.random.choice(factors) for _ in range(x.rank - 2))]
    transform = g.random.choice(transforms)
    inputs = [x, None, g.constant(scales, FLOAT)]
    return g.add("Resize", inputs, [x.kind], "element", mode=mode, coordinate_transformation_mode=transform)


def compress(g: Grower) -> object:
    condition = g.pick(lambda value: value.kind == BOOL and value.rank == 1)
    x = g.pick(lambda value: value.rank >= 1)
    return condition and x and g.add("Compress", [x, condition], [x.kind], axis=g.random.randrange(x.rank))


def nonzero(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 1 and value.kind in (BOOL, INT64))
    return x and g.add("NonZero", [x], [INT64])


def reverse_sequence(g: Grower) -> object:
    x = g.pick(lambda value: value.rank >= 2 and (value.same_size(0) or 0) > 0)
    if x is None:
        return None
    size = min(shape[1] for shape in x.shapes)
    lengths = g.constant(g.rng.integers(0, size + 1, x.same_size(0)), INT64)
    return g.add("ReverseSequence", [x, lengths], [x.kind], batch_axis=0, time_axis=1)


MAKERS = {
    unary: 6,
    binary: 8,
    residual: 2,
    integers: 1,
    variadic: 1,
    compare: 1,
    logic: 1,
    where: 2,
    clip: 1,
    cast: 3,
    scaled: 2,
    transpose: 3,
    reshape: 3,
    flatten: 1,
    unsqueeze: 2,
    squeeze: 1,
    concat: 4,
    split: 3,
    slice_: 3,
    gather: 2,
    gather_elements: 1,
    scatter: 1,
    pad: 2,
    tile: 1,
    expand: 1,
    trilu: 1,
    depth_to_space: 1,
    one_hot: 1,
    resize: 1,
    compress: 1,
    nonzero: 1,
    reverse_sequence: 1,
}
