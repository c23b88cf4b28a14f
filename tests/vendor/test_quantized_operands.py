"""Lowering of quantized operands for a device that offers the vendor libraries."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.plan.format import RecordKind
from ort_cuda_plugin.plan.tables import Precomputed
from ort_cuda_plugin.program.lowering.context import LoweringOptions
from test_library_forms import prepare

ELEMENTS = ", ".join(str(i % 251 - 125) for i in range(64 * 64))
WEIGHTS = f"w = Constant<value = int8[64, 64] {{{ELEMENTS}}}>()"
SCALES = """s = Constant<value_float = 0.03>() z = Constant<value = int8 {3}>()"""
PRODUCT = f"""(int8[64, 64] x) => (int8[64, 64] y) {{ {WEIGHTS} {SCALES}
    wf = DequantizeLinear(w, s, z) xf = DequantizeLinear(x, s, z) p = MatMul(xf, wf) y = QuantizeLinear(p, s, z) }}"""


@pytest.mark.parametrize("fusion", [True, False])
def test_a_library_gets_dequantized_operands_and_weights_are_dequantized_once(fusion: bool) -> None:
    """Libraries take only operands of the type in which they multiply."""
    variant, _ = prepare(PRODUCT, LoweringOptions(fusion=fusion))
    assert variant.plan is not None
    kinds = [record.kind for record in variant.plan.records]
    assert kinds == [RecordKind.LAUNCH] * (1 if fusion else 2) + [RecordKind.LIBRARY, RecordKind.LAUNCH]
    assert sum(isinstance(weight, Precomputed) for weight in variant.weights) == fusion
