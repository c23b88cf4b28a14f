"""Device events (kernels and copies) that the plugin adds to ONNX Runtime's profile file."""

from __future__ import annotations

import functools
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from copy_paths import on_device
from device_models import with_cpu_nodes
from encoder import encoder, encoder_inputs
from isolated import add_model, python
from profiles import Event, Profile, profiled_session

FEEDS = encoder_inputs(2, 32)


@functools.lru_cache
def small_encoder() -> bytes:
    return bytes(encoder(layers=1, hidden=64, heads=4).SerializeToString())


#: Whether the emulated device runs work in the call that enqueues it, and so during ORT's event of the node.
INLINE = os.environ.get("ORT_CUDA_PLUGIN_EMULATE_STREAMS", "inline") == "inline"


def of_nodes(event: Event) -> list[tuple[str, str]]:
    return list(zip(event.args["nodes"], event.args["op_types"], strict=True))


def signature(events: list[Event]) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(e.name, tuple(of_nodes(e))) for e in events]


def test_each_kernel_of_an_encoder_names_its_nodes_within_its_run(tmp_path: Path) -> None:
    model = onnx.load_from_string(small_encoder())
    options = {"automatic_cuda_graphs": "0"}
    session = profiled_session(small_encoder(), tmp_path, options)
    session.run(None, FEEDS)
    before = ort_cuda_plugin.counters()
    for _ in range(3):
        session.run(None, FEEDS)
    after = ort_cuda_plugin.counters()
    assert after["python_calls"] == before["python_calls"]
    profile = Profile(session.end_profiling())
    types = {node.name: node.op_type for node in model.graph.node}
    clusters = profile.nodes()
    assert len(clusters) == 4
    enqueued = [
        [e for e in profile.kernels if e.args["ort_event_id"] == number]
        for number in sorted({e.args["ort_event_id"] for e in profile.kernels}, key=int)
    ]
    runs = [kernels for kernels in enqueued if kernels[0].args.get("ort_event", "").endswith("_kernel_time")]
    assert [len(kernels) for kernels in runs[1:]] == [(after["launches"] - before["launches"]) // 3] * 3
    assert signature(runs[0]) == signature(runs[1]) == signature(runs[2]) == signature(runs[3])
    for kernel in profile.kernels:
        assert kernel.args["nodes"]
        assert all(types[name] == op_type for name, op_type in of_nodes(kernel))
    named = {op_type for kernel in runs[1] for _, op_type in of_nodes(kernel)}
    assert {"MatMul", "Add", "Softmax", "Erf", "LayerNormalization"} <= named
    for kernel in runs[1]:
        assert kernel.args["cluster"] in kernel.args["ort_event"]
        assert kernel.args["ort_event"] == clusters[1].name
        assert (kernel.args["provider"], kernel.args["device_kind"]) == (ort_cuda_plugin.get_ep_name(), "emulated")
        assert len(kernel.args["grid"]) == len(kernel.args["block"]) == 3
        sizes = {f"{what}_{axis}": kernel.args[what][i] for what in ("grid", "block") for i, axis in enumerate("xyz")}
        assert {name: int(kernel.args[name]) for name in sizes} == sizes
    copies = [e for e in profile.device if e.args["kind"] == "copy"]
    assert copies
    for copy in copies:  # as in ONNX Runtime's CUDA profiler
        assert {copy.args[f"{what}_{axis}"] for what in ("grid", "block") for axis in "xyz"} == {"-1"}
    starts = [e.begin for e in profile.device]
    assert starts == sorted(starts)
    if INLINE:
        for cluster, kernels in zip(clusters, runs, strict=True):
            assert [e for e in profile.within(cluster) if e in kernels] == kernels
    for run, cluster in zip(profile.sessions("model_run"), clusters, strict=True):
        assert run.holds(cluster)


@pytest.mark.skipif(not INLINE, reason="streams defer their work")
def test_kernels_take_most_of_an_encoders_cluster(tmp_path: Path) -> None:
    session = profiled_session(bytes(encoder(layers=2).SerializeToString()), tmp_path)
    for _ in range(12):
        session.run(None, encoder_inputs(2, 64))
    profile = Profile(session.end_profiling())
    shares = [sum(e.duration for e in profile.within(cluster)) / cluster.duration for cluster in profile.nodes()[-8:]]
    assert 0.8 <= statistics.median(shares) <= 1.0


def test_each_kernel_of_a_convolutional_net_names_its_nodes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).standard_normal
    weights = {"w": (4, 3, 3, 3), "v": (4, 3, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="wide", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Conv", ["x", "v"], ["d"], name="narrow"),
        helper.make_node("Concat", ["r", "d"], ["j"], name="join", axis=1),
        helper.make_node("MaxPool", ["j"], ["y"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
    ]
    values = [helper.make_tensor_value_info(*v) for v in (("x", 1, [1, 3, 8, 8]), ("y", 1, [1, 8, 4, 4]))]
    constants = [numpy_helper.from_array(noise(s, dtype=np.float32), name) for name, s in weights.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    net = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = profiled_session(net.SerializeToString(), tmp_path)
    session.run(None, {"x": noise((1, 3, 8, 8), dtype=np.float32)})
    profile = Profile(session.end_profiling())
    named = [name for kernel in profile.kernels for name in kernel.args["nodes"]]
    assert set(named) == {"wide", "relu", "narrow", "join", "pool"}
    pools = [kernel.args["nodes"] for kernel in profile.kernels if "pool" in kernel.args["nodes"]]
    assert pools == [["pool"]]


def test_copies_say_their_bytes_and_their_direction(tmp_path: Path) -> None:
    session = profiled_session(add_model(), tmp_path)
    session.run(None, {name: np.ones(8, np.float32) for name in "ab"})
    copies = [e for e in Profile(session.end_profiling()).device if e.args["kind"] == "copy"]
    run = [e for e in copies if e.args["ort_event"] == "model_run"]
    assert [(e.name, e.args["bytes"]) for e in run] == [("memcpy_host_to_device", "32")] * 2 + [
        ("memcpy_device_to_host", "32")
    ]


def test_copies_around_cpu_nodes_name_the_node_that_copies(tmp_path: Path) -> None:
    session = profiled_session(with_cpu_nodes(TensorProto.FLOAT), tmp_path)
    session.run(None, {"x": np.ones((2, 3), np.float32)})
    profile = Profile(session.end_profiling())
    named = {op_type for e in profile.device if e.args["kind"] == "copy" for op_type in e.args["op_types"]}
    assert named == {"MemcpyFromHost", "MemcpyToHost"}
    if INLINE:
        for node in profile.nodes():
            assert profile.within(node), node


def test_graph_nodes_are_the_same_kernels_of_the_same_nodes(tmp_path: Path) -> None:
    session = profiled_session(small_encoder(), tmp_path)
    before = ort_cuda_plugin.counters()["graph_replays"]
    for _ in range(6):
        session.run(None, FEEDS)
    assert ort_cuda_plugin.counters()["graph_replays"] > before
    profile = Profile(session.end_profiling())
    runs: dict[str, list[Event]] = {}
    for kernel in profile.kernels:
        if kernel.args["ort_event"].endswith("_kernel_time"):
            runs.setdefault(kernel.args["ort_event_id"], []).append(kernel)
    first, *_, last = runs.values()
    assert {e.args["graph"] for e in first} == {"0"}
    assert {e.args["graph"] for e in last} == {"1"}
    assert signature(first) == signature(last)


def test_captured_runs_name_their_nodes(tmp_path: Path) -> None:
    session = profiled_session(add_model(), tmp_path, {"enable_cuda_graph": "1"})
    values = {name: on_device(np.ones(8, np.float32)) for name in "abc"}
    binding = session.io_binding()
    for name in "ab":
        binding.bind_ortvalue_input(name, values[name])
    binding.bind_ortvalue_output("c", values["c"])
    for _ in range(6):
        session.run_with_iobinding(binding)
    np.testing.assert_array_equal(values["c"].numpy(), 2)
    profile = Profile(session.end_profiling())
    replayed = [e for e in profile.kernels if e.args["graph"] == "1"]
    assert len(replayed) >= 3
    assert all(of_nodes(e) == [("add", "Add")] for e in replayed)
    runs = profile.sessions("model_run")
    if INLINE:
        assert all(any(run.holds(e) for run in runs) for e in replayed)


def test_threads_with_streams_of_their_own_have_their_own_events(tmp_path: Path) -> None:
    session = profiled_session(small_encoder(), tmp_path)
    threads, runs = 3, 3
    start = Barrier(threads)

    def work(seed: int) -> None:
        start.wait()
        for _ in range(runs):
            session.run(None, encoder_inputs(2, 32, seed))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    profile = Profile(session.end_profiling())
    clusters = profile.nodes()
    assert len({e.thread for e in clusters}) == threads
    by_event: dict[str, list[Event]] = {}
    for kernel in profile.kernels:
        if kernel.args["ort_event"].endswith("_kernel_time"):
            by_event.setdefault(kernel.args["ort_event_id"], []).append(kernel)
    assert len(by_event) == threads * runs
    assert len({tuple(signature(kernels)) for kernels in by_event.values()}) == 1
    assert len({kernel.args["stream"] for kernel in profile.kernels if "ort_event" in kernel.args}) >= threads
    if INLINE:
        for kernels in by_event.values():
            held = [c for c in clusters if c.thread == kernels[0].thread and all(c.holds(e) for e in kernels)]
            assert len(held) == 1


def test_two_sessions_at_once_have_profiles_of_their_own(tmp_path: Path) -> None:
    sessions = {op_type: profiled_session(unary(op_type), tmp_path / op_type) for op_type in ("Sqrt", "Exp")}
    silent = ort_cuda_plugin.session(unary("Abs"), emulate=True)
    for _ in range(3):
        for session in (*sessions.values(), silent):
            session.run(None, {"x": np.ones(8, np.float32)})
    for op_type, session in sessions.items():
        profile = Profile(session.end_profiling())
        assert len(profile.kernels) == 3
        assert all(e.args["op_types"] == [op_type] for e in profile.kernels)


def unary(op_type: str, name: str = "only") -> bytes:
    values = [helper.make_tensor_value_info(v, TensorProto.FLOAT, [8]) for v in "xy"]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], name=name)], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("name", ['quoted "name"', "back\\slash", "line\nbreak\t", "[list", "ends (Sqrt) (here"])
def test_names_stand_in_the_file_as_the_model_has_them(name: str, tmp_path: Path) -> None:
    session = profiled_session(unary("Sqrt", name), tmp_path)
    session.run(None, {"x": np.ones(8, np.float32)})
    (kernel,) = Profile(session.end_profiling()).kernels
    assert of_nodes(kernel) == [(name, "Sqrt")]


def test_a_profile_ends_once(tmp_path: Path) -> None:
    session = profiled_session(unary("Sqrt"), tmp_path)
    feeds = {"x": np.ones(8, np.float32)}
    session.run(None, feeds)
    assert len(Profile(session.end_profiling()).kernels) == 1
    session.run(None, feeds)
    assert session.end_profiling() == ""


def test_a_profile_that_nobody_ends_is_written_with_the_session(tmp_path: Path) -> None:
    session = profiled_session(unary("Sqrt"), tmp_path)
    session.run(None, {"x": np.ones(8, np.float32)})
    del session
    (path,) = tmp_path.iterdir()
    assert len(Profile(str(path)).kernels) == 1


def test_work_that_waits_for_the_end_of_the_profile_is_in_it(tmp_path: Path) -> None:
    """The Runs do not wait for their streams; end_profiling must wait before it collects the events."""
    code = """
        import sys
        from pathlib import Path
        import numpy as np
        from isolated import add_model
        from copy_paths import on_device, without_waiting
        from profiles import Profile, profiled_session

        session = profiled_session(add_model(), Path(sys.argv[1]))
        values = {name: on_device(np.ones(8, np.float32)) for name in "abc"}
        binding = session.io_binding()
        for name in "ab":
            binding.bind_ortvalue_input(name, values[name])
        binding.bind_ortvalue_output("c", values["c"])
        for _ in range(2):
            session.run_with_iobinding(binding, without_waiting())
        assert len(Profile(session.end_profiling()).kernels) == 2
    """
    harness = str(Path(__file__).parents[1] / "harness")
    environment = {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": "adversarial", "PYTHONPATH": harness}
    python(code, str(tmp_path), env=environment, preloaded=True)
