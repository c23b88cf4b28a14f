"""Models with CPU nodes between clusters: ONNX Runtime's Memcpy nodes, and synchronization of device and host."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import ort_cuda_plugin
from device_models import with_cpu_nodes

DTYPES = [
    "float32",
    "float64",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]


def providers_of(session: ort.InferenceSession) -> list[str]:
    return [part.ep_name for part in session.get_provider_graph_assignment_info()]


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_goes_down_to_a_cpu_node_and_up_again(dtype: str) -> None:
    model = with_cpu_nodes(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    session = ort_cuda_plugin.session(model, emulate=True)
    assert providers_of(session).count(ort_cuda_plugin.get_ep_name()) == 2
    assert "CPUExecutionProvider" in providers_of(session)
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (3, 4)).astype(dtype)
    for run in range(5):
        before = ort_cuda_plugin.counters()
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.tile(x, (4, 1)))
        after = ort_cuda_plugin.counters()
        # Copies to the device: the model's input and the CPU nodes' result. To the host: the CPU nodes' input and the
        # model's output.
        assert after["copies_h2d"] - before["copies_h2d"] == 2
        assert after["copies_d2h"] - before["copies_d2h"] == 2
        if run < 2:  # later Runs are CUDA graphs, which keep memory
            assert after["device_bytes_in_use"] == before["device_bytes_in_use"]


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    "level", [ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL]
)
def test_many_changes_between_device_and_host_give_right_results(level: ort.GraphOptimizationLevel) -> None:
    before = ort_cuda_plugin.counters()["pinned_bytes_in_use"]
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort_cuda_plugin.session(with_cpu_nodes(1, rounds=5), emulate=True, sess_options=options)
    rng = np.random.default_rng(1)
    for rows, columns in [(1, 1), (30, 20), (5, 100), (30, 20)]:
        x = rng.integers(-1000, 1000, (rows, columns)).astype(np.float32)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.tile(x, (64, 1)))
    assert ort_cuda_plugin.counters()["pinned_bytes_in_use"] == before


def reduced_around_a_string_node() -> bytes:
    """Return a model of y = relu(r + sum(r)) with r = sum(x, axes).

    ORT does not infer the rank of r. Casts to and from string, which run on the CPU, split the graph into two clusters.
    """
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["r"], keepdims=0),
        helper.make_node("ReduceSum", ["r"], ["reduced"], keepdims=0),
        helper.make_node("Reshape", ["reduced", "scalar"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["text"], to=onnx.TensorProto.STRING),
        helper.make_node("Cast", ["text"], ["number"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Add", ["r", "number"], ["added"]),
        helper.make_node("Relu", ["added"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "reduced",
        [
            helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", "m", 2]),
            helper.make_tensor_value_info("axes", onnx.TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [helper.make_tensor("scalar", onnx.TensorProto.INT64, [0], [])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def test_a_rank_that_ort_does_not_infer_passes_from_one_cluster_to_the_next() -> None:
    session = ort_cuda_plugin.session(reduced_around_a_string_node(), emulate=True)
    elsewhere = [
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != ort_cuda_plugin.get_ep_name()
        for node in part.get_nodes()
    ]
    assert elsewhere == ["Cast", "Cast"]
    x = np.arange(-12, 12, dtype=np.float32).reshape(4, 3, 2)
    for axis in (0, 1, -1):
        (y,) = session.run(None, {"x": x, "axes": np.array([axis], np.int64)})
        reduced = x.sum(axis)
        np.testing.assert_array_equal(y, np.maximum(reduced + reduced.sum(), 0))


@pytest.mark.parametrize("said", [[1, 300], [1], [1, 1, 300]], ids=["dimension", "lower-rank", "higher-rank"])
def test_what_a_cpu_node_computes_may_have_another_shape_than_the_model_says(said: list[int]) -> None:
    """Some exporters declare wrong shapes. ONNX Runtime checks only the inputs of a Run; about others it only warns."""
    text = """<ir_version: 9, opset_import: ["" : 18]> shapes (float[1, 2, 300] x, int64[1] axes) => (float[m, n] y) {
        letters = Cast <to = 8> (x)
        squeezed = Squeeze (letters, axes)
        a = Cast <to = 1> (squeezed)
        e = Exp (a)
        scaled = Mul (e, factors)
        y = MatMul (scaled, weights)
    }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    constants = {
        "factors": rng.standard_normal(300).astype(np.float32),  # small: kept on the host
        "weights": rng.standard_normal((300, 100)).astype(np.float32),  # read back from the device
    }
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    model.graph.value_info.append(helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, said))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True, sess_options=options)
    assert ort_cuda_plugin.get_ep_name() in providers_of(session)
    x = rng.integers(-3, 3, (1, 2, 300)).astype(np.float32)
    expected = (np.exp(x[0]) * constants["factors"]) @ constants["weights"]
    for _ in range(2):
        (y,) = session.run(None, {"x": x, "axes": np.array([0], np.int64)})
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)
