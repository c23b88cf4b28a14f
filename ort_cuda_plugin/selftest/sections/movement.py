"""Checks of gathers, scatters and movements of data: each width of an element."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case

TYPES = ("float", "float16", "bfloat16", "double", "int8", "int32", "int64", "bool")
INDICES = {"i": (0, 16), "j": (0, 16), "p": (0, 16)}
MOVEMENTS = {
    "Transpose": ("{T}[33, 5, 17]", "Transpose<perm = [2, 1, 0]>(x)"),
    "Concat": ("{T}[17, 10, 33]", "Concat<axis = 1>(x, x)"),
    "Slice": ("{T}[17, 2, 11]", "Slice(x, starts, ends, axes, steps)"),
    "Pad": ("{T}[20, 5, 33]", "Pad(x, pads)"),
    "Tile": ("{T}[34, 5, 99]", "Tile(x, times)"),
    "Expand": ("{T}[2, 17, 5, 33]", "Expand(x, wide)"),
    "Gather": ("{T}[7, 5, 33]", "Gather<axis = 0>(x, i)"),
    "GatherElements": ("{T}[7, 5, 33]", "GatherElements<axis = 0>(x, j)"),
    "GatherND": ("{T}[6, 5, 33]", "GatherND(x, p)"),
}
CONSTANTS = """starts = Constant<value_ints = [1, 2]>() ends = Constant<value_ints = [5, 33]>()
    axes = Constant<value_ints = [1, 2]>() steps = Constant<value_ints = [2, 3]>()
    pads = Constant<value_ints = [1, 0, 0, 2, 0, 0]>() times = Constant<value_ints = [2, 1, 3]>()
    wide = Constant<value_ints = [2, 17, 5, 33]>()"""


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of movements."""
    for type_name in ("float", "float16", "int64") if is_quick else TYPES:
        moved = {name: value for name, value in MOVEMENTS.items() if (name, type_name) != ("Pad", "bool")}
        results = ", ".join(f"{shape} {name}" for name, (shape, _) in moved.items())
        nodes = " ".join(f"{name} = {node}" for name, (_, node) in moved.items())
        text = f"""({{T}}[17, 5, 33] x, int64[7] i, int64[7, 5, 33] j, int64[6, 1] p) => ({results})
            {{ {CONSTANTS} {nodes} }}"""
        yield Case(f"data movement, {type_name}", text, type_name, ranges=INDICES, by_output=True)
        yield _scatters(type_name)
    text = """(float[9, 31] x, bool[9, 31] c) => (float[9, 31] y) { z = Neg(x) y = Where(c, x, z) }"""
    yield Case("Where, float", text, "float", operators=("Where",))


def _scatters(type_name: str) -> Case:
    """Return a case of ScatterElements and ScatterND to distinct rows, so that the result is deterministic."""
    text = """({T}[40, 9] x, {T}[8, 9] u) => ({T}[40, 9] ScatterElements, {T}[40, 9] ScatterND) {
        start = Constant<value_int = 1>() end = Constant<value_int = 33>() step = Constant<value_int = 4>()
        rows = Range(start, end, step) column = Constant<value_ints = [-1, 1]>() at = Reshape(rows, column)
        shape = Constant<value_ints = [8, 9]>() all = Expand(at, shape)
        ScatterElements = ScatterElements<axis = 0>(x, all, u) ScatterND = ScatterND(x, at, u) }"""
    return Case(f"scatters, {type_name}", text, type_name, by_output=True)
