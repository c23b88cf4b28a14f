"""Contents of a context (plans, kernels and weights for each architecture), and inputs that no stored plan accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, helper, numpy_helper

import context_campaign
import ort_cuda_plugin
from contexts import (
    BINARY,
    RNG,
    assert_same,
    compile_model,
    container_of,
    context_nodes,
    load,
    nothing_compiled,
    row_model,
    rows,
    settings,
)
from decoder import decoder, decoder_inputs
from isolated import HARNESS, python
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.plan.decoder import decode
from session_pair import FLOAT, INT64, info


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Mapping[str, int],
    constants: Mapping[str, np.ndarray] | None = None,
) -> bytes:
    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    results = [info(name, kind, None) for name, kind in outputs.items()]
    graph = helper.make_graph(nodes, "g", inputs, results, initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(made.SerializeToString())


W = RNG.standard_normal((16, 20), dtype=np.float32)


def index_of(path: Path) -> Any:
    return container_of(path).index


def test_what_is_computed_once_is_computed_when_the_context_is_loaded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Exp", ["table"], ["e"]),
        helper.make_node("MatMul", ["a", "e"], ["y"]),
    ]
    constants = {"w": RNG.random((16, 32), np.float32), "table": RNG.random((32, 48), np.float32)}
    source = model(nodes, [info("x", FLOAT, ["n", 16])], {"y": FLOAT}, constants)
    compile_model(source, tmp_path / "m_ctx.onnx", level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    (target,) = index_of(tmp_path / BINARY.format("m"))["partitions"][0]["targets"]
    assert target["programs"]
    assert any("program" in weight for weight in target["weights"])
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), source, [{"x": rows(4)}, {"x": rows(1)}, {"x": rows(70)}])


def test_types_of_all_sizes_come_back(tmp_path: Path) -> None:
    """Constants of int4, float16, float32 and float64, infinite values included, are equal after loading."""
    packed = helper.make_tensor("q", onnx.TensorProto.INT4, [16, 6], list(range(-8, 8)) * 6)
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Cast", ["a"], ["h"], to=onnx.TensorProto.FLOAT16),
        helper.make_node("Mul", ["h", "half"], ["m"]),
        helper.make_node("Cast", ["m"], ["d"], to=onnx.TensorProto.DOUBLE),
        helper.make_node("Add", ["d", "double"], ["s"]),
        helper.make_node("Cast", ["s"], ["f"], to=FLOAT),
        helper.make_node("IsInf", ["f"], ["i"], detect_negative=0),
        helper.make_node("Where", ["i", "one", "f"], ["y"]),
    ]
    constants: dict[str, np.ndarray] = {
        "scale": np.array(0.5, np.float32),
        "half": RNG.random(6).astype(np.float16),
        "double": np.array([1e-3, np.inf, -1, 2, 3, -np.inf]),
        "one": np.array(1, np.float32),
    }
    proto = onnx.load_from_string(model(nodes, [info("x", FLOAT, ["n", 16])], {"y": FLOAT}, constants))
    proto.graph.initializer.append(packed)
    source = proto.SerializeToString()
    compile_model(source, tmp_path / "m_ctx.onnx")
    x = rows(5)
    expected = ort_cuda_plugin.session(source, emulate=True).run(None, {"x": x})[0]
    with nothing_compiled():
        np.testing.assert_array_equal(load(tmp_path / "m_ctx.onnx").run(None, {"x": x})[0], expected)


def test_weights_in_a_layout_of_kernels_are_stored_once(tmp_path: Path) -> None:
    """The context stores weights in the layout of kernels; the stored graph's initializers are views of them."""
    constants = {"k": RNG.random((24, 8, 3, 3), np.float32), "d": RNG.random((8, 1, 3, 3), np.float32)}
    constants["e"] = RNG.random((80, 4, 1, 1), np.float32)
    constants["i"] = RNG.random((8, 80, 1, 1), np.float32)
    constants |= {name: RNG.random((24, 20), np.float32) for name in ("q", "r")}
    nodes = [
        helper.make_node("Conv", ["x", "d"], ["s"], pads=[1, 1, 1, 1], group=8),
        helper.make_node("Conv", ["s", "e"], ["t"], group=2),
        helper.make_node("Conv", ["t", "i"], ["u"]),
        helper.make_node("Conv", ["u", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "q"], ["a"]),
        helper.make_node("MatMul", ["f", "r"], ["b"]),
        helper.make_node("Softmax", ["a"], ["y"]),
        helper.make_node("Softmax", ["b"], ["z"]),
    ]
    source = model(nodes, [info("x", FLOAT, ["n", 8, "h", "w"])], {"y": FLOAT, "z": FLOAT}, constants)
    compile_model(source, tmp_path / "m_ctx.onnx")
    index = index_of(tmp_path / BINARY.format("m"))
    views = [row["shape"] for row in index["constants"] if row.get("recipe", [""])[0] == "view"]
    assert sorted(views) == [[8, 1, 3, 3], [8, 80, 1, 1], [24, 8, 3, 3], [24, 20], [24, 20], [80, 4, 1, 1]]
    feeds = [{"x": RNG.random(shape, np.float32)} for shape in ((1, 8, 5, 6), (2, 8, 4, 4))]
    for host_code in (False, True):
        assert_same(load(tmp_path / "m_ctx.onnx", host_code), source, feeds)


def test_a_state_goes_on_from_run_to_run(tmp_path: Path) -> None:
    node = helper.make_node("RandomUniformLike", ["x"], ["y"], seed=7.0)
    source = model([node], [info("x", FLOAT, ["n", 16])], {"y": FLOAT})
    compile_model(source, tmp_path / "m_ctx.onnx")
    (target,) = index_of(tmp_path / BINARY.format("m"))["partitions"][0]["targets"]
    assert [weight["node"] for weight in target["weights"]] == [0]
    compiled = ort_cuda_plugin.session(source, emulate=True)
    with nothing_compiled():
        stored = load(tmp_path / "m_ctx.onnx")
        results = [stored.run(None, {"x": rows(3)})[0] for _ in range(3)]
    assert len({result.tobytes() for result in results}) == 3
    for result in results:
        np.testing.assert_array_equal(result, compiled.run(None, {"x": rows(3)})[0])


def test_host_inputs_are_read_back(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Expand", ["a", "shape"], ["b"]),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    inputs = [info("x", FLOAT, ["n", 16]), info("shape", INT64, [3])]
    source = model(nodes, inputs, {"y": FLOAT})
    compile_model(source, tmp_path / "m_ctx.onnx")
    (target,) = index_of(tmp_path / BINARY.format("m"))["partitions"][0]["targets"]
    assert target["host_inputs"] == [1]
    assert target["plans"], target["failures"]
    feed = {"x": rows(3), "shape": np.array([2, 3, 16])}
    assert_same(load(tmp_path / "m_ctx.onnx"), source, [feed, {"x": rows(1), "shape": np.array([2, 5, 16])}])


def test_open_ranks_and_conditions_are_foreseen(tmp_path: Path) -> None:
    bodies = {
        name: helper.make_graph([helper.make_node(op, ["a"], [name])], name, [], [info(name, FLOAT, None)])
        for name, op in (("then", "Neg"), ("else", "Exp"))
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("If", ["c"], ["y"], then_branch=bodies["then"], else_branch=bodies["else"]),
    ]
    unranked = helper.make_value_info("x", helper.make_tensor_type_proto(FLOAT, None))
    source = model(nodes, [unranked, info("c", onnx.TensorProto.BOOL, [])], {"y": FLOAT})
    compile_model(source, tmp_path / "m_ctx.onnx")
    shapes = [(5,), (3, 7), (2, 1, 6)]
    feeds = [{"x": RNG.random(shape, np.float32), "c": np.array(c)} for shape in shapes for c in (True, False)]
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), source, feeds)


def test_shapes_that_are_wanted_are_foreseen(tmp_path: Path) -> None:
    compile_model(broadcasting(), tmp_path / "m_ctx.onnx", context_shapes="a=3x16,b=3x1")
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), broadcasting(), [UNFORESEEN])


def test_an_initializer_that_could_be_replaced_is_an_input(tmp_path: Path) -> None:
    """An initializer that is also a graph input stays an input of the fused node, which may read a new value."""
    inputs = [info("x", FLOAT, ["n", 16]), info("w", FLOAT, [16])]
    source = model([helper.make_node("Add", ["x", "w"], ["y"])], inputs, {"y": FLOAT}, {"w": rows()})
    compiled = compile_model(source, tmp_path / "m_ctx.onnx")
    assert list(compiled.graph.node[0].input) == ["x", "w"]
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), source, [{"x": rows(3)}])


def test_bodies_come_back_with_the_graph(tmp_path: Path) -> None:
    """Without permission for host code, the session compiles the stored graph, which has both branches of the If."""
    body = helper.make_graph(
        [helper.make_node("Mul", ["outer", "outer"], ["then"])], "t", [], [info("then", FLOAT, None)]
    )
    other = helper.make_graph([helper.make_node("Neg", ["outer"], ["else"])], "e", [], [info("else", FLOAT, None)])
    nodes = [
        helper.make_node("Relu", ["x"], ["outer"]),
        helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=other),
        helper.make_node("Add", ["z", "outer"], ["y"]),
    ]
    source = model(nodes, [info("x", FLOAT, ["n", 16])], {"y": FLOAT}, {"c": np.array(True)})
    level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    compiled = compile_model(source, tmp_path / "m_ctx.onnx", level=level)
    assert [node.op_type for node in compiled.graph.node] == ["EPContext"]
    for host_code in (False, True):
        assert_same(load(tmp_path / "m_ctx.onnx", host_code), source, [{"x": rows(3)}, {"x": rows(1)}])


def test_a_decoder_runs_any_length(tmp_path: Path) -> None:
    proto = decoder(layers=1)
    source = proto.SerializeToString()
    compile_model(source, tmp_path / "m_ctx.onnx")
    session = load(tmp_path / "m_ctx.onnx")
    feeds = [decoder_inputs(proto, *sizes) for sizes in ((1, 1, 5), (2, 7, 0), (3, 4, 9))]
    with nothing_compiled():
        assert_same(session, source, feeds)


def test_contexts_are_for_several_architectures(tmp_path: Path) -> None:
    source = row_model()
    compiled = compile_model(source, tmp_path / "m_ctx.onnx", context_architectures="sm_80,sm_90,emulated")
    assert context_nodes(compiled)[0]["hardware_architecture"] == b"sm_80,sm_90,emulated"
    path = tmp_path / BINARY.format("m")
    index = index_of(path)
    targets = index["partitions"][0]["targets"]
    assert [target["arch"] for target in targets] == ["sm_80", "sm_90", "emulated"]
    container = container_of(path)
    for target in targets:
        assert target["plans"]
        assert target["kernels"]
        for number in target["kernels"]:
            assert index["kernels"][number]["arch"] == target["arch"]
            image = container.array(index["kernels"][number]["image"])
            machine = int.from_bytes(image[18:20], "little")
            assert (bytes(image[:4]), machine == 190) == (b"\x7fELF", target["arch"] != "emulated")
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), source, [{"x": rows(2, 3)}])


def test_a_model_for_other_devices_is_not_compiled_for_the_sessions_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that wrote the model still compiles kernels for its own device if a Run needs them."""
    asked = set()
    compile_kernels = KernelLibrary.get_many

    def watched(library: KernelLibrary, specs: Sequence[KernelSpec], target: Target) -> list[KernelImage]:
        asked.add(target.arch)
        return compile_kernels(library, specs, target)

    monkeypatch.setattr(KernelLibrary, "get_many", watched)
    fixed = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x", FLOAT, [2, 16])], {"y": FLOAT}, {"w": W})
    for source, x in ((row_model(), rows(2, 3)), (fixed, rows(2))):
        asked.clear()
        entries = {"ep.context_enable": "1", "ep.context_file_path": str(tmp_path / "m_ctx.onnx")}
        session = ort.InferenceSession(source, settings(entries, {"context_architectures": "sm_90"}))
        assert asked == {"sm_90"}
        assert_same(session, source, [{"x": x}])
        assert asked == {"sm_90", "emulated"}
        (tmp_path / "m_ctx.onnx").unlink()


def test_a_context_for_other_devices_is_compiled_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = row_model()
    compile_model(source, tmp_path / "m_ctx.onnx", context_architectures="sm_90")
    built = ort_cuda_plugin.counters()["plan_variants_built"]
    assert_same(load(tmp_path / "m_ctx.onnx", severity=2), source, [{"x": rows(2, 3)}])
    assert ort_cuda_plugin.counters()["plan_variants_built"] > built
    said = capfd.readouterr().err
    assert "it has no code for emulated that this computer can run" in said
    assert "sm_90: a GPU and the emulated device cannot run each other's code" in said


def test_the_permission_to_run_host_code_is_asked_only_where_there_is_host_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = row_model()
    for architecture, expected in (("sm_90", "it has no code for emulated"), ("emulated", "context_allow_host_code=1")):
        path = tmp_path / f"{architecture}_ctx.onnx"
        compile_model(source, path, context_architectures=architecture)
        load(path, host_code=False, severity=2)
        said = capfd.readouterr().err
        assert expected in said, architecture
        assert ("context_allow_host_code=1" in said) == (architecture == "emulated")


def test_a_session_that_wants_more_than_was_compiled_compiles(tmp_path: Path) -> None:
    source = row_model()
    compile_model(source, tmp_path / "m_ctx.onnx")
    built = ort_cuda_plugin.counters()["plan_variants_built"]
    assert_same(load(tmp_path / "m_ctx.onnx", deterministic="1"), source, [{"x": rows(2, 3)}])
    assert ort_cuda_plugin.counters()["plan_variants_built"] > built


def broadcasting() -> bytes:
    """Return y = a + b, where each dimension of either may be 1."""
    inputs = [info("a", FLOAT, ["m", "n"]), info("b", FLOAT, ["k", "l"])]
    return model([helper.make_node("Add", ["a", "b"], ["y"], name="sum")], inputs, {"y": FLOAT})


UNFORESEEN = {"a": rows(3), "b": RNG.standard_normal((3, 1), dtype=np.float32)}


def test_shapes_that_no_plan_takes_are_compiled(tmp_path: Path) -> None:
    source = broadcasting()
    compile_model(source, tmp_path / "m_ctx.onnx")
    session = load(tmp_path / "m_ctx.onnx")
    built = ort_cuda_plugin.counters()["plan_variants_built"]
    assert_same(session, source, [UNFORESEEN])
    assert ort_cuda_plugin.counters()["plan_variants_built"] == built + 1
    with nothing_compiled():
        assert_same(session, source, [UNFORESEEN, {"a": rows(8), "b": rows(8)}])


def test_without_a_compiler_the_error_names_input_dimension_and_guard(tmp_path: Path) -> None:
    compile_model(broadcasting(), tmp_path / "m_ctx.onnx")
    np.savez(tmp_path / "feed.npz", a=UNFORESEEN["a"], b=UNFORESEEN["b"])
    code = """
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
import numpy as np
from contexts import load
from pathlib import Path
session = load(Path(sys.argv[1]))
feed = np.load(sys.argv[2])
try:
    session.run(None, {"a": feed["a"], "b": feed["b"]})
except Exception as error:
    print(error)
a = np.ones((5, 7), np.float32)
np.testing.assert_array_equal(session.run(None, {"a": a, "b": a})[0], a + a)
"""
    environment = {"ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(HARNESS)}
    said = python(code, str(tmp_path / "m_ctx.onnx"), str(tmp_path / "feed.npz"), env=environment).stdout
    assert "has no plan for these inputs" in said
    assert "b.shape[1]" in said
    assert "b.shape[1] is 1" in said
    assert "a.shape[1] is 16" in said
    assert "No module named" in said


def test_plans_of_a_context_are_few(tmp_path: Path) -> None:
    """Plans are symbolic: a sample shape that an earlier plan accepts adds no plan."""
    compile_model(row_model(), tmp_path / "m_ctx.onnx")
    path = tmp_path / BINARY.format("m")
    (target,) = index_of(path)["partitions"][0]["targets"]
    container = container_of(path)
    assert len(target["plans"]) <= 3
    assert all(decode(bytes(container.array(number))).guards for number in target["plans"])


def test_contexts_are_damaged() -> None:
    """A damaged context gives either right results or an error of ONNX Runtime that says what to do."""
    outcomes = context_campaign.run(0, 90) + context_campaign.run(22737, 1)  # seed 22737: millions of elements
    for place in context_campaign.PLACES:
        assert sum(count for name, count in outcomes.items() if name.startswith(place) and "refused" in name) > 5
    assert any("right" in name for name in outcomes)
