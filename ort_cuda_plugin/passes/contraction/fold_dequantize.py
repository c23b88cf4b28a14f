"""Operand prologues: folds dequantization and casts into the operand loads of GEMMs and convolutions.

A GEMM then loads the quantized elements and converts them in registers. GEMMs that a library computes are excluded:
libraries accept no prologue, and a library's kernel saves more time than reading fewer bytes would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...kernels.gemm.dispatch import contiguous_axis
from ...model.ir import HALVES, DType
from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering
from ...program.lowering.shapes import broadcast_strides, collapse
from ...program.steps.schedule import Engine, Schedule
from ...program.steps.steps import Contract, Conversion, Convolve, Map, Substitution, Sums, dense, stored, used_inputs
from ...program.steps.tensor import Buffer, BufferKind, Tensor
from ...program.steps.trace import Step
from ...schedule.choose import has_integer_operands
from ...schedule.conv import is_direct
from ..analysis.affine_view import find_path
from ..analysis.uses import Uses
from ..simplification.dead_code_elimination import eliminate_dead_code

MAX_OPERATIONS = 16
"""Maximum operations of a prologue. A kernel repeats them for each result tile that loads the operand's element."""


def fold_dequantize(steps: Sequence[Step], wanted: Callable[[Sums], bool] | None = None) -> list[Step]:
    """Fold dequantization and casts into operand loads of the plugin's GEMMs and convolutions (operand prologues).

    With ``wanted``, a step is changed only if ``wanted`` is true for the changed step.

    Assumes: kernels are selected. A library accepts no prologue, so an elementwise step before a library call stays.
    Guarantees: an operand's prologue has at most 16 operations on the operand, constants and vectors along one of its
        axes. Values that no step reads after the pass are not stored.
    Example: ``w = Cast(w8) * scale; y = MatMul(x, w)`` -> ``y = MatMul(x, w8 with prologue Cast(w8) * scale)``.
    """
    result = list(steps)
    uses = Uses(enumerate(steps))
    for position, step in enumerate(steps):
        numbers = _operands(step, wanted is None)
        before = result.copy() if numbers else []
        for number in numbers:
            _narrow_operand(result, uses, position, number, wanted is not None)
        changed = result[position]
        if wanted and numbers and changed is not before[position]:
            assert isinstance(changed, Sums)
            if wanted(changed):
                continue
            for place, (old, new) in enumerate(zip(before, result, strict=True)):
                if old is not new:
                    _change(result, uses, place, old)
    return eliminate_dead_code(result)


def fold_dequantize_of_integers(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Fold DequantizeLinear into the operands of GEMMs and convolutions whose integer codes tensor cores multiply.

    Assumes: vertical fusion has joined each operand's conversion into one elementwise step.
    Guarantees: no library computes such a step in float32. A step that would not multiply integers is unchanged.
    Example: ``a = (qa - za) * sa; y = MatMul(a, b)`` -> ``y = MatMul(qa with prologue (qa - za) * sa, ...)``,
        multiplied as integers.
    """
    return fold_dequantize(steps, lambda step: has_integer_operands(ctx, step))


def _operands(step: Step, as_floats: bool) -> Sequence[int]:
    """Return the indices of the operands that the step's kernel can load with a prologue.

    The weights of a direct convolution have no prologue: they are reordered once, for all Runs. A convolution with an
    empty result has no such operands. Without ``as_floats`` only transposed convolutions count as direct, since tensor
    cores may multiply the integer codes of other convolutions.
    """
    if isinstance(step, Convolve):
        return () if 0 in step.shape else (0,) if is_direct(step) and (as_floats or step.transposed) else (0, 1)
    return (0, 1) if isinstance(step, Contract) else ()


def _narrow_operand(steps: list[Step], uses: Uses[int], position: int, number: int, twice: bool) -> None:
    """Fold the conversion of operand ``number`` into the step at ``position``.

    With ``twice``, the producer stores the narrow value in addition to the wide one, if other steps read the wide one.
    """
    step = steps[position]
    assert isinstance(step, Sums)
    x = step.operands[number]
    writers = uses.writers(x.buffer)
    producer = steps[writers[0]] if len(writers) == 1 else None
    if x.buffer.kind is not BufferKind.SCRATCH or not isinstance(producer, Map):
        return
    made = [(value, y) for value, y in producer.outputs if y.buffer is x.buffer]
    if len(made) != 1 or not dense(made[0][1]) or made[0][1].dtype is not x.dtype or made[0][1].shape != producer.shape:
        return
    value = made[0][0]
    single = {leaf: y for leaf, y in producer.inputs if _has_one_axis(y, producer.shape)}
    source = _source(value, single)
    if source is None:
        return
    kept = _kept(producer, source)
    if kept is None:
        if source.op == "leaf" or (not twice and any(user != position for user in uses.readers(x.buffer))):
            return
        kept = Tensor(source.dtype, producer.shape, Buffer(BufferKind.SCRATCH, made[0][1].size * source.dtype.itemsize))
    placed = [_placed(y, x, producer.shape) for y in (kept, *single.values())]
    leaf = Scalar(source.dtype, "leaf")
    inputs = []
    for old, y in zip(single, placed[1:], strict=True):
        if y is None:
            return
        inputs.append((old, y))
    operand = placed[0]
    expression = Substitution({source: leaf})(stored(value))
    conversion = Conversion(leaf, expression, used_inputs(inputs, [expression]))
    if operand is None or not _is_loadable(step, number, operand, conversion):
        return
    read = (operand, *(y for _, y in conversion.inputs))
    if any(writer > writers[0] for y in read for writer in uses.writers(y.buffer)):
        return  # a later step overwrites the source, and the GEMM would load the new value
    if not uses.writers(kept.buffer) and kept.buffer.kind is BufferKind.SCRATCH:
        _change(steps, uses, writers[0], replace(producer, outputs=(*producer.outputs, (source, kept))))
    operands, conversions = list(step.operands), list(step.conversions)
    operands[number], conversions[number] = operand, conversion
    nodes = tuple(dict.fromkeys((*producer.nodes, *step.nodes))) if source.op == "leaf" else step.nodes
    changed = replace(
        step,
        nodes=nodes,
        operands=tuple(operands),
        conversions=tuple(conversions),
        schedule=step.schedule if _takes_conversions(step.schedule) else None,
    )
    _change(steps, uses, position, changed)


def _takes_conversions(schedule: Schedule | None) -> bool:
    """Return whether the schedule remains valid with other operands: its kernels load any type and layout."""
    if schedule is None or schedule.engine not in (Engine.SIMT, Engine.DIRECT):
        return False
    return not schedule.gemv_rows and not schedule.im2col_pixels and not schedule.is_transposed


def fold_dequantize_into_inputs(steps: Sequence[Step]) -> list[Step]:
    """Fold DequantizeLinear into the epilogues and maps that read a dequantized tensor, such as a residual addition.

    Assumes: the codes are stored anyway, for a GEMM or a convolution.
    Guarantees: a float tensor that no other step reads is not stored.
    Example: ``q = Quantize(r); f = Dequantize(q); y = p + f`` -> ``q = Quantize(r); y = p + Dequantize(q)``.
    """
    result = list(steps)
    uses = Uses(enumerate(steps))
    for position, step in enumerate(steps):
        if type(step) in (Map, Contract, Convolve):
            assert isinstance(step, Map)
            for leaf, x in step.inputs:
                changed = _with_narrow_input(result, uses, result[position], leaf, x)
                if changed is not None:
                    _change(result, uses, position, changed)
    return eliminate_dead_code(result)


def _with_narrow_input(steps: list[Step], uses: Uses[int], step: Step, leaf: Scalar, x: Tensor) -> Map | None:
    """Return the step with the narrower source of x as an input instead of x; None if no such source is in memory."""
    writers = uses.writers(x.buffer)
    producer = steps[writers[0]] if len(writers) == 1 else None
    if x.buffer.kind is not BufferKind.SCRATCH or not isinstance(producer, Map) or not isinstance(step, Map):
        return None
    made = [(value, y) for value, y in producer.outputs if y.buffer is x.buffer and y.dtype is x.dtype]
    if len(made) != 1 or not dense(made[0][1]) or made[0][1].shape != producer.shape:
        return None
    single = {old: y for old, y in producer.inputs if _has_one_axis(y, producer.shape)}
    source = _source(made[0][0], single)
    kept = None if source is None or source.op == "leaf" else _kept(producer, source)
    if source is None or kept is None:
        return None
    leaves = {old: Scalar(old.dtype, "leaf") for old in (source, *single)}
    inputs = list(step.inputs)
    for old, y in ((source, kept), *single.items()):
        placed = _placed(y, x, producer.shape)
        if placed is None or any(writer > writers[0] for writer in uses.writers(y.buffer)):
            return None
        inputs.append((leaves[old], placed))
    changed = Substitution({leaf: Substitution(leaves)(stored(made[0][0]))})
    outputs = tuple((changed(value), y) for value, y in step.outputs)
    return replace(step, inputs=used_inputs(inputs, [value for value, _ in outputs]), outputs=outputs)


def _change(steps: list[Step], uses: Uses[int], position: int, step: Step) -> None:
    uses.leave(position, steps[position])
    steps[position] = step
    uses.enter(position, step)


def _has_one_axis(x: Tensor, shape: Sequence[Dim]) -> bool:
    """Return whether x, broadcast to ``shape``, varies along at most one dimension."""
    strides = broadcast_strides(x, shape)
    return sum(stride != 0 and dim != 1 for stride, dim in zip(strides, shape, strict=True)) < 2


def _source(value: Scalar, single: dict[Scalar, Tensor]) -> Scalar | None:
    """Return the narrower value from which ``value`` is computed with constants and leaves in ``single`` alone.

    Returns None if there is no such value, or more than one.
    """
    found: set[Scalar] = set()
    seen: set[Scalar] = set()
    stack = [value]
    while stack:
        x = stack.pop()
        if x in seen or x in single or not _varies(x, single):
            continue
        seen.add(x)
        if x.dtype.itemsize < value.dtype.itemsize and _is_storable(x):
            found.add(x)
        elif not x.operands or x.op in ("reduced", "load"):
            return None
        else:
            stack += x.operands
    return found.pop() if len(found) == 1 and len(seen) <= MAX_OPERATIONS else None


def _varies(x: Scalar, single: dict[Scalar, Tensor]) -> bool:
    return any(not y.operands and y.op != "constant" and y not in single for y in reachable([x]))


def _is_storable(x: Scalar) -> bool:
    """Return whether x can be stored as it is, in an integer, boolean or 16-bit float type."""
    return x.dtype.is_integer or x.dtype is DType.BOOL or (x.dtype in HALVES and stored(x) is x)


def _kept(producer: Map, source: Scalar) -> Tensor | None:
    """Return the tensor in device memory that the producer loads as ``source``, or in which it stores ``source``.

    Returns None if there is none; a tensor that the producer stores must be dense and have the type of ``source``.
    """
    if source.op == "leaf":
        return next((x for leaf, x in producer.inputs if leaf is source and x.buffer.kind is not BufferKind.HOST), None)
    return next((y for x, y in producer.outputs if x is source and dense(y) and y.dtype is x.dtype), None)


def _placed(y: Tensor, x: Tensor, beneath: Sequence[Dim]) -> Tensor | None:
    """Return y viewed like x: y has dimensions ``beneath``, and x is a view of a dense tensor with these dimensions.

    Returns None if x is not an affine view of the dense tensor.
    """
    if y.size == 1:
        return Tensor(y.dtype, x.shape, y.buffer, strides=[0] * x.rank, offset=y.offset)
    path = find_path(x.shape, x.strides, x.offset, beneath)
    if path is None:
        return None
    strides = broadcast_strides(y, beneath)
    return Tensor(y.dtype, x.shape, y.buffer, strides=path.strides(strides), offset=y.offset + path.offset(strides))


def _is_loadable(step: Sums, number: int, x: Tensor, conversion: Conversion) -> bool:
    """Return whether the kernel can load operand x with the prologue, and still add the products in the same order."""
    axes = {
        axis
        for _, y in conversion.inputs
        for axis, (stride, dim) in enumerate(zip(y.strides, y.shape, strict=True))
        if stride != 0 and dim != 1
    }
    if isinstance(step, Convolve):
        return x.is_contiguous and axes <= ({0} if number else set())
    assert isinstance(step, Contract)
    old = step.operands[number]
    inner, outer = (x.rank - 1, x.rank - 2) if number == 0 else (x.rank - 2, x.rank - 1)
    # The rows of operand a may span batches, so a vector along the rows is allowed only without batch dimensions.
    along = {inner, outer} if number or all(dim == 1 for dim in x.shape[:-2]) else {inner}
    is_one_matrix = number == 0 and all(dim == 1 for dim in step.b.shape[:-2])
    if is_one_matrix and _row_dims(x) > _row_dims(old):
        return False  # batches with different prologues cannot be flattened into the rows of one GEMM
    return contiguous_axis(x, "row", "column") == contiguous_axis(old, "row", "column") and axes <= along


def _row_dims(x: Tensor) -> int:
    """Return the minimum number of dimensions that address all rows of the matrices x [batch..., m, k]."""
    dims, _ = collapse(x.shape[:-1], [x.strides[:-1]])
    return max(len(dims), 1)
