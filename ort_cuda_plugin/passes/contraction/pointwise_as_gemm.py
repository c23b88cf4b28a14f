"""Pointwise (1x1) convolutions as GEMMs, if cuDNN would copy their result.

cuDNN cannot write output pixels with a stride, as in a slice of a concatenation: it writes a dense result to its
workspace and then copies it. cuBLASLt reads and writes strided rows directly.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.contraction.epilogue_patterns import product_form
from ...kernels.conv.channels_last import place_stride, places_first, to_memory
from ...program.lowering.context import Lowering
from ...program.lowering.views import permute, permuted
from ...program.steps.steps import Contract, Convolve
from ...program.steps.trace import Step
from ...schedule.gemm import sliced_k_before_library

__all__ = ["pointwise_as_gemm"]


def pointwise_as_gemm(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Rewrite pointwise (1x1) convolutions as GEMMs if cuDNN would copy their result, for example into a slice of a
    concatenation.

    Assumes: images have their channels last, so that output pixels are the rows of a GEMM.
    Guarantees: cuBLASLt fuses the whole epilogue of such a GEMM. Small convolutions stay, since the plugin's kernel is
        faster.
    Example: ``y[:, :8] = Conv1x1(x, w)`` -> ``y[:, :8] = MatMul(x [pixels, channels], w)``.
    """
    result: list[Step] = []
    for step in steps:
        with ctx.recording(step.nodes) as made:
            product = _as_product(ctx, step)
        result += [step] if product is step else [*made, product]
    return result


def _as_product(ctx: Lowering, step: Step) -> Step:
    """Return the step as a GEMM if it is a convolution whose result cuDNN would copy and cuBLASLt would not.

    The GEMM's rows are the output pixels of all images in NHWC. cuBLASLt must support the whole epilogue. Small
    convolutions stay, since the plugin's kernel takes less time.
    """
    if (
        not isinstance(step, Convolve)
        or step.schedule is not None
        or not ctx.device.libraries.issuperset({"cublaslt", "cudnn"})
    ):
        return step
    x, w = step.operands
    is_product = step.windows.pointwise and step.groups == step.channel_axes == 1 and not step.transposed
    if not is_product or step.is_converted or x.shape[1] != w.shape[1] or place_stride(x) is None:
        return step
    (_, y), *others = step.outputs
    if others or place_stride(y) in (None, y.shape[1]):
        return step
    ordered = permuted(step, places_first(step))
    rows, channels = w.static_shape[:2]
    b = permute(ctx, ctx.view(ctx.contiguous(w), (rows, channels)), (1, 0))
    made = Contract(
        step.nodes,
        ordered.shape,
        ordered.inputs,
        ordered.outputs,
        operands=(permute(ctx, x, to_memory(x.rank)), b),
        total=step.total,
    )
    form = product_form(ctx, made)
    return step if form is None or form.leftover or sliced_k_before_library(ctx, made) is not None else made
