"""The operations of symbolic integers."""

from __future__ import annotations

import enum


class ExprOp(enum.IntEnum):
    """The comparisons and logical ones give 0 or 1. The numbers are ``ocp_expr_op``'s, which plans hold."""

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
