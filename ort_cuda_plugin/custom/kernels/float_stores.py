"""Rejects Numba kernels that store floats into a workspace of bytes, because a byte keeps only the integer part.

The types of expressions are estimated from the syntax: an expression counts as a float only if it certainly is one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

from ...model.ir import DType

_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64})
_CASTS = frozenset({"float", "float32", "float64", "f16_to_f32", "bf16_to_f32"})
_SAME_TYPE = frozenset({"min", "max", "abs"})


def check_workspace(name: str, source: str, dtypes: Sequence[DType | None], number: int) -> None:
    """Raise TypeError if a kernel stores floats into parameter ``number``, which is the workspace as a tensor of bytes.

    ``dtypes`` has the element type of each parameter, None for a parameter that is a number.
    """
    floats = tuple(index for index, dtype in enumerate(dtypes) if dtype in _FLOATS)
    if _stores_float(source, floats, number):
        raise TypeError(
            f"kernel {name} stores floats into parameter {number}, the workspace, whose elements are bytes (uint8). "
            "Pass workspace.view(DType.FLOAT32, [number of elements])"
        )


@functools.lru_cache(maxsize=256)
def _stores_float(source: str, floats: tuple[int, ...], number: int) -> bool:
    kernel = next(x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef) and x.name == "kernel")
    names = [argument.arg for argument in kernel.args.args]
    if number >= len(names):
        return False
    pointers = {names[index] for index in floats if index < len(names)}
    variables: set[str] = set()
    assigned = [x for x in ast.walk(kernel) if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)]
    while new := {x.targets[0].id for x in assigned if _is_float(x.value, pointers, variables)} - variables:  # type: ignore[attr-defined]
        variables |= new
    return any(_is_float(value, pointers, variables) for value in _stored(kernel, names[number]))


def _stored(kernel: ast.FunctionDef, name: str) -> Iterator[ast.expr]:
    """Yield the expressions that the kernel stores into elements of ``name``, or adds to them."""
    for x in ast.walk(kernel):
        if isinstance(x, ast.Assign | ast.AugAssign):
            targets = x.targets if isinstance(x, ast.Assign) else [x.target]
            if any(
                isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name) and t.value.id == name for t in targets
            ):
                yield x.value
        elif isinstance(x, ast.Call) and x.args and isinstance(x.args[0], ast.Name) and x.args[0].id == name:
            yield from x.args[2:]  # cuda.atomic.add(array, index, value)


def _is_float(x: ast.expr, pointers: set[str], variables: set[str]) -> bool:
    """Tell whether the expression is certainly a float. ``pointers`` have float elements, ``variables`` are floats."""
    if isinstance(x, ast.Constant):
        return isinstance(x.value, float)
    if isinstance(x, ast.Name):
        return x.id in variables
    if isinstance(x, ast.Subscript):
        return isinstance(x.value, ast.Name) and x.value.id in pointers
    if isinstance(x, ast.BinOp):
        parts = [x.left, x.right]
        return isinstance(x.op, ast.Div) or any(_is_float(part, pointers, variables) for part in parts)
    if isinstance(x, ast.UnaryOp):
        return not isinstance(x.op, ast.Not) and _is_float(x.operand, pointers, variables)
    if isinstance(x, ast.IfExp):
        return any(_is_float(part, pointers, variables) for part in (x.body, x.orelse))
    if isinstance(x, ast.Call):
        if isinstance(x.func, ast.Attribute) and isinstance(x.func.value, ast.Name) and x.func.value.id == "math":
            return x.func.attr not in ("floor", "ceil", "trunc", "isnan", "isinf", "isfinite")
        called = x.func.id if isinstance(x.func, ast.Name) else ""
        return called in _CASTS or (
            called in _SAME_TYPE and any(_is_float(argument, pointers, variables) for argument in x.args)
        )
    return False
