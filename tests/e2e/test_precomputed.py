"""Constant folding on the device: tensors that depend only on weights are computed once and kept like weights."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import onnxruntime as ort
import pytest
from onnx import NodeProto, helper, numpy_helper

import ort_cuda_plugin
from session_pair import FLOAT, info

Array = np.ndarray
THREADS = 4


def session(
    nodes: Sequence[NodeProto], rows: str | int, outputs: Sequence[str], constants: dict[str, Array], **options: object
) -> ort.InferenceSession:
    """Return a session with the float input x [rows, 96], without ONNX Runtime's own constant folding."""
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(
        nodes, "g", [info("x", FLOAT, [rows, 96])], [info(name, FLOAT, None) for name in outputs], initializers
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model.SerializeToString()
    return ort_cuda_plugin.session(data, emulate=True, sess_options=settings, provider_options=options)


def in_use() -> dict[str, int]:
    gc.collect()
    counters = ort_cuda_plugin.counters()
    return {name: counters[name] for name in ("weight_bytes", "device_bytes_in_use", "pinned_bytes_in_use")}


def launches_of(made: ort.InferenceSession, x: Array) -> int:
    before = ort_cuda_plugin.counters()["launches"]
    made.run(None, {"x": x})
    return ort_cuda_plugin.counters()["launches"] - before


def products(seed: int) -> tuple[list[NodeProto], dict[str, Array], int]:
    """Return nodes with GEMMs of derived weights, their constants, and the size of the derived weights in bytes."""
    rng = np.random.default_rng(seed)
    constants: dict[str, Array] = {
        "table": rng.standard_normal((64, 128)).astype(np.float32),
        "left": rng.standard_normal((64, 8)).astype(np.float16),
        "right": rng.standard_normal((64, 24)).astype(np.float16),
        "scale": rng.random(128, dtype=np.float32),
        "w": rng.standard_normal((128, 96)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Exp", ["scale"], ["exp"]),
        helper.make_node("Transpose", ["w"], ["wt"]),
        helper.make_node("Sin", ["wt"], ["sin"]),
        helper.make_node("MatMul", ["x", "sin"], ["p"]),
        helper.make_node("Mul", ["p", "exp"], ["q"]),
        helper.make_node("Mul", ["q", "exp"], ["scaled"]),
        helper.make_node("Transpose", ["table"], ["turned"]),
        helper.make_node("Concat", ["left", "right"], ["both"], axis=1),
        helper.make_node("Cast", ["both"], ["wide"], to=FLOAT),
        helper.make_node("MatMul", ["turned", "wide"], ["inner"]),
        helper.make_node("MatMul", ["scaled", "inner"], ["y"]),
    ]
    return nodes, constants, 4 * (128 + 96 * 128 + 128 * 32)


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(("seed", "rows"), [(1, 7), (2, "n")])
def test_runs_do_only_what_depends_on_inputs(seed: int, rows: int | str) -> None:
    before = in_use()
    nodes, constants, nbytes = products(seed)
    made = session(nodes, rows, ["y"], constants)
    assert in_use()["weight_bytes"] - before["weight_bytes"] == nbytes
    x = np.random.default_rng(seed).standard_normal((7, 96)).astype(np.float32)
    results = [made.run(None, {"x": x})[0] for _ in range(3)]
    assert launches_of(made, x) == 2
    assert in_use()["weight_bytes"] - before["weight_bytes"] == nbytes
    plain = session(nodes, rows, ["y"], constants, fusion=0)
    assert launches_of(plain, x) > 6
    for result in results:
        np.testing.assert_array_equal(result, plain.run(None, {"x": x})[0])
    del made, plain
    assert in_use() == before


@pytest.mark.usefixtures("collected")
def test_plans_of_a_session_share_what_was_computed() -> None:
    nodes, constants, _ = products(3)
    nodes.append(helper.make_node("ReduceSum", ["x", "axes"], ["sum"]))
    nodes.append(helper.make_node("Add", ["y", "sum"], ["z"]))
    nodes.append(helper.make_node("Add", ["y", "eight"], ["broadcast"]))
    constants |= {"axes": np.array([1]), "eight": np.arange(8 * 32, dtype=np.float32).reshape(8, 32)}
    made = session(nodes, "n", ["z", "broadcast"], constants)
    weights = in_use()["weight_bytes"]
    before = ort_cuda_plugin.counters()["plan_variants_built"]
    for rows in (8, 1):
        made.run(None, {"x": np.ones((rows, 96), np.float32)})
    assert ort_cuda_plugin.counters()["plan_variants_built"] - before == 2
    assert in_use()["weight_bytes"] == weights


@pytest.mark.usefixtures("collected")
def test_what_is_much_larger_than_its_weights_is_not_kept() -> None:
    before = in_use()["weight_bytes"]
    constants = {"row": np.arange(96, dtype=np.float32), "shape": np.array([8192, 96]), "axis": np.array(0)}
    nodes = [
        helper.make_node("Expand", ["row", "shape"], ["large"]),
        helper.make_node("CumSum", ["large", "axis"], ["summed"]),
        helper.make_node("Transpose", ["summed"], ["turned"]),
        helper.make_node("MatMul", ["x", "turned"], ["y"]),
    ]
    made = session(nodes, 2, ["y"], constants)
    x = np.ones((2, 96), np.float32)
    np.testing.assert_allclose(made.run(None, {"x": x})[0][0], np.arange(1, 8193) * 96 * 95 / 2, rtol=1e-4)
    assert in_use()["weight_bytes"] - before < 10_000


def test_random_numbers_of_weights_are_drawn_in_each_run() -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["w"], ["noise"], seed=1.0),
        helper.make_node("Mul", ["x", "noise"], ["y"]),
    ]
    made = session(nodes, 1, ["y"], {"w": np.zeros((1, 96), np.float32)})
    x = np.ones((1, 96), np.float32)
    first, second = (made.run(None, {"x": x})[0] for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.usefixtures("collected")
def test_sessions_that_begin_at_once_compute_their_own() -> None:
    """Two of four threads create a session at once; then each thread runs both sessions on its own stream."""
    before = in_use()
    nodes, constants, _ = products(4)
    x = np.random.default_rng(0).standard_normal((9, 96)).astype(np.float32)
    expected = session(nodes, "n", ["y"], constants, fusion=0).run(None, {"x": x})[0]
    sessions: list[ort.InferenceSession] = []
    start = Barrier(THREADS)

    def work(number: int) -> None:
        start.wait()
        if number % 2 == 0:
            sessions.append(session(nodes, "n", ["y"], constants))
        start.wait()
        for made in (*sessions, *reversed(sessions)):
            np.testing.assert_array_equal(made.run(None, {"x": x})[0], expected)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, number) for number in range(THREADS)]:
            done.result()
    assert len(sessions) == 2
    sessions.clear()
    assert in_use() == before


def test_a_program_shows_what_is_computed_once(tmp_path: Path) -> None:
    nodes, constants, _ = products(5)
    made = session(nodes, 3, ["y"], constants, program_folder=str(tmp_path))
    del made
    (text,) = (file.read_text() for file in tmp_path.glob("*.txt"))
    _, once, in_each_run = re.split("after emission:|changed by constant_folding: ", text)
    assert "Concat" in once
    assert in_each_run.startswith("2 steps")
    lines = [line for line in in_each_run.splitlines() if "Concat" in line]
    assert lines
    assert all(line.startswith("- ") for line in lines)
