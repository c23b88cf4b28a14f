"""Checks of quantization, and of products of quantized operands."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of quantization."""
    for codes in ("uint8", "int8"):
        for size in (67,) if is_quick else (1, 67, 1025):
            yield _conversions(codes, size)
        yield _product(codes)
    text = """(float[5, 65] x) => (uint8[5, 65] y, float[] scale, uint8[] zero)
        { y, scale, zero = DynamicQuantizeLinear(x) }"""
    ranges = {"x": (-255, 255)}
    yield Case(
        "dynamic quantization", text, "float", ranges=ranges, operators=("DynamicQuantizeLinear",), is_exact=False
    )
    for rows in (1, 40):
        text = f"""(float[{rows}, 64] x, uint8[48, 2, 16] w, float[96] scales) => (float[{rows}, 48] y)
            {{ y = com.microsoft.MatMulNBits<K = 64, N = 48, bits = 4, block_size = 32>(x, w, scales) }}"""
        yield Case(
            f"product of 4-bit weights, {rows} rows",
            text,
            "float",
            ranges={"w": (0, 255)},
            operators=("com.microsoft::MatMulNBits",),
            each_schedule=True,
        )


def _conversions(codes: str, size: int) -> Case:
    text = f"""(float[3, {size}] x, {codes}[3, {size}] c) => ({codes}[3, {size}] QuantizeLinear,
        float[3, {size}] DequantizeLinear) {{
        scale = Constant<value_float = 0.5>() zero = Constant<value = {codes} {{3}}>()
        QuantizeLinear = QuantizeLinear(x, scale, zero) DequantizeLinear = DequantizeLinear(c, scale, zero) }}"""
    return Case(f"quantization of {size}, {codes}", text, codes, ranges={"x": (-90, 90)}, by_output=True)


def _product(codes: str) -> Case:
    """Return a case with MatMul of DequantizeLinear results, then QuantizeLinear, as in QDQ models."""
    text = f"""({codes}[40, 64] x) => ({codes}[40, 48] y) {{
        scale = Constant<value_float = 0.5>() zero = Constant<value = {codes} {{1}}>()
        a = DequantizeLinear(x, scale, zero) b = DequantizeLinear(w, scale, zero) p = MatMul(a, b)
        y = QuantizeLinear(p, scale, zero) }}"""
    operators = ("DequantizeLinear", "MatMul", "QuantizeLinear")
    name = f"product of quantized tensors, {codes}"
    return Case(name, text, codes, {"w": (64, 48)}, operators=operators, each_schedule=True)
