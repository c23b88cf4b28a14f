"""Kernels written as plain Python functions, with compile-time parameters and calls that generated source replaces.

A kernel whose code is mostly fixed is a Python function, so that mypy checks its types and names. Positional parameters
are those of the kernel. Keyword-only parameters are compile-time constants: a number, type or name is substituted as
text. The function calls its parameters of type `Lines` or `Expression`; generated source (an epilogue, a comparison)
replaces each call. Such source may come from a Python function as well (`PlainKernel.lines`), which then reads and
assigns variables of the calling function.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, TypeAlias

from ...model.ir import DType
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Int32, Lowering, Tensor
from .source import KernelBuilder

Lines: TypeAlias = "Callable[..., None]"
"""Generated statements. The arguments of the call only document which variables they read and assign."""
Expression: TypeAlias = "Callable[..., Any]"
"""A generated expression. The arguments of the call only document which variables it reads."""


class PlainKernel:
    """A kernel written as a Python function; `launch` takes its parameters as keyword arguments."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._parameters = [x.name for x in parameters if x.kind is not inspect.Parameter.KEYWORD_ONLY]
        self._constants = {x.name: x.annotation for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY}
        self.lines = cache(self._lines)

    @cached_property
    def _source(self) -> str:
        return textwrap.dedent(inspect.getsource(self._function))

    @cached_property
    def _tree(self) -> ast.FunctionDef:
        (function,) = ast.parse(self._source).body
        assert isinstance(function, ast.FunctionDef)
        return function

    def _lines(self, **constants: object) -> str:
        """Return the function's body without its docstring, with compile-time parameters substituted.

        Raises TypeError unless ``constants`` has exactly the compile-time parameters.
        """
        if constants.keys() != self._constants.keys():
            raise TypeError(
                f"kernel {self._function.__name__}: wrong compile-time parameters: got {', '.join(constants)}, "
                f"expected {', '.join(self._constants)}. Pass one value for each keyword-only parameter"
            )
        first = self._tree.body[0]
        start = first.end_lineno if ast.get_docstring(self._tree) else first.lineno - 1
        text = textwrap.dedent("\n".join(self._source.splitlines()[start:]))
        for name, value in constants.items():
            if self._constants[name] in ("Lines", "Expression"):
                text = _generate(text, name, str(value).strip("\n"))
            else:
                text = re.sub(rf"(?<![\w.]){name}(?!\w)", str(value), text)
        return text

    def launch(self, ctx: Lowering, name: str, blocks: Dim | tuple[Dim, Dim, Dim], threads: int, **values: Any) -> None:
        """Launch ``blocks`` blocks of ``threads`` threads. The function may also have ``threads`` as a parameter.

        ``values`` are the function's parameters: tensors, sizes (int64, or an `Int32`), None for a parameter that the
        kernel omits, and the values of compile-time parameters. Raises TypeError if one is missing or unknown.
        """
        if "threads" in self._constants:
            values["threads"] = threads
        if values.keys() != {*self._parameters, *self._constants}:
            expected = ", ".join([*self._parameters, *self._constants])
            raise TypeError(
                f"kernel {name}: wrong arguments: got {', '.join(values)}, expected {expected}. Pass one value for each"
            )
        text = self.lines(**{constant: values[constant] for constant in self._constants})
        written = written_names(text)
        builder = KernelBuilder()
        for parameter in self._parameters:
            value = values[parameter]
            if value is None:
                continue
            if isinstance(value, Tensor):
                builder.tensor(value, parameter, written=parameter in written)
            elif isinstance(value, Int32):
                builder.integer(value.value, DType.INT32, parameter)
            else:
                builder.integer(value, name=parameter)
        grid = blocks if isinstance(blocks, tuple) else (blocks, 1, 1)
        builder.launch(ctx, name, grid, (threads, 1, 1), body=textwrap.indent(text, "    "))


def plain_kernel(function: Callable[..., None]) -> PlainKernel:
    """Convert the decorated function to a kernel."""
    return PlainKernel(function)


def _generate(text: str, name: str, made: str) -> str:
    """Replace each call of ``name`` in ``text`` by the source ``made``, at the indentation of the call."""
    call = rf"^( *)(.*)(?<![\w.]){name}\([\w, ]*\)"
    return re.sub(call, lambda at: at[1] + at[2] + made.replace("\n", f"\n{at[1]}"), text, flags=re.MULTILINE)


@cache
def written_names(text: str) -> set[str]:
    """Return the names of the arrays that ``text`` writes, by subscript or by an atomic intrinsic."""
    found: set[str] = set()
    for x in ast.walk(ast.parse(text)):
        if isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Store) and isinstance(x.value, ast.Name):
            found.add(x.value.id)
        elif isinstance(x, ast.Call) and ast.unparse(x.func).startswith("atomic_"):
            found.add(ast.unparse(x.args[0]))
    return found
