"""A model that mixes a convolutional network, a CPU node, a Loop with an If, and an LSTM."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper, parser

import ort_cuda_plugin
from session_pair import FLOAT, RNG, floats, info

EP = "CudaPluginExecutionProvider"

BODY = """body (int64 i, bool go_on, float[n, 8] state) => (bool still, float[n, 8] next, float[n, 8] each)
{
  half = Constant<value_float = 0.5>()
  zero = Constant<value_float = 0.0>()
  smaller = Mul(state, half)
  total = ReduceSum<keepdims = 0>(smaller)
  negative = Less(total, zero)
  next = If(negative) <then_branch = yes () => (float[n, 8] t) { t = Neg(smaller) },
                       else_branch = no () => (float[n, 8] e) { e = Tanh(smaller) }>
  each = Identity(next)
  size = ReduceMax<keepdims = 0>(next)
  least = Constant<value_float = 0.01>()
  still = Greater(size, least)
}"""


def mixed_model() -> onnx.ModelProto:
    """Return the model: input ``x`` [n, 3, 16, 16], output ``y``: an LSTM over the results of the Loop's iterations."""
    weights = {
        "w1": floats(8, 3, 3, 3) * 0.2,
        "w2": floats(8, 8, 3, 3) * 0.2,
        "b2": floats(8) * 0.2,
        "lstm_w": floats(1, 24, 8) * 0.3,
        "lstm_r": floats(1, 24, 6) * 0.3,
        "most": np.array(9),
        "yes": np.array(True),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("MaxPool", ["r1"], ["p1"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "w2", "b2"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Cast", ["c2"], ["text"], name="to_text", to=onnx.TensorProto.STRING),
        helper.make_node("Cast", ["text"], ["back"], name="from_text", to=FLOAT),
        helper.make_node("GlobalAveragePool", ["back"], ["g"], name="average"),
        helper.make_node("Flatten", ["g"], ["features"], name="flatten"),
        helper.make_node(
            "Loop",
            ["most", "yes", "features"],
            ["last", "steps"],
            name="loop",
            body=parser.parse_graph(BODY),
        ),
        helper.make_node("LSTM", ["steps", "lstm_w", "lstm_r"], ["y"], name="lstm", hidden_size=6),
    ]
    graph = helper.make_graph(
        nodes,
        "mixed",
        [info("x", FLOAT, ["n", 3, 16, 16])],
        [info("y", FLOAT, None), info("last", FLOAT, None)],
        [numpy_helper.from_array(array.astype(array.dtype), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("layout", ["channels-first", "channels-last"])
def test_each_part_runs_here_and_no_tensor_moves_that_need_not(layout: str) -> None:
    model = mixed_model().SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort_cuda_plugin.session(
        model,
        emulate=True,
        sess_options=options,
        provider_options={"prefer_nhwc": int(layout == "channels-last")},
    )
    cpu = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    elsewhere = sorted(
        node.name
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != EP
        for node in part.get_nodes()
    )
    assert elsewhere == ["from_text", "to_text"]
    domains = {
        (node.domain, node.op_type)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    }
    assert (("com.ms.internal.nhwc", "Conv") in domains) == (layout == "channels-last")
    for rows in (2, 1, 3, 3):
        x = RNG.standard_normal((rows, 3, 16, 16), dtype=np.float32)
        before = ort_cuda_plugin.counters()
        results = session.run(None, {"x": x})
        after = ort_cuda_plugin.counters()
        expected = cpu.run(None, {"x": x})
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
        iterations = expected[0].shape[0]
        assert iterations > 2
        # Copies to the device: the model's input, and the result of the CPU's Cast.
        assert after["copies_h2d"] - before["copies_h2d"] == 2
        # Copies to the host: the Cast's input, two model outputs, and the conditions of If and Loop in each iteration.
        assert after["copies_d2h"] - before["copies_d2h"] == 3 + 2 * iterations
