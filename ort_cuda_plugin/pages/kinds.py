"""Kinds of kernels: the colors of steps on all pages. A color means its kind of kernel, and nothing else.

The style sheet (page.css) has two colors for each kind, for light and for dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence

KINDS = {
    "conv": "convolution",
    "gemm": "matrix product",
    "attention": "attention",
    "norm": "normalization, reduction",
    "pool": "pooling",
    "elementwise": "elementwise",
    "data": "data movement",
    "scan": "recurrence, scan, sort",
    "copy": "copy or memset",
    "other": "other",
}
"""The name of each kind in legends, by the kind's class in the style sheet."""

_WORDS = (
    ("attention", ("Attention", "FlashAttention")),
    ("conv", ("Conv", "DeformConv", "Im2Col", "Col2Im")),
    ("gemm", ("MatMul", "Gemm", "Einsum", "MoE")),
    ("scan", ("LSTM", "GRU", "RNN", "Scan", "Cum", "TopK", "Sort", "Unique", "NonMaxSuppression", "NonZero", "Search",
              "Sampling", "Loop", "If")),
    ("pool", ("Pool", "Upsample", "Resize", "RoiAlign", "GridSample")),
    ("norm", ("Normalization", "Softmax", "Reduce", "ArgM", "LRN", "Hardmax")),
)  # fmt: skip
# fmt: off
_MOVES = frozenset({
    "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Concat", "Split", "Slice", "Gather",
    "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND", "Expand", "Tile", "Pad",
    "Identity", "Cast", "DepthToSpace", "SpaceToDepth", "Shape", "ConstantOfShape", "Constant", "Range",
    "OneHot", "ReverseSequence", "Compress", "EyeLike", "Size", "Trilu",
})
# fmt: on


def kind_of(step: str, op_types: Sequence[str], name: str = "") -> str:
    """Return the kind, a key of `KINDS`, of a step that computes nodes with these operators.

    ``step`` is the step's kind in a plan: "kernel", "library", "copy", "memset", ...; ``name`` is that of its kernel.
    The most expensive kind decides: a convolution with a fused Relu is a convolution. A step with a matrix product and
    a Softmax is an attention.
    """
    if step in ("copy", "memset", "fill", "read back"):
        return "copy"
    # A BatchNormalization is only a Mul and an Add with constants, although its name suggests a reduction.
    types = [op_type for op_type in op_types if op_type != "BatchNormalization"]
    found = [kind for kind, words in _WORDS if any(word in op_type for word in words for op_type in types)]
    if "attention" in name or ("gemm" in found and "Softmax" in types):
        return "attention"
    if found:
        return found[0]
    if not types:
        return "elementwise" if op_types else "other"
    return "data" if all(op_type in _MOVES for op_type in types) else "elementwise"
