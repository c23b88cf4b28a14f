"""Hostile models: the plugin declines a node that it cannot run, with a reason, and still claims the other nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from ort_cuda_plugin.model.ir import DType, InvalidModel, Unsupported
from ort_cuda_plugin.ops.registry import FLAGS, operators
from ort_cuda_plugin.program.expressions.fold import fold
from ort_cuda_plugin.program.lowering import elementwise

f32 = np.float32
INFO = helper.make_tensor_value_info
NODE = helper.make_node


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int | str | None]]],
    constants: dict[str, np.ndarray[Any, Any]] | None = None,
    opset: int = 18,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "hostile",
        [INFO(name, kind, dims) for name, (kind, dims) in inputs.items()],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def options() -> ort.SessionOptions:
    made = ort.SessionOptions()
    made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made.log_severity_level = 4
    return made


def reasons(proto: onnx.ModelProto) -> dict[str, str]:
    """Return the reasons for declined nodes by operator type."""
    verdicts = ort_cuda_plugin.explain(proto.SerializeToString(), emulate=True, sess_options=options())
    return {verdict.op_type: verdict.reason for verdict in verdicts if not verdict.supported}


def agree(proto: onnx.ModelProto, **feeds: np.ndarray[Any, Any]) -> None:
    data = proto.SerializeToString()
    ort_cuda_plugin.register(emulate=True)
    ours = ort.InferenceSession(data, options(), providers=[ort_cuda_plugin.get_ep_name(), "CPUExecutionProvider"])
    cpu = ort.InferenceSession(data, options(), providers=["CPUExecutionProvider"])
    for actual, expected in zip(ours.run(None, feeds), cpu.run(None, feeds), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, strict=True)


@pytest.mark.parametrize("dims", [[1] * 20, [None] * 20])
def test_a_rank_above_that_of_plans_is_declined(dims: list[int | str | None]) -> None:
    proto = model([NODE("Neg", ["x"], ["n"]), NODE("ReduceSum", ["n"], ["y"])], {"x": (TensorProto.FLOAT, dims)})
    values = {"Neg": "x", "ReduceSum": "n"}
    assert reasons(proto) == {op: f"the rank of '{name}' is 20; supported: up to 16" for op, name in values.items()}
    agree(proto, x=np.ones([1] * 20, f32))


def test_a_result_of_a_rank_above_that_of_plans_is_declined() -> None:
    nodes = [NODE("Abs", ["x"], ["a"]), NODE("Unsqueeze", ["a", "axes"], ["y"])]
    proto = model(nodes, {"x": (TensorProto.FLOAT, ["n"])}, {"axes": np.arange(1, 17)})
    assert reasons(proto) == {"Unsqueeze": "the rank of 'y' is 17; supported: up to 16"}
    agree(proto, x=np.ones(3, f32))


def test_a_shape_that_the_host_cannot_compute_is_declined_with_the_node_that_computes_it() -> None:
    nodes = [
        NODE("BitwiseAnd", ["n", "mask"], ["b"], name="rounded"),
        NODE("Expand", ["x", "b"], ["y"]),
    ]
    shapes: dict[str, tuple[int, list[int | str | None]]] = {
        "x": (TensorProto.FLOAT, [1]),
        "n": (TensorProto.INT64, [1]),
    }
    proto = model(nodes, shapes, {"mask": np.array([-4])})
    said = "Expand: a shape depends on the result of rounded (BitwiseAnd), which the host cannot compute; supported: +"
    assert reasons(proto)["Expand"].startswith(said)
    agree(proto, x=np.ones(1, f32), n=np.array([7]))


@pytest.mark.parametrize("index", [2, -3, 2**40])
def test_an_index_outside_a_shape_gives_0_as_on_the_device(index: int) -> None:
    nodes = [NODE("Shape", ["x"], ["s"]), NODE("Gather", ["s", "i"], ["g"]), NODE("ConstantOfShape", ["g"], ["y"])]
    proto = model(nodes, {"x": (TensorProto.FLOAT, ["n", "m"])}, {"i": np.array([1, index])})
    session = ort_cuda_plugin.session(proto.SerializeToString(), emulate=True, sess_options=options())
    assert session.run(None, {"x": np.ones((2, 3), f32)})[0].shape == (3, 0)


def test_the_number_of_no_element_type_is_an_error_with_a_reason() -> None:
    assert DType.of_attribute(1) is DType.FLOAT32
    for number in (0, -1, 99, 2**32):
        with pytest.raises(InvalidModel, match=f"no element type with the number {number}"):
            DType.of_attribute(number)
    with pytest.raises(Unsupported, match="a cast to STRING"):
        DType.of_attribute(8, "a cast to")


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_a_flag_that_is_neither_0_nor_1_is_declined(name: str) -> None:
    having = [operator for operator in operators() if name in operator.attributes]
    assert having
    for operator in having:
        with pytest.raises(Unsupported, match=f"{name} is 4; supported: 0, 1"):
            operator.bind_attributes({name: 4})


def test_large_tensors_of_sizes_are_computed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(*arguments: Any) -> Any:
        calls.append(1)
        return fold(*arguments)

    monkeypatch.setattr(elementwise, "fold", counting)
    nodes = [NODE("Shape", ["x"], ["s"]), NODE("Mul", ["ones", "s"], ["v0"])]
    nodes += [NODE(("Div", "Add")[i % 2], [f"v{i}", "three"], [f"v{i + 1}"]) for i in range(40)]
    nodes.append(NODE("Identity", ["v40"], ["y"]))
    constants = {"ones": np.ones(1000, np.int64), "three": np.array(3)}
    proto = model(nodes, {"x": (TensorProto.FLOAT, ["n"])}, constants)
    agree(proto, x=np.ones(5, f32))
    assert len(calls) < 1000


def test_an_attribute_that_onnx_runtime_does_not_hand_over_declines_its_node_only() -> None:
    optional = NODE("Optional", [], ["nothing"], type=helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
    has = NODE("OptionalHasElement", ["nothing"], ["has"])
    proto = model([optional, has, NODE("Abs", ["x"], ["y"])], {"x": (TensorProto.FLOAT, ["n"])})
    assert "Abs" not in reasons(proto)
    agree(proto, x=np.ones(3, f32))


def test_a_kernel_that_would_not_end_is_declined() -> None:
    node = NODE("RoiAlign", ["x", "rois", "batch"], ["y"], sampling_ratio=2**31 - 1)
    inputs: dict[str, tuple[int, list[int | str | None]]] = {
        "x": (TensorProto.FLOAT, [1, 1, 4, 4]),
        "rois": (TensorProto.FLOAT, ["n", 4]),
        "batch": (TensorProto.INT64, ["n"]),
    }
    assert reasons(model([node], inputs)) == {
        "RoiAlign": "RoiAlign: sampling_ratio is 2147483647; supported: up to 1024"
    }
