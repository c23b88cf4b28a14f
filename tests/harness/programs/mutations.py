"""Mutation testing of passes: injects plausible mistakes, and reports which checks notice them.

    PYTHONPATH=tests/harness python -m programs --mutations [vertical_fusion]

A `Mutation` replaces some text in a function of a pass, so that for example an axis or an order is wrong, a scale is
dropped, or a reader is missed. `noticed_by` applies it, compiles the models of tests/passes, and returns the checks
that fail: the verifier, the interpreter, the expected text of the pass's change, an assertion. tests/passes fails if a
pass has no mutation, if no check notices a mutation, or if the replaced text no longer exists.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import numpy as np
import onnx

from ort_cuda_plugin.program.analysis.verify import VERIFY_VARIABLE, InvalidProgramError
from pass_programs import Case, case, case_names, change_of, small_models_count
from programs.states import CannotRunError, Difference, first_difference, record
from programs.values import Array


@dataclass(frozen=True)
class Mutation:
    """A mistake in a pass: ``old`` in the source of ``function`` becomes ``new``. ``what`` describes the effect."""

    pass_name: str
    what: str
    function: Callable[..., Any]
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.pass_name}: {self.what}"


def mutated(mutation: Mutation) -> CodeType:
    """Return the code object of the function with the mistake."""
    function = mutation.function
    assert isinstance(function, FunctionType)
    text = textwrap.dedent(inspect.getsource(function))
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation}: {function.__qualname__} has {text.count(mutation.old)} times {mutation.old!r}")
    tree = ast.parse("from __future__ import annotations\n" + text.replace(mutation.old, mutation.new))
    definition = tree.body[1]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    names: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(function), "exec"), dict(function.__globals__), names)
    made: FunctionType = names[function.__name__]
    return made.__code__


@contextmanager
def broken(mutation: Mutation) -> Iterator[None]:
    """Within the block, the function has the mistake, also for modules that have imported it already."""
    function = mutation.function
    assert isinstance(function, FunctionType)
    former = function.__code__
    function.__code__ = mutated(mutation)
    try:
        yield
    finally:
        function.__code__ = former


def noticed_by(mutation: Mutation, cases: Sequence[str] | None = None) -> list[str]:
    """Return the checks that notice the mistake in models of its pass: "verifier", "interpreter", "text" (of the
    change) or "assertion".
    """
    found: dict[str, None] = {}
    with broken(mutation):
        for name in cases or case_names(mutation.pass_name):
            one = case(name)
            found.update(dict.fromkeys(_complaints(one)))
    return list(found)


def _complaints(one: Case) -> Iterator[str]:
    try:
        with mock.patch.dict(os.environ, {VERIFY_VARIABLE: "1"}):
            if change_of(one) != one.expected:
                yield "text"
    except InvalidProgramError:
        yield "verifier"
    except AssertionError:
        yield "assertion"
    try:
        if difference_in(one) is not None:
            yield "interpreter"
    except CannotRunError:
        return
    except (AssertionError, InvalidProgramError):
        return


def difference_in(one: Case) -> Difference | None:
    """Return the first pass after which the program of a case's model gives other results, None if there is none."""
    given = feeds(one.model)
    if one.pass_name not in ("l2_batch_tiling", "split_k_fusion"):
        return first_difference(record(one.model, given, one.device), given)
    with small_models_count():
        return first_difference(record(one.model, given, one.device), given)


def feeds(model: onnx.ModelProto) -> list[Array]:
    """Return random inputs for a model whose sizes are all known."""
    numbers = np.random.default_rng(3)
    found = []
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        random = numbers.integers(0, 200, shape) if dtype.kind in "iu" else numbers.standard_normal(shape)
        found.append(np.asarray(random, dtype))
    return found


def table_of(mutations: Sequence[Mutation]) -> tuple[str, list[Mutation]]:
    """Return a Markdown table of the checks that notice each mutation, and the mutations that no check notices."""
    lines, missed = ["| pass | mistake | noticed by |", "|---|---|---|"], []
    for each in mutations:
        found = noticed_by(each)
        lines.append(f"| {each.pass_name} | {each.what} | {', '.join(found) or 'nothing'} |")
        if not found:
            missed.append(each)
    return "\n".join(lines), missed
