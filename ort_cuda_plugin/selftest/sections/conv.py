"""Checks of convolutions: each engine and tile, element types, dimensions, groups, strides, dilations and epilogues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .case import Case


@dataclass(frozen=True)
class Shape:
    """Sizes of a convolution; ``attributes`` in ONNX's text format."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    attributes: str = ""
    operator: str = "Conv"


SHAPES = {
    "1x1": Shape((2, 24, 7, 9), (40, 24, 1, 1), (2, 40, 7, 9)),
    "3x3": Shape((1, 32, 9, 9), (48, 32, 3, 3), (1, 48, 9, 9), "pads = [1, 1, 1, 1]"),
    "3x3 with few channels": Shape((1, 3, 17, 15), (10, 3, 3, 3), (1, 10, 8, 7), "strides = [2, 2]"),
    "one pixel": Shape((1, 16, 1, 1), (33, 16, 1, 1), (1, 33, 1, 1)),
    "wide": Shape((1, 8, 12, 70), (72, 8, 3, 3), (1, 72, 10, 68)),
    "dilated": Shape((1, 16, 13, 13), (20, 16, 3, 3), (1, 20, 9, 9), "dilations = [2, 2]"),
    "with groups": Shape((1, 16, 9, 9), (24, 8, 3, 3), (1, 24, 7, 7), "group = 2"),
    "depthwise": Shape((1, 32, 9, 9), (32, 1, 3, 3), (1, 32, 9, 9), "group = 32, pads = [1, 1, 1, 1]"),
    "1-D": Shape((2, 16, 65), (24, 16, 5), (2, 24, 61)),
    "3-D": Shape((1, 4, 5, 6, 7), (20, 4, 3, 3, 3), (1, 20, 3, 4, 5)),
    "transposed": Shape((1, 16, 5, 5), (16, 12, 3, 3), (1, 12, 11, 11), "strides = [2, 2]", "ConvTranspose"),
}
QUICK = ("1x1", "3x3", "3x3 with few channels", "depthwise", "transposed")
"""The shapes of a quick selftest."""


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of convolutions."""
    for type_name in ("float", "float16") if is_quick else ("float", "float16", "bfloat16", "double"):
        for name in QUICK if is_quick else SHAPES:
            shape = SHAPES[name]
            attributes = f"<{shape.attributes}>" if shape.attributes else ""
            text = f"({{T}}{list(shape.x)} x) => ({{T}}{list(shape.y)} y) {{ y = {shape.operator}{attributes}(x, w) }}"
            yield Case(
                f"convolution {name}, {type_name}",
                text,
                type_name,
                {"w": shape.w},
                operators=(shape.operator,),
                each_schedule=True,
            )
        yield Case(
            f"convolution with bias, residual and ReLU, {type_name}",
            """({T}[1, 16, 9, 9] x, {T}[1, 24, 9, 9] r) => ({T}[1, 24, 9, 9] y)
            { c = Conv<pads = [1, 1, 1, 1]>(x, w, b) s = Add(c, r) y = Relu(s) }""",
            type_name,
            {"w": (24, 16, 3, 3), "b": (24,)},
            operators=("Conv", "Add", "Relu"),
            each_schedule=True,
        )
        yield from _activations(type_name)
    yield Case(
        "convolution of integers",
        "(uint8[1, 16, 9, 9] x) => (int32[1, 24, 7, 7] y) { y = ConvInteger(x, w) }",
        "uint8",
        {"w": (24, 16, 3, 3)},
        operators=("ConvInteger",),
        each_schedule=True,
    )


def _activations(type_name: str) -> Iterator[Case]:
    """Yield convolutions with activations that a library may compute, on integers: only the SiLU is rounded."""
    for name, nodes, operators in (
        ("SiLU", "g = Sigmoid(c) y = Mul(c, g)", ("Conv", "Sigmoid", "Mul")),
        (
            "ReLU6",
            """zero = Constant<value_float = 0.0>() six = Constant<value_float = 6.0>()
            low = CastLike(zero, c) high = CastLike(six, c) y = Clip(c, low, high)""",
            ("Conv", "Clip"),
        ),
    ):
        yield Case(
            f"convolution with bias and {name}, {type_name}",
            f"({{T}}[1, 16, 9, 9] x) => ({{T}}[1, 24, 9, 9] y) {{ c = Conv<pads = [1, 1, 1, 1]>(x, w, b) {nodes} }}",
            type_name,
            {"w": (24, 16, 3, 3), "b": (24,)},
            ranges=dict.fromkeys("xwb", (-1, 1)),
            operators=operators,
            is_exact=name == "ReLU6",
            each_schedule=True,
        )
