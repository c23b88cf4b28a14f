"""Low-rank fusion: a GEMM kernel also computes a low-rank product that is added to the result of the GEMM (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...kernels.gemm.dispatch import folded
from ...kernels.gemm.tf32_weights_as_f16 import has_compact_columns, has_compact_lines
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import hint
from ...program.lowering.context import Lowering
from ...program.steps.schedule import Engine
from ...program.steps.steps import (
    Contract,
    Input,
    LowRank,
    Substitution,
    dense,
    joined_nodes,
    stored,
    used_inputs,
)
from ...program.steps.tensor import BufferKind, Tensor, contiguous_strides
from ...program.steps.trace import ReadBack, Step
from ...schedule.choose import candidates
from ..analysis.uses import Uses
from ..fusion.vertical_fusion import is_small, reads_all

__all__ = ["fuse_low_rank"]

MAX_RANK = 256
"""Maximum rank, known or expected, of a product that is fused: adapters have ranks of 4 to 256."""


def fuse_low_rank(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Fuse a low-rank product into the base product: one kernel accumulates the terms of both products.

    Assumes: epilogues are fused, so that the epilogue of one of the two products adds the result of the other one. The
        left operand of the low-rank product is a product of the base product's left operand, as in LoRA.
    Guarantees: the result of one of the products is not stored. A value that the model rounds to a narrow type before
        the addition is not rounded. The guards of the base product's schedule become guards of the plan.
    Example: ``d = MatMul(x, a); u = MatMul(d, b); y = MatMul(x, w) + u`` -> ``d = MatMul(x, a); y = [x d] @ [w; b]``.
    """
    result: list[Step | None] = list(steps)
    uses = Uses(enumerate(steps))
    for position, step in enumerate(steps):
        if not isinstance(step, Contract):
            continue
        for _, x in step.inputs:
            start = uses.replaceable_writer(x.buffer, position, step)
            other = None if start is None else result[start]
            if start is None or not isinstance(other, Contract) or _is_changed(steps, uses, start, position):
                continue
            fused = _fused(ctx, uses, result, (other, step), x)
            if fused is not None:
                result[start], result[position] = None, fused
                break
    return [step for step in result if step is not None]


def _is_changed(steps: Sequence[Step], uses: Uses[int], start: int, end: int) -> bool:
    """Return whether the inputs of the step at ``start`` change before ``end``, or a read-back lies between."""
    if any(isinstance(step, ReadBack) for step in steps[start:end]):
        return True
    return any(start < writer < end for buffer in steps[start].reads for writer in uses.writers(buffer))


def _fused(
    ctx: Lowering, uses: Uses[int], steps: Sequence[Step | None], pair: tuple[Contract, Contract], x: Tensor
) -> Contract | None:
    """Return one step for a ``pair`` of products; the second product reads the result of the first one through x.

    Returns None if neither product is an adapter of the other one, or if a single kernel is impossible or slower.
    """
    other, step = pair
    if not _is_plain(step) or not _is_plain(other) or len(other.outputs) != 1:
        return None
    (value, y), leaf = other.outputs[0], next(leaf for leaf, z in step.inputs if z is x)
    if not dense(y) or not reads_all(x, step.shape, y, contiguous_strides(step.shape)):
        return None
    if step.shape != other.shape and any(z.size != 1 for _, z in other.inputs):
        return None
    inlined = Substitution({leaf: stored(value)})
    outputs = tuple((inlined(value), y) for value, y in step.outputs)
    inputs = (*((own, z) for own, z in step.inputs if own is not leaf), *other.inputs)
    for base, low in ((step, other), (other, step)):
        if not _is_adapter(uses, steps, low, base):
            continue
        found = _without_term([value for value, _ in outputs], inputs, base.total, low.total)
        if found is None or not _pays(ctx, base) or not all(folded(ctx, each).rows_folded for each in (base, low)):
            continue
        values, scale = found
        joint = replace(
            step,
            nodes=joined_nodes(other, step),
            operands=base.operands,
            conversions=base.conversions,
            total=base.total,
            inputs=used_inputs(inputs, values),
            outputs=tuple((value, y) for value, (_, y) in zip(values, outputs, strict=True)),
            low_rank=LowRank(low.a, low.b, scale),
        )
        return joint if is_small(joint) else None
    return None


def _is_plain(step: Contract) -> bool:
    return step.low_rank is None and step.schedule is None and not step.column_parts and step.total.dtype.is_float


def _is_adapter(uses: Uses[int], steps: Sequence[Step | None], low: Contract, base: Contract) -> bool:
    """Return whether ``low`` is the second product of an adapter of ``base``, and a kernel can multiply the operands of
    both.

    ``base`` multiplies constant weights. The rank may be 0, other dimensions may not.
    """
    writers = [steps[number] for number in uses.writers(low.a.buffer)]
    if not any(isinstance(down, Contract) and down.a.buffer is base.a.buffer for down in writers):
        return False
    rank, depth = low.a.shape[-1], base.a.shape[-1]
    if not base.b.is_constant or hint(rank) > MAX_RANK or 2 * hint(rank) > hint(depth) or 0 in (depth, *base.shape):
        return False
    if low.is_converted or base.conversions[0] is not None or low.total.dtype is not base.total.dtype:
        return False
    return low.a.dtype is low.b.dtype is base.a.dtype


def _pays(ctx: Lowering, base: Contract) -> bool:
    """Return whether one of the plugin's kernels computes ``base``, so that the kernel can add the second product.

    A library adds the second product to the stored result of the first one. Weights that the device converts to scaled
    float16 give accumulators with a scale of their own. A split-K kernel would add the second product in each split.
    """
    if has_compact_lines(ctx, base) or has_compact_columns(ctx, base):
        return False
    choice = next(iter(candidates(ctx, base)), None)
    if choice is None or choice.schedule.engine is Engine.LIBRARY or choice.schedule.split_k > 1:
        return False
    return all(ctx.settled(guard) for guard in choice.guards)


def _without_term(
    values: Sequence[Scalar], inputs: Sequence[Input], base: Scalar, low: Scalar
) -> tuple[list[Scalar], Tensor | None] | None:
    """Remove the accumulator ``low`` from a sum that also has the accumulator ``base`` as a term.

    Returns the new values, and the tensor by which ``low`` is multiplied (None: ``low`` has no factor). Returns None if
    the values have no such sum, or use ``low`` in another way as well.
    """
    users: dict[Scalar, list[Scalar]] = {value: [value] for value in values}
    for each in reachable(values):
        for operand in each.operands:
            users.setdefault(operand, []).append(each)
    scale, term = None, _rounded(low, users)
    product = _user(term, users)
    if product is not None and product.op == "mul":
        factor = _uncast(product.operands[1 - product.operands.index(term)])
        scale = next((x for leaf, x in inputs if leaf is factor), None)
        if scale is None or scale.size != 1 or not scale.dtype.is_float or scale.buffer.kind is BufferKind.HOST:
            return None
        term = _rounded(product, users)
    addition = _user(term, users)
    if addition is None or addition.op != "add" or set(_sums_above(term, users)).isdisjoint(_sums_above(base, users)):
        return None
    rest = s.cast(addition.operands[1 - addition.operands.index(term)], addition.dtype)
    changed = Substitution({addition: rest})
    return [changed(value) for value in values], scale


def _user(x: Scalar, users: Mapping[Scalar, Sequence[Scalar]]) -> Scalar | None:
    """Return the only operation that uses x; None if there are several, or if x is a result."""
    own = users.get(x, ())
    return own[0] if len(own) == 1 and own[0] is not x else None


def _rounded(x: Scalar, users: Mapping[Scalar, Sequence[Scalar]]) -> Scalar:
    """Follow x's only use, as long as it is a cast to a float type. Return the last cast, or x if there is none."""
    while (user := _user(x, users)) is not None and user.op == "cast" and user.dtype.is_float:
        x = user
    return x


def _sums_above(x: Scalar, users: Mapping[Scalar, Sequence[Scalar]]) -> list[Scalar]:
    """Return the additions that have x as a term: its user, the user of this sum, and so on, perhaps after casts."""
    found = []
    while (user := _user(_rounded(x, users), users)) is not None and user.op == "add":
        found.append(user)
        x = user
    return found


def _uncast(x: Scalar) -> Scalar:
    """Return x without casts between float types around it."""
    while x.op == "cast" and x.dtype.is_float and x.operands[0].dtype.is_float:
        (x,) = x.operands
    return x
