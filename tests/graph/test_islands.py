"""Unprofitable islands: groups of nodes that stay on the CPU because copies would cost more than the GPU saves."""

from __future__ import annotations

import pytest
from onnx import parser

from ort_cuda_plugin.clusters.claims.claims import claim
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

DEVICE = DeviceProperties()


def claimed(nodes: str, unprofitable: bool = False) -> list[str]:
    """Return the operators that the plugin claims. Casts from and to strings run on the CPU provider."""
    text = f"""<ir_version: 9, opset_import: ["" : 18]> m (float[n] x, float[n] y, string[n] s) => (string[n] z)
        {{ {nodes} z = Cast<to = 8>(last) }}"""
    claims = claim(read_model(parser.parse_model(text)), DEVICE, claim_unprofitable_nodes=unprofitable)
    return [node.op_type for cluster in claims.clusters for node in cluster]


FROM_HOST = "a = Cast<to = 1>(s)"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("last = Neg(a)", []),
        ("last = Add(a, a)", []),
        ("b = Neg(a) last = Exp(b)", []),
        ("b = Neg(a) c = Exp(b) last = Abs(c)", ["Neg", "Exp", "Abs"]),  # three nodes, two copies
        ("w = Constant<value = float[3, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9}>() last = MatMul(a, w)", ["Constant", "MatMul"]),
        ("last = Add(a, x)", ["Add"]),  # x is a graph input, which may already be on the device
        ("b = Neg(a) c = Exp(x) last = Identity(b)", ["Exp"]),  # Neg and Exp are not connected
        ("w = Constant<value_float = 2.0>() last = Mul(a, w)", []),
    ],
)
def test_a_part_pays_that_does_more_than_its_copies(nodes: str, expected: list[str]) -> None:
    assert claimed(f"{FROM_HOST} {nodes}") == expected
    assert claimed(f"{FROM_HOST} {nodes}", unprofitable=True) != []


def test_a_part_that_gives_a_result_of_the_model_stays() -> None:
    text = """<ir_version: 9, opset_import: ["" : 18]> m (string[n] s) => (float[n] z)
        { a = Cast<to = 1>(s) z = Neg(a) }"""
    assert len(claim(read_model(parser.parse_model(text)), DEVICE).clusters) == 1
