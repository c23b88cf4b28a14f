"""The operators that may read tensors which grow in each iteration, with their rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import attention, sizes, tensors
from .body import Rule

_MS: Final = "com.microsoft"
_ELEMENTWISE: Final = (
    "Abs Add And Cast Ceil Clip Cos Div Equal Erf Exp Floor Gelu Greater GreaterOrEqual Identity Less LessOrEqual Log "
    "Max Mean Min Mul Neg Not Or Pow Reciprocal Relu Sigmoid Sign Sin Sqrt Sub Sum Tanh Where Xor"
)

READS_BUFFERS: Final = frozenset({("", "Shape"), (_MS, "DecoderMaskedMultiHeadAttention"), (_MS, "MultiHeadAttention")})
"""The operators that may read a cache which past and present share."""

RULES: Final[Mapping[tuple[str, str], Rule]] = {
    **{("", name): tensors.broadcasting for name in _ELEMENTWISE.split()},
    **{("", f"Reduce{kind}"): tensors.reduction for kind in ("Max", "Mean", "Min", "Sum")},
    ("", "Concat"): tensors.concat,
    ("", "Gather"): tensors.gather,
    ("", "MatMul"): tensors.matmul,
    ("", "Range"): sizes.range_of_sizes,
    ("", "Reshape"): tensors.reshaped,
    ("", "Shape"): sizes.shape,
    ("", "Slice"): tensors.slice_of,
    ("", "Softmax"): tensors.softmax,
    ("", "Squeeze"): tensors.squeeze,
    ("", "Transpose"): tensors.transpose,
    ("", "Unsqueeze"): tensors.unsqueeze,
    (_MS, "Attention"): attention.attention,
    (_MS, "DecoderMaskedMultiHeadAttention"): attention.decoder_masked_multi_head_attention,
    (_MS, "MultiHeadAttention"): attention.multi_head_attention,
    (_MS, "RelativePositionBias"): attention.relative_position_bias,
}
