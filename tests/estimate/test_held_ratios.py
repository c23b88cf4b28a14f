"""Ratios of small networks' plans to the rooflines of their steps, by the model of an H100.

The limits are the reached figures with a margin. A plan or a kernel that gets slower exceeds them.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from ort_cuda_plugin import gpus
from ort_cuda_plugin.estimate import gather
from ort_cuda_plugin.estimate.model import estimate

TRANSFORMER = """<ir_version: 10, opset_import: ["" : 20]> layer (float16[4096, 384] x) => (float16[4096, 384] y) {
    h = MatMul(x, a) b = Add(h, ab) d = Div(b, root) e = Erf(d) f = Add(e, one) g = Mul(b, f) i = Mul(g, half)
    j = MatMul(i, c) k = Add(j, cb) l = Add(k, x) y = LayerNormalization(l, w, cb) }"""
IMAGES = """<ir_version: 10, opset_import: ["" : 20]> images (float16[16, 64, 56, 56] x) => (float16[16, 64] y) {
    p = Conv(x, a) q = Relu(p) r = Conv<group = 64, pads = [1, 1, 1, 1]>(q, b) s = Relu(r) t = Conv(s, c)
    u = ConvTranspose<strides = [2, 2]>(t, d) v = Conv(u, a) m = GlobalAveragePool(v) y = Flatten(m) }"""
WEIGHTS: dict[str, dict[str, tuple[int, ...]]] = {
    TRANSFORMER: {
        "a": (384, 1536),
        "ab": (1536,),
        "root": (),
        "one": (),
        "half": (),
        "c": (1536, 384),
        "cb": (384,),
        "w": (384,),
    },
    IMAGES: {"a": (64, 64, 1, 1), "b": (64, 1, 3, 3), "c": (64, 64, 1, 1), "d": (64, 64, 2, 2)},
}


def network(text: str) -> ModelProto:
    model = parser.parse_model(text)
    for name, shape in WEIGHTS[text].items():
        model.graph.initializer.append(numpy_helper.from_array(np.full(shape, 1.5, np.float16), name))
    return model


@pytest.mark.parametrize(("text", "held"), [(TRANSFORMER, 2.2), (IMAGES, 2.1)], ids=["transformer", "images"])
def test_small_networks_stay_near_their_rooflines(text: str, held: float) -> None:
    found = estimate(gather.work_of_model(network(text), {}), gpus.gpu("h100"))
    slowest = sorted(found.steps, key=lambda step: step.roofline - step.seconds)
    shown = [f"{step.name}: {step.seconds * 1e6:.1f} us, roofline {step.roofline * 1e6:.1f}" for step in slowest[:3]]
    assert found.steps_ratio < held, shown
