"""Declined nodes that probably nobody runs: ONNX Runtime's own error would not say why.

ONNX Runtime asks its CPU provider after us, so the plugin can only expect. Operators of ONNX have CPU kernels or an
error of ONNX Runtime that names them. Many contrib operators have neither; nor has a node that holds a compiled model.
"""

from __future__ import annotations

from ..model.ir import Node
from .identity import EP_NAME

#: Contrib operators of which ONNX Runtime's CPU provider has kernels.
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
#: Domains whose operators only ONNX Runtime's own providers and plugins have; others come with libraries of kernels.
_OF_HOST = ("com.microsoft", "com.ms.internal.nhwc")


def is_compiled_model(node: Node) -> bool:
    """Whether the node is a model that an execution provider compiled before."""
    return (node.domain, node.op_type) == ("com.microsoft", "EPContext")


def why_not_loaded(node: Node) -> str:
    """The reason for which the plugin declines a compiled model of another source."""
    made_by = str(node.attributes.get("source", "")) or "a provider that it does not name"
    return f"it holds a model that {made_by} compiled, and {EP_NAME} loads its own only: use the original model"


def is_probably_lost(node: Node) -> bool:
    """Whether no provider of this ONNX Runtime is known to run such a node."""
    if is_compiled_model(node):
        return True
    return node.domain in _OF_HOST and not (node.domain == "com.microsoft" and node.op_type in _ON_CPU)


def described(node: Node) -> str:
    """The node's operator, with its version and the types of its inputs."""
    types = ("none" if x is None else "unknown" if x.dtype is None else x.dtype.name for x in node.inputs)
    return f"{node.domain or 'ai.onnx'}.{node.op_type}-{node.since_version} of ({', '.join(types)})"
