"""Rejects Numba kernels that compute with the bits of 16-bit floats as if they were integers."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

from ...model.ir import HALVES, DType

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def check_halves(name: str, source: str, dtypes: Sequence[DType | None]) -> None:
    """Raise TypeError if a kernel computes with elements of 16-bit floats; moving and converting them is allowed.

    ``dtypes`` has the element type of each parameter, None for a parameter that is a number.
    """
    halves = tuple(number for number, dtype in enumerate(dtypes) if dtype in HALVES)
    number = _computed_with(source, halves) if halves else None
    if number is None:
        return
    dtype = dtypes[number]
    assert dtype is not None
    convert = f"{dtype.short}_to_f32() and f32_to_{dtype.short}()"
    raise TypeError(
        f"kernel {name} computes with elements of parameter {number}, but the kernel gets {dtype.name} elements as the "
        f"bits in a uint16. Convert them by {convert}, or declare the parameter as Float32"
    )


@functools.lru_cache(maxsize=256)
def _computed_with(source: str, halves: tuple[int, ...]) -> int | None:
    """Return the index of a parameter of ``halves`` whose elements are operands of arithmetic; None if none are."""
    kernel = next(x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef) and x.name == "kernel")
    names = {kernel.args.args[number].arg: number for number in halves if number < len(kernel.args.args)}

    def element_of(x: ast.expr) -> int | None:
        is_element = isinstance(x, ast.Subscript) and isinstance(x.value, ast.Name)
        return names.get(x.value.id) if is_element else None  # type: ignore[attr-defined]

    held: dict[str, set[int | None]] = {}
    for x in ast.walk(kernel):
        if isinstance(x, ast.Assign) and len(x.targets) == 1 and isinstance(x.targets[0], ast.Name):
            held.setdefault(x.targets[0].id, set()).add(element_of(x.value))
        elif isinstance(x, ast.AugAssign | ast.For) and isinstance(x.target, ast.Name):
            held.setdefault(x.target.id, set()).add(None)
    for operand in _operands(kernel):
        of_variable = held.get(operand.id, {None}) if isinstance(operand, ast.Name) else {element_of(operand)}
        if None not in of_variable:
            return min(number for number in of_variable if number is not None)
    return None


def _operands(kernel: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield the operands of the kernel's additions, multiplications, comparisons and so on."""
    for x in ast.walk(kernel):
        if isinstance(x, ast.BinOp) and isinstance(x.op, _ARITHMETIC):
            yield from (x.left, x.right)
        elif isinstance(x, ast.AugAssign) and isinstance(x.op, _ARITHMETIC):
            yield from (x.target, x.value)
        elif isinstance(x, ast.Compare) and all(isinstance(op, _ORDER) for op in x.ops):
            yield from (x.left, *x.comparators)
        elif isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub):
            yield x.operand
