"""Elementwise and row kernels access memory by 16 bytes in a GPU's machine code."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import parser, shape_inference

from encoder import encoder, encoder_inputs
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.estimate.sass import code_of, disassembler
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties(emulated=False, libraries=frozenset({"cublaslt", "cudnn"}))
HALF = """<ir_version: 10, opset_import: ["" : 20]> half
    (float16[8, 128, 384] x, float16[8, 128, 384] r, float16[384] w, float16[8, 12, 128, 512] s, int64[8, 128] i,
     float16[1000, 384] t, uint8[8, 128, 384] codes)
    => (float16[8, 128, 384] norm, float16[8, 12, 128, 512] soft, float16[8, 128, 384] words,
        float16[8, 384, 128] turned, float[1, 1, 1] total, float16[8, 128, 384] active, uint8[8, 128, 384] again)
    { a = Add(x, r) norm = LayerNormalization(a, w, w) soft = Softmax(s) words = Gather(t, i) b = Mul(x, w)
      active = Gelu(b) turned = Transpose<perm = [0, 2, 1]>(r) wide = Cast<to = 1>(x) total = ReduceMax(wide)
      scale = Constant<value_float = 0.03>() number = DequantizeLinear(codes, scale)
      again = QuantizeLinear(number, scale) }"""


def kernels(model: Any, feeds: dict[str, Any]) -> list[KernelSpec]:
    cluster = CompiledCluster(read_model(shape_inference.infer_shapes(model)), GPU)
    plan = cluster.prepare()
    if plan.plan is None:
        return list(cluster.build([feeds[value.name].shape for value in cluster.inputs], []).kernels)
    return list(plan.kernels)


def test_kernels_of_elements_and_rows_move_16_bytes() -> None:
    if disassembler() is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    found = kernels(encoder(), encoder_inputs(8, 128)) + kernels(parser.parse_model(HALF), {})
    # Other tests check attention; the kernel of a transpose accesses its tile in shared memory element by element.
    moved = [spec for spec in dict.fromkeys(found) if "attention" not in spec.name]
    straight = [spec for spec in moved if "cuda.shared.array(1056" not in spec.source]
    assert len(straight) == len(moved) - 1 > 9
    for spec, code in zip(straight, code_of(straight, Target.cuda(9, 0)), strict=True):
        results = {"LDG", "STG"} if "store_row" in spec.source or "store_lanes" in spec.source else {"LDG"}
        widths = {code.widest(name) for name in results}
        # A kernel's widest type has vectors of 16 bytes; narrower types have as many elements, so fewer bytes.
        assert max(widths) == 16, spec.name
        assert len(widths) == 1 or (min(widths) == 8 and len({x for x in spec.signature if x[0] == "*"}) > 1), spec.name
        assert code.spilled == code.mix.get("LDL", 0) == code.mix.get("STL", 0) == 0
