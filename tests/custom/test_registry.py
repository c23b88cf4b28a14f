"""The registry of custom operators: versions, priorities, snapshots, packages, and shared resources."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

from custom_operators import DOMAIN, X, kept_registry, operator
from ort_cuda_plugin.clusters.claims.claims import analyze
from ort_cuda_plugin.custom import registry, report
from ort_cuda_plugin.custom.operator import Attribute, AttributeKind, Port, PortKind
from ort_cuda_plugin.custom.resources import Resources
from ort_cuda_plugin.model.ir import Constant, DType, Graph, InvalidModel, Node, Unsupported, Value
from ort_cuda_plugin.ops.registry import FLOATS
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering, Tensor


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with kept_registry():
        yield


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the messages for the log are appended."""
    texts: list[str] = []
    for module in (registry, report):
        monkeypatch.setattr(module, "report", lambda text, where="": texts.append(text))
    return texts


def node(op_type: str, domain: str = DOMAIN, since: int = 1, **attributes: Any) -> Node:
    x, y = Value("x", DType.FLOAT32, (2, "n")), Value("y", DType.FLOAT32, None)
    return Node("here", op_type, domain, since, (x,), (y,), attributes)


def graph_of(one: Node, opset: int = 1) -> Graph:
    return Graph("g", [one], [one.inputs[0]], [one.outputs[0]], {one.domain: opset})  # type: ignore[list-item]


def serving(one: Node, opset: int) -> list[object]:
    return list(registry.current().implementations(one, opset))


def test_the_newest_version_that_is_not_newer_serves() -> None:
    first, third = registry.register(operator(version=1)), registry.register(operator(version=3))
    assert [serving(node("Double"), opset) for opset in (1, 2, 3, 9)] == [[first], [first], [third], [third]]
    with pytest.raises(Unsupported, match="Triple is not implemented"):
        serving(node("Triple"), 1)


def test_priorities_decide_and_the_plugins_own_operators_have_0() -> None:
    override = registry.register(operator("Relu", domain="", version=14, priority=5))
    fallback = registry.register(operator("Relu", domain="", version=1, priority=-1))
    first, own, last = serving(node("Relu", "", 14), 22)
    assert (first, last) == (override, fallback)
    assert type(own).__name__ == "Operator"
    assert len(serving(node("Relu", "", 13), 22)) == 2  # the override serves only version 14 and later


def test_a_snapshot_keeps_what_is_unregistered() -> None:
    added = registry.register(operator())
    kept = registry.current()
    registry.unregister(added)
    assert added not in registry.current().operators
    assert kept.implementations(node("Double"), 1) == [added]
    with pytest.raises(LookupError, match=r"my\.domain::Double-1 with priority 0 is not registered"):
        registry.unregister(added)


def test_one_name_version_and_priority_is_registered_once() -> None:
    registry.register(operator(origin="one"))
    with pytest.raises(ValueError, match=r"my\.domain::Double-1 with priority 0 is registered already by one"):
        registry.register(operator())
    registry.register(operator(priority=1))


def test_a_claim_says_whose_operator_runs_the_node() -> None:
    registry.register(operator("Relu", domain="", version=1, priority=5, origin="package fast 1.0"))
    (verdict,) = analyze(graph_of(node("Relu", "", 14), 14), DeviceProperties())
    assert verdict.supported
    assert verdict.note == "run by ai.onnx::Relu-1 of package fast 1.0, priority 5"


def test_what_an_operator_declines_the_next_one_runs() -> None:
    def declines(*_: object) -> list[Tensor]:
        raise Unsupported("shape", "only even sizes")

    registry.register(operator(priority=2, function=declines))
    registry.register(operator(priority=1))
    (verdict,) = analyze(graph_of(node("Double")), DeviceProperties())
    assert (verdict.supported, verdict.note) == (True, "run by my.domain::Double-1, priority 1")


BETA = Attribute("beta", AttributeKind.FLOAT)
PADS = Attribute("pads", AttributeKind.INTS, (0, 0))
FLAG = Attribute("flag", AttributeKind.INT, False, is_flag=True)


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({}, "my.domain::Double-1: the required attribute 'beta' is missing"),
        ({"beta": "x"}, "my.domain::Double-1: attribute 'beta' = 'x': expected the type 'float'"),
        ({"beta": 1.0, "pads": (1.5,)}, "attribute 'pads' = (1.5,): expected the type 'ints'"),
        ({"beta": 1.0, "flag": 2}, "attribute 'flag' = 2: expected 0 or 1"),
        ({"beta": 1.0, "gamma": 3}, "unknown attribute 'gamma' = 3; the operator has beta, pads, flag"),
    ],
)
def test_attributes_are_checked(attributes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidModel) as raised:
        operator(attributes=(BETA, PADS, FLAG)).bound_attributes(attributes)
    assert why in str(raised.value)


def test_attributes_come_with_their_defaults() -> None:
    bound = operator(attributes=(BETA, PADS, FLAG)).bound_attributes({"beta": 2, "flag": 1})
    assert bound == {"beta": 2.0, "pads": (0, 0), "flag": True}
    assert (type(bound["beta"]), type(bound["flag"])) == (float, bool)


def test_inputs_are_checked() -> None:
    rest = Port("rest", frozenset({DType.INT64}), kind=PortKind.VARIADIC, minimum=2)
    two = operator(inputs=(X, Port("bias", FLOATS, "T", PortKind.OPTIONAL), rest))
    f32, f16, i64 = DType.FLOAT32, DType.FLOAT16, DType.INT64
    assert two.check_inputs([f32, None, i64, i64]) == {"T": f32}
    with pytest.raises(InvalidModel, match="inputs of the type constraint 'T' are FLOAT32 and FLOAT16"):
        two.check_inputs([f32, f16, i64, i64])
    with pytest.raises(InvalidModel, match="got 1 tensors for input 'rest', expected at least 2"):
        two.check_inputs([f32, None, i64])
    with pytest.raises(InvalidModel, match="the required input 'x' is missing"):
        two.check_inputs([None, None, i64, i64])
    with pytest.raises(Unsupported, match="input 'x' is INT64; supported: BFLOAT16, FLOAT16, FLOAT32, FLOAT64"):
        two.check_inputs([i64, None, i64, i64])
    with pytest.raises(InvalidModel, match="got at least 2 inputs, expected at most the 1"):
        operator().check_inputs([f32, f32])


def test_records_that_onnx_runtime_would_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="'a b' is not the name of an operator"):
        operator("a b")
    with pytest.raises(ValueError, match="only the last input may be variadic, not 'x'"):
        operator(inputs=(Port("x", FLOATS, kind=PortKind.VARIADIC), X))
    with pytest.raises(ValueError, match="version 0, expected a number from 1"):
        operator(version=0)
    given: Any = "high"
    with pytest.raises(ValueError, match="priority 'high', expected an integer"):
        operator(priority=given)


def test_an_exception_of_an_author_declines_one_node(told: list[str]) -> None:
    def broken(*_: object) -> list[Tensor]:
        raise KeyError("table")

    registry.register(operator(function=broken))
    (verdict,) = analyze(graph_of(node("Double")), DeviceProperties())
    assert (verdict.kind, verdict.reason) == ("op", "my.domain::Double-1 failed with KeyError: 'table'")
    assert 'raise KeyError("table")' in told[0]


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ([], "returned 0 outputs, expected 1"),
        (3, "returned int for output 0, expected a tensor"),
        (DType.INT64, "returned INT64 for output 'y', expected FLOAT32"),
    ],
)
def test_what_an_author_gives_is_checked(result: object, why: str) -> None:
    def function(ctx: Lowering, *_: object) -> object:
        return ctx.empty((2,), result) if isinstance(result, DType) else result

    registry.register(operator(function=function))
    (verdict,) = analyze(graph_of(node("Double")), DeviceProperties())
    assert verdict.reason.endswith(why)


# ---- installed packages ----


def test_a_broken_package_is_named_and_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, told: list[str]
) -> None:
    (tmp_path / "broken_operators.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "ending_operators.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "good_operators.py").write_text(
        "def enter():\n    from test_registry import operator, registry\n    registry.register(operator())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    group = registry.ENTRY_POINTS
    parts = (("broken", ""), ("ending", ""), ("good", ":enter"))
    entries = metadata.EntryPoints(
        [metadata.EntryPoint(name, f"{name}_operators{what}", group) for name, what in parts]
    )
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
    registry.discover(again=True)
    text, end = told
    assert "SystemExit: 3" in end
    assert text.startswith("entry broken: the entry point broken = broken_operators of ort_cuda_plugin.ops failed")
    assert "No module named 'a_module_that_is_not_there'" in text
    assert "entry good" in [row.origin for row in registry.current().operators]


# ---- resources ----


def test_a_resource_lives_from_its_first_user_to_its_last() -> None:
    resources, log = Resources(), list[str]()

    def make() -> list[int]:
        log.append("made")
        return [1]

    first = resources.acquire("handle", make, lambda value: log.append(f"released {value}"))
    second = resources.acquire("handle", lambda: [2])
    assert first.value is second.value
    assert resources.users("handle") == 2
    first.close()
    first.close()
    assert (resources.users("handle"), log) == (1, ["made"])
    with second as value:
        assert value == [1]
    assert (resources.users("handle"), log) == (0, ["made", "released [1]"])


def test_a_resource_that_cannot_be_made_is_not_there() -> None:
    resources = Resources()
    with pytest.raises(ZeroDivisionError):
        resources.acquire("bad", lambda: 1 // 0)
    assert resources.users("bad") == 0


def test_a_tensor_attribute_is_shown_by_its_type() -> None:
    table = Constant(DType.FLOAT32, (2,), list)  # type: ignore[arg-type]
    with pytest.raises(InvalidModel, match=r"attribute 'beta' = a tensor of FLOAT32\[2\]: expected the type 'float'"):
        operator(attributes=(BETA,)).bound_attributes({"beta": table})
