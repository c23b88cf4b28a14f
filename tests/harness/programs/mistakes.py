"""Plausible mistakes in passes, at least one for each; see `programs.mutations`."""

from __future__ import annotations

from ort_cuda_plugin.kernels.gemm import gemm_mma
from ort_cuda_plugin.kernels.library import library_calls
from ort_cuda_plugin.passes.analysis import expression_equality
from ort_cuda_plugin.passes.analysis.uses import Uses
from ort_cuda_plugin.passes.attention import attention_decomposition, attention_fusion, gqa_broadcast_elimination
from ort_cuda_plugin.passes.contraction import (
    fold_dequantize,
    kernel_selection,
    low_rank_fusion,
    pointwise_as_gemm,
    tf32_as_scaled_f16,
)
from ort_cuda_plugin.passes.emission import emission
from ort_cuda_plugin.passes.fusion import (
    horizontal_contraction,
    horizontal_conv,
    horizontal_fusion,
    horizontal_gemm,
    squeeze_excite_fusion,
    vertical_fusion,
)
from ort_cuda_plugin.passes.layout import flatten_channel_axes, l2_batch_tiling, layout_propagation, loop_interchange
from ort_cuda_plugin.passes.simplification import (
    common_subexpression_elimination,
    concat_elimination,
    constant_folding,
    dead_code_elimination,
    rematerialization,
    sink_through_concat,
)
from programs.mutations import Mutation

MISTAKES = (
    Mutation(
        "dead_code_elimination", "a reader is missed: what it reads is dropped",
        dead_code_elimination.eliminate_dead_code, "needed.update(step.reads)", "pass",
    ),
    Mutation(
        "sink_through_concat", "the other input of a sunk map is read from its start in each part",
        sink_through_concat._with_map, "x.offset + part.start * strides[part.axis]", "x.offset",
    ),
    Mutation(
        "vertical_fusion", "an epilogue takes a transposed result for the result itself",
        vertical_fusion.reads_all, "dim == 1 or stride == wanted", "True",
    ),
    Mutation(
        "vertical_fusion", "two slices of one tensor are taken for one",
        vertical_fusion._place, "x.buffer, x.dtype, x.offset, ", "x.buffer, x.dtype, ",
    ),
    Mutation(
        "vertical_fusion", "a fused value is not rounded as it was stored",
        vertical_fusion._join_sums, "replaced[leaf] = stored(output[0])", "replaced[leaf] = output[0]",
    ),
    Mutation(
        "rematerialization", "the source is taken for what is made of it",
        rematerialization._with_fewer_reads, "stored(Substitution({source: other})(value))", "other",
    ),
    Mutation(
        "common_subexpression_elimination", "results of one shape are taken for equal",
        common_subexpression_elimination._drop_one, "is_copy and are_equal(value, other, tensors)", "is_copy",
    ),
    Mutation(
        "common_subexpression_elimination", "a reader is missed: it reads what nobody stores",
        common_subexpression_elimination._drop, "dict.fromkeys(uses.readers(copy.source.buffer))", "()",
    ),
    Mutation(
        "horizontal_gemm", "weights are joined in another order than results",
        horizontal_gemm._merge, "[step.b for step in products]", "[step.b for step in products[::-1]]",
    ),
    Mutation(
        "horizontal_gemm", "all results are the first columns",
        horizontal_gemm._merge, "offset += operator.index(step.shape[-1])", "offset += 0",
    ),
    Mutation(
        "concat_elimination", "producers write to the start of the concatenation",
        concat_elimination._moved, "target.offset + path.offset(placed)", "path.offset(placed)",
    ),
    Mutation(
        "concat_elimination", "a reader is missed: it reads what nobody writes",
        concat_elimination._Placement._place, "for user in users:", "for user in users[:1]:",
    ),
    Mutation(
        "attention_fusion", "the softmax is dropped",
        attention_fusion._joint, "weight=stored(expression)", "weight=first.total",
    ),
    Mutation(
        "gqa_broadcast_elimination", "groups and the heads of a group are swapped",
        gqa_broadcast_elimination._Split.__call__, "stride * self.times, stride,", "stride, stride * self.times,",
    ),
    Mutation(
        "horizontal_fusion", "a map moves before the step that makes what it reads",
        horizontal_fusion._may_move, "reads.isdisjoint(other.writes)", "True",
    ),
    Mutation(
        "squeeze_excite_fusion", "another reader of the hidden values is missed",
        Uses.replaceable_writer, "or list(self.readers(buffer)) != [reader]", "",
    ),
    Mutation(
        "squeeze_excite_fusion", "the convolutions are swapped",
        squeeze_excite_fusion.fuse_squeeze_excite, "form, first, second)", "form, second, first)",
    ),
    Mutation(
        "fold_dequantize_of_integers", "the scale and the zero point are dropped",
        fold_dequantize._narrow_operand, "Substitution({source: leaf})(stored(value))", "leaf",
    ),
    Mutation(
        "fold_dequantize_into_inputs", "the scale and the zero point are dropped",
        fold_dequantize._with_narrow_input, "Substitution(leaves)(stored(made[0][0]))", "leaves[source]",
    ),
    Mutation(
        "fold_dequantize_into_inputs", "a vector of scales is read along the other axis",
        fold_dequantize._placed, "broadcast_strides(y, beneath)", "broadcast_strides(y, beneath)[::-1]",
    ),
    Mutation(
        "horizontal_integer_gemm", "all weights have the scale of the first",
        expression_equality.joined_conversion, "zip(conversions, operands, strict=True)",
        "zip(conversions[:1] * len(operands), operands, strict=True)",
    ),
    Mutation(
        "tf32_as_scaled_f16", "the stored numbers are not scaled",
        tf32_as_scaled_f16._Halves._with_stored, "s.cast(value * leaf, DType.FLOAT16)", "s.cast(value, DType.FLOAT16)",
    ),
    Mutation(
        "tf32_as_scaled_f16", "scores lack the scale of the keys",
        tf32_as_scaled_f16._Halves._attention, "step.score * leaves[0] * leaves[1]", "step.score * leaves[0]",
    ),
    Mutation(
        "split_k_fusion", "the reader adds one partial sum several times",
        gemm_mma.sum_of_parts, "parts.offset + number * size", "parts.offset",
    ),
    Mutation(
        "low_rank_fusion", "the scale of an adapter is dropped",
        low_rank_fusion._fused, "LowRank(low.a, low.b, scale)", "LowRank(low.a, low.b)",
    ),
    Mutation(
        "attention_decomposition", "the parts come in another order",
        attention_decomposition.decompose_attention, "decomposed_attention(ctx, chosen) if",
        "[*decomposed_attention(ctx, chosen)][::-1] if",
    ),
    Mutation(
        "flatten_channel_axes", "all channels have the bias of the first",
        flatten_channel_axes._flattened, "(1, *[0] * len(step.space))", "(0, *[0] * len(step.space))",
    ),
    Mutation(
        "layout_propagation", "rows and columns of a padded image are swapped",
        layout_propagation._Propagation._ordered, "[c[0], c[-1], *c[1:-1]]", "[c[0], c[-1], *c[-2:0:-1]]",
    ),
    Mutation(
        "layout_propagation", "a step that refuses reads a copy that nobody fills",
        layout_propagation._Propagation._move, "self._copied(move.target, whole)", "self._copied(whole, move.target)",
    ),
    Mutation(
        "l2_batch_tiling", "all tiles are the first images",
        l2_batch_tiling._part, "part(ctx, x, 0, start, size)", "part(ctx, x, 0, 0, size)",
    ),
    Mutation(
        "horizontal_conv", "weights are joined in another order than results",
        horizontal_contraction.Merging.joined, "outputs=tuple((first.outputs[0][0], y) for step in steps ",
        "outputs=tuple((first.outputs[0][0], y) for step in steps[::-1] ",
    ),
    Mutation(
        "horizontal_conv", "convolutions of other windows are merged",
        horizontal_conv._Convolutions.key, "step.windows, ", "",
    ),
    Mutation(
        "pointwise_as_gemm", "weights are viewed, not transposed",
        pointwise_as_gemm._as_product, "permute(ctx, ctx.view(ctx.contiguous(w), (rows, channels)), (1, 0))",
        "ctx.view(ctx.contiguous(w), (channels, rows))",
    ),
    Mutation(
        "kernel_selection", "what a library leaves of the epilogue is dropped",
        kernel_selection._selected, "return made", "return made[:1]",
    ),
    Mutation(
        "kernel_selection", "a library adds no bias",
        library_calls._flags, "(ProblemFlags.BIAS, form.bias is not None)", "(ProblemFlags.BIAS, False)",
    ),
    Mutation(
        "loop_interchange", "sizes are interchanged, strides are not",
        loop_interchange._in_memory_order, "permuted(step, to_memory(rank))",
        "replace(step, shape=permuted(step, to_memory(rank)).shape)",
    ),
    Mutation(
        "loop_interchange", "a slice is read from the start of its tensor",
        loop_interchange._unit_axis_last, "offset=x.offset", "offset=0",
    ),
    Mutation(
        "fold_dequantize", "a slice of quantized weights is read from their start",
        fold_dequantize._placed, "y.offset + path.offset(strides)", "y.offset",
    ),
    Mutation(
        "emission", "what a kernel needs first is dropped",
        emission.emit, "emit(ctx, made)", "emit(ctx, made[-1:])",
    ),
    Mutation(
        "constant_folding", "an input is taken for a weight",
        constant_folding._bytes_beneath, "is BufferKind.WEIGHT", "in (BufferKind.WEIGHT, BufferKind.INPUT)",
    ),
)  # fmt: skip
"""The mistakes, at least one for each pass."""
