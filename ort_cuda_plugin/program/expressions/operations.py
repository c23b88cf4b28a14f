"""The operations of symbolic integers."""

from __future__ import annotations

import enum


class ExprOp(enum.IntEnum):
    """Comparisons and logical operations give 0 or 1. The numbers are those of ``ocp_expr_op`` in plans."""

    CONST = 0
    ADD = 1
    SUB = 2
    MUL = 3
    FLOORDIV = 4
    MOD = 5
    CEILDIV = 6
    MIN = 7
    MAX = 8
    EQ = 9
    NE = 10
    LT = 11
    LE = 12
    AND = 13
    OR = 14
    SELECT = 15
    TRUNCDIV = 16
