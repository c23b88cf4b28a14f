"""Float16 storage between TF32 GEMMs, with a power-of-two scale for each column. `RangeAnalysis` bounds the values.

TF32 and float16 both have 10 bits of mantissa. So a normalization, a GEMM or attention stores float16 numbers with one
power-of-two scale per column, or one for all columns. Tensor cores multiply float16 at twice the rate of TF32, and the
steps move half the bytes. `half_lines` multiplies the scales of a GEMM's left operand into its weights, once. The
scales of queries and keys are a factor of the attention scores. Numbers are rounded as in TF32, except that numbers
below 2**-28 of their column's bound lose bits.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from ...kernels.gemm.tf32_weights_as_f16 import half_lines, has_compact_lines, power_of
from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.views import permute
from ...program.steps.steps import Attend, Contract, Map, Substitution
from ...program.steps.tensor import Buffer, BufferKind
from ...program.steps.trace import Step
from ...schedule.flash import is_faster_as_flash
from ...schedule.gemm import is_faster_in_f16
from ..analysis.range_analysis import RangeAnalysis
from ..analysis.uses import Uses
from ..simplification.dead_code_elimination import eliminate_dead_code

__all__ = ["store_tf32_as_scaled_f16"]

LARGEST = 2.0**14
"""Magnitude to which the scale of a column maps the column's bound, up to a factor of 2; float16 ends at 2**16."""


def store_tf32_as_scaled_f16(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Store tensors between TF32 GEMMs as float16 with a power of two for each column.

    TF32 and float16 have the same 10 bits of mantissa. Range analysis bounds each tensor from weights and
    normalizations, so that the scaled values fit float16.

    Assumes: attention is fused; TF32 is allowed; kernels are generated for a GPU.
    Guarantees: only GEMMs that float16 makes faster, and attention that is faster as FlashAttention, read such tensors.
        The scales of a left operand are factors of the weights, computed once.
    Example: ``n = LayerNorm(x) f32; y = MatMul(n, w)`` -> ``n = f16(LayerNorm(x) * s); y = MatMul(n, w / s)``.
    """
    halves = _Halves(ctx, steps)
    halves.decide()
    return halves.rewritten() if halves.readers else list(steps)


@dataclass
class _Stored:
    """A tensor that is stored as scaled float16.

    ``codes`` are the float16 numbers, in the layout of the tensor's buffer. ``powers`` are the scales (value = code *
    scale), a vector along the columns or a single number; ``inverses`` are 1 / scale. They are None for the result of
    attention, which has the scale of the values.
    """

    codes: Tensor
    powers: Tensor
    inverses: Tensor | None = field(default=None)


class _Halves:
    def __init__(self, ctx: Lowering, steps: Sequence[Step]) -> None:
        self.ctx, self.steps = ctx, steps
        self.uses = Uses(enumerate(steps))
        self.limits = RangeAnalysis(ctx)
        self.readers: dict[Buffer, list[int]] = {}
        """For each tensor, the positions of the steps that will read it as scaled float16."""
        self.writers: dict[Buffer, int] = {}
        """For each tensor with bounds, the position of the step that can store it as scaled float16."""
        self.changed: set[int] = set()
        self.stored: dict[Buffer, _Stored] = {}

    # ---- choice of the tensors to store as float16 ----

    def decide(self) -> None:
        for position, step in enumerate(self.steps):
            if isinstance(step, Contract):
                if not self._is_halved(step, self.writers):
                    continue
                self._read(position, step.a)
            elif isinstance(step, Attend):
                if not self._is_attention_halved(step):
                    continue
                for x in step.operands:
                    self._read(position, x)
                out = step.outputs[0][1].buffer
                self.limits.pass_on(step.operands[2].buffer, out)
                self.writers[out] = position
                continue
            if isinstance(step, Map):
                self.limits.note(step)
                for _, y in step.outputs:
                    if y.buffer in self.limits and self._is_alone(y):
                        self.writers[y.buffer] = position

    def _read(self, position: int, x: Tensor) -> None:
        self.changed.add(position)
        self.readers.setdefault(x.buffer, []).append(position)

    def _is_alone(self, y: Tensor) -> bool:
        """Return whether y, a result of a step, fills its buffer, and no other step writes to the buffer."""
        is_whole = y.buffer.kind is BufferKind.SCRATCH and y.offset == 0 and y.buffer.nbytes == y.nbytes
        return is_whole and len(self.uses.writers(y.buffer)) == 1

    def _is_halved(self, step: Contract, limited: Container[Buffer]) -> bool:
        a = step.a
        if (
            a.buffer not in limited
            or step.schedule is not None
            or 0 in step.shape
            or not has_compact_lines(self.ctx, step)
        ):
            return False
        return self._has_powers_along(a) and is_faster_in_f16(self.ctx, step)

    def _has_powers_along(self, a: Tensor) -> bool:
        """Return whether operand ``a`` can be scaled by columns: its buffer has a single bound, or one bound for
        each column of ``a``.
        """
        columns = self.limits.column_count(a.buffer) if a.buffer in self.limits else 1
        return columns == 1 or (a.is_contiguous and a.shape[-1] == columns and a.size * 4 == a.buffer.nbytes)

    def _is_attention_halved(self, step: Attend) -> bool:
        """Return whether an attention step can use scaled float16 throughout, and is faster as FlashAttention.

        All readers must then be GEMMs that read the result as their first operand only, not also as a residual.
        """
        if len(step.outputs) != 1 or any(x.buffer not in self.writers for x in step.operands):
            return False
        out = step.outputs[0][1]
        if not self._is_alone(out) or any(x.dtype is not DType.FLOAT32 for x in (out, *step.operands)):
            return False
        readers = [self.steps[reader] for reader in self.uses.readers(out.buffer)]
        if not readers or not is_faster_as_flash(self.ctx, step):
            return False
        return all(
            isinstance(one, Contract) and self._is_halved(one, {out.buffer}) and one.reads_once(out.buffer)
            for one in readers
        )

    def _is_uniform(self, buffer: Buffer) -> bool:
        return any(isinstance(self.steps[reader], Attend) for reader in self.readers[buffer])

    # ---- rewriting of the steps ----

    def rewritten(self) -> list[Step]:
        result: list[Step] = []
        for position, step in enumerate(self.steps):
            with self.ctx.recording(step.nodes) as made:
                if isinstance(step, Attend) and position in self.changed:
                    step = self._attention(step)
                elif isinstance(step, Map):
                    if isinstance(step, Contract) and position in self.changed:
                        step = self._product(step)
                    written = {y.buffer for _, y in step.outputs}
                    for buffer in written & self.readers.keys():
                        step = self._with_stored(step, buffer)
            result += [*made, step]
        return eliminate_dead_code([*self.limits.steps, *result])

    def _of(self, buffer: Buffer) -> _Stored:
        """Return the scaled float16 tensor for ``buffer``; the first call records the steps that compute its scales."""
        if buffer not in self.stored:
            is_uniform = self._is_uniform(buffer) or self.limits.column_count(buffer) == 1
            limits = self.limits.largest(buffer) if is_uniform else self.limits.of(buffer)
            count = limits.shape if not is_uniform else (1,)
            leaf = Scalar(DType.FLOAT32, "leaf")
            power = power_of(leaf, LARGEST)
            with self.limits.recording(()):
                powers, inverses = (self.ctx.empty(count, DType.FLOAT32) for _ in range(2))
                outputs = ((power, powers), (1.0 / power, inverses))
                self.ctx.record(Map((), tuple(count), ((leaf, self.ctx.view(limits, count)),), outputs))
            (position,) = self.uses.writers(buffer)
            size = next(y.size for _, y in _outputs(self.steps[position]) if y.buffer is buffer)
            self.stored[buffer] = _Stored(self.ctx.empty((size,), DType.FLOAT16), powers, inverses)
        return self.stored[buffer]

    def _codes(self, x: Tensor) -> Tensor:
        """Return the view of the scaled float16 tensor that corresponds to x, a view of the float32 tensor."""
        return self.ctx.view(self._of(x.buffer).codes, x.shape, x.strides, x.offset)

    def _product(self, step: Contract) -> Contract:
        a = self._codes(step.a)
        changed, lines = half_lines(self.ctx, step, self._of(step.a.buffer).powers)
        return replace(changed, operands=(a, permute(self.ctx, lines, (1, 0))))

    def _with_stored(self, step: Map, buffer: Buffer) -> Map:
        """Return the step that also stores its result in ``buffer`` as scaled float16."""
        stored = self._of(buffer)
        assert stored.inverses is not None
        value, y = next((value, y) for value, y in step.outputs if y.buffer is buffer)
        leaf = Scalar(DType.FLOAT32, "leaf")
        code = s.cast(value * leaf, DType.FLOAT16)
        codes = self.ctx.view(stored.codes, y.shape, y.strides, y.offset)
        inputs = (*step.inputs, (leaf, stored.inverses))
        return replace(step, inputs=inputs, outputs=(*step.outputs, (code, codes)))

    def _attention(self, step: Attend) -> Attend:
        """Return the attention step on scaled float16 tensors.

        The scales of queries and keys become a factor of the scores; the results have the scale of the values.
        """
        (_, out), operands = step.outputs[0], tuple(map(self._codes, step.operands))
        queries, keys, values = (self._of(x.buffer).powers for x in step.operands)
        leaves = [Scalar(DType.FLOAT32, "leaf") for _ in (queries, keys)]
        self.stored[out.buffer] = _Stored(self.ctx.empty((out.size,), DType.FLOAT16), values)
        changed = Substitution({step.score: step.score * leaves[0] * leaves[1]})
        return replace(
            step,
            operands=operands,
            score_inputs=(*step.score_inputs, *zip(leaves, (queries, keys), strict=True)),
            weight=changed(step.weight),
            outputs=((s.cast(step.total, DType.FLOAT16), self._codes(out)),),
            parts=(),  # the unfused steps would multiply float32
        )


def _outputs(step: Step) -> Sequence[tuple[Scalar, Tensor]]:
    assert isinstance(step, Map)
    return step.outputs
