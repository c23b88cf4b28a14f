"""Horizontal fusion of GEMMs with one left operand and different constant weights, such as Q, K and V projections."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ...program.expressions.scalar import reachable
from ...program.expressions.symbolic import Dim
from ...program.steps.steps import Contract, dense, joined_nodes
from ...program.steps.tensor import Buffer, BufferKind, Tensor, contiguous_strides
from ...program.steps.trace import Step
from ...program.termination import Measure
from ..analysis.expression_equality import Expression, completed, joined_constant, joined_inputs, result_of, same_leaves
from ..analysis.uses import Uses
from ..simplification.concat_elimination import Copy, with_view

COLUMNS = -1
"""The axis along which the GEMMs' results are concatenated."""


def merge_gemms(steps: Sequence[Step]) -> list[Step]:
    """Merge GEMMs of one left operand with constant weights into one GEMM over joined columns (Q, K and V).

    Assumes: epilogues are fused.
    Guarantees: GEMMs stay separate if a step after the first of them writes the left operand. Results become views of
        the joined result. A shorter epilogue gets additions of -0.0 and factors of 1.0, which change no bit.
    Example: ``q = MatMul(x, wq); k = MatMul(x, wk)`` -> ``qk = MatMul(x, [wq wk]); q, k = views of qk``.
    """
    result: list[Step] = list(steps)
    groups: dict[Hashable, list[int]] = {}
    for position, step in enumerate(result):
        if isinstance(step, Contract) and not step.is_converted and step.low_rank is None and _is_mergeable(step):
            groups.setdefault(_operand_key(step), []).append(position)
    uses = Uses(enumerate(result))
    gone: set[int] = set()
    for positions in groups.values():
        measure = Measure("horizontal_gemm")
        while len(positions) > 1:
            measure.fall(len(positions), result[positions[0]].node)
            # Shorter epilogues are padded to the longest one with neutral additions and multiplications.
            longest = max(positions, key=lambda position: _length(_contract(result, position)))
            group = _group_of(result, longest, positions)
            positions = [position for position in positions if position not in group]
            if len(group) > 1 and _merge(result, group, uses):
                gone.update(list(group)[1:])
    return [step for position, step in enumerate(result) if position not in gone]


def _is_mergeable(step: Contract) -> bool:
    """Return whether the GEMM can be merged: constant weights, a single intermediate result, and a suitable epilogue.

    An epilogue with an operand that varies along both rows and columns, such as a residual, matches no other epilogue.
    """
    if len(step.outputs) != 1 or step.b.rank != 2 or not step.b.is_constant or step.column_axes != 1:
        return False
    own, y = result_of(step), step.outputs[0][1]
    if not dense(y) or y.buffer.kind is not BufferKind.SCRATCH or not isinstance(step.shape[-1], int):
        return False
    return same_leaves(own, own, COLUMNS) is not None


def _contract(steps: Sequence[Step], position: int) -> Contract:
    step = steps[position]
    assert isinstance(step, Contract)
    return step


def _length(step: Contract) -> int:
    return len(reachable([step.outputs[0][0]]))


def _group_of(steps: Sequence[Step], longest: int, positions: Sequence[int]) -> dict[int, Expression]:
    """Return the padded epilogue of each GEMM that matches the GEMM at ``longest``, by position.

    The GEMM at ``longest`` matches itself. The result is in program order, like ``positions``, since `_merge` replaces
    the first GEMM.
    """
    model = result_of(_contract(steps, longest))
    found = {}
    for position in positions:
        own = completed(model, result_of(_contract(steps, position)), COLUMNS)
        if same_leaves(model, own, COLUMNS) is not None:
            found[position] = own
    return found


def _operand_key(step: Contract) -> Hashable:
    a, b = step.a, step.b
    return a.buffer, a.dtype, a.shape, a.strides, a.offset, b.shape[0], step.outputs[0][1].dtype


def _merge(steps: list[Step], results: Mapping[int, Expression], uses: Uses[int]) -> bool:
    positions, (own, *others) = list(results), results.values()
    products = [_contract(steps, position) for position in positions]
    first = products[0]
    if any(writer > positions[0] for writer in uses.writers(first.a.buffer)):
        return False
    width = sum(operator.index(step.shape[-1]) for step in products)
    shape: tuple[Dim, ...] = (*first.shape[:-1], width)
    result = first.outputs[0][1]
    nbytes = result.buffer.nbytes * width // operator.index(first.shape[-1])
    joined = Tensor(result.dtype, shape, Buffer(BufferKind.SCRATCH, nbytes))
    copies = []
    offset = 0
    for step in products:
        target = Tensor(result.dtype, step.shape, joined.buffer, strides=contiguous_strides(shape), offset=offset)
        copies.append(Copy(0, step.outputs[0][1], target))
        offset += operator.index(step.shape[-1])
    changed: dict[int, Step] = {}
    for copy in copies:
        for user in uses.users(copy.source.buffer):
            if user in positions:
                continue
            viewed = with_view(changed.get(user, steps[user]), copy)
            if viewed is None:
                return False
            changed[user] = viewed
    inputs = joined_inputs(own, others, COLUMNS, shape)
    merged = replace(
        first,
        nodes=joined_nodes(*products),
        shape=shape,
        operands=(first.a, joined_constant([step.b for step in products], axis=1)),
        inputs=inputs,
        outputs=((own.value, joined),),
    )
    for position in positions:
        uses.leave(position, steps[position])
    changed[positions[0]] = merged
    for user, new in changed.items():
        if user not in positions:
            uses.leave(user, steps[user])
        uses.enter(user, new)
        steps[user] = new
    return True
