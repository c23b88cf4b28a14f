"""Checks of scans, sorting and selection: element types, lengths around the block size."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case

LENGTHS = (1, 33, 1023, 1025, 5000)
TYPES = ("float", "float16", "bfloat16", "double", "int32", "int64")


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of scans, sorting and selection."""
    for type_name in ("float", "int64") if is_quick else TYPES:
        for length in (33, 1025) if is_quick else LENGTHS:
            yield _one("CumSum", f"scan of {length}", type_name, length, _scan(length))
            if type_name != "bfloat16":  # TopK does not take bfloat16
                yield from _sorted(type_name, length)
        yield _one("CumSum", "scan of columns", type_name, 40, SCAN_OF_COLUMNS)
    yield Case(
        "NonZero and Compress, bool",
        "(bool[37, 41] x, float[37, 41] y) => (int64[2, n] NonZero, float[m] Compress) "
        "{ NonZero = NonZero(x) flat = Constant<value_ints = [-1]>() f = Reshape(x, flat) v = Reshape(y, flat) "
        "Compress = Compress<axis = 0>(v, f) }",
        "bool",
        by_output=True,
    )


def _scan(length: int) -> str:
    return (
        f"({{T}}[3, {length}] x) => ({{T}}[3, {length}] y) {{ axis = Constant<value_int = 1>() y = CumSum(x, axis) }}"
    )


SCAN_OF_COLUMNS = (
    "({T}[40, 70] x) => ({T}[40, 70] y) { axis = Constant<value_int = 0>() y = CumSum<reverse = 1>(x, axis) }"
)


def _one(operator: str, name: str, type_name: str, length: int, text: str) -> Case:
    signs = {"x": (-1, 1)} if length > 500 else {}  # keeps long sums exact in 16-bit floats
    return Case(f"{name}, {type_name}", text, type_name, ranges=signs, operators=(operator,))


def _sorted(type_name: str, length: int) -> Iterator[Case]:
    for count in sorted({1, min(length, 20), length}):
        text = f"""({{T}}[3, {length}] x) => ({{T}}[3, {count}] values, int64[3, {count}] indices) {{
            k = Constant<value_ints = [{count}]>() values, indices = TopK(x, k) }}"""
        limit = 100 if type_name in ("float16", "bfloat16") else 1000
        name = f"largest {count} of {length}, {type_name}"
        yield Case(name, text, type_name, ranges={"x": (-limit, limit)}, operators=("TopK",))
