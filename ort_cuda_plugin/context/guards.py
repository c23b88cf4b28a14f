"""Evaluates a plan's guards in Python: whether the plan accepts given inputs, and if not, which guard fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..plan.format import Plan, PlanExpr
from ..program.expressions.operations import ExprOp
from ..program.expressions.symbolic import evaluators

_SIGNS = {
    ExprOp.ADD: "+",
    ExprOp.SUB: "-",
    ExprOp.MUL: "*",
    ExprOp.FLOORDIV: "//",
    ExprOp.TRUNCDIV: "/",
    ExprOp.MOD: "%",
    ExprOp.EQ: "==",
    ExprOp.NE: "!=",
    ExprOp.LT: "<",
    ExprOp.LE: "<=",
    ExprOp.AND: "and",
    ExprOp.OR: "or",
}
_OPERANDS = {ExprOp.CONST: 0, ExprOp.SELECT: 3}
_MAX_TEXT_DEPTH = 12
_MAX_REGISTERS = 1 << 16
"""Maximum number of an input's dimensions, and of its elements that the host reads. Each has a register."""


class Guards:
    """The guards of ``plan``; ``names`` are the names of the plan's inputs.

    Raises:
        ValueError: the plan contradicts itself.
    """

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        self.plan = plan
        self.names = names
        self._exprs = {expr.dst: expr for expr in plan.exprs}
        self._registers: dict[int, str] = {}
        for name, given in zip(names, plan.inputs, strict=True):
            if max(given.rank, given.host_count) > _MAX_REGISTERS:
                raise ValueError(
                    f"input {name!r}: got {given.rank} dimensions and {given.host_count} elements that the host reads, "
                    f"expected at most {_MAX_REGISTERS} dimensions and {_MAX_REGISTERS} elements"
                )
            for axis in range(given.rank):
                self._registers[given.first_register + axis] = f"{name}.shape[{axis}]"
            if given.host_register is not None:
                for index in range(given.host_count):
                    self._registers[given.host_register + index] = f"{name}[{index}]"

    def texts(self) -> list[str]:
        """Return each guard as the text of an expression of the inputs' dimensions and host elements."""
        return [self._text(register, 0) for register in self.plan.guards]

    def refusal(self, shapes: Sequence[Sequence[int]], host_values: Mapping[int, Sequence[int]]) -> str:
        """Return why the plan does not accept the inputs; "" if it does.

        ``host_values`` maps the index of an input that the host reads to the input's contents.
        """
        values: dict[int, int] = {}
        for index, (name, given, shape) in enumerate(zip(self.names, self.plan.inputs, shapes, strict=True)):
            if len(shape) != given.rank:
                return f"{name!r} has {given.rank} dimensions in the plan, {len(shape)} in the Run"
            values.update((given.first_register + axis, dim) for axis, dim in enumerate(shape))
            if given.host_register is not None:
                contents = host_values.get(index, ())
                if len(contents) != given.host_count:
                    return f"{name!r} has {given.host_count} elements in the plan, {len(contents)} in the Run"
                values.update((given.host_register + i, int(x)) for i, x in enumerate(contents))
        for expr in self.plan.exprs:
            if expr.segment == 0 and not self._define(expr, values):
                return f"the plan is damaged: register {expr.dst} has no value"
        for register in self.plan.guards:
            if not values.get(register, 0):
                return self._why(register, values)
        return ""

    @staticmethod
    def _define(expr: PlanExpr, values: dict[int, int]) -> bool:
        operands = (expr.a, expr.b, expr.c)[: _OPERANDS.get(expr.op, 2)]
        try:
            known = [values[register] for register in operands]
            values[expr.dst] = expr.imm if expr.op is ExprOp.CONST else evaluators[expr.op](*known)
        except ZeroDivisionError:
            values[expr.dst] = 0  # a division by 0 may be in the unused branch of a select
        except KeyError:
            return False
        return True

    def _why(self, register: int, values: dict[int, int]) -> str:
        used = sorted(self._leaves(register, set()))
        came = ", ".join(f"{self._registers[leaf]} is {values[leaf]}" for leaf in used)
        return f"it requires {self._text(register, 0)}, but {came}"

    def _leaves(self, register: int, seen: set[int]) -> set[int]:
        if register in seen:
            return set()
        seen.add(register)
        expr = self._exprs.get(register)
        if expr is None:
            return {register} & self._registers.keys()
        operands = (expr.a, expr.b, expr.c)[: _OPERANDS.get(expr.op, 2)]
        return set().union(*(self._leaves(operand, seen) for operand in operands))

    def _text(self, register: int, depth: int) -> str:
        expr = self._exprs.get(register)
        if expr is None:
            return self._registers.get(register, f"register {register}")
        if expr.op is ExprOp.CONST:
            return str(expr.imm)
        if depth > _MAX_TEXT_DEPTH:
            return "..."
        operands = (expr.a, expr.b, expr.c)[: _OPERANDS.get(expr.op, 2)]
        parts = [self._text(operand, depth + 1) for operand in operands]
        if expr.op in _SIGNS:
            inner = f" {_SIGNS[expr.op]} ".join(parts)
            return f"({inner})" if depth else inner
        return f"{expr.op.name.lower()}({', '.join(parts)})"
