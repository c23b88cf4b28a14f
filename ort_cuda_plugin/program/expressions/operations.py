"""The operations of symbolic integers, with their numbers in serialized plans."""

from __future__ import annotations

import enum


class ExprOp(enum.IntEnum):
    """An operation of symbolic integers, by number in plans (``ocp_expr_op``). Comparisons and logic return 0 or 1."""

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
