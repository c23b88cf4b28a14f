"""Scalar expressions as readable text: ``v1 = exp(x)``, ``y = v1 / sum(v1)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..expressions.scalar import INFIX, Scalar, operands_first
from ..steps.row_program import MAX, MIN, PRODUCT, SUM, Stage

MOST_OPERATIONS = 60
"""Maximum operations of a step whose expressions are written out; for larger ones only the number is shown."""
_REDUCTIONS = {SUM: "sum", PRODUCT: "product", MAX: "max", MIN: "min"}


def formulas(results: Sequence[tuple[str, Scalar]], leaves: Mapping[Scalar, str]) -> list[str]:
    """Return a line per result (name, expression), preceded by a line per shared subexpression.

    ``leaves`` maps the expressions' leaves to the names of the input tensors. If the results have more than
    `MOST_OPERATIONS` operations in all, returns one line that says how many.
    """
    values = [value for _, value in results]
    ordered = list(operands_first(values))
    inner = [x for x in ordered if x not in leaves]
    if len(inner) > MOST_OPERATIONS:
        return [f"{', '.join(name for name, _ in results)} = an expression of {len(inner)} operations"]
    used = Counter(operand for x in inner for operand in x.operands)
    names = dict(leaves)
    lines = []
    for x in ordered:
        if used[x] > 1 and x not in names and x.op != "constant":
            text = _text(x, names)
            names[x] = f"v{len(names) - len(leaves) + 1}"
            lines.append(f"{names[x]} = {text}")
    return lines + [f"{name} = {_text(value, names)}" for name, value in results]


def _text(x: Scalar, names: Mapping[Scalar, str]) -> str:
    if x in names:
        return names[x]
    operands = [_text(operand, names) for operand in x.operands]
    if x.op == "constant":
        return f"{x.value:.9g}" if isinstance(x.value, float) else str(x.value)
    if x.op == "cast":
        return f"{x.dtype.short}({operands[0]})"
    if x.op == "reduced":
        stage: Stage = x.value[0]
        number = f"[{x.value[1]}]" if len(stage.initial) > 1 else ""
        return f"{_REDUCTIONS.get(stage.reduction, 'reduction')}({', '.join(operands)}){number}"
    if x.op in INFIX and len(operands) == 2:
        return f"({operands[0]} {INFIX[x.op]} {operands[1]})"
    return f"{x.op}({', '.join(operands)})" if operands else x.op
