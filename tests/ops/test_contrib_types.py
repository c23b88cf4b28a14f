"""All com.microsoft operators in all supported types, with and without each optional input and attribute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from contributed import FLOAT, FLOAT16, Array, noise
from contributed_cases_attention import ATTENTION, GROUPED, NGRAMS, RECURRENCES
from contributed_cases_maps import MAPS, PLACES, PRODUCTS, ROWS, TRANSFORMS
from contributed_cases_ordered import ORDERED, SMALL_FLOATS
from contributed_cases_quantized import CONVERSIONS, ELEMENTS, EXPERTS, GATHERS
from contributed_cases_quantized import PRODUCTS as WEIGHTS
from contributed_sweep import DOMAIN, Case, check_cases, model_of, untested
from ort_cuda_plugin.ops import registry
from ort_versions import api_version

FAMILIES: dict[str, list[Case]] = {
    "attention": ATTENTION,
    "conversions": CONVERSIONS,
    "elements": ELEMENTS,
    "experts": EXPERTS,
    "gathers": GATHERS,
    "grouped": GROUPED,
    "maps": MAPS,
    "n-grams": NGRAMS,
    "ordered": ORDERED,
    "places": PLACES,
    "products": PRODUCTS,
    "recurrences": RECURRENCES,
    "rows": ROWS,
    "small floats": SMALL_FLOATS,
    "transforms": TRANSFORMS,
    "weights": WEIGHTS,
}
CASES = [case for family in FAMILIES.values() for case in family]


def changed(
    op_type: str,
    attributes: Mapping[str, Any] | None = None,
    inputs: Mapping[int, Array | None] | None = None,
    *,
    mean: bool = False,
) -> Case:
    """Return an operator's first case with other attributes and inputs; ``mean`` adds the second output."""
    case = next(case for case in CASES if case.op_type == op_type)
    given = dict(enumerate(case.inputs)) | dict(inputs or {})
    listed = [given.get(i) for i in range(max(given) + 1)]
    outputs = (True, True) if mean else case.outputs
    return dataclasses.replace(
        case, inputs=listed, attributes={**case.attributes, **(attributes or {})}, outputs=outputs
    )


DECLINED = {
    "do_rotary set of Attention": changed("Attention", {"do_rotary": 1}),
    "rotary_embedding_dim set of Attention": changed("Attention", {"do_rotary": 1, "rotary_embedding_dim": 32}),
    "sliding_window_cache set of GroupQueryAttention": changed("GroupQueryAttention", {"sliding_window_cache": 1}),
    "scale set of RotaryEmbedding": changed("RotaryEmbedding", {"scale": 2.0}),
    "cache_indirection given of MultiHeadAttention": changed(
        "MultiHeadAttention", inputs={9: np.zeros((1, 2, 5), np.int32)}
    ),
    "past_present_share_buffer set of QAttention": changed("QAttention", {"past_present_share_buffer": 1}),
    "do_rotary set of QAttention": changed("QAttention", {"do_rotary": 1}),
    "weights_prepacked set of QMoE": changed("QMoE", {"weights_prepacked": 1}),
    "past given of QOrderedAttention": changed("QOrderedAttention", inputs={18: np.zeros((2, 2, 2, 4, 8), np.int8)}),
    "attention_bias given of QOrderedAttention": changed("QOrderedAttention", inputs={19: noise(2, 2, 4, 4)}),
    "unidirectional set of QOrderedAttention": changed("QOrderedAttention", {"unidirectional": 1}),
    "scale_QKT_gemm left out of QOrderedAttention": changed("QOrderedAttention", inputs={14: None}),
    "scale_QKT_softmax left out of QOrderedAttention": changed("QOrderedAttention", inputs={15: None}),
    "mean given of SkipSimplifiedLayerNormalization": changed("SkipSimplifiedLayerNormalization", mean=True),
}
"""Options that the plugin declines -> a case of a node with the option."""
REFUSED = {
    "A_zero_point left out of QLinearAdd": changed("QLinearAdd", inputs={2: None}),
    "B_zero_point left out of QLinearAdd": changed("QLinearAdd", inputs={5: None}),
    "A_zero_point left out of QLinearMul": changed("QLinearMul", inputs={2: None}),
    "B_zero_point left out of QLinearMul": changed("QLinearMul", inputs={5: None}),
    "x_zero_point left out of QLinearAveragePool": changed("QLinearAveragePool", inputs={2: None}),
}
"""Optional inputs that ONNX Runtime's type inference requires, although its schema does not -> a case without it."""
LATER = {
    f"{part} of {name}"
    for name, parts in {
        "CausalConvWithState": "input_channel_offset set, input_channels set, state_channels_last set, "
        "state_length set, state_update given, state_update_capacity set",
        "GatedAdd": "gate_weight given",
        "GatedDeltaNet": "T float, TG bfloat16, TG float, gate_lower_bound set",
        "GroupQueryAttention": "k_norm_epsilon set, q_norm_epsilon set, query_seqlens given",
        "MoE": "swiglu_limit_after_activation set",
        "QMoE": "swiglu_limit_after_activation set",
        "VarlenCausalConvWithState": "delta_offset set, group_size set, kernel_delta given, previous_mask given",
    }.items()
    for part in parts.split(", ")
}
"""Options that only schemas of ONNX Runtime 1.32 have. Nodes with unknown attributes or inputs are declined."""
ELSEWHERE = {
    "DecoderMaskedMultiHeadAttention": "test_contrib_decoder.py",
    "DecoderMaskedSelfAttention": "test_contrib_decoder.py",
    "DynamicSparseAttention": "test_contrib_selected.py",
    "PackedAttention": "test_contrib_padding.py",
    "PackedMultiHeadAttention": "test_contrib_padding.py",
    "PackedSparseAttentionIndexer": "test_contrib_indexer.py",
    "PagedAttention": "test_contrib_paged.py",
    "SparseAttention": "test_contrib_sparse.py",
    "SparseAttentionIndexer": "test_contrib_indexer.py",
    "SparsePagedAttention": "test_contrib_selected.py",
}
"""Operators with their own test files, because their inputs refer to each other (pages, beams, blocks of a cache)."""


@pytest.mark.parametrize("family", FAMILIES)
def test_types(family: str) -> None:
    check_cases(FAMILIES[family])


ONE_TYPE = (
    "BranchwiseRMSNorm",
    "ComplexMul",
    "ComplexMulConj",
    "DequantizeLinear",
    "DequantizeWithOrder",
    "EngramGate",
    "GatedAdd",
    "GemmFloat8",
    "GemmaRotaryEmbedding",
    "HyperConnectionPostMix",
    "HyperConnectionPreMix",
    "MatMulBlockQuantizedFp4Weight",
    "MatMulBlockQuantizedFp8Weight",
    "QLinearAdd",
    "QLinearConcat",
    "QLinearLeakyRelu",
    "QLinearMul",
    "QLinearSigmoid",
    "QLinearSoftmax",
    "QOrderedGelu",
    "QOrderedLayerNormalization",
    "QOrderedLongformerAttention",
    "QOrderedMatMul",
    "QuantizeLinear",
    "QuantizeWithOrder",
    "ScaledSiLU",
)
"""Operators that no other test of the first tier (the fast tests) runs; bench/test_time.py lists them."""


@pytest.mark.every_case
@pytest.mark.parametrize("real", [FLOAT, FLOAT16], ids=["float32", "float16"])
def test_a_case_of_each_operator_in_its_first_type(real: int) -> None:
    first = [next(case for case in CASES if case.op_type == name) for name in ONE_TYPE]
    check_cases([case for case in first if case.real_types[0] == real], [real])


def test_a_case_tests_each_type_and_each_option() -> None:
    """Each operator, type, optional input, output and attribute must occur in a case. A new one fails here."""
    names = [row.name for row in registry.operators() if row.domain == DOMAIN]
    missing = {f"{part} of {name}" for name in names if name not in ELSEWHERE for part in untested(CASES, name)}
    assert missing - LATER == {*DECLINED, *REFUSED}
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (Path(__file__).parent / file).read_text()


def test_each_case_is_compared_with_something() -> None:
    """Each case has a reference: the CPU provider, NumPy, or the operator's own float32 results."""
    alone = [
        case.op_type
        for case in CASES
        if not case.is_compared_elsewhere and all(case.kinds(real) == case.kinds(FLOAT) for real in case.real_types)
    ]
    assert alone == []


def test_what_is_declined_has_a_reason() -> None:
    for name, case in DECLINED.items():
        if case.op_type == "QMoE" and api_version(ort.__version__) >= 32:
            continue  # the CPU provider of ORT 1.32 rejects the block size of this case
        verdicts = ort_cuda_plugin.explain(model_of({0: case}, FLOAT), emulate=True)
        assert [verdict.supported for verdict in verdicts] == [False], name
        assert verdicts[0].reason, name


def test_onnx_runtime_refuses_the_rest() -> None:
    for case in REFUSED.values():
        with pytest.raises(Exception, match="Input data type does not match"):
            ort_cuda_plugin.session(model_of({0: case}, FLOAT), emulate=True)
