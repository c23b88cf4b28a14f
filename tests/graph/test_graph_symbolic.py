"""Symbolic integers, compared with plain ints, and the plan expressions (registers) that compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ort_cuda_plugin.plan.format import Plan
from ort_cuda_plugin.plan.registers import Registers
from ort_cuda_plugin.program.expressions import polynomial
from ort_cuda_plugin.program.expressions.operations import ExprOp
from ort_cuda_plugin.program.expressions.polynomial import Expr
from ort_cuda_plugin.program.expressions.symbolic import (
    READ_BACK,
    Dim,
    bounds,
    ceildiv,
    divides,
    eq,
    evaluators,
    floordiv,
    hint,
    is_read_back,
    le,
    logical_and,
    logical_not,
    logical_or,
    lt,
    mod,
    ne,
    product,
    select,
    sym_max,
    sym_min,
    symbol,
    truncdiv,
)
from plan_interpreter import evaluate, evaluate_registers

BINARY = {
    ExprOp.ADD: lambda a, b: a + b,
    ExprOp.SUB: lambda a, b: a - b,
    ExprOp.MUL: lambda a, b: a * b,
    ExprOp.FLOORDIV: floordiv,
    ExprOp.MOD: mod,
    ExprOp.CEILDIV: ceildiv,
    ExprOp.TRUNCDIV: truncdiv,
    ExprOp.MIN: sym_min,
    ExprOp.MAX: sym_max,
    ExprOp.EQ: eq,
    ExprOp.NE: ne,
    ExprOp.LT: lt,
    ExprOp.LE: le,
    ExprOp.AND: logical_and,
    ExprOp.OR: logical_or,
}
NUM_SYMBOLS = 4
leaves = st.one_of(
    st.tuples(st.just("symbol"), st.integers(0, NUM_SYMBOLS - 1)), st.tuples(st.just("int"), st.integers(-9, 9))
)
Tree: TypeAlias = tuple[Any, ...]
"""(operation, operands ...), ("symbol", number) or ("int", value)."""
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(BINARY)), inner, inner),
        st.tuples(st.just(ExprOp.SELECT), inner, inner, inner),
        st.tuples(st.just("not"), inner),
    ),
    max_leaves=12,
)
# Symbols 0 and 1 are dimensions, so they have a dimension's bounds. The others are host values and may be negative.
points = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(-12, 12), st.integers(-12, 12))


def build(tree: Tree, hints: tuple[int, ...]) -> Dim:
    """Return the tree as a Dim. Raises ZeroDivisionError if a divisor is the constant 0."""
    head, *rest = tree
    if head == "symbol":
        return symbol(
            rest[0], f"s{rest[0]}", hints[rest[0]], 0 if rest[0] < 2 else None, 2**40 if rest[0] < 2 else None
        )
    if head == "int":
        return int(rest[0])
    parts = [build(part, hints) for part in rest]
    if head == "not":
        return logical_not(parts[0])
    return select(*parts) if head is ExprOp.SELECT else BINARY[head](*parts)


def compute(tree: Tree, point: tuple[int, ...]) -> int:
    """Evaluate the tree with plain ints; ``point`` has the values of the symbols. Raises ZeroDivisionError."""
    head, *rest = tree
    if head == "symbol":
        return point[int(rest[0])]
    if head == "int":
        return int(rest[0])
    parts = [compute(part, point) for part in rest]
    return int(parts[0] == 0) if head == "not" else evaluators[head](*parts)


@given(trees, points, points)
def test_simplification_keeps_the_value_of_every_expression_that_divides_by_no_zero(
    tree: Tree, point: tuple[int, ...], hints: tuple[int, ...]
) -> None:
    try:
        expected = compute(tree, point)
        dim = build(tree, hints)
        actual = evaluate(dim, dict(enumerate(point)))
    except ZeroDivisionError:
        assume(False)
    assert actual == expected


@given(trees, points, points)
def test_products_that_are_no_polynomials_have_the_same_value_hint_and_bounds(
    tree: Tree, point: tuple[int, ...], hints: tuple[int, ...]
) -> None:
    try:
        expected, expected_hint = compute(tree, point), compute(tree, hints)
        with patch.object(polynomial, "MAX_DEGREE", 1):
            dim = build(tree, hints)
        actual = evaluate(dim, dict(enumerate(point)))
    except ZeroDivisionError:
        assume(False)
    assert (actual, hint(dim)) == (expected, expected_hint)
    low, high = bounds(dim)
    assert low is None or low <= expected
    assert high is None or high >= expected


@given(trees, points)
def test_the_hint_is_the_value_at_the_hinted_symbols(tree: Tree, point: tuple[int, ...]) -> None:
    try:
        expected = compute(tree, point)
        dim = build(tree, point)
    except ZeroDivisionError:
        assume(False)
    assert (dim if isinstance(dim, int) else dim.hint) == expected


@given(trees, points)
def test_the_value_lies_within_the_bounds(tree: Tree, point: tuple[int, ...]) -> None:
    try:
        dim = build(tree, point)
        value = evaluate(dim, dict(enumerate(point)))
    except ZeroDivisionError:
        assume(False)
    low, high = (dim, dim) if isinstance(dim, int) else dim.bounds
    assert low is None or low <= value
    assert high is None or value <= high


@given(st.lists(trees, min_size=1, max_size=3), points)
def test_registers_hold_what_the_expressions_mean(forest: list[Tree], point: tuple[int, ...]) -> None:
    registers = Registers(NUM_SYMBOLS)
    try:
        dims = [build(tree, point) for tree in forest]
        values = [evaluate(dim, dict(enumerate(point))) for dim in dims]
        numbers = [registers.of(dim) for dim in dims]
        assume(all(-(2**63) <= expr.imm < 2**63 for expr in registers.exprs))
        results = dict(enumerate(point))
        evaluate_registers(Plan(registers.count, inputs=(), outputs=(), exprs=tuple(registers.exprs)), results)
    except ZeroDivisionError:
        assume(False)
    assert [results[number] for number in numbers] == values


@given(trees, trees, points)
def test_equal_expressions_are_equal_everywhere_and_hash_alike(
    tree_a: Tree, tree_b: Tree, point: tuple[int, ...]
) -> None:
    try:
        a, b = build(tree_a, point), build(tree_b, point)
        same = evaluate(a, dict(enumerate(point))) == evaluate(b, dict(enumerate(point)))
    except ZeroDivisionError:
        assume(False)
    if a == b:
        assert same
        assert hash(a) == hash(b)
    assert build(tree_a, point) == a


@given(trees, st.integers(1, 6), points)
def test_divides_is_true_only_of_multiples(tree: Tree, divisor: int, point: tuple[int, ...]) -> None:
    try:
        dim = build(tree, point)
        value = evaluate(dim, dict(enumerate(point)))
    except ZeroDivisionError:
        assume(False)
    assert not divides(divisor, dim) or value % divisor == 0


B = symbol(0, "batch", 2)
S = symbol(1, "sequence", 16, 0, 2**40)
H = symbol(2, "host", 5, None, None)


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (B * S * 384 // (B * S), 384),
        (B * S * 384 // (384 * S), B),
        ((S * B + S) // (B + 1), S),
        ((4 * S + 3) // 4, S),
        (S // 2 // 3, S // 6),
        ((B * 8 + S) % 4, S % 4),
        ((B - S) + (S - B), 0),
        ((B + S) * (B - S) - B * B + S * S, 0),
        (ceildiv(B * 512, 256), 2 * B),
        (truncdiv(B * S * 12, 4), 3 * B * S),
        (sym_min(S, 2**63 - 1), S),
        (sym_max(S, 0), S),
        (sym_max(S + 3, S), S + 3),
        (sym_min(B, S), sym_min(S, B)),
        (sym_min(sym_min(B, H), H), sym_min(B, H)),
        (sym_max(H, sym_max(H, S)), sym_max(H, S)),
        (eq(B + 1, 0), 0),
        (le(-3 * B * S, 0), 1),
        (eq(B, S), eq(S, B)),
        (lt(B, B + 1), 1),
        (le(0, S), 1),
        (select(eq(B, -1), 7, B), B),
        (select(eq(B, S), S, B), B),
        (select(eq(H, 0), B, B), B),
        (logical_and(eq(H, 1), 1), eq(H, 1)),
        (logical_or(eq(H, 1), eq(H, 1)), eq(H, 1)),
        (logical_not(lt(H, B)), le(B, H)),
        (product([B, 12, S]), 12 * B * S),
    ],
)
def test_what_shape_arithmetic_must_fold_is_folded(dim: Expr | int, expected: Expr | int) -> None:
    assert dim == expected


def test_an_expression_has_neither_truth_nor_order() -> None:
    with pytest.raises(TypeError, match="cannot be a condition"):
        bool(B)
    with pytest.raises(TypeError, match="cannot be compared by <"):
        B < S  # noqa: B015
    with pytest.raises(TypeError, match="expected an integer"):
        range(B)
    assert (B == 2) is False


def padded_again_and_again() -> Dim:
    """Return a size padded 60 times to a multiple of 8. Each level refers to the one below twice: 2**60 paths."""
    size: Dim = H
    for _ in range(60):
        size = size + mod(-size, 8)
    return size


def test_work_does_not_grow_with_the_number_of_paths_through_shared_parts() -> None:
    size, same = padded_again_and_again(), padded_again_and_again()
    assert size is not same
    assert size == same
    assert size - same == 0
    assert eq(size, same + 1) == 0
    assert not is_read_back(size)
    assert is_read_back(size + symbol(READ_BACK, "r", 1))
    assert "..." in repr(size)
    assert len(repr(size)) < 10_000
    assert repr(mod(-H, 8) + 1) == "(mod(-1*host, 8) + 1)"


@pytest.mark.parametrize("base", [S, S + 2, B * S - 1, -3 * S])
def test_a_chain_of_squares_stays_small(base: Expr) -> None:
    power: Dim = base
    for _ in range(40):
        power = power * power
    assert eq(power + 1, power) == 0
    assert hint(power).bit_length() < 10_000
    registers = Registers(2)
    registers.of(power)
    assert len(registers.exprs) < 1000


@pytest.mark.parametrize("divide", [floordiv, mod, ceildiv, truncdiv])
def test_division_by_a_constant_zero_raises(divide: Callable[..., Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        divide(H, 0)


def test_common_subexpressions_are_computed_once() -> None:
    registers = Registers(2)
    registers.of(B * S * 384)
    registers.of(B * S * 1536)
    assert [expr.op.name for expr in registers.exprs] == ["MUL", "CONST", "MUL", "CONST", "MUL"]


def test_a_choice_has_a_value_in_the_segment_that_reads_its_last_operand_back() -> None:
    registers = Registers(2)
    registers.read_back(READ_BACK, 1, segment=1)
    read = symbol(READ_BACK, "read", 3)
    chosen = [registers.of(select(eq(B, S), *operands)) for operands in ((B, S * 2), (B, read), (read, S))]
    assert [registers.segment(register) for register in chosen] == [0, 1, 1]
