"""Clusters, host values and views in ONNX Runtime sessions, compared with the CPU provider."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.ir import Graph
from session_pair import BOOL, FLOAT, INT64, Pair, floats, info


def test_a_node_of_the_cpu_in_the_middle_splits_the_graph_and_results_stay_right() -> None:
    pair = Pair(
        [
            helper.make_node("Mul", ["x", "x"], ["a"]),
            helper.make_node("Cast", ["a"], ["text"], to=TensorProto.STRING),
            helper.make_node("Cast", ["text"], ["d"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["a", "d"], ["y"]),
        ],
        [info("x", FLOAT, ["n", "n"])],
        [info("y", FLOAT, None)],
    )
    assert sorted(pair.clusters) == [["Add"], ["Mul"]]
    for n in (2, 3, 1):
        pair.check(x=floats(n, n))


def test_unseen_shapes_need_neither_python_nor_a_variant() -> None:
    pair = Pair(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("Add", ["a", "x"], ["b"]),
            helper.make_node("Transpose", ["b"], ["t"], perm=[0, 2, 1]),
            helper.make_node("Softmax", ["t"], ["y"], axis=-1),
        ],
        [info("x", FLOAT, ["batch", "sequence", 8])],
        [info("y", FLOAT, None)],
        w=floats(8, 8),
    )
    pair.check(x=floats(2, 3, 8))
    before = ort_cuda_plugin.counters()
    for batch, sequence in [(1, 1), (1, 5), (7, 1), (4, 33), (0, 3), (3, 2)]:
        pair.check(x=floats(batch, sequence, 8))
    after = ort_cuda_plugin.counters()
    assert after["python_calls"] == before["python_calls"]
    assert after["plan_variants_built"] == before["plan_variants_built"]
    assert after["plan_hits"] == before["plan_hits"] + 6


def test_shape_arithmetic_is_neither_launched_nor_read_back() -> None:
    pair = Pair(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "one"], ["m"]),
            helper.make_node("Mul", ["m", "three"], ["m3"]),
            helper.make_node("Unsqueeze", ["m3", "zero"], ["u"]),
            helper.make_node("Concat", ["minus", "u"], ["shape"], axis=0),
            helper.make_node("Reshape", ["x", "shape"], ["r"]),
            helper.make_node("Neg", ["r"], ["y"]),
        ],
        [info("x", FLOAT, ["n", "m"])],
        [info("y", FLOAT, None)],
        one=np.array(1),
        three=np.array(3),
        zero=np.array([0]),
        minus=np.array([-1]),
    )
    pair.check(x=floats(6, 5))
    before = ort_cuda_plugin.counters()
    pair.check(x=floats(9, 1))
    after = ort_cuda_plugin.counters()
    assert after["launches"] == before["launches"] + 1
    assert after["host_value_reads"] == before["host_value_reads"]


def test_a_shape_that_is_a_graph_input_is_read_back_once_per_run() -> None:
    pair = Pair(
        [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("Neg", ["r"], ["y"])],
        [info("x", FLOAT, ["n"]), info("shape", INT64, [2])],
        [info("y", FLOAT, None)],
    )
    assert pair.clusters == [["Neg", "Reshape"]]
    pair.check(x=floats(6), shape=np.array([2, 3]))
    before = ort_cuda_plugin.counters()
    for n, shape in [(6, [3, 2]), (8, [2, 4]), (1, [1, 1]), (6, [6, 1])]:
        pair.check(x=floats(n), shape=np.array(shape))
    after = ort_cuda_plugin.counters()
    assert after["host_value_reads"] == before["host_value_reads"] + 4
    assert after["plan_variants_built"] == before["plan_variants_built"]
    pair.check(x=floats(6), shape=np.array([-1, 2]))


def test_inputs_constants_views_and_repeated_values_can_be_outputs() -> None:
    pair = Pair(
        [
            helper.make_node("Identity", ["x"], ["same"]),
            helper.make_node("Identity", ["w"], ["constant"]),
            helper.make_node("Add", ["x", "w"], ["sum"]),
            helper.make_node("Transpose", ["sum"], ["transposed"], perm=[1, 0]),
            helper.make_node("Identity", ["sum"], ["again"]),
            helper.make_node("Shape", ["sum"], ["shape"]),
        ],
        [info("x", FLOAT, ["n", 3])],
        [
            info(name, INT64 if name == "shape" else FLOAT, None)
            for name in ("same", "constant", "sum", "transposed", "again", "shape")
        ],
        w=floats(3),
    )
    assert len(pair.clusters) == 1
    pair.check(x=floats(2, 3))
    pair.check(x=floats(1, 3))


def test_a_shape_that_does_not_fit_fails_with_the_node_and_the_next_run_works() -> None:
    pair = Pair(
        [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("Add", ["n", "z"], ["y"], name="the sum")],
        [info("x", FLOAT, ["a"]), info("z", FLOAT, ["b"])],
        [info("y", FLOAT, None)],
    )
    pair.check(x=floats(4), z=floats(4))
    with pytest.raises(Exception, match=r"node .the sum \(Add\).: .*broadcast"):
        pair.ours.run(None, {"x": floats(4), "z": floats(3)})
    pair.check(x=floats(4), z=floats(1))


def test_values_from_outside_reach_the_body_of_a_conditional() -> None:
    then_branch = helper.make_graph([helper.make_node("Add", ["a", "w"], ["t"])], "then", [], [info("t", FLOAT, None)])
    else_branch = helper.make_graph([helper.make_node("Sub", ["a", "w"], ["e"])], "else", [], [info("e", FLOAT, None)])
    pair = Pair(
        [
            helper.make_node("Mul", ["x", "w"], ["a"]),
            helper.make_node("If", ["c"], ["i"], then_branch=then_branch, else_branch=else_branch),
            helper.make_node("Mul", ["i", "a"], ["y"]),
        ],
        [info("c", BOOL, []), info("x", FLOAT, ["n", 2])],
        [info("y", FLOAT, None)],
        w=floats(2),
    )
    assert sorted(pair.clusters) == [["Add"], ["If", "Mul", "Mul"], ["Sub"]]
    for condition in (True, False):
        pair.check(c=np.array(condition), x=floats(3, 2))


@pytest.mark.usefixtures("collected")
def test_weights_that_left_host_memory_serve_a_later_variant() -> None:
    pair = Pair(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("Add", ["a", "z"], ["y"]),
        ],
        [info("x", FLOAT, ["n", 256]), info("z", FLOAT, ["n", 256])],
        [info("y", FLOAT, None)],
        w=floats(256, 256),
    )
    before = ort_cuda_plugin.counters()
    pair.check(x=floats(5, 256), z=floats(5, 256))
    # x and z both declare the dimension n. Different sizes for it need a variant of their own.
    pair.check(x=floats(5, 256), z=floats(1, 256))
    after = ort_cuda_plugin.counters()
    assert after["plan_variants_built"] == before["plan_variants_built"] + 2
    assert after["weight_bytes"] == before["weight_bytes"]


def test_nodes_of_a_function_are_explained_in_the_place_of_the_function(tmp_path: Path) -> None:
    body = [
        helper.make_node("Neg", ["a"], ["n"]),
        helper.make_node("Abs", ["n"], ["d"]),
        helper.make_node("Cast", ["d"], ["o"], to=TensorProto.STRING),
    ]
    function = helper.make_function("local", "Written", ["a"], ["o"], body, [helper.make_opsetid("", 17)])
    graph = helper.make_graph(
        [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Written", ["e"], ["y"], domain="local")],
        "functions",
        [info("x", FLOAT, ["n", "n"])],
        [info("y", TensorProto.STRING, ["n", "n"])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=9), path)
    verdicts = ort_cuda_plugin.explain(path, emulate=True)
    assert {verdict.op_type: verdict.supported for verdict in verdicts} == {
        "Exp": True,
        "Neg": True,
        "Abs": True,
        "Cast": False,
    }


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([-2, -3], "shape must be at least -1"),
        ([-1, -1], r"shape must have at most one -1, got .*shape\[1\]"),
        ([2**62, 4], r"node \w+ \(Reshape\): .* 64-bit"),
        ([4, 2], "shape must have the product n, the number of elements of data"),
    ],
)
def test_a_hostile_shape_is_an_error_of_its_run_only(shape: list[int], text: str) -> None:
    pair = Pair(
        [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("Neg", ["r"], ["y"])],
        [info("x", FLOAT, ["n"]), info("shape", INT64, [2])],
        [info("y", FLOAT, None)],
    )
    with pytest.raises(Exception, match=text):
        pair.ours.run(None, {"x": floats(6), "shape": np.array(shape)})
    pair.check(x=floats(6), shape=np.array([3, 2]))


@pytest.mark.parametrize(
    ("nodes", "value", "text"),
    [
        pytest.param(
            [
                ("Mul", ["v", "v"], "a"),
                ("Sub", ["a", "v"], "b"),
                ("Min", ["b", "one"], "c"),
                ("Expand", ["x", "c"], "y"),
            ],
            2**33,
            r"'a \(Mul\)': .* 8589934592 \* 8589934592 overflows 64 bits; check",
            id="a product that a later node subtracts from",
        ),
        pytest.param(
            [("Add", ["v", "v"], "a"), ("Min", ["a", "one"], "b"), ("Expand", ["x", "b"], "y")],
            2**62,
            r"'a \(Add\)': .* 4611686018427387904 \* 2 overflows 64 bits; check",
            id="a sum of one value",
        ),
        pytest.param(
            [("Div", ["one", "v"], "a"), ("Add", ["a", "v"], "b"), ("Expand", ["x", "b"], "y")],
            0,
            r"'a \(Div\)': .* 1 / 0 divides by zero; check",
            id="a quotient in a sum",
        ),
        pytest.param(
            [("Mod", ["one", "v"], "a"), ("Expand", ["x", "a"], "y")],
            0,
            r"'a \(Mod\)': .* 1 / 0 divides by zero; check",
            id="a remainder",
        ),
        pytest.param(
            [("Sub", ["v", "one"], "a"), ("Expand", ["x", "a"], "y")],
            -4,
            r"'y \(Expand\)': .*shape must be at least 0",
            id="a negative size",
        ),
        pytest.param(
            [("Expand", ["x", "v"], "a"), ("Concat", ["a", "a", "a", "a"], "y", {"axis": 0})],
            2**61 - 1,
            r"node '?y \(Concat\)'?: .*(overflows 64 bits|bytes)",
            id="too many bytes",
        ),
    ],
)
def test_shape_arithmetic_without_a_value_names_the_node_that_computes_it(nodes: Any, value: int, text: str) -> None:
    pair = Pair(
        [
            helper.make_node(op_type, inputs, [output], output, **(attributes[0] if attributes else {}))
            for op_type, inputs, output, *attributes in nodes
        ],
        [info("x", FLOAT, [1]), info("v", INT64, [1])],
        [info("y", FLOAT, None)],
        one=np.array([1]),
    )
    assert pair.clusters == [sorted(node[0] for node in nodes)]
    for _ in range(2):  # first while no plan exists, then with the plan of the valid Run
        with pytest.raises(Exception, match=text):
            pair.ours.run(None, {"x": floats(1), "v": np.array([value])})
        pair.ours.run(None, {"x": floats(1), "v": np.array([1])})


def test_slices_beyond_both_ends_are_cut_where_the_ends_are_inputs() -> None:
    pair = Pair(
        [helper.make_node("Slice", ["x", "start", "end"], ["s"]), helper.make_node("Neg", ["s"], ["y"])],
        [info("x", FLOAT, ["n"]), info("start", INT64, [1]), info("end", INT64, [1])],
        [info("y", FLOAT, None)],
    )
    for start, end in [(1, 3), (5, 2), (-100, 100), (-(2**63), 2**63 - 1), (-3, -1), (2**62, -(2**62))]:
        pair.check(x=floats(6), start=np.array([start]), end=np.array([end]))


def test_guessed_sizes_that_contradict_each_other_do_not_stop_a_session() -> None:
    """The Slice has one column, as MatMul requires, only if n <= 8. The size guessed for n may contradict this."""
    ends = [helper.make_node("Constant", [], [name], value_ints=[i]) for name, i in (("a", 0), ("b", -9), ("c", -1))]
    axis = helper.make_node("Constant", [], ["axis"], value_ints=[1])
    slice_node = helper.make_node("Slice", ["x", "a", "b", "axis", "c"], ["s"])
    nodes = [*ends, axis, slice_node, helper.make_node("MatMul", ["s", "w"], ["y"])]
    pair = Pair(nodes, [info("x", FLOAT, [2, "n"]), info("w", FLOAT, [1, 8])], [info("y", FLOAT, None)])
    for columns in (8, 3):
        pair.check(x=floats(2, columns), w=floats(1, 8))
    with pytest.raises(Exception, match=r"node .*\(MatMul\): .*dimension"):
        pair.ours.run(None, {"x": floats(2, 20), "w": floats(1, 8)})


def test_a_released_session_leaves_no_graph_behind() -> None:
    def sessions() -> None:
        pair = Pair(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            [info("x", FLOAT, ["n", 200])],
            [info("y", FLOAT, None)],
            w=floats(200, 200),
        )
        pair.check(x=floats(3, 200))

    sessions()
    gc.collect()
    gc.disable()
    try:
        before = [obj for obj in gc.get_objects() if isinstance(obj, (CompiledCluster, Graph))]
        sessions()
        after = [obj for obj in gc.get_objects() if isinstance(obj, (CompiledCluster, Graph))]
        assert len(after) == len(before)
    finally:
        gc.enable()


def test_host_values_for_which_no_plan_can_be_evaluated_are_errors_of_the_node() -> None:
    """A guard of the plan divides by frame_step before the plan checks that frame_step is at least 1."""
    nodes = [
        helper.make_node("Relu", ["x"], ["signal"]),
        helper.make_node("STFT", ["signal", "step", "", "length"], ["y"], name="frames"),
    ]
    inputs = [info("x", FLOAT, [1, "n", 1]), info("step", INT64, []), info("length", INT64, [])]
    pair = Pair(nodes, inputs, [info("y", FLOAT, None)])
    x, length = floats(1, 32, 1), np.array(8)
    pair.check(x=x, step=np.array(4), length=length)
    with pytest.raises(Exception, match=r"node 'frames \(STFT\)': frame_step must be at least 1"):
        pair.ours.run(None, {"x": x, "step": np.array(0), "length": length})
    with pytest.raises(Exception, match=r"node 'frames \(STFT\)'"):
        pair.ours.run(None, {"x": x, "step": np.array(4), "length": np.array(-(2**63))})
    pair.check(x=x, step=np.array(2), length=length)


def test_an_application_gives_the_values_of_external_initializers() -> None:
    """No file of the model's external data exists."""
    weight, x = floats(4, 3), floats(5, 4)
    tensor = TensorProto(name="w", data_type=FLOAT, dims=weight.shape, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "missing.bin", "offset": 0, "length": weight.nbytes}.items():
        tensor.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "external",
        [info("x", FLOAT, ["n", 4])],
        [info("y", FLOAT, ["n", 3])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    settings = ort.SessionOptions()
    given = ort.OrtValue.ortvalue_from_numpy(weight)
    settings.add_external_initializers(["w"], [given])
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True, sess_options=settings)
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x @ weight, rtol=1e-5, atol=1e-6)
