"""Custom operators in stock sessions: schemas, shapes, versions, late registration, and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from contributed import on_device
from custom_operators import DOMAIN, X, Y, kept_registry, model, operator, stock_session
from ort_cuda_plugin.custom import Alias, T, check, count_prefixes, le, op, registry, scalar
from ort_cuda_plugin.custom.operator import Attribute, AttributeKind, Port, PortKind
from ort_cuda_plugin.ep.nodes.custom_domains import MAX_COMBINATIONS, schema_of
from ort_cuda_plugin.kernels.elementwise.index_map import gather_map
from ort_cuda_plugin.model.ir import DType, InvalidModel, Unsupported
from ort_cuda_plugin.ops.onnx.tensor.slicing import concat
from ort_cuda_plugin.ops.registry import ALL_TENSORS, FLOATS
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.elementwise import elementwise
from ort_cuda_plugin.session_errors import NoProviderError

A = np.array([[1, -2, 3], [4, 5, -6]], np.float32)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with kept_registry():
        yield


def node(op_type: str, *inputs: str, outputs: Sequence[str] = ("y",), **attributes: Any) -> Any:
    return helper.make_node(op_type, inputs, outputs, name="here", domain=DOMAIN, **attributes)


def scaled(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Any) -> list[Tensor]:
    if attributes["alpha"] < 0:
        raise InvalidModel(f"alpha = {attributes['alpha']} must not be negative")
    assert inputs[0] is not None
    return [elementwise(ctx, lambda a: a * attributes["alpha"], inputs[0])]


def scale(version: int = 1, default: float = 2.0) -> Any:
    alpha = Attribute("alpha", AttributeKind.FLOAT, default)
    return operator("Scale", version=version, attributes=(alpha,), function=scaled)


def test_a_session_loads_what_was_registered_before_it_got_the_device() -> None:
    registry.register(scale())
    session = stock_session(model([node("Scale", "x", alpha=3.0)], {"x": [2, "n"]}, ["y"]))
    (output,) = session.get_outputs()
    assert (output.shape, output.type) == ([2, "n"], "tensor(float)")
    np.testing.assert_array_equal(session.run(None, {"x": A})[0], 3 * A)


def test_a_session_that_gets_the_provider_by_name_registers_the_library_of_operators() -> None:
    registry.register(scale())
    ort_cuda_plugin.register(emulate=True)
    options = ort.SessionOptions()
    options.register_custom_ops_library(ort_cuda_plugin.get_library_path())
    built = model([node("Scale", "x")], {"x": [2, "n"]}, ["y"])
    session = ort.InferenceSession(built, options, providers=[ort_cuda_plugin.get_ep_name()])
    np.testing.assert_array_equal(session.run(None, {"x": A})[0], 2 * A)


def test_the_model_says_which_version_serves() -> None:
    registry.register(scale(version=1, default=2.0))
    registry.register(scale(version=3, default=5.0))
    for opset, factor in ((2, 2), (3, 5)):
        built = model([node("Scale", "x")], {"x": [2, "n"]}, ["y"], opset=opset)
        np.testing.assert_array_equal(stock_session(built).run(None, {"x": A})[0], factor * A)


def test_the_types_of_results_follow_from_the_inputs() -> None:
    registry.register(scale())
    session = stock_session(model([node("Scale", "x")], {"x": [2, "n"]}, ["y"], TensorProto.FLOAT16))
    assert session.get_outputs()[0].type == "tensor(float16)"


def joined(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Any) -> list[Tensor]:
    return [concat(ctx, *[x for x in inputs if x is not None], axis=0)]


def biased(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Any) -> list[Tensor]:
    x, bias, factor = [*inputs, None, None][:3]
    assert x is not None
    for other, function in ((bias, lambda a, b: a + b), (factor, lambda a, b: a * b)):
        x = x if other is None else elementwise(ctx, function, x, other)
    return [x]


def test_inputs_may_be_left_out() -> None:
    optional = [Port(name, FLOATS, "T", PortKind.OPTIONAL) for name in ("bias", "factor")]
    registry.register(operator("Biased", inputs=(X, *optional), function=biased))
    first = helper.make_node("Biased", ["x", "", "x"], ["h"], name="first", domain=DOMAIN)
    nodes = [first, node("Biased", "h", "x")]
    session = stock_session(model(nodes, {"x": [2, "n"]}, ["y"]))
    np.testing.assert_array_equal(session.run(None, {"x": A})[0], A * A + A)


def test_outputs_may_be_left_out() -> None:
    @op("my.domain::Parts", outputs=("whole", "rest"))
    def parts(ctx: Lowering, x: T) -> tuple[T | None, T | None]:
        whole = elementwise(ctx, scalar.floor, x)
        return whole, elementwise(ctx, lambda a, b: a - b, x, whole)

    x = np.array([1.5, -2.25], np.float32)
    for outputs, expected in ((["y"], [1, -3]), (["", "y"], [0.5, 0.75])):
        made = helper.make_node("Parts", ["x"], outputs, domain=DOMAIN)
        session = stock_session(model([made], {"x": ["n"]}, ["y"]))
        assert session.run(None, {"x": x})[0].tolist() == expected


def test_dimensions_are_known_by_their_expressions() -> None:
    rest = Port("rest", FLOATS, "T", PortKind.VARIADIC)
    registry.register(operator("Join", inputs=(rest,), function=joined))
    built = model([node("Join", "x", "x", "z")], {"x": ["n", 3], "z": [2, 3]}, ["y"])
    session = stock_session(built)
    assert session.get_outputs()[0].shape == ["(2*n + 2)", 3]
    np.testing.assert_array_equal(session.run(None, {"x": A, "z": A})[0], np.concatenate([A, A, A]))


def test_a_declined_node_is_an_error_of_the_session_that_says_why() -> None:
    registry.register(scale())
    why = r"node 'here': only CudaPluginExecutionProvider runs my\.domain::Scale, and declined it: .*alpha = -1\.0 must"
    with pytest.raises(Exception, match=why):
        stock_session(model([node("Scale", "x", alpha=-1.0)], {"x": [2, "n"]}, ["y"]))


def test_an_unregistered_operator_stays_with_its_sessions() -> None:
    added = registry.register(scale())
    built = model([node("Scale", "x")], {"x": ["m", "n"]}, ["y"])
    session = stock_session(built)
    registry.unregister(added)
    np.testing.assert_array_equal(session.run(None, {"x": A.T})[0], 2 * A.T)  # builds its plan only now
    with pytest.raises(Exception, match="Scale"):
        stock_session(built)


def test_explain_says_whose_operator_takes_the_place_of_a_built_in_one() -> None:
    registry.register(operator("Relu", domain="", version=1, priority=5, origin="package fast 1.0"))
    built = model([helper.make_node("Relu", ["x"], ["y"])], {"x": [2, "n"]}, ["y"])
    (verdict,) = ort_cuda_plugin.explain(built, emulate=True)
    assert verdict.note == "run by ai.onnx::Relu-1 of package fast 1.0, priority 5"
    np.testing.assert_array_equal(stock_session(built).run(None, {"x": A})[0], 2 * A)


def test_explain_says_why_a_node_runs_nowhere() -> None:
    registry.register(scale())
    built = model([node("Scale", "x", alpha=-1.0)], {"x": [2, "n"]}, ["y"])
    (verdict,) = ort_cuda_plugin.explain(built, emulate=True)
    assert "alpha = -1.0 must not be negative; no other provider runs it" in verdict.reason


def test_a_session_without_the_operator_says_how_it_gets_it() -> None:
    built = model([node("Scale", "x")], {"x": [2, "n"]}, ["y"])
    with pytest.raises(RuntimeError, match=r"my\.domain::Scale is not registered with the plugin\. Import the module"):
        ort_cuda_plugin.session(built, emulate=True)
    with pytest.raises(RuntimeError, match="is not registered with the plugin"):
        ort_cuda_plugin.explain(built, emulate=True)
    registry.register(scale(version=2))
    with pytest.raises(RuntimeError, match=r"my\.domain::Scale-2 was registered after .* or is newer than the opset"):
        ort_cuda_plugin.session(built, emulate=True)


def checked(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Any) -> list[Tensor]:
    (x, limit) = inputs
    assert x is not None
    assert limit is not None
    (most,) = ctx.host_values(limit, "limit")
    check(ctx, le(x.shape[1], most), "limit", most, "less than the columns of x")
    _, total = count_prefixes(ctx, ctx.contiguous(elementwise(ctx, lambda a: a > 0, x)))
    (count,) = ctx.read_back(total, "count", 0, x.size)
    check(ctx, le(count, most), "positive elements", count, "more than the limit")
    return [elementwise(ctx, lambda a: a * 2, x)]


def test_values_are_checked_in_the_run_that_brings_them() -> None:
    limit = Port("limit", frozenset({DType.INT64}), on_host=True)
    registry.register(operator("Checked", inputs=(X, limit), function=checked))
    graph = helper.make_graph(
        [node("Checked", "x", "limit")],
        "checked",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"]),
            helper.make_tensor_value_info("limit", TensorProto.INT64, [1]),
        ],
        [helper.make_empty_tensor_value_info("y")],
    )
    built = helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=8).SerializeToString()
    session = stock_session(built)
    for most, why in (
        (3, "positive elements: more than the limit"),
        (2, "Checked-1: limit = 2: less than the columns"),
    ):
        with pytest.raises(Exception, match=rf"here .Checked.*: .*{why}"):
            session.run(None, {"x": A, "limit": np.array([most])})
        np.testing.assert_array_equal(session.run(None, {"x": A, "limit": np.array([4])})[0], 2 * A)


def test_the_log_has_the_traceback_of_an_author_s_exception(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> list[Tensor]:
        raise KeyError("table")

    registry.register(operator(function=broken))
    with pytest.raises(Exception, match=r"declined it: my\.domain::Double-1 failed with KeyError: 'table'"):
        stock_session(model([node("Double", "x")], {"x": [2, "n"]}, ["y"]))
    assert 'raise KeyError("table")' in capfd.readouterr().err


@pytest.mark.parametrize(("domain", "called"), [("com.microsoft", r"com\.microsoft"), ("", r"ai\.onnx")])
def test_no_operator_joins_a_domain_of_onnx_runtime(domain: str, called: str) -> None:
    registry.register(operator("Double", domain=domain))
    built = model([helper.make_node("Double", ["x"], ["y"], domain=domain)], {"x": [2, "n"]}, ["y"])
    with pytest.raises(
        RuntimeError, match=f"operators to the domain '{called}' of ONNX Runtime. Use a domain of your own"
    ):
        ort_cuda_plugin.session(built, emulate=True)


# ---- schemas ----


def kinds(ports: Sequence[Any]) -> list[str]:
    return [port.kind.name for port in ports]


def test_a_schema_covers_all_versions() -> None:
    wide = operator(version=2, inputs=(X, Port("bias", FLOATS, "T")))
    schema = schema_of([operator(), wide], frozenset({DType.FLOAT32, DType.FLOAT16}))
    assert (schema.since, len(schema.combinations)) == (1, 4)
    assert {tuple(kinds(inputs)) for inputs, _ in schema.combinations} == {("REQUIRED", "OPTIONAL")}


def summed(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Any) -> list[Tensor]:
    x, *rest = (x for x in inputs if x is not None)
    for other in rest:
        x = elementwise(ctx, lambda a, b: a + b, x, other)
    return [x]


@pytest.mark.parametrize(
    "second", [Port("bias", FLOATS, "T"), Port("rest", FLOATS, "T", PortKind.VARIADIC)], ids=["more", "variadic"]
)
def test_versions_with_other_inputs_share_a_schema(second: Port) -> None:
    registry.register(operator())
    registry.register(operator(version=2, inputs=(X, second), function=summed))
    for opset, inputs in ((1, ["x"]), (2, ["x", "x"])):
        session = stock_session(model([node("Double", *inputs)], {"x": [2, "n"]}, ["y"], opset=opset))
        assert (session.get_outputs()[0].type, session.get_outputs()[0].shape) == ("tensor(float)", [2, "n"])
        np.testing.assert_array_equal(session.run(None, {"x": A})[0], 2 * A)
    with pytest.raises(
        Exception, match=r"Double-2: (the required input|got 0 tensors for input 'rest', expected at least 1)"
    ):
        stock_session(model([node("Double", "x")], {"x": [2, "n"]}, ["y"], opset=2))


def test_types_that_go_together_in_too_many_ways_are_left_open() -> None:
    every = [Port(name, ALL_TENSORS) for name in "abc"]
    ((inputs, _),) = schema_of([operator(inputs=tuple(every))], ALL_TENSORS).combinations
    assert [port.dtype for port in inputs] == [None] * 3
    assert len(ALL_TENSORS) ** 3 > MAX_COMBINATIONS


def test_an_operator_with_open_types_runs() -> None:
    every = [Port(name, ALL_TENSORS, name) for name in "ab"]
    registry.register(operator("First", inputs=(X, *every), outputs=(Y,)))
    built = model([node("First", "x", "x", "x")], {"x": [2, "n"]}, ["y"])
    np.testing.assert_array_equal(stock_session(built).run(None, {"x": A})[0], 2 * A)


def test_an_alias_is_written_by_the_kernel_that_reads_its_input() -> None:
    @op(f"{DOMAIN}::Step")
    def step(ctx: Lowering, x: T) -> Annotated[T, Alias("x")]:
        return gather_map(ctx, x.shape, x.dtype, lambda maps, c: maps.source(x).at(c) * 2.0)

    built = model([node("Step", "x")], {"x": [2, "n"]}, ["y"])
    session, state = ort_cuda_plugin.session(built, emulate=True), on_device(np.ones((2, 3), np.float32))
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", state)
    binding.bind_ortvalue_output("y", state)
    before = ort_cuda_plugin.counters()["outputs_redirected"]
    for _ in range(4):
        session.run_with_iobinding(binding)
    assert ort_cuda_plugin.counters()["outputs_redirected"] == before
    assert (state.numpy() == 16).all()


# ---- sessions that an operator's function creates ----


@pytest.mark.parametrize("kind", ["ours", "ONNX Runtime's", "one that fails"])
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_a_session_that_an_operator_creates_is_not_taken_for_the_one_that_has_it(kind: str, kept: bool) -> None:
    inner, held = model([helper.make_node("Tanh", ["x"], ["y"])], {"x": ["n"]}, ["y"]), []

    def nest(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Any) -> list[Tensor]:
        if kind == "one that fails":
            with pytest.raises(Exception, match="no_such_option"):
                ort_cuda_plugin.session(inner, emulate=True, provider_options={"no_such_option": 1})
        else:
            made = ort_cuda_plugin.session(inner, emulate=True) if kind == "ours" else stock_session(inner)
            made.run(None, {"x": A[0]})
            held.extend([made] if kept else [])
        assert inputs[0] is not None
        return [elementwise(ctx, lambda a: a + 1, inputs[0])]

    registry.register(operator("Nest", function=nest))
    outer = model([helper.make_node("Relu", ["x"], ["a"], name="r"), node("Nest", "a")], {"x": [2, "n"]}, ["y"])
    session = ort_cuda_plugin.session(outer, emulate=True)
    np.testing.assert_array_equal(session.run(None, {"x": A})[0], np.maximum(A, 0) + 1)
    assert [verdict.op_type for verdict in ort_cuda_plugin.explain(outer, emulate=True)] == ["Relu", "Nest"]


def test_the_error_of_a_session_is_about_its_own_nodes_where_an_operator_creates_another() -> None:
    inner = model([helper.make_node("Tanh", ["x"], ["y"])], {"x": ["n"]}, ["y"])

    def nest(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Any) -> list[Tensor]:
        ort_cuda_plugin.session(inner, emulate=True)
        raise Unsupported("shape", "it is told to be")

    registry.register(operator("Nest", function=nest))
    with pytest.raises(NoProviderError, match=r"runs the node 'here' .*: it is told to be; no other provider"):
        ort_cuda_plugin.session(model([node("Nest", "x")], {"x": [2, "n"]}, ["y"]), emulate=True)
