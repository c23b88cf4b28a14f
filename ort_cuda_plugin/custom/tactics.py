"""Tactics: alternative implementations of a custom operator. The compiler chooses one.

With the session option ``autotune`` each tactic is measured on the session's device, for sizes close to those of the
Run, and the times are stored on disk. Without the option, or with ``deterministic``, the first tactic is used.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..model.ir import Constant, InvalidModel, Unsupported
from ..program.expressions.symbolic import hint
from ..program.lowering.context import Lowering, Tactic, Tensor
from ..program.steps.trace import Launch
from .operator import LowerFunction
from .report import report_failure


def choose_tactic(
    ctx: Lowering,
    problem: str,
    inputs: Sequence[Tensor | None],
    names: Sequence[str],
    make: Callable[[Lowering, Sequence[Tensor | None], str], object],
) -> Tactic:
    """Return the fastest of the tactics ``names`` if the session measures tactics and no input is empty, else the first
    one.

    ``problem`` is the timing-cache id: it identifies the computation without types and sizes. ``make`` records the work
    of a tactic in a separate context, with separate inputs; a tactic for which it raises is not used.
    """

    def guarded(own: Lowering, given: Sequence[Tensor | None], name: str) -> None:
        try:
            make(own, given, name)
        except (Unsupported, InvalidModel):
            raise
        except Exception as error:
            report_failure(f"tactic {name} of {problem}", error)
            raise Unsupported("op", f"tactic {name} failed with {type(error).__name__}: {error}") from error

    if any(hint(x.size) == 0 for x in inputs if x is not None):
        return Tactic(names[0], "the first tactic, not measured, because an input is empty")
    if ctx.tuner is not None and len(names) > 1:
        found = ctx.tuner.fastest(ctx, problem, inputs, names, guarded)
        if found is not None:
            return found
        if ctx.is_guess and any(not isinstance(size, int) for x in inputs if x is not None for size in x.shape):
            return Tactic(names[0], "the first tactic, not measured, because sizes are unknown before a Run")
    return Tactic(names[0], "the first tactic, not measured")


class Tactics:
    """The tactics of one operator. ``candidates`` returns the tactics of a node, the default one first."""

    def __init__(self, label: str, takes_tactic: bool) -> None:
        self.label = label
        self.takes_tactic = takes_tactic
        self.candidates: Callable[..., Sequence[Any]] | None = None
        self.timing_id = ""

    def around(self, function: Callable[..., Any]) -> LowerFunction:
        """Wrap an author's function: choose the node's tactic, and pass it as ``tactic`` if the function takes it."""

        def call(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Sequence[Tensor]:
            if not self.takes_tactic:
                return function(ctx, inputs, attributes)  # type: ignore[no-any-return]
            found = list(self.candidates(ctx, *inputs, **attributes)) if self.candidates is not None else []
            if not found:
                return function(ctx, inputs, attributes, tactic=None)  # type: ignore[no-any-return]
            by_name = {repr(tactic): tactic for tactic in found}

            def make(own: Lowering, given: Sequence[Tensor | None], name: str) -> None:
                function(own, given, attributes, tactic=by_name[name])

            problem = repr(
                (self.label, self.timing_id, [(name, _text(attributes[name])) for name in sorted(attributes)])
            )
            chosen = choose_tactic(ctx, problem, inputs, list(by_name), make)
            before = len(ctx.trace.steps)
            results = function(ctx, inputs, attributes, tactic=by_name[chosen.name])
            for step in ctx.trace.steps[before:]:
                if isinstance(step, Launch):
                    step.note = f"tactic {chosen.name}: {chosen.why}"
            return results  # type: ignore[no-any-return]

        return call


def _text(value: object) -> str:
    return f"{value.dtype.name}{value.shape}" if isinstance(value, Constant) else repr(value)


def source_id(*functions: Callable[..., Any]) -> str:
    """Return a timing-cache id that changes with the source of the functions.

    If Python finds no source of a function, the function's name takes the place of the source.
    """
    texts = []
    for function in functions:
        try:
            texts.append(inspect.getsource(function))
        except (OSError, TypeError):
            texts.append(function.__qualname__)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
