"""Process of test_nn_libraries.py: runs small networks whose convolutions and attention are calls of a stand-in cuDNN.

``python library_images.py FAKE_CUBLASLT.so FAKE_CUDNN.so`` prints a JSON list.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from kernel_harness import Array, run_model
from library_engines import halved
from library_scenarios import number, offer, use
from nn_reference import lrn, noise

NETS = {
    # The first convolution needs a copy of the image padded by a zero channel. Then pooling, a residual, and a mean
    # that reads NHWC.
    "residual": """(float[N, 3, 17, 15] x, float[16, 3, 3, 3] a, float[16] ab, float[16, 16, 1, 1] b, float[16] bb,
        float[16, 16, 3, 3] c, float[16] cb, float[16, 5] d, float[5] db) => (float[N, 5] y) {
        p = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, a, ab) q = Relu(p)
        r = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(q)
        s = Conv(r, b, bb) t = Relu(s) u = Conv<pads = [1, 1, 1, 1]>(t, c, cb) v = Add(u, r) w = Relu(v)
        g = GlobalAveragePool(w) f = Flatten(g) y = Gemm(f, d, db) }""",
    # Concat, pooling and Resize between convolutions; an image that is also an output; a GEMM that reads NCHW order.
    "branches": """(float[2, 4, 6, 5] x, float[8, 4, 3, 3] a, float[8] ab, float[6, 8, 1, 1] b, float[5, 8, 3, 3] c,
        float[7, 8, 1, 1] d, float[7] db, float[4, 18, 1, 1] e, float[480, 3] h)
        => (float[2, 8, 6, 5] q, float[2, 3] y) {
        p = Conv<pads = [1, 1, 1, 1]>(x, a, ab) q = Relu(p) r = Conv(q, b) s = Conv<pads = [1, 1, 1, 1]>(q, c)
        t = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(q) u = Conv(t, d, db) v = Concat<axis = 1>(r, s, u)
        w = Sigmoid(v) i = Conv(w, e)
        k = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>()
        j = Resize<mode = "nearest">(i, , k) m = Tanh(j) f = Flatten(m) y = MatMul(f, h) }""",
    # Readers of a convolution's result that cannot read NHWC: a transposed convolution, and a sum over channels.
    "exits": """(float[N, 4, 5, 6] x, float[6, 2, 3, 3] a, float[6] ab, float[6, 4, 2, 2] b, float[4] bb,
        float[8, 4, 3, 3] c, float[8, 8, 1, 1] d) => (float[N, 1, 5, 6] y, float[N, 8, 10, 12] z) {
        p = Conv<group = 2, pads = [1, 1, 1, 1]>(x, a, ab) q = Relu(p) r = ConvTranspose<strides = [2, 2]>(q, b, bb)
        s = Conv<pads = [1, 1, 1, 1]>(r, c) t = Conv(s, d) z = Relu(t)
        axes = Constant<value_ints = [1]>() y = ReduceSum(q, axes) }""",
    # Depthwise convolutions, which kernels of the plugin compute.
    "depthwise": """(float[N, 4, 9, 7] x, float[8, 4, 1, 1] a, float[8, 1, 5, 5] b, float[8] bb, float[6, 8, 1, 1] c)
        => (float[N, 6, 5, 4] y) {
        p = Conv(x, a) low = Constant<value_float = 0.0>() high = Constant<value_float = 6.0>()
        q = Conv<group = 8, pads = [2, 2, 2, 2], strides = [2, 2]>(p, b, bb) r = Clip(q, low, high) y = Conv(r, c) }""",
    # Depthwise kernels with vectors of channels and several output pixels per thread, some of them beyond the image's
    # edge, and a residual. The second one has many taps, and one output pixel per thread.
    "wide depthwise": """(float[N, 32, 24, 22] x, float[32, 32, 1, 1] a, float[32, 1, 3, 3] b, float[32] bb,
        float[32, 1, 6, 5] c, float[4, 32, 1, 1] d) => (float[N, 4, 23, 22] y) {
        p = Conv(x, a) q = Conv<group = 32, pads = [1, 1, 1, 1]>(p, b, bb) r = Add(q, p)
        s = Conv<group = 32, pads = [2, 2, 2, 2]>(r, c) t = Sigmoid(s) u = Mul(s, t) v = Conv(u, d) y = Tanh(v) }""",
    # Depthwise with more channels than the adjacent threads of one output pixel cover.
    "many depthwise": """(float[N, 4, 45, 43] x, float[144, 4, 1, 1] a, float[144, 1, 5, 5] b, float[144] bb,
        float[4, 144, 1, 1] d) => (float[N, 4, 45, 43] y) {
        p = Conv(x, a) q = Conv<group = 144, pads = [2, 2, 2, 2]>(p, b, bb) r = Relu(q) y = Conv(r, d) }""",
    # Activations of convolutions with many channels, which are fused into the library calls.
    "activations": """(float[N, 16, 5, 4] x, float[16, 16, 1, 1] a, float[16] ab, float[16, 16, 3, 3] c, float[16] cb)
        => (float[N, 16, 5, 4] y) {
        k = Constant<value_float = 8.0>() m = Mul(x, k) p = Conv(m, a, ab) low = Constant<value_float = 0.0>()
        high = Constant<value_float = 6.0>() q = Clip(p, low, high) r = Conv<pads = [1, 1, 1, 1]>(q, c, cb)
        s = Sigmoid(r) y = Mul(r, s) }""",
    # A normalization along channels, which are contiguous in NHWC, and a pooling of its result.
    "normalized": """(float[N, 4, 12, 11] x, float[24, 4, 3, 3] a, float[24] ab, float[8, 24, 3, 3] c)
        => (float[N, 8, 3, 3] y) {
        p = Conv<pads = [1, 1, 1, 1]>(x, a, ab) q = Relu(p) r = LRN<size = 5, alpha = 0.01>(q)
        s = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>(r) y = Conv(s, c) }""",
    "line": """(float[2, 4, 9] x, float[6, 4, 3] a, float[6] ab, float[6, 6, 1] b) => (float[2, 6, 4] y) {
        p = Conv<strides = [2]>(x, a, ab) q = Relu(p) r = Conv(q, b) y = Add(r, q) }""",
    "volume": """(float[1, 2, 4, 5, 6] x, float[4, 2, 2, 3, 2] a, float[4] ab, float[3, 4, 1, 1, 1] b)
        => (float[1, 3, 3, 3, 5] y) {
        p = Conv(x, a, ab) q = Relu(p) y = Conv(q, b) }""",
}  # fmt: skip
PARTS = """(float[N, 4, 6, 5] x, float[8, 4, 3, 3] a, float[8] ab, float[6, 8, 1, 1] b, float[6] bb,
    float[5, 8, 3, 3] c, float[7, 8, 1, 1] d, float[4, 18, 1, 1] e) => (float[N, 4, 6, 5] y) {
    p = Conv<pads = [1, 1, 1, 1]>(x, a, ab) q = Relu(p) f = Conv(q, b, bb) r = Relu(f)
    s = Conv<pads = [1, 1, 1, 1]>(q, c) u = Conv(q, d) v = Concat<axis = 1>(r, s, u) y = Conv(v, e) }"""
HALF = {"residual", "wide depthwise", "many depthwise", "normalized"}
HEADS = """(float[2, 33, 96] x) => (float[2, 33, 32] y) {{
    parts = Constant<value_ints = [32, 32, 32]>() q, k, v = Split<axis = 2>(x, parts)
    shape = Constant<value_ints = [0, 0, 2, 16]>() flat = Constant<value_ints = [0, 0, 32]>()
    qh = Reshape(q, shape) kh = Reshape(k, shape) vh = Reshape(v, shape) qt = Transpose<perm = [0, 2, 1, 3]>(qh)
    kt = Transpose<perm = [0, 2, 3, 1]>(kh) vt = Transpose<perm = [0, 2, 1, 3]>(vh) s = MatMul(qt, kt)
    c = Constant<value = float {{0.25}}>() l = Mul(c, s) {masked} p = Softmax<axis = -1>(m) o = MatMul(p, vt)
    t = Transpose<perm = [0, 2, 1, 3]>(o) y = Reshape(t, flat) }}"""
ATTENTION = {
    "attention": HEADS.format(masked="m = Identity(l)"),
    "masked attention": HEADS.replace("float[2, 33, 96] x", "float[2, 33, 96] x, float[2, 1, 1, 33] b").format(
        masked="m = Add(l, b)"
    ),
    "computed mask": HEADS.replace("float[2, 33, 96] x", "float[2, 33, 96] x, float[2, 1, 1, 33] b").format(
        masked="g = ReduceMax(x) n = Mul(b, g) m = Add(l, n)"
    ),
}


class LRN(OpRun):
    """LRN for the reference evaluator, whose own LRN is wrong: it normalizes only the first N channels for N images."""

    def _run(self, x: Array, alpha: float, beta: float, bias: float, size: int) -> tuple[Array]:
        return (lrn(x, size, alpha, beta, bias).astype(x.dtype),)


def net(text: str, batch: int) -> tuple[onnx.ModelProto, list[Any]]:
    """Return a model with random initializers for all inputs but the first, and a list with the first input."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> net {text}')
    graph = model.graph
    for seed, value in enumerate(graph.input[1:]):
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        scale = np.float32(np.sqrt(2 / max(np.prod(shape[1:]), 1)))
        graph.initializer.append(numpy_helper.from_array(noise(seed + 1, tuple(shape)) * scale, value.name))
    x = graph.input[0]
    del graph.input[1:]
    return model, [noise(0, tuple(dim.dim_value or batch for dim in x.type.tensor_type.shape.dim))]


def exact(model: onnx.ModelProto, x: Array) -> list[Array]:
    """Return the model's results in float64.

    In float32 NumPy's summation order, and so its error, would depend on the processor.
    """
    evaluator = ReferenceEvaluator(halved(model, onnx.TensorProto.DOUBLE), new_ops=[LRN])
    return [np.asarray(result) for result in evaluator.run(None, {"x": x.astype(np.float64)})]


def parts(path: str, cudnn: ctypes.CDLL) -> dict[str, Any]:
    """Return the largest error and the numbers of calls for a Concat of results of both libraries."""
    products = use("cublaslt", 0, path)
    offer("cublaslt", "cudnn")
    model, inputs = net(PARTS, 2)
    (wanted,) = exact(model, inputs[0])
    before = number(cudnn, "fake_runs")
    found = run_model(model, inputs)[0].view(np.float32)
    calls = [number(products, "fake_runs"), number(cudnn, "fake_runs") - before]
    return {"net": "parts", "error": float(np.max(np.abs(found - wanted))), "calls": calls}


def main(cublaslt_path: str, cudnn_path: str) -> list[dict[str, Any]]:
    """Return the largest errors and the numbers of calls: of each network in float32 and float16, with the number of
    channels-last calls; of attention; and of `parts`.
    """
    fake = use("cudnn", 1, cudnn_path)
    results = []
    for name, text in NETS.items():
        model, inputs = net(text, 2)
        wanted = exact(model, inputs[0])
        for half in (False, True) if name in HALF else (False,):
            before = [number(fake, key) for key in ("fake_runs", "fake_channels_last")]
            fed = [x.astype(np.float16) if half else x for x in inputs]
            found = run_model(halved(model) if half else model, fed)
            errors = [
                float(np.max(np.abs(a.view(np.float16 if half else np.float32).astype(np.float32) - b)))
                for a, b in zip(found, wanted, strict=True)
            ]
            calls = [number(fake, key) for key in ("fake_runs", "fake_channels_last")]
            runs = [now - then for now, then in zip(calls, before, strict=True)]
            operations = number(fake, "fake_operations")  # operations that are fused into the last call
            results.append({"net": name, "half": half, "error": max(errors), "runs": runs, "operations": operations})
    offer("cublaslt", "cudnn")
    for name, text in ATTENTION.items():
        model, inputs = net(text, 2)
        inputs = [x.astype(np.float16) for x in inputs]
        (attention,) = exact(model, inputs[0])
        attended = number(fake, "fake_runs")
        found = run_model(halved(model), inputs)
        error = float(np.max(np.abs(found[0].view(np.float16).astype(np.float32) - attention)))
        results.append({"net": name, "error": error, "attention": number(fake, "fake_runs") - attended})
    results.append(parts(cublaslt_path, fake))
    return results


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
