"""Models for tests of sessions on several devices, with inputs."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser

Array = np.ndarray
Feeds = dict[str, Array]


def parsed(text: str) -> onnx.ModelProto:
    """Return a model in the text format of onnx.parser, with inferred shapes."""
    return onnx.shape_inference.infer_shapes(
        parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> staged {text}')
    )


def layers(count: int, width: int = 16, seed: int = 0) -> bytes:
    """Return a model of ``count`` layers, x [n, width] -> Tanh(x @ w): ``count * 4 * width**2`` bytes of weights."""
    rng = np.random.default_rng(seed)
    body, before = "", "x"
    for index in range(count):
        body += f" m{index} = MatMul({before}, w{index}) t{index} = Tanh(m{index})"
        before = f"t{index}"
    weights = ", ".join(f"float[{width}, {width}] w{index}" for index in range(count))
    made = parsed(f"(float[n, {width}] x, {weights}) => (float[n, {width}] {before}) {{{body} }}")
    inputs = [value for value in made.graph.input if value.name == "x"]
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    for index in range(count):
        array = rng.standard_normal((width, width)).astype(np.float32) / np.sqrt(np.float32(width))
        made.graph.initializer.append(numpy_helper.from_array(array, f"w{index}"))
    for node in made.graph.node:
        node.name = f"/layer.{node.output[0][1:]}/{node.op_type}"
    return bytes(made.SerializeToString())


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


W = "float[8, 8] w"
PRODUCT = {"x": numbers(3, 8), "w": numbers(8, 8, seed=1)}

CASES: dict[str, tuple[str, Feeds]] = {
    # The target of Reshape follows from the shape of b, which is on another device.
    "shape arithmetic": (
        f"""(float[n, 4, 8] x, {W}) => (float[k] y) {{
            a = MatMul(x, w)  b = Tanh(a)  shape = Shape(b)
            two = Constant<value_ints = [2]>()  last = Gather(shape, two)
            rest = Constant<value_ints = [-1]>()  target = Concat<axis = 0>(rest, last)
            c = Reshape(b, target)  d = MatMul(c, w)  e = Sigmoid(d)  y = Reshape(e, rest) }}""",
        {"x": numbers(3, 4, 8), "w": numbers(8, 8, seed=1)},
    ),
    "outputs of several stages": (
        f"""(float[n, 8] x, {W}) => (float[n, 8] p, float[n, 8] q, float[n, 8] r, int64[2] s) {{
            a = MatMul(x, w)  p = Tanh(a)  b = MatMul(p, w)  q = Add(b, x)  c = MatMul(q, w)  r = Add(c, p)
            s = Shape(r) }}""",
        PRODUCT,
    ),
    "a shape that the application feeds": (
        f"""(float[n, 8] x, int64[2] shape, {W}) => (float[i, j] y) {{
            a = MatMul(x, w)  b = Tanh(a)  c = Reshape(b, shape)  d = Sigmoid(c)  y = Neg(d) }}""",
        {**PRODUCT, "shape": np.array([6, 4])},
    ),
    "sizes that a device computes": (
        f"""(float[n, 8] x, {W}) => (float[k] y) {{
            a = MatMul(x, w)  b = Tanh(a)  c = NonZero(b)  t = Transpose(c)  d = GatherND(b, t)  y = Relu(d) }}""",
        PRODUCT,
    ),
    "no rows": (
        f"""(float[n, 8] x, {W}) => (float[n, 8] y) {{
            a = MatMul(x, w)  b = Tanh(a)  c = MatMul(b, w)  y = Relu(c) }}""",
        {"x": numbers(0, 8), "w": numbers(8, 8, seed=1)},
    ),
    "bool and float16 cross": (
        f"""(float[n, 8] x, {W}) => (float[n, 8] y) {{
            a = MatMul(x, w)  zero = Constant<value_float = 0.0>()  b = Less(a, zero)  h = Cast<to = 10>(a)
            t = Tanh(h)  c = Where(b, t, h)  d = Cast<to = 1>(c)  y = MatMul(d, w) }}""",
        PRODUCT,
    ),
    "a sequence": (
        f"""(float[n, 8] x, {W}) => (float[n, 16] y) {{
            a = MatMul(x, w)  b = Tanh(a)  s = SequenceConstruct(a, b)
            c = ConcatFromSequence<axis = 1>(s)  y = Relu(c) }}""",
        PRODUCT,
    ),
    "If": (
        f"""(float[n, 8] x, {W}, bool on) => (float[n, 8] y) {{
            a = MatMul(x, w)  b = Tanh(a)
            d = If(on) <then_branch = then() => (float[n, 8] p) {{ p = MatMul(b, w) }},
                        else_branch = other() => (float[n, 8] q) {{ q = Neg(b) }}>
            y = MatMul(d, w) }}""",
        {**PRODUCT, "on": np.array(True)},
    ),
    "Loop": (
        f"""(float[n, 8] x, {W}, int64 m, bool on) => (float[n, 8] y) {{
            a = MatMul(x, w)
            b = Loop(m, on, a) <body = step(int64 i, bool before, float[n, 8] s) => (bool k, float[n, 8] next) {{
                k = Identity(before)  u = MatMul(s, w)  next = Tanh(u) }}>
            y = MatMul(b, w) }}""",
        {**PRODUCT, "m": np.array(3), "on": np.array(True)},
    ),
    "nodes of the CPU provider": (
        f"""(float[n, 8] x, {W}) => (float[n, 8] y) {{
            a = MatMul(x, w)  b = Tanh(a)  text = Cast<to = 8>(b)  c = Cast<to = 1>(text)
            d = MatMul(c, w)  e = Tanh(d)  y = MatMul(e, w) }}""",
        PRODUCT,
    ),
}
"""By name of the case: the model in the text format of onnx.parser, and its inputs."""
