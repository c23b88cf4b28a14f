"""Read-backs: shapes that depend on values computed on the device, which the host reads in the middle of a Run."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, parser

import ort_cuda_plugin


def session(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> ort.InferenceSession:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = ort_cuda_plugin.session(model.SerializeToString(), emulate=True, sess_options=options)
    placed = {part.ep_name for part in made.get_provider_graph_assignment_info()}
    assert placed == {ort_cuda_plugin.get_ep_name()}
    return made


@pytest.fixture(scope="module")
def reshape() -> ort.InferenceSession:
    return session(
        [
            helper.make_node("Cast", ["s"], ["shape"], to=TensorProto.INT64),
            helper.make_node("Reshape", ["x", "shape"], ["r"], name="to_computed"),
            helper.make_node("Relu", ["r"], ["y"]),
        ],
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b"]),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [3]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["p", "q", "r"])],
    )


def test_one_plan_serves_every_computed_shape(reshape: ort.InferenceSession) -> None:
    x = np.random.default_rng(0).standard_normal((4, 6), dtype=np.float32)
    reshape.run(None, {"x": x, "s": np.array([24, 1, 1], np.float32)})
    before = ort_cuda_plugin.counters()
    for shape, expected in [((2, 3, 4), (2, 3, 4)), ((-1, 2, 2), (6, 2, 2)), ((0, 3, -1), (4, 3, 2))]:
        (y,) = reshape.run(None, {"x": x, "s": np.array(shape, np.float32)})
        np.testing.assert_array_equal(y, np.maximum(x, 0).reshape(expected))
    after = ort_cuda_plugin.counters()
    assert after["python_calls"] == before["python_calls"]
    assert after["host_value_reads"] > before["host_value_reads"]


def test_a_computed_shape_that_does_not_fit_fails_the_run_by_name_and_the_next_one_works(
    reshape: ort.InferenceSession,
) -> None:
    x = np.ones((4, 6), np.float32)
    with pytest.raises(Exception, match=r"to_computed \(Reshape\)"):
        reshape.run(None, {"x": x, "s": np.array([5, 5, 5], np.float32)})
    (y,) = reshape.run(None, {"x": x, "s": np.array([1, 1, -1], np.float32)})
    assert y.shape == (1, 1, 24)


@pytest.mark.parametrize("pads", ["of a shape", "of an input"])
def test_pads_that_an_exporter_transposes_are_not_read_back_in_the_middle_of_a_run(pads: str) -> None:
    """torch.onnx.export reverses pads with Reshape, Slice, Transpose and Reshape; here to a multiple of 4 columns."""
    source = "n = Shape(x) c = Slice(n, one, two) r = Mod(c, four) d = Sub(four, r) w = Mod(d, four)"
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[a, b] x, int64[1] p) => (float[c, d] y)'
        " <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] last = {-1},"
        " int64[1] first = {-9223372036854775807}, int64[2] pairs = {-1, 2}> {"
        f" {source if pads == 'of a shape' else 'w = Add(p, p)'}"
        " e = Concat<axis = 0>(zero, w, zero, zero) m = Reshape(e, pairs) q = Slice(m, last, first, zero, last)"
        " t = Transpose<perm = [1, 0]>(q) k = Reshape(t, last) y = Pad(x, k) }"
    ).SerializeToString()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = ort_cuda_plugin.session(model, emulate=True, sess_options=options)
    cpu = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    before = ort_cuda_plugin.counters()
    for columns in (5, 5, 5, 5, 8, 3):
        feeds = {"x": np.ones((2, columns), np.float32), "p": np.array([columns])}
        np.testing.assert_array_equal(made.run(None, feeds)[0], cpu.run(None, feeds)[0])
    after = ort_cuda_plugin.counters()
    assert after["graph_fallbacks_read_back"] == before["graph_fallbacks_read_back"]


@pytest.mark.parametrize("reduction", ["ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin"])
def test_the_host_reduces_shapes_without_a_read_back(reduction: str) -> None:
    """Torchvision's detectors take the minimum of a size and a number, and models multiply the sizes of a shape."""
    source, axes = ("Concat<axis = 0>(n, few)", "<axes = [0]>(s)") if reduction == "ReduceMin" else ("Add(n, n)", "(s)")
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[a, b] x) => (float[k] y, int64[m] z)'
        f" <int64[1] few = {{4}}, int64[1] one = {{1}}> {{ n = Shape(x) s = {source} r = {reduction}{axes}"
        " y = ConstantOfShape(r) z = Mul(r, one) }"
    ).SerializeToString()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = ort_cuda_plugin.session(model, emulate=True, sess_options=options)
    cpu = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    before = ort_cuda_plugin.counters()
    for shape in ((3, 5), (7, 6), (7, 6), (7, 6), (3, 5)):
        for got, want in zip(
            made.run(None, {"x": np.ones(shape, np.float32)}),
            cpu.run(None, {"x": np.ones(shape, np.float32)}),
            strict=True,
        ):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    after = ort_cuda_plugin.counters()
    assert after["host_value_reads"] == before["host_value_reads"]


GATHERS = {
    "OneHot": "c = Concat<axis = 0>(one, n) d = Slice(c, zero, two) r = OneHot(one, three, d)",  # repeats of a Tile
    # The exporter computes a factor as a quotient of two sizes, which is a constant after simplification.
    "OneHot of a constant": "t = Add(n, n) q = Div(t, n) o = Slice(q, zero, one) c = Concat<axis = 0>(one, o)"
    " r = OneHot(one, three, c)",
    "GatherND": "i = Unsqueeze(one, one) r = GatherND(n, i)",
    "GatherElements": "r = GatherElements(n, one)",
    "GatherElements without a valid index": "r = GatherElements(n, three)",
}


@pytest.mark.parametrize("gather", GATHERS)
def test_the_host_gathers_sizes_without_a_read_back(gather: str) -> None:
    """torch.onnx.export writes the repeats of a repeat_interleave as the OneHot of a size."""
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[a, b] x) => (float[k, l, m] y)'
        " <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, int64[1] last = {-1},"
        f" int64[3] ones = {{1, 1, 1}}> {{ n = Shape(x) {GATHERS[gather]} f = Reshape(r, last) e = Expand(f, three)"
        " s = Slice(e, zero, three) y = ConstantOfShape(s) }"
    ).SerializeToString()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = ort_cuda_plugin.session(model, emulate=True, sess_options=options)
    before = ort_cuda_plugin.counters()
    for a, b in ((3, 5), (7, 6), (7, 6), (7, 6), (3, 5)):
        want = {
            "OneHot": (1, a, 1),
            "OneHot of a constant": (1, 2, 1),
            "GatherElements without a valid index": (0, 0, 0),
        }.get(gather, (b, b, b))
        assert np.asarray(made.run(None, {"x": np.ones((a, b), np.float32)})[0]).shape == want
    after = ort_cuda_plugin.counters()
    assert after["host_value_reads"] == before["host_value_reads"]


def test_several_read_backs_in_one_plan() -> None:
    made = session(
        [
            helper.make_node("Constant", [], ["one"], value_ints=[1]),
            helper.make_node("Cast", ["s"], ["first"], to=TensorProto.INT64),
            helper.make_node("Reshape", ["x", "first"], ["r"]),
            helper.make_node("ReduceMax", ["r"], ["largest"], keepdims=1),
            helper.make_node("Reshape", ["largest", "one"], ["flat"]),
            helper.make_node("Cast", ["flat"], ["count"], to=TensorProto.INT64),
            helper.make_node("Concat", ["count", "one"], ["second"], axis=0),
            helper.make_node("Expand", ["r", "second"], ["y"]),
        ],
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    x = np.array([1, 3, 2], np.float32)
    feeds = {"x": x, "s": np.array([1, 3], np.float32)}
    np.testing.assert_array_equal(made.run(None, feeds)[0], np.broadcast_to(x, (3, 3)))
