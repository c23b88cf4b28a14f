"""The kernel registry: what ONNX Runtime finds in it, and nodes that it runs one by one."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnxruntime.capi import _pybind_state as ort_state

import ort_cuda_plugin
from encoder import encoder
from ort_cuda_plugin import models
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary
from ort_cuda_plugin.ep.nodes import kept_definitions
from ort_cuda_plugin.ep.nodes.kernel_registry import definitions_of_host
from ort_cuda_plugin.ep.provider import last_provider
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.model.ort import ort_kernel
from ort_cuda_plugin.model.ort.ort_schema import OpSchema
from ort_cuda_plugin.ops import registry
from ort_cuda_plugin.ops.kernel_definitions import UNLIMITED, KernelDefinition, Mismatch, kernel_definitions
from ort_cuda_plugin.ops.registry import operators
from session_pair import FLOAT, INT64, floats, info

EP = "CudaPluginExecutionProvider"


def singly(model: onnx.ModelProto, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    return ort_cuda_plugin.session(
        model.SerializeToString(), emulate=True, provider_options={"single_nodes": 1}, sess_options=options
    )


def on_cpu(model: onnx.ModelProto, **feed: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: list[np.ndarray] = session.run(None, feed)
    return results


def small_model(nodes: list[onnx.NodeProto], shape: list[int | str | None], **constants: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", FLOAT, shape)],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


# ---- the listed kernels ----


def test_every_type_constraint_is_one_of_ort_s_schemas() -> None:
    ort_cuda_plugin.register(emulate=True)
    definitions, mismatches = definitions_of_host()
    assert not mismatches
    assert len(definitions) > 500


def ours() -> list[registry.Operator]:
    """Return the operators of the package, without those that other tests in this process have registered."""
    package = f"{ort_cuda_plugin.__name__}.ops."
    return [each for each in operators() if inspect.unwrap(each.function).__module__.startswith(package)]


def test_every_operator_has_a_schema() -> None:
    """ONNX Runtime refuses a model with an operator that has no schema before it asks the plugin."""
    known = {(each.domain, each.name) for each in ort_state.get_all_operator_schema()}
    known |= {(each.domain, each.name) for each in onnx.defs.get_all_schemas_with_history()}
    assert [each.name for each in ours() if (each.domain, each.name) not in known] == []


def schema(since: int, **constraints: set[DType]) -> OpSchema:
    types = {name: frozenset(dtypes) for name, dtypes in constraints.items()}
    return OpSchema("Relu", "", since, tuple(constraints), tuple(constraints), types)


def only_relu(*versions: OpSchema) -> tuple[list[KernelDefinition], list[Mismatch]]:
    return kernel_definitions(lambda name, domain: versions if (name, domain) == ("Relu", "") else ())


def test_a_constraint_that_no_schema_has_is_named_with_its_operator() -> None:
    _, (mismatch,) = only_relu(schema(14, X={DType.FLOAT32}), schema(6, X={DType.FLOAT32}))
    assert str(mismatch) == "Relu-14, type constraint 'T': ONNX Runtime's schema has no such type constraint, only X"


def test_a_constraint_of_another_input_without_a_common_type_is_named() -> None:
    other = OpSchema("Relu", "", 14, ("U",), ("T",), {"T": frozenset({DType.FLOAT32}), "U": frozenset({DType.STRING})})
    _, (mismatch,) = only_relu(other)
    assert (
        str(mismatch) == "Relu-14, type constraint 'T': in ONNX Runtime's schema, input 0 has the type constraint 'U'"
    )


def test_constraints_into_which_a_newer_schema_splits_one_of_the_table_have_its_types() -> None:
    split = OpSchema("Relu", "", 14, ("X",), ("T",), {"T": frozenset({DType.FLOAT32}), "X": frozenset({DType.FLOAT16})})
    ((definition,), mismatches) = only_relu(split)
    assert mismatches == []
    assert definition.types["X"] == (DType.FLOAT16,)


def test_a_definition_has_the_types_of_the_table_and_ends_where_the_next_version_begins() -> None:
    (relu,) = [row for row in operators() if (row.domain, row.name) == ("", "Relu")]
    definitions, mismatches = only_relu(schema(14, T={DType.FLOAT32}), schema(6, T={DType.FLOAT16}))
    assert mismatches == []
    assert [(d.since, d.until, set(d.types["T"])) for d in definitions] == [
        (14, UNLIMITED, set(relu.types["T"])),
        (6, 13, set(relu.types["T"])),
    ]


def test_a_constraint_that_the_table_leaves_out_has_the_types_of_the_schema_that_the_device_has() -> None:
    both = OpSchema("Relu", "", 14, ("T",), ("Y",), {"T": frozenset(), "Y": frozenset({DType.INT8, DType.STRING})})
    ((definition,), _) = only_relu(both)
    assert dict(definition.types) == {"Y": (DType.INT8,)}


def test_the_host_lists_the_kernels_under_the_name_of_the_provider() -> None:
    ort_cuda_plugin.register(emulate=True)
    listed = ort_state.get_registered_ep_kernel_defs(EP)
    assert {kernel.provider for kernel in listed} == {EP}
    found = {(kernel.op_name, kernel.version_range): kernel.type_constraints for kernel in listed if not kernel.domain}
    assert found["Not", (1, UNLIMITED)] == {"T": ["tensor(bool)"]}
    assert set(found["Relu", (6, 12)]["T"]) >= {"tensor(float)", "tensor(float16)", "tensor(double)"}
    assert ("MemcpyFromHost", (1, 1)) in found


def test_every_attribute_can_be_read_for_a_kernel() -> None:
    kinds = {
        str(attribute.annotation).removesuffix(" | None"): f"{operator.name}.{name}"
        for operator in registry.operators()
        for name, attribute in operator.attributes.items()
    }
    assert {kind: example for kind, example in kinds.items() if kind not in ort_kernel.READERS} == {}


# ---- nodes that ORT calls one by one ----


@pytest.mark.parametrize("name", ["light_squeezenet", "light_shufflenet"])
def test_a_network_runs_by_kernels_of_its_nodes(name: str) -> None:
    model = models.with_noise_weights(onnx.load(models.find_model(name)))
    session = singly(model)
    fed = session.get_inputs()[0]
    x = floats(*fed.shape)
    provider = last_provider()
    assert provider is not None
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name == EP]
    assert all(len(part.get_nodes()) == 1 for part in parts)
    assert len(provider.fused_nodes) == len(parts) > 20
    for _ in range(3):
        np.testing.assert_allclose(session.run(None, {fed.name: x})[0], on_cpu(model, **{fed.name: x})[0], atol=1e-4)


def test_a_dynamic_encoder_runs_by_kernels_and_leaves_shape_arithmetic_to_the_cpu() -> None:
    model = encoder(layers=1)
    session = singly(model)
    placed = {
        node.op_type: part.ep_name for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()
    }
    assert {placed[op] for op in ("MatMul", "Softmax", "Reshape") if op in placed} == {EP}
    for batch, length in ((1, 4), (2, 7), (2, 7)):
        feed = {value.name: np.ones((batch, length), np.int64) for value in session.get_inputs()}
        for actual, expected in zip(session.run(None, feed), on_cpu(model, **feed), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_a_written_model_has_its_own_nodes_and_runs_again(tmp_path: Path) -> None:
    model = small_model(
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])],
        ["n", 4],
        w=floats(4, 3),
    )
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "written.onnx")
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True, sess_options=options)
    written = onnx.load(options.optimized_model_filepath)
    assert [node.op_type for node in written.graph.node] == ["MatMul", "Tanh"]
    x = floats(2, 4)
    assert {part.ep_name for part in session.get_provider_graph_assignment_info()} == {EP}
    again = ort_cuda_plugin.session(written.SerializeToString(), emulate=True)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], again.run(None, {"x": x})[0])


def test_a_kernel_takes_over_its_weights_from_ort() -> None:
    weights = floats(1024, 1024)
    model = small_model([helper.make_node("MatMul", ["x", "w"], ["y"])], ["n", 1024], w=weights)
    before = ort_cuda_plugin.counters()["device_bytes_in_use"]
    first = singly(model)
    one = ort_cuda_plugin.counters()["device_bytes_in_use"] - before
    second = singly(model)
    two = ort_cuda_plugin.counters()["device_bytes_in_use"] - before
    assert weights.nbytes <= one < 1.5 * weights.nbytes
    assert two == one, "both sessions share the weights"
    x = floats(3, 1024)
    for session in (first, second):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weights, rtol=1e-3, atol=1e-3)


def test_a_shape_that_is_fed_is_not_read_back_where_a_node_stands_alone() -> None:
    graph = helper.make_graph(
        [helper.make_node("Expand", ["x", "shape"], ["y"])],
        "g",
        [info("x", FLOAT, [1, "n"]), info("shape", INT64, [2])],
        [info("y", FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
    x = floats(1, 5)
    session.run(None, {"x": x, "shape": np.array([2, 5])})
    before = ort_cuda_plugin.counters()["host_value_reads"]
    for rows in (1, 3):
        result = session.run(None, {"x": x, "shape": np.array([rows, 5])})[0]
        np.testing.assert_array_equal(result, np.broadcast_to(x, (rows, 5)))
    assert ort_cuda_plugin.counters()["host_value_reads"] == before


@pytest.mark.parametrize("attributes", [{}, {"start": 1}, {"start": -2, "end": -1}, {"start": 5}, {"end": 0}])
def test_the_kernel_of_shape_counts_axes_as_onnx_does(attributes: dict[str, Any]) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], **attributes),
        helper.make_node("Size", ["x"], ["n"]),
        helper.make_node("Cast", ["s"], ["a"], to=FLOAT),
        helper.make_node("Cast", ["n"], ["b"], to=FLOAT),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    model = small_model(nodes, ["a", "b", "c"])
    session = singly(model)
    for shape in ((2, 3, 4), (1, 0, 5)):
        x = floats(*shape)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], on_cpu(model, x=x)[0])


def test_an_output_in_its_input_s_memory_is_not_copied() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Flatten", ["a"], ["b"]),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    model = small_model(nodes, ["n", 3, 4])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = singly(model, options)
    x = floats(2, 3, 4)
    session.run(None, {"x": x})
    before = ort_cuda_plugin.counters()["copies_d2d"]
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.maximum(x, 0).reshape(2, 12))
    assert ort_cuda_plugin.counters()["copies_d2d"] == before


def test_elementwise_nodes_write_over_what_nobody_reads_again() -> None:
    names = ["Relu", "Abs", "Sqrt", "Exp", "Log", "Neg", "Tanh", "Sigmoid"]
    edges = ["x", *(f"a{i}" for i in range(len(names) - 1)), "y"]
    nodes = [helper.make_node(name, [edges[i]], [edges[i + 1]]) for i, name in enumerate(names)]
    model = small_model(nodes, ["n"])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = singly(model, options)
    x = floats(1 << 18)
    for _ in range(2):
        before = ort_cuda_plugin.memory_stats()["device"]["NumAllocs"]
        np.testing.assert_allclose(session.run(None, {"x": x})[0], on_cpu(model, x=x)[0], rtol=1e-5, atol=1e-6)
        assert ort_cuda_plugin.memory_stats()["device"]["NumAllocs"] - before == 3


def test_a_constant_that_a_body_reads_stays_with_ort() -> None:
    """ORT passes the constant to the If in each Run, although the kernel of the If's body has its contents."""
    branch = {
        name: helper.make_graph(
            [helper.make_node(op, ["x", "w"], [name])], name, [], [helper.make_empty_tensor_value_info(name)]
        )
        for name, op in (("then", "Add"), ("else", "Mul"))
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Less", ["sum", "zero"], ["negative"]),
        helper.make_node("If", ["negative"], ["y"], then_branch=branch["then"], else_branch=branch["else"]),
    ]
    model = small_model(nodes, ["n", 3], w=floats(3), zero=np.array(0, np.float32))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = singly(model, options)
    for sign in (1, -1):
        x = sign * np.abs(floats(2, 3))
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], on_cpu(model, x=x)[0])


def test_definitions_are_kept_for_later_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ort_cuda_plugin.register(emulate=True)
    library = KernelLibrary(KernelCache(tmp_path))
    monkeypatch.setattr(kept_definitions, "kernel_library", lambda: library)
    assert kept_definitions.kept() is None
    definitions, _ = definitions_of_host()
    kept_definitions.keep(definitions, ["what is wrong"])
    assert kept_definitions.kept() == (definitions, ["what is wrong"])
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    for damaged in ("", "{}", text[:-2], text.replace('"name"', '"nome"'), text.replace('["', '["0', 1), "[" * 5000):
        path.write_text(damaged)
        assert kept_definitions.kept() is None
    path.write_text(text)
    assert kept_definitions.kept() == (definitions, ["what is wrong"])


def test_kept_definitions_depend_on_every_module_that_declares_operators() -> None:
    declaring = {
        f"{inspect.unwrap(entry.function).__module__.partition('.')[2].replace('.', '/')}.py" for entry in ours()
    }
    assert declaring - set(kept_definitions.operator_sources()) == set()
