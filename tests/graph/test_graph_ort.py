"""The reader of OrtGraph, on the graphs that ONNX Runtime passes to the plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.clusters.claims.claims import Claims, analyze
from ort_cuda_plugin.ep import claiming, session_state
from ort_cuda_plugin.model.ir import MAX_SUBGRAPH_DEPTH, Constant, DType, Graph, LongList, Node
from ort_cuda_plugin.model.ort.ort_calls import OrtCallError
from ort_cuda_plugin.model.ort.ort_graph import read_graph

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


Read: TypeAlias = Callable[..., list[Graph]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Read:
    """Return a function that creates a session and returns the graphs that the plugin read.

    Its parameter ``inspect`` is called with each graph while the OrtGraph is still valid.
    """
    ort_cuda_plugin.register(emulate=True)

    def run(
        graph: onnx.GraphProto, inspect: Callable[[Graph], object] = lambda graph: None, opset: int = 17, **saving: Any
    ) -> list[Graph]:
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        path = tmp_path / "model.onnx"
        onnx.save(model, path, **saving)
        graphs: list[Graph] = []
        failures: list[BaseException] = []

        def reading(api: Any, ort_graph: Any) -> Graph:
            graph = read_graph(api, ort_graph)
            try:
                inspect(graph)
            except BaseException as error:  # raised below: ORT's callback would catch it
                failures.append(error)
            graphs.append(graph)
            return graph

        monkeypatch.setattr(session_state, "read_graph", reading)
        # Claim no node, so that the graphs contain the original nodes and no fused ones.
        monkeypatch.setattr(claiming, "claim", lambda graph, *rest, **more: Claims([], [], analyze(graph, *rest)))
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        ort.InferenceSession(path, options, providers=["CudaPluginExecutionProvider", "CPUExecutionProvider"])
        for failure in failures:
            raise failure
        return graphs

    return run


def node_of(graphs: list[Graph], op_type: str) -> Node:
    return next(node for graph in graphs for node in graph.nodes if node.op_type == op_type)


def info(name: str, kind: int, shape: list[int | str | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def test_names_types_and_dimensions_are_as_the_model_says(read: Read) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"], name="copy"), helper.make_node("Identity", ["u"], ["v"])],
        "shapes",
        [info("x", FLOAT, ["batch", 3, None]), info("u", BOOL, None)],
        [info("y", FLOAT, None), info("v", BOOL, None)],
    )
    result = read(graph)[0]
    assert result.name == "shapes"
    assert result.opsets[""] == 17
    assert not result.is_subgraph
    assert [(v.name, v.dtype, v.shape) for v in result.inputs] == [
        ("x", DType.FLOAT32, ("batch", 3, None)),
        ("u", DType.BOOL, None),
    ]
    assert [value.name for value in result.outputs] == ["y", "v"]
    copy = next(node for node in result.nodes if node.name == "copy")
    assert copy.inputs == (result.inputs[0],)
    assert (copy.op_type, copy.domain, copy.since_version) == ("Identity", "", 16)


def test_attributes_of_every_type_are_read(read: Read) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["x"], ["a"], perm=[1, 0]),
            helper.make_node("LeakyRelu", ["x"], ["b"], alpha=0.25),
            helper.make_node("Softmax", ["x"], ["c"], axis=0),
            helper.make_node("AveragePool", ["image"], ["d"], kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
            helper.make_node("ConstantOfShape", ["shape"], ["e"], value=helper.make_tensor("v", INT64, [1], [7])),
            helper.make_node(
                "LSTM",
                ["s", "w", "r"],
                ["f"],
                hidden_size=2,
                activations=["Tanh", "Relu", "Tanh"],
                activation_alpha=[0.5, 1.5],
            ),
        ],
        "attributes",
        [
            info("x", FLOAT, [2, 3]),
            info("image", FLOAT, [1, 1, 4, 4]),
            info("shape", INT64, [1]),
            info("s", FLOAT, [1, 1, 3]),
            info("w", FLOAT, [1, 8, 3]),
            info("r", FLOAT, [1, 8, 2]),
        ],
        [info(name, INT64 if name == "e" else FLOAT, None) for name in "abcdef"],
    )
    graphs = read(graph)
    assert node_of(graphs, "Transpose").attributes["perm"] == (1, 0)
    assert node_of(graphs, "LeakyRelu").attributes["alpha"] == 0.25
    assert node_of(graphs, "Softmax").attributes["axis"] == 0
    assert node_of(graphs, "AveragePool").attributes["auto_pad"] == "SAME_UPPER"
    value = node_of(graphs, "ConstantOfShape").attributes["value"]
    assert isinstance(value, Constant)
    assert value.dtype is DType.INT64
    np.testing.assert_array_equal(value.array, np.array([7]))
    lstm = node_of(graphs, "LSTM").attributes
    assert lstm["activations"] == ("Tanh", "Relu", "Tanh")
    assert lstm["activation_alpha"] == (0.5, 1.5)


def test_long_lists_stay_arrays_and_are_as_tuples_are(read: Read) -> None:
    """Tree ensembles have lists of millions of numbers; as Python objects they would take ten times the memory."""
    count = 6000
    kinds = [f"k{number % 7}" for number in range(count)]
    attributes: dict[str, Any] = {"keys_int64s": [*range(count)], "values_strings": kinds, "default_string": "none"}
    node = helper.make_node("LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    table = [0.1 * number for number in range(count)]
    weights = helper.make_node("Constant", [], ["z"], value_floats=table)
    outputs = [info("y", TensorProto.STRING, [3]), info("z", FLOAT, [count])]
    found = read(helper.make_graph([node, weights], "g", [info("x", INT64, [3])], outputs))
    read_back = node_of(found, "LabelEncoder").attributes
    keys, strings = read_back["keys_int64s"], read_back["values_strings"]
    assert isinstance(keys, LongList)
    assert isinstance(strings, tuple)
    assert strings == tuple(kinds)
    assert len(set(map(id, strings))) == 7
    assert keys == tuple(range(count))
    assert keys == LongList(np.arange(count))
    assert keys != LongList(np.arange(1, count + 1))
    assert hash(keys) == hash(tuple(range(count)))
    assert (len(keys), keys[5], keys[-1], tuple(keys[3:5]), type(keys[0])) == (count, 5, count - 1, (3, 4), int)
    assert np.array(keys).dtype == np.int64
    floats = LongList(np.asarray(table, np.float32))
    assert np.array(floats).dtype == np.float64
    assert [*floats] == np.asarray(table, np.float32).tolist()


def test_omitted_inputs_are_none(read: Read) -> None:
    graph = helper.make_graph(
        [helper.make_node("Clip", ["x", "", "high"], ["y"])],
        "clip",
        [info("x", FLOAT, [2])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(np.array(6, np.float32), "high")],
    )
    x, low, high = node_of(read(graph), "Clip").inputs
    assert x is not None
    assert high is not None
    assert (x.name, low, high.name) == ("x", None, "high")


@pytest.mark.parametrize("external", [False, True])
def test_initializers_have_their_contents(read: Read, external: bool) -> None:
    arrays: dict[str, np.ndarray] = {
        "w": np.arange(4096, dtype=np.float32).reshape(64, 64),
        "h": np.arange(600, dtype=np.float16),
        "i": np.array([-1, 2**40], np.int64),
        "scalar": np.array(True),
        "none": np.zeros((0, 3), np.float32),
    }
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in arrays],
        "initializers",
        [],
        [info(f"{name}_out", helper.np_dtype_to_tensor_dtype(array.dtype), None) for name, array in arrays.items()],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )

    inspected: list[str] = []

    def inspect(graph: Graph) -> None:
        inspected.append(graph.name)
        values = {value.name: value for node in graph.nodes for value in node.reads()}
        for name, array in arrays.items():
            actual = values[name].constant
            assert actual is not None
            assert actual.dtype == array.dtype
            np.testing.assert_array_equal(actual, array)
        initializer = values["w"].initializer
        assert initializer is not None
        assert initializer.is_file == external

    saving = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 1000} if external else {}
    read(graph, inspect, **saving)
    assert "initializers" in inspected


@pytest.mark.parametrize(("size", "reads"), [(1 << 16, 1), ((1 << 16) + 1, 2)])
def test_large_contents_of_files_stay_in_memory_only_while_they_are_used(size: int, reads: int) -> None:
    loads = []

    def load() -> np.ndarray:
        loads.append(size)
        return np.zeros(size, np.uint8)

    constant = Constant(DType.UINT8, (size,), load, is_file=True)
    held = constant.array
    assert constant.array is held
    assert len(loads) == 1
    del held
    assert constant.array.shape == (size,)
    assert len(loads) == reads


def test_kept_initializers_outlive_the_session(read: Read) -> None:
    array = np.arange(1000, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])],
        "kept",
        [],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(array, "w")],
    )
    constants: list[Constant] = []

    def inspect(graph: Graph) -> None:
        value = graph.nodes[0].inputs[0]
        assert value is not None
        assert value.initializer is not None
        constants.append(value.initializer)
        constants[0].keep()

    read(graph, inspect)
    np.testing.assert_array_equal(constants[0].array, array)


def test_an_initializer_that_the_application_may_replace_is_no_constant(read: Read) -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "default"], ["y"])],
        "overridable",
        [info("x", FLOAT, [2]), info("default", FLOAT, [2])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(np.ones(2, np.float32), "default")],
    )
    _, default = node_of(read(graph), "Add").inputs
    assert default is not None
    assert default.initializer is None


def test_bodies_of_control_flow_and_what_they_read_from_outside_are_known(read: Read) -> None:
    then_branch = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["t"], name="inside")], "then", [], [info("t", FLOAT, None)]
    )
    else_branch = helper.make_graph([helper.make_node("Identity", ["x"], ["e"])], "else", [], [info("e", FLOAT, None)])
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=then_branch, else_branch=else_branch)],
        "main",
        [info("c", BOOL, []), info("x", FLOAT, ["n", 2])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(np.ones(2, np.float32), "w")],
    )
    graphs = read(graph)[:3]  # ONNX Runtime passes the same graphs to the plugin again later
    assert [(g.name, g.is_subgraph) for g in graphs] == [("else", True), ("then", True), ("main", False)]
    conditional = node_of(graphs, "If")
    assert conditional.has_subgraphs
    assert {value.name for value in conditional.implicit_inputs} == {"x", "w"}
    assert {value.name for value in conditional.reads()} == {"c", "x", "w"}
    weights = node_of(graphs, "Add").inputs[1]
    assert weights is not None
    assert weights.initializer is not None
    bodies = conditional.subgraphs
    assert {name: (body.name, body.is_subgraph) for name, body in bodies.items()} == {
        "then_branch": ("then", True),
        "else_branch": ("else", True),
    }
    shared = {value.name: value for value in conditional.implicit_inputs}
    inside = bodies["then_branch"].nodes[0]
    assert inside.inputs == (shared["x"], shared["w"])
    assert bodies["then_branch"].outputs == list(inside.outputs)
    assert conditional.unreadable_attributes == ()
    parents = [graph.parent for graph in graphs]
    read_by_both = ("If", ["c", "w", "x"])
    assert [parent and (parent.op_type, sorted(v.name for v in parent.reads())) for parent in parents] == [
        read_by_both,
        read_by_both,
        None,
    ]


def test_bodies_share_the_values_of_all_graphs_around_them_and_are_read_to_a_limit(read: Read) -> None:
    def nested(depth: int) -> onnx.GraphProto:
        def body(nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
            return helper.make_graph(nodes, f"depth {depth}", [], [info(f"r{depth}", FLOAT, None)])

        add = helper.make_node("Add", ["x", "x"], [f"r{depth}"])
        if not depth:
            return body([add])
        return body(
            [helper.make_node("If", ["c"], [f"r{depth}"], then_branch=nested(depth - 1), else_branch=body([add]))]
        )

    graph = nested(MAX_SUBGRAPH_DEPTH + 2)
    graph.input.extend([info("c", BOOL, []), info("x", FLOAT, ["n", 2])])
    main = next(graph for graph in read(graph) if not graph.is_subgraph)
    nodes = list(main.all_nodes())
    assert len(nodes) == 2 * MAX_SUBGRAPH_DEPTH + 1  # the deepest If is read without its subgraphs
    assert [value for node in nodes for value in node.inputs if node.op_type == "Add"] == 2 * MAX_SUBGRAPH_DEPTH * [
        main.inputs[1]
    ]
    assert [(node.has_subgraphs, len(node.subgraphs)) for node in nodes if node.op_type == "If"][-1] == (True, 0)


def test_a_failing_call_raises_its_name_and_message(read: Read) -> None:
    class Failing:
        """An OrtApi whose calls all fail with the same status."""

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return {
                "GetErrorMessage": lambda status: self.message,
                "ReleaseStatus": lambda status: None,
            }.get(name, lambda *args: ffi.cast("OrtStatus *", 1))

        message = ffi.new("char[]", b"no such graph")

    with pytest.raises(OrtCallError, match="Graph_GetModelPath: no such graph"):
        read_graph(Failing(), ffi.NULL)
