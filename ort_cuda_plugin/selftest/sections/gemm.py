"""Checks of matrix products: each engine and tile, element types, edge sizes, epilogues and layouts."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case

SIZES = {
    "1x1x1": (1, 1, 1),
    "1x64x48": (1, 64, 48),
    "3x17x5": (3, 17, 5),
    "33x130x65": (33, 130, 65),
    "64x64x64": (64, 64, 64),
    "65x96x127": (65, 96, 127),
    "129x256x72": (129, 256, 72),
}
"""m x k x n: one, odd numbers, and sizes just below, at and just above tiles."""
QUICK = ("1x64x48", "33x130x65")
"""The sizes of a quick selftest."""
TYPES = ("float", "float16", "bfloat16", "double")


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of matrix products."""
    for type_name in TYPES:
        for name in QUICK if is_quick else SIZES:
            m, k, n = SIZES[name]
            text = f"({{T}}[{m}, {k}] x) => ({{T}}[{m}, {n}] y) {{ y = MatMul(x, w) }}"
            yield _case(f"product {name}", text, type_name, {"w": (k, n)})
        yield from _forms(type_name)
    for signed in ("int8", "uint8"):
        for m, k, n in (
            ((1, 64, 48), (40, 192, 48)) if is_quick else ((1, 64, 48), (5, 33, 7), (40, 192, 48), (65, 64, 130))
        ):
            text = f"({{T}}[{m}, {k}] x) => (int32[{m}, {n}] y) {{ y = MatMulInteger(x, w) }}"
            yield _case(f"integer product {m}x{k}x{n}", text, signed, {"w": (k, n)}, ("MatMulInteger",))


def _forms(type_name: str) -> Iterator[Case]:
    """Yield products with an epilogue, with transposed operands, and in batches."""
    text = """({T}[40, 32] x, {T}[48] b) => ({T}[40, 48] y) { p = MatMul(x, w) s = Add(p, b) y = Relu(s) }"""
    yield _case("product with bias and ReLU", text, type_name, {"w": (32, 48)}, ("MatMul", "Add", "Relu"))
    text = """({T}[40, 32] x) => ({T}[40, 48] y) { p = MatMul(x, w) y = Relu(p) }"""
    yield _case("product with ReLU", text, type_name, {"w": (32, 48)}, ("MatMul", "Relu"))
    text = """({T}[40, 32] x, {T}[40, 48] r) => ({T}[40, 48] y) { p = MatMul(x, w) y = Add(p, r) }"""
    yield _case("product with residual", text, type_name, {"w": (32, 48)}, ("MatMul", "Add"))
    text = """({T}[33, 40] x, {T}[48, 33] w, {T}[48] b) => ({T}[40, 48] y)
        { y = Gemm<transA = 1, transB = 1, alpha = 2.0>(x, w, b) }"""
    yield _case("product of transposed operands", text, type_name, {}, ("Gemm",))
    text = """({T}[3, 2, 17, 32] x, {T}[2, 32, 24] w) => ({T}[3, 2, 17, 24] y) { y = MatMul(x, w) }"""
    yield _case("product in batches", text, type_name, {})
    text = """({T}[3, 17, 32] x, {T}[3, 32, 24] w) => ({T}[3, 17, 24] y) { y = MatMul(x, w) }"""
    yield _case("product in one batch", text, type_name, {})  # library calls have one batch dimension
    text = """({T}[40, 64] x, {T}[64, 5] a, {T}[5, 48] b) => ({T}[40, 48] y)
        { p = MatMul(x, w) d = MatMul(x, a) u = MatMul(d, b) y = Add(p, u) }"""
    yield Case(
        f"product with an adapter of low rank, {type_name}",
        text,
        type_name,
        {"w": (64, 48)},
        ranges=dict.fromkeys("xabw", (-1, 1)),  # small enough that the results of both products are exact
        operators=("MatMul", "Add"),
        each_schedule=True,
    )
    if type_name == "double":
        return  # the constants of the CPU provider's GELU are float32
    text = """({T}[40, 32] x, {T}[48] b) => ({T}[40, 48] y)
        { p = MatMul(x, w) s = Add(p, b) y = Gelu<approximate = "tanh">(s) }"""
    yield Case(
        f"product with bias and GELU, {type_name}",
        text,
        type_name,
        {"w": (32, 48)},
        ranges=dict.fromkeys("xwb", (-1, 1)),  # only the GELU is rounded
        operators=("MatMul", "Add", "Gelu"),
        is_exact=False,
        each_schedule=True,
    )


def _case(
    name: str, text: str, type_name: str, weights: dict[str, tuple[int, ...]], operators: tuple[str, ...] = ("MatMul",)
) -> Case:
    return Case(f"{name}, {type_name}", text, type_name, weights, operators=operators, each_schedule=True)
