"""Einsum, lowered to matrix products and reductions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from ....program.expressions.symbolic import Dim, eq, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.multiply import multiply
from ....program.lowering.reduce import reduce, row_map
from ....program.lowering.shapes import broadcast_shapes
from ....program.lowering.views import expand, permute, reshape, unsqueeze
from ....program.steps.row_program import SUM
from ... import requirements as require
from ...registry import FLOATS, INTS, op
from .matmul import PRODUCTS

Labels = list[str]

_term_pattern = re.compile(r"[A-Za-z]*(\.\.\.[A-Za-z]*)?")


def _labels(term: str, rank: int) -> Labels:
    """Return one label per dimension; the ellipsis stands for "...n", ..., "...1", "...0"."""
    valid = bool(_term_pattern.fullmatch(term))
    require.that(valid, "a term of equation", "have only letters and at most one ellipsis", repr(term))
    before, ellipsis, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not ellipsis):
        raise require.violation("a term of equation", f"name the {rank} dimensions of its input", repr(term))
    return [*before, *_hidden_labels(hidden), *after]


def _hidden_labels(count: int) -> Labels:
    return [f"...{number}" for number in reversed(range(count))]


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """Return the labels of each input's dimensions, and of the output's. Raises InvalidModel for a malformed equation.

    Without "->" the output has the ellipsis dimensions, then the labels that occur once, in alphabetical order.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    require.that(len(terms) == len(ranks), "equation", f"have a term for each of {len(ranks)} inputs", repr(equation))
    inputs = [_labels(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    every = [label for labels in inputs for label in labels]
    hidden = _hidden_labels(max((sum(label[0] == "." for label in labels) for labels in inputs), default=0))
    if not arrow:
        return inputs, [*hidden, *sorted(label for label in every if every.count(label) == 1 and label[0] != ".")]
    letters = len(right.replace("...", ""))
    output = _labels(right, letters + (len(hidden) if "..." in right else 0))
    are_known, expected = set(output) <= set(every), "name labels of the inputs, each at most once"
    require.that(are_known and len(set(output)) == len(output), "the output of equation", expected, repr(equation))
    return inputs, output


def _diagonal(ctx: Lowering, x: Tensor, labels: Labels) -> tuple[Tensor, Labels]:
    """Return the view of x's diagonal, in which each label has one dimension, and the labels of the view."""
    kept = list(dict.fromkeys(labels))
    shape: dict[str, Dim] = {}
    strides: dict[str, Dim] = {}
    for label, dim, stride in zip(labels, x.shape, x.strides, strict=True):
        first = shape.setdefault(label, dim)
        subject = f"the dimensions of an input that share the label {label!r}"
        require.holds(ctx, eq(first, dim), subject, "have the same size", f"{first!r} and {dim!r}")
        strides[label] = strides.get(label, 0) + stride
    return ctx.view(x, [shape[label] for label in kept], [strides[label] for label in kept], x.offset), kept


def _summed(ctx: Lowering, x: Tensor, labels: Labels, keep: Collection[str]) -> tuple[Tensor, Labels]:
    axes = [axis for axis, label in enumerate(labels) if label not in keep]
    if not axes:
        return x, labels
    total = reduce(ctx, lambda row, value: row.reduce(SUM, value), x, axes, keepdims=False)
    return total, [label for label in labels if label in keep]


def _ordered(ctx: Lowering, x: Tensor, labels: Labels, order: Iterable[str]) -> Tensor:
    """Return x with its dimensions in ``order``, with size 1 for missing labels."""
    order = list(order)
    present = permute(ctx, x, [labels.index(label) for label in order if label in labels])
    return unsqueeze(ctx, present, [axis for axis, label in enumerate(order) if label not in labels])


def _contract(
    ctx: Lowering, a: Tensor, a_labels: Labels, b: Tensor, b_labels: Labels, keep: Collection[str]
) -> tuple[Tensor, Labels]:
    """Contract two operands over the labels that are not in ``keep``; return the result and its labels."""
    a, a_labels = _summed(ctx, a, a_labels, {*keep, *b_labels})
    b, b_labels = _summed(ctx, b, b_labels, {*keep, *a_labels})
    common = [label for label in a_labels if label in b_labels]
    batch, inner = [x for x in common if x in keep], [x for x in common if x not in keep]
    rows, columns = [x for x in a_labels if x not in common], [x for x in b_labels if x not in common]
    labels = [*batch, *rows, *columns]
    if not inner or a.dtype not in PRODUCTS:
        left, right = (_ordered(ctx, x, own, [*labels, *inner]) for x, own in ((a, a_labels), (b, b_labels)))
        if not inner:
            return elementwise(ctx, lambda a, b: a * b, left, right), labels
        axes = range(len(labels), len(labels) + len(inner))
        total = row_map(ctx, lambda row, a, b: ([], [row.reduce(SUM, a * b)]), axes, left, right)[0]
        return ctx.view(total, total.shape[: len(labels)]), labels
    left = _ordered(ctx, a, a_labels, [*batch, *rows, *inner])
    right = _ordered(ctx, b, b_labels, [*batch, *inner, *columns])
    shape = (*left.shape[: len(batch) + len(rows)], *right.shape[len(batch) + len(inner) :])
    batches = left.shape[: len(batch)]
    m = product(left.shape[len(batch) : len(batch) + len(rows)])
    k = product(left.shape[len(batch) + len(rows) :])
    n = product(right.shape[len(batch) + len(inner) :])
    result = multiply(ctx, reshape(ctx, left, [*batches, m, k]), reshape(ctx, right, [*batches, k, n]))
    return ctx.view(result, shape), labels


@op("Einsum", since=12, types={"T": FLOATS | INTS})
def einsum(ctx: Lowering, *inputs: Tensor, equation: str) -> Tensor:
    """Contract the operands from left to right."""
    terms, output = parse_equation(equation, [x.rank for x in inputs])
    operands = [_diagonal(ctx, x, labels) for x, labels in zip(inputs, terms, strict=True)]
    sizes: dict[str, Dim] = {}
    for x, labels in operands:
        for label, dim in zip(labels, x.shape, strict=True):
            (sizes[label],) = broadcast_shapes(ctx, (sizes.get(label, 1),), (dim,))
    operands = [(expand(ctx, x, [sizes[label] for label in labels]), labels) for x, labels in operands]
    (total, labels), *others = operands
    for number, (x, x_labels) in enumerate(others, 1):
        keep = {*output, *(label for _, later in others[number:] for label in later)}
        total, labels = _contract(ctx, total, labels, x, x_labels, keep)
    total, labels = _summed(ctx, total, labels, output)
    return permute(ctx, total, [labels.index(label) for label in output])
