"""Makers of reductions, normalizations, GEMMs, convolutions, pools, recurrences and quantized operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzzing.network import BFLOAT16, FLOAT, FLOAT16, INT8, INT32, INT64, UINT8, Grower, Value
from random_models import broadcast

REDUCTIONS = ("Sum", "Mean", "Max", "Min", "L1", "L2", "LogSumExp", "SumSquare", "Prod")


def is_float(value: Value) -> bool:
    return value.is_float


def has_rows(value: Value) -> bool:
    return value.is_float and value.rank >= 2 and bool(value.same_size(-1))


def reduce(g: Grower) -> object:
    x = g.pick(lambda value: value.is_float and value.rank >= 1)
    if x is None:
        return None
    axes = g.random.sample(range(x.rank), g.random.randint(1, x.rank))
    kind, keep = g.random.choice(REDUCTIONS), g.random.randrange(2)
    if kind in ("Sum", "Mean", "Max", "Min") and g.random.random() < 0.1:
        axes = []
    return g.add(f"Reduce{kind}", [x, g.constant(axes, INT64)], [x.kind], "sum", keepdims=keep)


def variance(g: Grower) -> object:
    """Add a decomposed normalization: mean, difference, mean of the squares, square root."""
    x = g.pick(lambda value: value.is_float and value.rank >= 1)
    if x is None:
        return None
    axes = g.constant([g.random.randrange(x.rank)])
    mean = g.add("ReduceMean", [x, axes], [x.kind], "sum")
    centered = mean and g.add("Sub", [x, mean[0]], [x.kind], "sum")
    squares = centered and g.add("Mul", [centered[0], centered[0]], [x.kind], "element")
    square_mean = squares and g.add("ReduceMean", [squares[0], axes], [x.kind], "sum")
    shifted = square_mean and g.add("Add", [square_mean[0], g.constant(0.1, x.kind)], [x.kind], "element")
    root = shifted and g.add("Sqrt", [shifted[0]], [x.kind], "element")
    return root and centered and g.add("Div", [centered[0], root[0]], [x.kind], "element")


def softmax(g: Grower) -> object:
    x = g.pick(lambda value: value.is_float and value.rank >= 1)
    op_type = g.random.choice(("Softmax", "Softmax", "LogSoftmax", "Hardmax"))
    return x and g.add(op_type, [x], [x.kind], "sum", axis=g.random.randrange(-x.rank, x.rank))


def cumulative_sum(g: Grower) -> object:
    x = g.pick(lambda value: value.kind in (FLOAT, INT64) and value.rank >= 1)
    flags: dict[str, Any] = {"exclusive": g.random.randrange(2), "reverse": g.random.randrange(2)}
    return x and g.add("CumSum", [x, g.constant(g.random.randrange(x.rank))], [x.kind], "sum", **flags)


def arg(g: Grower) -> object:
    x = g.pick(lambda value: value.kind in (FLOAT, FLOAT16) and value.rank >= 1)
    axis, keep = x and g.random.randrange(x.rank), g.random.randrange(2)
    last = g.random.randrange(2)
    op_type = g.random.choice(("ArgMax", "ArgMin"))
    return x and g.add(op_type, [x], [INT64], axis=axis, keepdims=keep, select_last_index=last)


def top_k(g: Grower) -> object:
    x = g.pick(lambda value: value.kind in (FLOAT, INT64) and value.rank >= 1)
    if x is None:
        return None
    axis, largest = g.random.randrange(x.rank), g.random.randrange(2)
    return g.add("TopK", [x, g.constant([2])], [x.kind, INT64], axis=axis, largest=largest)


def normalization(g: Grower) -> object:
    x = g.pick(has_rows)
    if x is None:
        return None
    size = x.same_size(-1) or 1
    scale, bias = (g.constant(g.rng.uniform(0.5, 1.5, size), x.kind) for _ in range(2))
    chance = g.random.random()
    if chance < 0.6:
        return g.add("LayerNormalization", [x, scale, bias], [x.kind], "sum", epsilon=0.01)
    if x.kind == BFLOAT16:
        return None
    if chance < 0.8:
        return g.add("SimplifiedLayerNormalization", [x, scale], [x.kind], "sum", epsilon=0.01, axis=-1)
    inputs = [x, x, scale, bias]
    return g.add("SkipLayerNormalization", inputs, [x.kind], "sum", domain="com.microsoft", epsilon=0.01)


def channel_normalization(g: Grower) -> object:
    x = g.pick(lambda value: value.kind == FLOAT and value.rank >= 3 and value.same_size(1))
    if x is None:
        return None
    channels = x.same_size(1) or 1
    scale, bias, mean = (g.constant(g.rng.uniform(0.5, 1.5, channels), x.kind) for _ in range(3))
    chance = g.random.random()
    if chance < 0.5:
        return g.add("BatchNormalization", [x, scale, bias, mean, scale], [x.kind], "element")
    if chance < 0.75:
        return g.add("InstanceNormalization", [x, scale, bias], [x.kind], "sum", epsilon=0.1)
    groups = g.random.choice([n for n in range(1, channels + 1) if channels % n == 0])
    return g.add("GroupNormalization", [x, scale, bias], [x.kind], "sum", epsilon=0.1, num_groups=groups)


# ---- products ----


def linear(g: Grower) -> object:
    """Add a MatMul with constant weights, maybe with a bias and an activation. Weights are often shared."""
    x = g.pick(has_rows)
    if x is None:
        return None
    size = x.same_size(-1) or 1
    made = g.add("MatMul", [x, g.weights(size, g.random.choice((4, 8, 8, 16)), kind=x.kind)], [x.kind], "sum")
    if made and g.random.random() < 0.5:
        bias = g.constant(g.rng.standard_normal(made[0].same_size(-1)), x.kind)
        made = g.add("Add", [made[0], bias], [x.kind], "element")
    if made and g.random.random() < 0.3:
        return g.add(g.random.choice(("Relu", "Tanh", "Gelu")), [made[0]], [x.kind], "element")
    return made


def several_products(g: Grower) -> object:
    """Add two or three GEMMs of one tensor, some with a bias or residual: candidates for horizontal fusion."""
    x = g.pick(has_rows)
    if x is None:
        return None
    size = x.same_size(-1) or 1
    for _ in range(g.random.randint(2, 3)):
        made = g.add("MatMul", [x, g.weights(size, size, kind=x.kind)], [x.kind], "sum")
        if made and g.random.random() < 0.5:
            other = x if g.random.random() < 0.5 else g.constant(g.rng.standard_normal(size), x.kind)
            g.add(g.random.choice(("Add", "Mul")), [made[0], other], [x.kind], "element")
    return True


def product(g: Grower) -> object:
    """Add a GEMM of two tensors of the network, one transposed if that makes them fit."""
    a = g.pick(lambda value: value.is_float and value.rank >= 2)
    b = g.pick(lambda value: a is not None and value.kind == a.kind and value.rank >= 2)
    if a is None or b is None:
        return None
    if a.shapes[0][-1] != b.shapes[0][-2]:
        permutation = [*range(b.rank - 2), b.rank - 1, b.rank - 2]
        made = g.add("Transpose", [b], [b.kind], perm=permutation)
        b = made[0] if made else b
    # For k = 0 ONNX Runtime accepts batch dimensions that do not broadcast.
    if any(broadcast(x[:-2], y[:-2]) is None for x, y in zip(a.shapes, b.shapes, strict=True)):
        return None
    return g.add("MatMul", [a, b], [a.kind], "sum")


def gemm(g: Grower) -> object:
    x = g.pick(lambda value: has_rows(value) and value.rank == 2)
    if x is None:
        return None
    size, columns, transposed = x.same_size(-1) or 1, g.random.choice((1, 3, 8)), g.random.randrange(2)
    weights = g.weights(*((columns, size) if transposed else (size, columns)), kind=x.kind)
    bias = g.constant(g.rng.standard_normal(columns), x.kind)
    factors: dict[str, Any] = {"alpha": g.random.choice((1.0, 0.5)), "beta": g.random.choice((1.0, 2.0))}
    return g.add("Gemm", [x, weights, bias], [x.kind], "sum", transB=transposed, **factors)


def attention(g: Grower) -> object:
    """Add attention as exporters write it: projections, scaled scores, Softmax, product with the values."""
    q = g.pick(lambda value: has_rows(value) and value.rank >= 3)
    if q is None:
        return None
    size = q.same_size(-1) or 1
    parts = [g.add("MatMul", [q, g.weights(size, size, kind=q.kind)], [q.kind], "sum") for _ in range(3)]
    if None in parts:
        return None
    a, b, c = (part[0] for part in parts if part)
    made = g.add("Transpose", [b], [q.kind], perm=[*range(q.rank - 2), q.rank - 1, q.rank - 2])
    scores = made and g.add("MatMul", [a, made[0]], [q.kind], "sum")
    scores = scores and g.add("Mul", [scores[0], g.constant(0.35, q.kind)], [q.kind], "element")
    weights = scores and g.add("Softmax", [scores[0]], [q.kind], "sum", axis=-1)
    return weights and g.add("MatMul", [weights[0], c], [q.kind], "sum")


def einsum(g: Grower) -> object:
    a = g.pick(lambda value: value.kind == FLOAT and value.rank == 3)
    b = g.pick(lambda value: value.kind == FLOAT and value.rank == 3)
    equation = g.random.choice(("abc,abd->cd", "abc,adc->abd", "abc,abc->ab", "abc,abc->bca"))
    return a and b and g.add("Einsum", [a, b], [FLOAT], "sum", equation=equation)


# ---- images ----


def is_image(value: Value) -> bool:
    return value.kind in (FLOAT, FLOAT16) and value.rank in (3, 4) and bool(value.same_size(1))


def image(g: Grower) -> Value | None:
    """Pick an image, or turn a matrix into one by adding dimensions for batch and channels."""
    x = g.pick(is_image)
    if x is not None:
        return x
    y = g.pick(lambda value: value.kind == FLOAT and value.rank == 2)
    made = y and g.add("Unsqueeze", [y, g.constant([0, 1])], [FLOAT])
    return made[0] if made else None


def convolution(g: Grower) -> object:
    x = image(g)
    if x is None:
        return None
    channels, axes = x.same_size(1) or 1, x.rank - 2
    groups = g.random.choice([1, 1, channels])
    outputs = channels if groups > 1 else g.random.choice((4, 8, 5))
    kernel = [g.random.choice((1, 1, 3, 2)) for _ in range(axes)]
    pads = [size // 2 for size in kernel] * 2 if g.random.random() < 0.6 else [0] * (2 * axes)
    weights = g.constant(g.rng.standard_normal((outputs, channels // groups, *kernel)) * 0.4, x.kind)
    bias = [g.constant(g.rng.standard_normal(outputs), x.kind)] if g.random.random() < 0.5 else []
    strides = [g.random.choice((1, 1, 2))] * axes
    made = g.add("Conv", [x, weights, *bias], [x.kind], "sum", group=groups, pads=pads, strides=strides)
    if made and g.random.random() < 0.4:
        return g.add(g.random.choice(("Relu", "Sigmoid", "HardSwish")), [made[0]], [x.kind], "element")
    return made


def transposed_convolution(g: Grower) -> object:
    x = g.pick(lambda value: is_image(value) and value.kind == FLOAT)
    if x is None:
        return None
    weights = g.constant(g.rng.standard_normal((x.same_size(1) or 1, 4, *[3] * (x.rank - 2))) * 0.4, x.kind)
    stride = g.random.choice((1, 2))
    return g.add("ConvTranspose", [x, weights], [x.kind], "sum", strides=[stride] * (x.rank - 2))


def pool(g: Grower) -> object:
    x = g.pick(lambda value: value.kind == FLOAT and value.rank in (3, 4))
    if x is None:
        return None
    if g.random.random() < 0.3:
        return g.add(g.random.choice(("GlobalAveragePool", "GlobalMaxPool")), [x], [x.kind], "sum")
    axes = x.rank - 2
    window: dict[str, Any] = {"kernel_shape": [2] * axes, "pads": [0] * axes + [1] * axes}
    window["strides"] = [g.random.choice((1, 2))] * axes
    if g.random.random() < 0.5:
        return g.add("MaxPool", [x], [x.kind], ceil_mode=g.random.randrange(2), **window)
    return g.add("AveragePool", [x], [x.kind], "sum", count_include_pad=g.random.randrange(2), **window)


def squeeze_and_excite(g: Grower) -> object:
    x = g.pick(lambda value: is_image(value) and value.rank == 4)
    mean = x and g.add("GlobalAveragePool", [x], [x.kind], "sum")
    if not x or not mean:
        return None
    channels = x.same_size(1) or 1
    one, two = (g.constant(g.rng.standard_normal((channels, channels, 1, 1)) * 0.3, x.kind) for _ in range(2))
    made = g.add("Conv", [mean[0], one], [x.kind], "sum")
    made = made and g.add("Relu", [made[0]], [x.kind])
    made = made and g.add("Conv", [made[0], two], [x.kind], "sum")
    gate = made and g.add("Sigmoid", [made[0]], [x.kind], "element")
    return gate and g.add("Mul", [x, gate[0]], [x.kind], "element")


# ---- recurrences and quantized operators ----


def recurrence(g: Grower) -> object:
    """Add an LSTM, GRU or RNN. Empty tensors are excluded: kernels of the CPU provider abort the process for them."""
    x = g.pick(lambda value: value.kind == FLOAT and value.rank == 3 and value.same_size(2))
    if x is None or any(0 in shape for shape in x.shapes):
        return None
    op_type, gates = g.random.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    direction = g.random.choice(("forward", "reverse", "bidirectional"))
    directions, hidden = 2 if direction == "bidirectional" else 1, 4
    w, r = (
        g.constant(g.rng.standard_normal((directions, gates * hidden, n)) * 0.4, FLOAT)
        for n in (x.same_size(2) or 1, hidden)
    )
    kinds = [FLOAT, FLOAT, FLOAT] if op_type == "LSTM" else [FLOAT, FLOAT]
    return g.add(op_type, [x, w, r], kinds, "sum", hidden_size=hidden, direction=direction)


def quantize(g: Grower) -> object:
    """Add QuantizeLinear and DequantizeLinear of a tensor."""
    x = g.pick(lambda value: value.kind == FLOAT)
    if x is None:
        return None
    kind = g.random.choice((INT8, UINT8))
    scale, zero = g.constant(0.1, FLOAT), g.constant(3, kind)
    codes = g.add("QuantizeLinear", [x, scale, zero], [kind])
    return codes and g.add("DequantizeLinear", [codes[0], scale, zero], [FLOAT], "element")


def dynamic_quantized_product(g: Grower) -> object:
    x = g.pick(lambda value: value.kind == FLOAT and has_rows(value))
    made = x and g.add("DynamicQuantizeLinear", [x], [UINT8, FLOAT, UINT8])
    if not x or not made:
        return None
    weights = g.constant(g.rng.integers(-60, 60, (x.same_size(-1) or 1, 8)), INT8)
    sums = g.add("MatMulInteger", [made[0], weights, made[2]], [INT32])
    floats = sums and g.add("Cast", [sums[0]], [FLOAT], "element", to=FLOAT)
    return floats and g.add("Mul", [floats[0], made[1]], [FLOAT], "element")


def packed_weights(g: Grower) -> object:
    """Add a MatMulNBits whose scales are constant or computed by the network."""
    x = g.pick(lambda value: value.kind == FLOAT and has_rows(value) and (value.same_size(-1) or 0) % 16 == 0)
    if x is None:
        return None
    size, columns, block = x.same_size(-1) or 16, 8, 16
    codes = g.constant(g.rng.integers(0, 256, (columns, size // block, block // 2)), UINT8)
    scales: Value | None = g.constant(g.rng.uniform(0.05, 0.1, columns * size // block), FLOAT)
    if g.random.random() < 0.6:
        other = g.pick(lambda value: value.kind == FLOAT and value.rank == 0)
        made = scales and g.add("Mul", [scales, other or g.constant(0.5, FLOAT)], [FLOAT], "element")
        scales = made[0] if made else None
    inputs = [x, codes, scales]
    attributes: dict[str, Any] = {"K": size, "N": columns, "bits": 4, "block_size": block}
    return scales and g.add("MatMulNBits", inputs, [FLOAT], "sum", domain="com.microsoft", **attributes)


def contributed(g: Grower) -> object:
    x = g.pick(lambda value: value.kind == FLOAT and has_rows(value))
    if x is None:
        return None
    size = x.same_size(-1) or 1
    bias = g.constant(g.rng.standard_normal(size), FLOAT)
    op_type, inputs = g.random.choice(
        (("FastGelu", [x, bias]), ("BiasGelu", [x, bias]), ("QuickGelu", [x]), ("Gelu", [x]))
    )
    return g.add(op_type, inputs, [FLOAT], "sum", domain="com.microsoft")


def matrix(g: Grower) -> object:
    """Add a tensor with 16 columns, so that GEMMs with constant weights can read it."""
    x = g.pick(lambda value: value.is_float and value.rank >= 1)
    if x is None:
        return None
    made = g.add("Unsqueeze", [x, g.constant([x.rank])], [x.kind])
    return made and g.add("Mul", [made[0], g.constant(np.linspace(-1, 1, 16), x.kind)], [x.kind], "element")


MAKERS = {
    reduce: 3,
    variance: 1,
    softmax: 2,
    cumulative_sum: 1,
    arg: 1,
    top_k: 1,
    normalization: 2,
    channel_normalization: 1,
    linear: 4,
    several_products: 2,
    product: 2,
    gemm: 2,
    attention: 1,
    einsum: 1,
    convolution: 4,
    transposed_convolution: 1,
    pool: 2,
    squeeze_and_excite: 1,
    recurrence: 1,
    quantize: 2,
    dynamic_quantized_product: 1,
    packed_weights: 2,
    contributed: 1,
    matrix: 1,
}
