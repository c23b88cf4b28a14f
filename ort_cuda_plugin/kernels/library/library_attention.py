"""cuDNN attention: finds the Attend steps that cuDNN can compute, and records the calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...model.ir import HALVES, Array, DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import Dim, divides, hint, lt
from ...program.lowering.context import Arg, Int64, Lowering, Tensor
from ...program.lowering.shapes import broadcast_strides
from ...program.lowering.views import transpose_matrices
from ...program.steps.libraries import ATTENTION, WORKSPACE_BYTES, LibraryProblem, ProblemFlags
from ...program.steps.row_program import MAX, SUM
from ...program.steps.steps import Attend, Map, used_inputs
from ..codegen.source import constant_number
from ..contraction.epilogue_patterns import evaluate

WIDTHS = range(8, 129, 8)
"""Head sizes, in elements, that cuDNN's engines support."""
VECTOR = 8
"""Elements of a vectorized load in cuDNN's engines; strides must be multiples of this number."""
MIN_SCORES = 1 << 10
"""Minimum scores per head for which a call pays off, since cuDNN compiles an engine for about a second (estimate)."""
MAX_OPERATIONS = 80  # maximum operations of an attention weight's expression that is searched for a softmax

_SCORES = np.array([[-3.0, 0.5, 2.0, 1.25], [0.0, -70.0, 3.5, 3.0]])
_BIASES = np.array([[0.75, -1.0, 0.0, 4.0], [-1e4, 1.0, 0.5, 0.0]])


@dataclass(frozen=True)
class AttentionForm:
    """Arguments of a cuDNN attention call, which computes softmax(``scale`` * scores + ``bias``) @ v.

    ``numbers`` are the call's sizes and strides. The bias is a tensor, or ``computed``: an expression that a Map stores
    in a tensor of ``bias_shape`` before the call. Both are None without a bias.
    """

    scale: float
    numbers: tuple[Dim, ...]
    bias: Tensor | None = None
    computed: Scalar | None = None
    bias_shape: tuple[Dim, ...] = ()


@dataclass(frozen=True)
class Softmax:
    """Attention weights that are the softmax of ``scale`` * score * units + ``addend``, up to rounding.

    ``units`` are leaves of one-element tensors, whose values are known only on the device. ``addend`` is None for 0.
    """

    scale: float
    addend: Scalar | None
    units: tuple[Scalar, ...] = ()


def call_cudnn_attention(ctx: Lowering, step: Attend) -> bool:
    """Record a cuDNN call for the step; return False if cuDNN is missing or cannot compute the step."""
    form = attention_form(ctx, step)
    if form is None or not ctx.try_guard(lt(0, step.score_shape[-1])):
        return False
    out = step.outputs[0][1]
    biases = [] if form.bias is None else [form.bias]
    if form.computed is not None:
        biases = [ctx.empty(form.bias_shape, out.dtype)]
        inputs = used_inputs(step.score_inputs, [form.computed])
        ctx.record(Map(step.nodes, form.bias_shape, inputs, ((s.cast(form.computed, out.dtype), biases[0]),)))
    flags = ProblemFlags.BIAS if biases else ProblemFlags(0)
    flags |= ProblemFlags.DETERMINISTIC if ctx.options.deterministic else ProblemFlags(0)
    problem = LibraryProblem(ATTENTION, out.dtype.onnx, flags, alpha=form.scale)
    if ctx.device.refusals.matches(problem, form.numbers):
        return False
    workspace = ctx.empty((WORKSPACE_BYTES,), DType.UINT8)
    args: list[Arg] = [out, *step.operands, *biases, workspace, *map(Int64, [*form.numbers, WORKSPACE_BYTES])]
    note = f"cuDNN: attention{' + bias' if biases else ''}"
    ctx.library(problem, args, writes=(out, workspace), note=note)
    return True


def attention_form(ctx: Lowering, step: Attend) -> AttentionForm | None:
    """Return the arguments of a cuDNN call for the step.

    Returns None if the options forbid cuDNN, cuDNN cannot compute the step, the scores are few, or the keys grow.
    """
    q, k, v = step.operands
    *batch, rows, keys = step.score_shape
    if not ctx.options.allows_cudnn_attention:
        return None
    if "cudnn" not in ctx.device.libraries or q.dtype not in HALVES or len(batch) > 2:
        return None
    if not isinstance(keys, int) and keys != rows:
        # A growing K/V cache has a new size in each Run. cuDNN takes about a second to compile an engine for a size.
        return None
    if len(step.outputs) != 1 or uncast(step.outputs[0][0]) is not step.total or hint(rows) * hint(keys) < MIN_SCORES:
        return None
    out = step.outputs[0][1]
    if {k.dtype, v.dtype, out.dtype} != {q.dtype} or q.shape[-1] not in WIDTHS or v.shape[-1] not in WIDTHS:
        return None
    softmax = softmax_of(step)
    if softmax is None or softmax.units:
        return None
    scale, addend = softmax.scale, softmax.addend
    outer = [0] * (2 - len(batch))
    heads = [*[1] * len(outer), *batch]
    numbers: list[Dim] = [*heads, rows, keys, q.shape[-1], v.shape[-1]]
    for x in (q, transpose_matrices(ctx, k), v, out):
        strides = broadcast_strides(x, (*batch, *x.shape[-2:]))
        repeated = any(stride == 0 and dim != 1 for stride, dim in zip(strides, (*batch, *x.shape[-2:]), strict=True))
        aligned = all(divides(VECTOR, number) for number in (x.offset, *strides[:-1]))
        if strides[-1] != 1 or repeated or not aligned:
            return None
        numbers += [*outer, *strides[:-1]]
    if addend is None:
        return AttentionForm(scale, (*numbers, 0, 0, 0, 0))
    # cuDNN reads the bias in q's type: undo casts to wider types, but do not narrow a bias, which may not fit.
    while addend.dtype is not q.dtype and addend.op == "cast" and addend.operands[0].dtype.is_float:
        (addend,) = addend.operands
    if addend.dtype is not q.dtype:
        return None
    bias = dict(step.score_inputs).get(addend)
    if bias is not None:
        strides = broadcast_strides(bias, step.score_shape)
        return AttentionForm(scale, (*numbers, *outer, *strides), bias) if strides[-1] == 1 else None
    every = [broadcast_strides(x, step.score_shape) for _, x in used_inputs(step.score_inputs, [addend])]
    along = (any(strides[axis] != 0 for strides in every) for axis in range(len(step.score_shape)))
    shape = tuple(dim if differs else 1 for dim, differs in zip(step.score_shape, along, strict=True))
    strides = broadcast_strides(Tensor(q.dtype, shape, q.buffer), step.score_shape)
    if strides[-1] != 1:
        return None
    return AttentionForm(scale, (*numbers, *outer, *strides), computed=addend, bias_shape=shape)


def uncast(x: Scalar) -> Scalar:
    """Return x without outer casts between float types. They may be ignored, since cuDNN rounds in its own way."""
    while x.op == "cast" and x.operands[0].dtype.is_float and x.dtype.is_float:
        x = x.operands[0]
    return x


def softmax_of(step: Attend) -> Softmax | None:
    """Match the step's attention weights as a `Softmax`; None if they are not a softmax of the scores.

    The match evaluates the expression for sample scores, so that the algebraic form of the softmax does not matter. It
    gives up, with None, for an expression of more than `MAX_OPERATIONS` operations.
    """
    parts = reachable([step.weight])
    maxima = {x.value[0] for x in parts if x.op == "reduced" and x.value[0].reduction is MAX}
    if len(maxima) != 1 or len(parts) > MAX_OPERATIONS:
        return None
    tensors = dict(step.score_inputs)
    numbers = ((leaf, constant_number(x)) for leaf, x in tensors.items())
    known = {leaf: float(number) for leaf, number in numbers if number is not None}
    (stage,) = maxima
    logit, bias, scale = uncast(stage.elements[0]), None, 1.0
    if logit.op == "add":
        for x, other in (logit.operands, logit.operands[::-1]):
            # A bias depends on elements of tensors, and not on a reduction of its row.
            inner = reachable([other])
            if not inner.isdisjoint(tensors.keys() - known.keys()) and all(y.op != "reduced" for y in inner):
                logit, bias = uncast(x), other
                break
    if logit.op in ("mul", "div"):
        first, second = map(uncast, logit.operands)
        if logit.op == "mul" and first is not step.score:
            first, second = second, first
        number = known.get(second, second.value if second.op == "constant" else None)
        if number is not None:
            if not np.isfinite(number) or number == 0:
                return None
            logit, scale = first, float(number) if logit.op == "mul" else 1.0 / float(number)
    units = []
    while logit.op == "mul" and logit.operands[1] in tensors and tensors[logit.operands[1]].size == 1:
        logit, unit = logit.operands
        units.append(unit)
    if logit is not step.score:
        return None
    values: dict[Scalar, Array | float] = {**known, step.score: _SCORES, **dict.fromkeys(units, 1.0)}
    biases = np.zeros_like(_BIASES)
    if bias is not None:
        values[bias] = biases = _BIASES
    with np.errstate(all="ignore"):
        found = evaluate(step.weight, values, _operations, {MAX: np.max, SUM: np.sum})
        powers = np.exp(scale * _SCORES + biases - np.max(scale * _SCORES + biases, -1, keepdims=True))
        wanted = powers / powers.sum(-1, keepdims=True)
    if found is None or not np.allclose(found, wanted, rtol=1e-6, atol=1e-12):
        return None
    return Softmax(scale, bias, tuple(units))


_operations: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "exp": np.exp,
    "where": np.where, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "max": np.maximum, "min": np.minimum, "abs": np.abs, "cast": lambda x: x,
}  # fmt: skip
