"""Warns about declined nodes that no other provider is likely to have a kernel for.

ONNX Runtime's error would not name the reason. ONNX Runtime asks its CPU provider after the plugin, so the plugin
cannot know its answer. Nearly all operators of ONNX have CPU kernels; many contrib operators and nodes with compiled
models have none.
"""

from __future__ import annotations

from ...model.ir import Node
from ...plugin_library import EP_NAME

#: Contrib operators with kernels in ONNX Runtime's CPU provider.
_ON_CPU = frozenset({
    "Attention", "AttnLSTM", "BeamSearch", "BiasGelu", "BifurcationDetector", "BranchwiseRMSNorm", "CDist",
    "CausalConvWithState", "ConvTransposeWithDynamicPads", "CropAndResize", "DecoderMaskedMultiHeadAttention",
    "DequantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "DynamicTimeWarping",
    "EmbedLayerNormalization", "EngramGate", "ExpandDims", "FastGelu", "FusedConv", "FusedGemm", "FusedMatMul",
    "GatedAdd", "GatedRMSNorm", "GatherBlockQuantized", "GatherND", "Gelu", "GreedySearch", "GridSample",
    "GroupQueryAttention", "HyperConnectionPostMix", "HyperConnectionPreMix", "Inverse", "LinearAttention",
    "LinearAttentionGate", "MRotaryEmbedding", "MatMulBnb4", "MatMulFpQ4", "MatMulInteger16",
    "MatMulIntegerToFloat", "MatMulNBits", "MaxpoolWithMask", "MoE", "MultiHeadAttention", "MurmurHash3",
    "NGramHashMapping", "NGramRepeatBlock", "NhwcMaxPool", "Pad", "QAttention", "QEmbedLayerNormalization",
    "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv", "QLinearGlobalAveragePool",
    "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere", "QMoE",
    "QuantizeLinear", "QuickGelu", "Range", "RotaryEmbedding", "SampleOp", "Sampling", "ScaledSiLU",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SparseAttention", "SparseToDenseMatMul",
    "Tokenizer", "TransposeMatMul", "Trilu", "UnfoldTensor", "Unique", "VarlenNGramHashMapping",
    "WhisperBeamSearch", "WordConvEmbedding",
})  # fmt: skip
#: Domains of ONNX Runtime's own operators. ONNX's operators have CPU kernels, and other domains come with libraries of
#: kernels.
_OF_HOST = ("com.microsoft", "com.ms.internal.nhwc")


def is_compiled_model(node: Node) -> bool:
    """Return whether the node is a model that an execution provider compiled before."""
    return (node.domain, node.op_type) == ("com.microsoft", "EPContext")


def why_not_loaded(node: Node) -> str:
    """Explain why the plugin declines a compiled model of another execution provider."""
    made_by = str(node.attributes.get("source", "")) or "a provider that it does not name"
    return (
        f"it contains a model that {made_by} compiled, and {EP_NAME} loads only models that it compiled itself: use "
        "the original model"
    )


def is_probably_lost(node: Node) -> bool:
    """Return whether no provider of this ONNX Runtime is known to have a kernel for the node."""
    if is_compiled_model(node):
        return True
    return node.domain in _OF_HOST and not (node.domain == "com.microsoft" and node.op_type in _ON_CPU)


def described(node: Node) -> str:
    """Return the node's operator with its version and its input types, as text."""
    types = ("none" if x is None else "unknown" if x.dtype is None else x.dtype.name for x in node.inputs)
    return f"{node.domain or 'ai.onnx'}.{node.op_type}-{node.since_version} of ({', '.join(types)})"
