"""Compiler from symbolic integers to a plan's register expressions, with common subexpression elimination."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..model.ir import InvalidModel, Node
from ..program.expressions.operations import ExprOp
from ..program.expressions.symbolic import READ_BACK, Atom, Dim, Expr, Monomial
from .format import PlanExpr


class Registers:
    """The registers of one plan.

    The first ``num_inputs`` registers hold the inputs' dimensions and host values: symbol n is register n. Registers of
    `read_back` follow; ``exprs`` defines the other registers in order. Each expression has a node, which errors name:
    the one in ``origins`` for the expression or for the innermost expression that contains it, else ``node``, the node
    that is being planned. ``number`` returns the index of a node.
    """

    def __init__(
        self,
        num_inputs: int,
        origins: Mapping[Expr | Monomial, Node] | None = None,
        number: Callable[[Node], int] | None = None,
    ) -> None:
        self.count = num_inputs
        self.node: Node | None = None
        self.exprs: list[PlanExpr] = []
        self._segments = [0] * num_inputs
        self._read_back: dict[int, int] = {}
        self._num_inputs = num_inputs
        self._computed: dict[tuple[ExprOp, int, int, int], int] = {}
        self._constants: dict[int, int] = {}
        self._dims: dict[Dim, int] = {}
        self._origins = origins or {}
        self._number = number

    def read_back(self, first_symbol: int, count: int, segment: int) -> int:
        """Assign registers to ``count`` symbols that are read back before ``segment``; return the first register.

        Call this before any expression is compiled, because operands must have smaller registers than results.
        """
        first = self.count
        self._read_back.update({first_symbol + i: first + i for i in range(count)})
        self._segments += [segment] * count
        self.count += count
        return first

    def segment(self, register: int) -> int:
        """Return the first segment in which the register's value is known."""
        return self._segments[register]

    def of(self, dim: Dim) -> int:
        """Return the register that holds ``dim``. Raises InvalidModel for a constant beyond 64 bits."""
        register = self._dims.get(dim)
        if register is None:
            register = self._dims[dim] = self._constant(dim) if isinstance(dim, int) else self._nested(dim)
        return register

    def _nested(self, dim: Expr) -> int:
        """Compile the operands of ``dim`` and then itself; return its register.

        An explicit stack replaces recursion, because a model may nest operations without limit.
        """
        outer = self.node
        pending = [(dim, outer)]
        while pending:
            value, self.node = pending[-1]
            self._enter(value)
            operands = [] if value in self._dims else self._missing_operands(value)
            if operands:
                pending += reversed(operands)
                continue
            if value not in self._dims:
                self._dims[value] = self._polynomial(value)
            pending.pop()
        self.node = outer
        return self._dims[dim]

    def _missing_operands(self, expr: Expr) -> list[tuple[Expr, Node | None]]:
        """Return the operands of ``expr`` that have no register yet, each with the node to name in errors about it."""
        return [
            (arg, self._origins.get(monomial, self.node))
            for monomial, _ in expr.terms
            for atom in monomial
            if atom.op is not None
            for arg in atom.args
            if isinstance(arg, Expr) and arg not in self._dims
        ]

    def _constant(self, value: int) -> int:
        if value not in self._constants:
            if not -(2**63) <= value < 2**63:
                raise InvalidModel(f"the integer {value} does not fit 64 bits")
            self._constants[value] = self._append(PlanExpr(ExprOp.CONST, self.count, imm=value), 0)
        return self._constants[value]

    def _append(self, expr: PlanExpr, segment: int) -> int:
        self.exprs.append(expr)
        self._segments.append(segment)
        self.count += 1
        return expr.dst

    def _compute(self, op: ExprOp, a: int, b: int, c: int = 0) -> int:
        key = op, a, b, c
        if key not in self._computed:
            operands = (a, b, c) if op is ExprOp.SELECT else (a, b)
            segment = max(self._segments[operand] for operand in operands)
            node = None if self.node is None or self._number is None else self._number(self.node)
            self._computed[key] = self._append(PlanExpr(op, self.count, a, b, c, segment, node=node), segment)
        return self._computed[key]

    def _polynomial(self, expr: Expr) -> int:
        total: int | None = None
        for monomial, coefficient in sorted(expr.terms, key=lambda term: term[1] < 0):
            term = self._monomial(monomial)
            if total is not None and coefficient < 0:
                total = self._compute(ExprOp.SUB, total, self._scaled(term, -coefficient))
            else:
                scaled = self._scaled(term, coefficient)
                total = scaled if total is None else self._compute(ExprOp.ADD, total, scaled)
        assert total is not None
        if expr.const:
            total = self._compute(ExprOp.ADD, total, self._constant(expr.const))
        return total

    def _enter(self, value: Expr | Monomial) -> Node | None:
        """Set ``node`` to the origin of ``value``, if it has one; return the previous node."""
        outer = self.node
        self.node = self._origins.get(value, outer)
        return outer

    def _scaled(self, register: int, factor: int) -> int:
        return register if factor == 1 else self._compute(ExprOp.MUL, register, self._constant(factor))

    def _monomial(self, monomial: Monomial) -> int:
        outer = self._enter(monomial)
        result = self._atom(monomial[0])
        for atom in monomial[1:]:
            result = self._compute(ExprOp.MUL, result, self._atom(atom))
        self.node = outer
        return result

    def _atom(self, atom: Atom) -> int:
        if atom.op is None:
            number = atom.args[0]
            assert isinstance(number, int)
            if number >= READ_BACK:
                return self._read_back[number]
            assert number < self._num_inputs, "a symbol of another plan"
            return number
        return self._compute(atom.op, *(self.of(arg) for arg in atom.args))
