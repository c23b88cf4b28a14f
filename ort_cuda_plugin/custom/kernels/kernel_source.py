"""Turns a kernel that an application wrote as a Python function into source text."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from ...abi.errors import Error

_ROOTS = ("math", "numba", "numpy")
"""Modules whose names a kernel may use; the kernel's source text imports them."""
_MODULES = ("math", "numba.cuda", "numba.cuda.libdevice", "numba", "numpy", "ort_cuda_plugin.compiler.intrinsics")
"""Modules in which functions and types that a kernel uses are looked up, to import them by name."""
_KNOWN = {"math": "math", "cuda": "numba.cuda", "libdevice": "numba.cuda.libdevice"}
"""Modules that every kernel can use, by name."""
_TYPES = frozenset({"float32", "float64", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))})
"""Number types that every kernel can use, by name."""
_TAKEN = frozenset({"kernel", "author"})
"""Names that the generated source text defines."""


class KernelSourceError(Error, ValueError):
    """A function cannot be a kernel. The message names it and says what to do."""


@functools.cache
def kernel_source(function: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """Return the text for `KernelSpec.source`, and the names of the function's parameters.

    The text defines everything that ``function`` uses from its module or from an enclosing function: numbers become
    constants, functions become device functions.

    Raises: KernelSourceError: the source cannot be found, or ``function`` uses other kinds of objects from outside.
    """
    definition, plain = _definition(function, "kernel")
    around: dict[str, str] = {}
    _add_surroundings(plain, definition, around, plain.__qualname__)
    definition.name = "kernel"
    parts = [around[name] for name in sorted(around)]
    return "\n".join([*parts, ast.unparse(definition), ""]), tuple(x.arg for x in definition.args.args)


def _definition(function: Callable[..., Any], what: str) -> tuple[ast.FunctionDef, FunctionType]:
    """Return the function's syntax tree without decorators and annotations, and the undecorated function."""
    plain = getattr(function, "py_func", function)  # a function that numba.cuda.jit decorates
    if not isinstance(plain, FunctionType):
        raise KernelSourceError(f"{function!r} is not a Python function, expected the function of a Numba kernel")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, TypeError, SyntaxError) as error:
        raise KernelSourceError(
            f"the source of {what} {plain.__qualname__} cannot be read: {error}; define it in a file or in a notebook, "
            "or give numba_kernel its text"
        ) from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise KernelSourceError(f"{what} {plain.__qualname__} is not a function with a name: write it with def")
    arguments = definition.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        raise KernelSourceError(
            f"{what} {plain.__qualname__} has *args, **kwargs, keyword-only parameters or defaults: use "
            "positional parameters only"
        )
    definition.decorator_list, definition.returns = [], None
    for argument in arguments.args:
        argument.annotation = None
    return definition, plain


def _add_surroundings(function: FunctionType, definition: ast.FunctionDef, around: dict[str, str], kernel: str) -> None:
    """Add to ``around`` the source text of each name that the function uses from outside."""
    outside = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    read = {x.id for x in ast.walk(definition) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    for name in sorted((read & outside.keys()) - _local_names(function.__code__)):
        value = outside[name]
        helper = getattr(value, "py_func", value)
        text = _text(name, value)
        if text is None and isinstance(helper, FunctionType):
            inner, helper = _definition(value, "function")
            inner.name = name
            text = f"@cuda.jit(device=True)\n{ast.unparse(inner)}"
            if name not in around:
                around[name] = text
                _add_surroundings(helper, inner, around, kernel)
        if text is None:
            raise KernelSourceError(
                f"kernel {kernel} uses the global or captured name {name!r} of type {type(value).__name__}: only "
                "numbers, tuples of numbers, functions, and names of math, numba and numpy are allowed. Pass other "
                "objects as arguments"
            )
        if text and name in _TAKEN:
            raise KernelSourceError(
                f"kernel {kernel} uses the name {name!r}, which the generated code defines too. Rename it"
            )
        if text and around.setdefault(name, text) != text:
            raise KernelSourceError(
                f"kernel {kernel} and the functions that it calls use {name!r} for different objects: rename one"
            )


def _text(name: str, value: Any) -> str | None:
    """Return source that defines ``name`` as ``value``: "" if every kernel has the name, None if no source can."""
    number = _number(value)
    if number is not None:
        return f"{name} = {number}"
    if isinstance(value, ModuleType):
        if _KNOWN.get(name) == value.__name__:
            return ""
        return f"import {value.__name__} as {name}" if value.__name__.partition(".")[0] in _ROOTS else None
    kind = value.__name__ if isinstance(value, type) and issubclass(value, np.number) else str(value)
    if kind in _TYPES and (type(value).__module__.startswith("numba.") or isinstance(value, type)):
        return "" if kind == name else f"{name} = {kind}"
    for module in _MODULES:
        for known, other in list(vars(sys.modules[module]).items()) if module in sys.modules else ():
            if other is value:
                own = module.startswith("ort_cuda_plugin") and known == name
                return "" if own else f"from {module} import {known} as {name}"
    return None


def _number(value: Any) -> str | None:
    """Return the source text of a number or of a tuple of numbers, None for another value."""
    if isinstance(value, bool | np.bool_):
        return repr(bool(value))
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, np.integer | np.float32):
        return f"{value.dtype.name}({_number(value.item())})"
    if isinstance(value, float | np.floating):
        return repr(float(value)) if math.isfinite(value) else f"float({str(float(value))!r})"
    if isinstance(value, tuple):
        parts = [_number(part) for part in value]
        return None if None in parts else f"({''.join(f'{part}, ' for part in parts)})"
    return None


def _local_names(code: CodeType) -> set[str]:
    names = {*code.co_varnames, *code.co_cellvars}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _local_names(inner)
    return names
