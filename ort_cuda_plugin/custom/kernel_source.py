"""The text of a kernel that an application wrote as a Python function."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_SIZED = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_KNOWN_NAMES = frozenset({"cuda", "libdevice", "math", "float32", "float64", *_SIZED})
"""Names that mean the same in every kernel."""
_KNOWN_MODULES = ("numba", "ort_cuda_plugin.compiler", "math")


class KernelSourceError(ValueError):
    """A function cannot be a kernel; the message names it and what to do."""


@functools.cache
def kernel_source(function: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """The text that `KernelSpec.source` wants, and the names of the parameters.

    Numbers that the function uses of its module or of the function around it become constants of the text.

    Raises:
        KernelSourceError: its text cannot be found, or it uses something else of its surroundings.
    """
    plain = getattr(function, "py_func", function)  # of numba.cuda.jit
    if not isinstance(plain, FunctionType):
        raise KernelSourceError(f"{function!r} is no Python function, which a Numba kernel is")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, TypeError, SyntaxError) as error:
        raise KernelSourceError(
            f"the source of kernel {plain.__qualname__} cannot be read: {error}; define it in a file or in a notebook, "
            "or give numba_kernel its text"
        ) from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise KernelSourceError(f"kernel {plain.__qualname__} is no function with a name: write it with def")
    arguments = definition.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        raise KernelSourceError(f"kernel {plain.__qualname__} has parameters that are not plain positional ones")
    definition.name, definition.decorator_list, definition.returns = "kernel", [], None
    for argument in arguments.args:
        argument.annotation = None
    constants = [f"{name} = {_constant(plain, name, value)}" for name, value in _surroundings(plain).items()]
    return "\n".join([*constants, ast.unparse(definition), ""]), tuple(argument.arg for argument in arguments.args)


def _surroundings(function: FunctionType) -> dict[str, Any]:
    """What the function uses from outside that does not mean the same in every kernel."""
    outside = inspect.getclosurevars(function)
    used = {**outside.globals, **outside.nonlocals}
    return {name: value for name, value in sorted(used.items()) if not _is_known(name, value)}


def _is_known(name: str, value: Any) -> bool:
    origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return name in _KNOWN_NAMES or (not isinstance(value, FunctionType) and origin.startswith(_KNOWN_MODULES))


def _constant(function: FunctionType, name: str, value: Any) -> str:
    if isinstance(value, bool | int | float):
        return repr(value)
    raise KernelSourceError(
        f"kernel {function.__qualname__} uses {name!r}, {type(value).__name__}, from outside: only numbers can be used "
        "so; give other things as arguments, and write helper functions out"
    )
