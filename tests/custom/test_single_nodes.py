"""Custom operators that ONNX Runtime runs one by one, by kernels of the plugin's registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from custom_models import in_place_of
from custom_operators import DOMAIN, X, Y, kept_registry, model, operator
from ort_cuda_plugin.custom import registry
from ort_cuda_plugin.custom.operator import Attribute, AttributeKind, Port, PortKind
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.ops.registry import FLOATS
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.elementwise import elementwise

A = np.array([[1, -2], [3, 4]], np.float32)
EP = ort_cuda_plugin.get_ep_name()
Inputs = Sequence[Tensor | None]


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_registry():
        yield


def single(source: bytes, rules: str = "cpu(Relu)", **options: str) -> ort.InferenceSession:
    """Create a session with a rule that gives Relu to the CPU; everything else runs on the plugin."""
    made = ort.SessionOptions()
    made.log_severity_level = 3
    made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if rules:
        made.add_session_config_entry("session.layer_assignment_settings", rules)
    (device,) = (d for d in ort_cuda_plugin.register(emulate=True) if d.ep_metadata.get("emulated") == "1")
    made.add_provider_for_devices([device], options)
    return ort.InferenceSession(source, made, enable_fallback=0)


def on_plugin(session: ort.InferenceSession) -> set[str]:
    parts = session.get_provider_graph_assignment_info()
    return {node.op_type for part in parts if part.ep_name == EP for node in part.get_nodes()}


def after_relu(*nodes: Any, outputs: Sequence[str] = ("y",), opset: int = 1) -> bytes:
    """Return a model of a = Relu(x), annotated for the rule of `single`, and of ``nodes``, which read a."""
    first = helper.make_node("Relu", ["x"], ["a"])
    first.metadata_props.add(key="layer_ann", value="Relu")
    return model([first, *nodes], {"x": ["n", 2]}, outputs, opset=opset)


@pytest.mark.parametrize(("rules", "options"), [("cpu(Relu)", {}), ("", {"single_nodes": "1"})])
def test_an_operator_has_a_kernel(rules: str, options: Mapping[str, str]) -> None:
    registry.register(operator())
    nodes = [helper.make_node("Double", ["a"], ["b"], domain=DOMAIN), helper.make_node("Neg", ["b"], ["y"])]
    session = single(after_relu(*nodes), rules, **options)
    assert on_plugin(session) >= {"Double", "Neg"}
    for x in (A, np.ones((5, 2), np.float32)):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], -2 * np.maximum(x, 0))


def test_attributes_of_all_kinds_reach_it() -> None:
    """Attributes that the node lacks reach the operator with their defaults."""
    seen: list[dict[str, Any]] = []

    def look(ctx: Lowering, inputs: Inputs, attributes: Mapping[str, Any]) -> list[Tensor]:
        seen.append({**attributes, "tensor": attributes["tensor"].array.tolist()})
        assert inputs[0] is not None
        return [elementwise(ctx, lambda a: a * attributes["float"], inputs[0])]

    kinds = AttributeKind
    attributes = [
        Attribute("int", kinds.INT, 3),
        Attribute("ints", kinds.INTS, (1, 2)),
        Attribute("float", kinds.FLOAT, 0.5),
        Attribute("floats", kinds.FLOATS, (0.25,)),
        Attribute("text", kinds.STRING, "plain"),
        Attribute("texts", kinds.STRINGS, ("a",)),
        Attribute("tensor", kinds.TENSOR),
        Attribute("flag", kinds.INT, False, is_flag=True),
    ]
    registry.register(operator("Look", attributes=tuple(attributes), function=look))
    tensor = numpy_helper.from_array(np.array([7, 8], np.int64))
    given: dict[str, Any] = {
        "int": 5,
        "ints": [4, 5, 6],
        "float": 2.0,
        "floats": [1.5, 2.5],
        "text": "other",
        "texts": ["b", "c"],
    }
    cases: list[tuple[dict[str, Any], float]] = [({}, 0.5), ({**given, "flag": 1}, 2.0)]
    for extra, factor in cases:
        seen.clear()
        node = helper.make_node("Look", ["a"], ["y"], domain=DOMAIN, tensor=tensor, **extra)
        session = single(after_relu(node))
        np.testing.assert_array_equal(session.run(None, {"x": A})[0], np.maximum(A, 0) * np.float32(factor))
        expected: dict[str, Any] = {attribute.name: attribute.default for attribute in attributes} | {"tensor": [7, 8]}
        expected |= {key: tuple(value) if isinstance(value, list) else value for key, value in extra.items()}
        assert all(each == expected for each in seen)


def test_the_models_opset_chooses_the_version() -> None:
    def times(factor: float) -> Any:
        def function(ctx: Lowering, inputs: Inputs, attributes: Mapping[str, Any]) -> list[Tensor]:
            assert inputs[0] is not None
            return [elementwise(ctx, lambda a: a * factor, inputs[0])]

        return function

    for version in (1, 3):
        registry.register(operator(version=version, function=times(float(version))))
    for opset, factor in ((1, 1), (2, 1), (3, 3), (4, 3)):
        node = helper.make_node("Double", ["a"], ["y"], domain=DOMAIN)
        session = single(after_relu(node, opset=opset))
        np.testing.assert_array_equal(session.run(None, {"x": A})[0], np.maximum(A, 0) * factor)


def test_optional_variadic_and_host_inputs() -> None:
    def sums(ctx: Lowering, inputs: Inputs, attributes: Mapping[str, Any]) -> list[Tensor]:
        present = [x for x in inputs if x is not None]
        total = present[0]
        for x in present[1:]:
            total = elementwise(ctx, lambda a, b: a + b, total, x)
        return [total, elementwise(ctx, lambda a: a * len(present), total)]

    ports = (X, Port("maybe", FLOATS, "T", PortKind.OPTIONAL), Port("more", FLOATS, "T", PortKind.VARIADIC, minimum=1))
    registry.register(operator("Sums", inputs=ports, outputs=(Y, Port("z", FLOATS, "T")), function=sums))
    for maybe, count in (("", 3), ("a", 4)):
        node = helper.make_node("Sums", ["a", maybe, "a", "x"], ["y", "z"], domain=DOMAIN)
        session = single(after_relu(node, outputs=("y", "z")))
        y, z = session.run(None, {"x": A})
        np.testing.assert_array_equal(y, np.maximum(A, 0) * (count - 1) + A)
        np.testing.assert_array_equal(z, y * count)


def test_an_operator_in_the_place_of_a_built_in_one() -> None:
    def thrice(ctx: Lowering, inputs: Inputs, attributes: Mapping[str, Any]) -> list[Tensor]:
        assert inputs[0] is not None
        return [elementwise(ctx, lambda a: a * 3, inputs[0])]

    with in_place_of("Neg", thrice):
        session = single(after_relu(helper.make_node("Neg", ["a"], ["y"])))
        assert on_plugin(session) == {"Neg"}
        np.testing.assert_array_equal(session.run(None, {"x": A})[0], np.maximum(A, 0) * 3)


def test_a_session_has_the_operators_of_its_own_time() -> None:
    """Kernels of a later session do not serve an earlier one, and vice versa."""
    first = registry.register(operator())
    source = after_relu(helper.make_node("Double", ["a"], ["y"], domain=DOMAIN))
    before = single(source)
    registry.unregister(first)

    def halved(ctx: Lowering, inputs: Inputs, attributes: Mapping[str, Any]) -> list[Tensor]:
        assert inputs[0] is not None
        return [elementwise(ctx, lambda a: a * 0.5, inputs[0])]

    registry.register(operator(function=halved))
    after = single(source)
    for rows in (1, 4):
        x = np.ones((rows, 2), np.float32)
        np.testing.assert_array_equal(before.run(None, {"x": x})[0], 2 * x)
        np.testing.assert_array_equal(after.run(None, {"x": x})[0], x / 2)


def test_a_declined_node_says_why() -> None:
    registry.register(operator(inputs=(Port("x", frozenset({DType.FLOAT64}), "T"),), outputs=(Y,)))
    graph = helper.make_graph(
        [helper.make_node("Double", ["x"], ["y"], domain=DOMAIN, name="mine")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_empty_tensor_value_info("y")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    source = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    with pytest.raises(Exception, match="Double"):
        single(source)
