"""CUDA graphs in sessions: graphs that ONNX Runtime captures, and graphs that the plugin captures automatically."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import ort_cuda_plugin
from device_models import add_and_double, model, with_cpu_nodes
from encoder import encoder, encoder_inputs
from isolated import add_model, python
from ort_cuda_plugin import models
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device, Stream
from session_pair import ep_session

Arrays = dict[str, np.ndarray]
CAPTURE = {"enable_cuda_graph": "1"}


def vendor() -> int:
    devices = ort_cuda_plugin.register(emulate=True)
    device = next(device for device in devices if device.ep_metadata["emulated"] == "1")
    return int(device.memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id)


def on_device(array: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array, "gpu", 0, vendor())


def write(value: ort.OrtValue, array: np.ndarray) -> None:
    """Overwrite a value in device memory with ``array``."""
    ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(array)], [value])


class Bound:
    """A session whose inputs and outputs are bound to fixed device memory, as graphs require."""

    def __init__(self, session: ort.InferenceSession, inputs: Arrays, outputs: Arrays, graph_id: int | None = None):
        self.session = session
        self.values = {name: on_device(array) for name, array in (inputs | outputs).items()}
        self.outputs = list(outputs)
        self.binding = session.io_binding()
        for name in inputs:
            self.binding.bind_ortvalue_input(name, self.values[name])
        for name in outputs:
            self.binding.bind_ortvalue_output(name, self.values[name])
        self.options = ort.RunOptions()
        if graph_id is not None:
            self.options.add_run_config_entry("gpu_graph_id", str(graph_id))

    def run(self, **inputs: np.ndarray) -> np.ndarray:
        for name, array in inputs.items():
            write(self.values[name], array)
        self.session.run_with_iobinding(self.binding, self.options)
        result: np.ndarray = self.values[self.outputs[0]].numpy()
        return result


@contextmanager
def changes() -> Iterator[dict[str, int]]:
    """Yield a dict that receives, at the end of the block, the changes of the counters that changed.

    A garbage collection comes first, so that objects of earlier tests are not counted.
    """
    gc.collect()
    before = ort_cuda_plugin.counters()
    found: dict[str, int] = {}
    yield found
    after = ort_cuda_plugin.counters()
    found.update({name: after[name] - before[name] for name in before if after[name] != before[name]})


def graphs_live() -> int:
    return ort_cuda_plugin.counters()["graphs_live"]


def captured(source: bytes = b"", **options: str) -> ort.InferenceSession:
    return ort_cuda_plugin.session(source or add_and_double(), emulate=True, provider_options=CAPTURE | options)


def vector(n: int, value: float) -> np.ndarray:
    return np.full(n, value, np.float32)


def parsed(graph: str) -> bytes:
    return bytes(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {graph}').SerializeToString())


# ---- capture by ONNX Runtime ----


def test_cuda_graph_capture_and_replay() -> None:
    a, b = vector(100, 3), vector(100, 4)
    bound = Bound(captured(), {"a": a, "b": b}, {"c": vector(100, 0)})
    with changes() as first:  # ORT repeats the first Run until it is captured
        np.testing.assert_array_equal(bound.run(), 2 * (a + b))
    assert (first["runs"], first["graph_captures"], first["graph_replays"]) == (3, 1, 1)
    for _ in range(3):
        with changes() as replay:
            bound.session.run_with_iobinding(bound.binding)
        assert replay == {"graph_replays": 1}
    np.testing.assert_array_equal(bound.run(), 2 * (a + b))


def test_cuda_graph_replay_with_updated_input() -> None:
    bound = Bound(captured(), {"a": vector(100, 3), "b": vector(100, 4)}, {"c": vector(100, 0)})
    bound.run()
    for n in range(5):
        a = np.arange(100, dtype=np.float32) + n
        np.testing.assert_array_equal(bound.run(a=a), 2 * (a + 4))


def test_cuda_graph_with_mempool() -> None:
    session = captured(add_and_double(), **{"arena.use_cuda_mempool": "1"})
    bound = Bound(session, {"a": vector(100, 3), "b": vector(100, 4)}, {"c": vector(100, 0)})
    with changes() as found:
        for n in range(4):
            np.testing.assert_array_equal(bound.run(a=vector(100, n)), vector(100, 2 * (n + 4)))
    assert (found["graph_captures"], found["graph_replays"]) == (1, 4)


def test_cuda_graph_annotation_id() -> None:
    session = captured()
    bounds = {n: Bound(session, {"a": vector(n, n), "b": vector(n, 1)}, {"c": vector(n, 0)}, n) for n in (1, 10, 1000)}
    with changes() as capture:
        for n, bound in bounds.items():
            np.testing.assert_array_equal(bound.run(), vector(n, 2 * (n + 1)))
    assert capture["graph_captures"] == 3
    with changes() as replay:
        for n in (10, 1000, 1, 10):
            np.testing.assert_array_equal(bounds[n].run(a=vector(n, 5)), vector(n, 12))
    assert replay["graph_replays"] == 4
    assert "runs" not in replay


def test_cuda_graph_add_model() -> None:
    source = model([helper.make_node("Add", ["A", "B"], ["Y"])], {"A": [3, 2], "B": [3, 2]}, {"Y": [3, 2]})
    a, b = (np.random.default_rng(n).random((3, 2), dtype=np.float32) for n in (1, 2))
    bound = Bound(captured(source), {"A": a, "B": b}, {"Y": np.zeros((3, 2), np.float32)})
    with changes() as found:
        for _ in range(2):
            np.testing.assert_array_equal(bound.run(), a + b)
    assert (found["graph_captures"], found["graph_replays"]) == (1, 2)


def test_an_id_of_minus_one_runs_without_capture() -> None:
    a, b = vector(8, 1), vector(8, 2)
    session = captured()
    with changes() as found:
        for _ in range(5):
            bound = Bound(session, {"a": a, "b": b}, {"c": vector(8, 0)}, -1)
            np.testing.assert_array_equal(bound.run(), vector(8, 6))
    assert found["runs"] == 5
    assert "graph_captures" not in found


def test_more_warm_up_runs_are_the_sessions_choice() -> None:
    session = captured(min_num_runs_before_cuda_graph_capture="5")
    bound = Bound(session, {"a": vector(8, 1), "b": vector(8, 2)}, {"c": vector(8, 0)})
    with changes() as found:
        bound.run()
    assert (found["runs"], found["graph_captures"]) == (6, 1)


def test_a_capture_is_a_line_of_the_log() -> None:
    done = python(
        """
import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
ort.set_default_logger_severity(1)
plugin.register(emulate=True)
options = {"enable_cuda_graph": "1", "min_num_runs_before_cuda_graph_capture": "7"}
session = ort.InferenceSession(bytes.fromhex(sys.argv[1]), providers=[(plugin.get_ep_name(), options)])
x, y = (ort.OrtValue.ortvalue_from_numpy(np.ones(8, np.float32), "cuda", 0) for _ in range(2))
binding = session.io_binding()
for name, value in ("a", x), ("b", x):
    binding.bind_ortvalue_input(name, value)
binding.bind_ortvalue_output("c", y)
session.run_with_iobinding(binding)
np.testing.assert_array_equal(y.numpy(), np.full(8, 2, np.float32))
assert plugin.counters()["graph_captures"] == 1
""",
        add_model().hex(),
        env={"CUDA_VISIBLE_DEVICES": ""},
        preloaded=True,
    )
    assert done.stderr.count("captured a CUDA graph of 1 nodes for gpu_graph_id 0; the graph keeps ") == 1


def test_outputs_that_onnxruntime_allocates_are_written_by_replays() -> None:
    session = captured()
    a = on_device(vector(50, 1))
    binding = session.io_binding()
    binding.bind_ortvalue_input("a", a)
    binding.bind_ortvalue_input("b", a)
    binding._iobinding.bind_output("c", ort.OrtDevice.make("gpu", 0, vendor())._get_c_device())
    session.run_with_iobinding(binding)
    [c] = binding.get_outputs()
    for n in range(3):
        write(a, vector(50, n))
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(c.numpy(), vector(50, 4 * n))


@pytest.mark.parametrize("options", [{}, {"arena.use_cuda_mempool": "1"}], ids=["arena", "mempool"])
def test_memory_of_a_captured_run_is_kept_for_its_replays_and_returned(options: dict[str, str]) -> None:
    """A captured graph owns its memory: allocations of other sessions between replays must not get it."""

    def in_use() -> int:
        return ort_cuda_plugin.counters()["device_bytes_in_use"]

    gc.collect()
    before = in_use(), graphs_live()
    source = encoder(layers=2).SerializeToString()
    session = captured(source, **options)
    other = ort_cuda_plugin.session(add_and_double(), emulate=True)
    cpu = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    feeds = [encoder_inputs(2, 16, seed) for seed in (1, 2)]
    expected = [cpu.run(None, feed)[0] for feed in feeds]
    bound = Bound(session, feeds[0], {"last_hidden_state": np.zeros_like(expected[0])})
    for n in range(6):
        assert models.relative_error(bound.run(**feeds[n % 2]), expected[n % 2]) <= 1e-3
        held = [on_device(vector(1000 * (n + 1), 7)) for _ in range(4)]
        x = vector(5000, n)
        np.testing.assert_array_equal(other.run(None, {"a": x, "b": x})[0], 4 * x)
        assert all((value.numpy() == 7).all() for value in held)
    del bound, session, other, held
    gc.collect()
    assert (in_use(), graphs_live()) == before


def test_each_thread_captures_and_replays_its_own_graphs() -> None:
    gc.collect()
    before = graphs_live()
    session = captured()
    start = Barrier(4)

    def work(index: int) -> None:
        n = 100 * (index + 1)
        bound = Bound(session, {"a": vector(n, index), "b": vector(n, 1)}, {"c": vector(n, 0)})
        start.wait()
        for k in range(8):
            np.testing.assert_array_equal(bound.run(a=vector(n, k)), vector(n, 2 * (k + 1)))

    with changes() as found, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, index) for index in range(4)]:
            done.result()
    assert found["graph_captures"] == 4
    assert found["graph_replays"] == 4 * 8
    end = time.monotonic() + 100  # a thread's end destroys its graphs, perhaps after Python has joined it
    while graphs_live() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert graphs_live() == before


def test_capture_on_the_stream_of_the_application() -> None:
    device = Device.emulated()
    with Stream(device) as stream:
        session = captured(user_compute_stream=str(int(ffi.cast("uintptr_t", stream.handle))))
        a, c = device.empty(100, np.float32), device.empty(100, np.float32)
        binding = session.io_binding()
        for name in ("a", "b"):
            ort_cuda_plugin.bind_input(binding, name, a)
        ort_cuda_plugin.bind_output(binding, "c", c)
        with changes() as found:
            for n in range(4):
                a.copy_from(vector(100, n), stream)
                session.run_with_iobinding(binding)
                np.testing.assert_array_equal(c.copy_to(np.empty(100, np.float32), stream), vector(100, 4 * n))
        assert (found["graph_captures"], found["graph_replays"]) == (1, 4)
        del binding, session
        gc.collect()


def test_a_model_with_nodes_elsewhere_is_refused_by_onnxruntime() -> None:
    with pytest.raises(Exception, match="graph capture"):
        captured(with_cpu_nodes(1))


def test_the_default_stream_cannot_be_captured() -> None:
    bound = Bound(captured(user_compute_stream="0"), {"a": vector(8, 1), "b": vector(8, 2)}, {"c": vector(8, 0)})
    with pytest.raises(Exception, match="cuStreamBeginCapture"):
        bound.run()
    bound.options.add_run_config_entry("gpu_graph_id", "-1")
    np.testing.assert_array_equal(bound.run(), vector(8, 6))


def test_what_cannot_be_captured_is_an_error_that_says_what_to_do() -> None:
    session = captured()
    x = vector(10, 1)
    with pytest.raises(Exception, match=r"bind inputs and outputs on the device .* gpu_graph_id=-1"):
        session.run(None, {"a": x, "b": x})
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x}, options)[0], 4 * x)
    bound = Bound(session, {"a": x, "b": x}, {"c": vector(10, 0)}, 1)
    np.testing.assert_array_equal(bound.run(), 4 * x)


@pytest.mark.parametrize("name", ["c", "a"], ids=["output", "input"])
def test_a_run_with_a_copy_to_the_host_gives_no_graph(name: str) -> None:
    """ONNX Runtime copies outputs to the host outside of the graph, so a replay would not repeat the copy."""
    nodes = [helper.make_node("Add", ["a", "a"], ["c"])]
    session = captured(model(nodes, {"a": [10]}, {"c": [10], "a": [10]}))
    bound = Bound(session, {"a": vector(10, 1)}, {"c": vector(10, 0)})
    bound.binding.bind_ortvalue_output("a", on_device(vector(10, 0)))
    bound.binding.bind_output(name)
    for _ in range(3):
        with changes() as found, pytest.raises(Exception, match=r"bind inputs and outputs on the device"):
            session.run_with_iobinding(bound.binding)
        assert "graph_captures" not in found
    assert graphs_live() == 0
    bound.options.add_run_config_entry("gpu_graph_id", "-1")
    session.run_with_iobinding(bound.binding, bound.options)
    assert {value.numpy()[0] for value in bound.binding.get_outputs()} == {1, 2}


def test_a_size_on_the_device_cannot_be_captured() -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["found"]), helper.make_node("Abs", ["x"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "sizes",
        [helper.make_tensor_value_info("x", 1, ["n"])],
        [helper.make_tensor_value_info("found", 7, [1, "k"]), helper.make_tensor_value_info("y", 1, ["n"])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.array([0, -1, 0, 2], np.float32)
    bound = Bound(
        captured(made.SerializeToString()),
        {"x": x},
        {"found": np.zeros((1, 2), np.int64), "y": np.zeros(4, np.float32)},
    )
    with pytest.raises(Exception, match=r"a CUDA graph cannot capture.*gpu_graph_id=-1"):
        bound.run()


#: By name: nodes with an input ``at`` that the application feeds and the host reads, and the declaration of ``at``.
HOST_READS = {
    "Slice": ("y = Slice(x, at, end)", "int64[1] at"),
    "Pad": ("y = Pad(x, at)", "int64[2] at"),
    "CumSum": ("y = CumSum(x, at)", "int64[1] at"),
    "Tile": ("y = Tile(x, at)", "int64[1] at"),
    "Expand": ("y = Expand(x, at)", "int64[1] at"),
    "Reshape": ("y = Reshape(x, at)", "int64[1] at"),
    "Split": ("y, z = Split(x, at)", "int64[2] at"),
    "several nodes": ("a = Tanh(x) b = Slice(a, at, end) y = Exp(b)", "int64[1] at"),
    "a computed bound": ("one = Constant<value_ints=[1]>() b = Add(at, one) y = Slice(x, b, end)", "int64[1] at"),
}


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("name", HOST_READS)
def test_what_the_application_feeds_and_the_host_reads_is_not_captured(name: str, place: str) -> None:
    """The plan depends on the value of the input ``at``, so a replay would ignore a new value."""
    nodes, at = HOST_READS[name]
    session = captured(parsed(f"g (float[6] x, {at}) => (float[n] y) {{ end = Constant<value_ints=[9]>() {nodes} }}"))
    shape = session.get_inputs()[1].shape
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", on_device(vector(6, 1)))
    fed = np.array({"Split": [2, 4], "Expand": [6], "Reshape": [6]}.get(name, [0] * shape[0]), np.int64)
    binding.bind_ortvalue_input("at", ort.OrtValue.ortvalue_from_numpy(fed) if place == "cpu" else on_device(fed))
    binding._iobinding.bind_output("y", ort.OrtDevice.make("gpu", 0, vendor())._get_c_device())
    with pytest.raises(Exception, match=r"a CUDA graph cannot cap|a captured Run cannot copy"):
        session.run_with_iobinding(binding)


def test_bounds_that_follow_from_shapes_are_captured() -> None:
    nodes = "n = Shape(y) at = Div(n, two) z = Slice(x, at, end)"
    text = f"two = Constant<value_ints=[2]>() end = Constant<value_ints=[99]>() {nodes}"
    session = captured(parsed(f"g (float[6] x, float[4] y) => (float[m] z) {{ {text} }}"))
    x = np.arange(6, dtype=np.float32)
    bound = Bound(session, {"x": x, "y": vector(4, 0)}, {"z": vector(4, 0)})
    np.testing.assert_array_equal(bound.run(), x[2:])
    np.testing.assert_array_equal(bound.run(x=x + 1), x[2:] + 1)


# ---- automatic graphs ----


def test_a_steady_session_replays_and_one_option_turns_that_off() -> None:
    x = vector(100, 1)
    warm = {"min_num_runs_before_cuda_graph_capture": "4"}
    for options, replays in (({}, 3), ({"automatic_cuda_graphs": "0"}, 0), (warm, 1)):
        session = ort_cuda_plugin.session(add_and_double(), emulate=True, provider_options=options)
        with changes() as found:
            for n in range(5):
                np.testing.assert_array_equal(session.run(None, {"a": n * x, "b": x})[0], 2 * (n * x + x))
        assert found.get("graph_replays", 0) == replays
        assert found["launches"] == 10


def test_a_session_keeps_as_many_graphs_as_its_option_says() -> None:
    gc.collect()
    before = graphs_live()
    for options, live in (({"cuda_graph_cache_size": "2"}, 2), ({}, 4)):
        session = ort_cuda_plugin.session(add_and_double(), emulate=True, provider_options=options)
        for n in (10, 20, 30, 40):
            for _ in range(3):
                x = vector(n, n)
                np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], 4 * x)
        assert graphs_live() == before + live
        del session
        gc.collect()


def test_bound_runs_are_replays_without_any_change() -> None:
    session = ort_cuda_plugin.session(add_and_double(), emulate=True)
    bound = Bound(session, {"a": vector(64, 1), "b": vector(64, 2)}, {"c": vector(64, 0)})
    for _ in range(3):
        bound.run()
    with changes() as found:
        for _ in range(10):
            session.run_with_iobinding(bound.binding)
    assert found == {"runs": 10, "launches": 20, "plan_hits": 10, "graph_replays": 10}
    np.testing.assert_array_equal(bound.run(a=vector(64, 5)), vector(64, 14))


def test_graphs_give_their_memory_to_a_run_that_lacks_it() -> None:
    code = """
import sys, numpy as np, ort_cuda_plugin as plugin
session = plugin.session(bytes.fromhex(sys.argv[1]), emulate=True)
def run(n):
    x = np.arange(n, dtype=np.float32)
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], 4 * x)
for n in (500_000, 500_001):
    for _ in range(3):
        run(n)
assert plugin.counters()["graphs_live"] == 2  # four million bytes of 16 MiB
run(900_000)  # 14.4 million
assert plugin.counters()["graphs_live"] < 2
for _ in range(8):
    run(500_000)
assert plugin.counters()["graphs_live"] > 0
print("end")
"""
    environment = {"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "16M"}
    assert python(code, add_and_double().hex(), env=environment, preloaded=True).stdout == "end\n"


def test_random_operators_go_on_in_replays() -> None:
    source = model(
        [helper.make_node("RandomUniformLike", ["x"], ["r"], seed=3.0), helper.make_node("Add", ["x", "r"], ["y"])],
        {"x": [64]},
        {"y": [64]},
    )
    zero = np.zeros(64, np.float32)
    plain = ort_cuda_plugin.session(source, emulate=True, provider_options={"automatic_cuda_graphs": "0"})
    expected = [plain.run(None, {"x": zero})[0] for _ in range(6)]
    assert len({array.tobytes() for array in expected}) == 6
    session = ort_cuda_plugin.session(source, emulate=True)
    for array in expected:
        np.testing.assert_array_equal(session.run(None, {"x": zero})[0], array)
    bound = Bound(captured(source), {"x": zero}, {"y": zero})
    # Two warm-up Runs draw first, so the captured Run returns the third array.
    for array in expected[2:]:
        np.testing.assert_array_equal(bound.run(), array)


def test_shapes_that_change_at_random_on_threads() -> None:
    session = ep_session(add_and_double())

    def work(index: int) -> None:
        rng = np.random.default_rng(index)
        for _ in range(40):
            a, b = (rng.standard_normal(int(n)).astype(np.float32) for n in [rng.integers(1, 5) * 500] * 2)
            np.testing.assert_array_equal(session.run(None, {"a": a, "b": b})[0], 2 * (a + b))

    with changes() as found, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, index) for index in range(4)]:
            done.result()
    assert found["graph_replays"] > 40


def test_trim_releases_graphs_and_later_runs_make_them_anew() -> None:
    gc.collect()
    before = graphs_live()
    bound = Bound(
        ort_cuda_plugin.session(add_and_double(), emulate=True),
        {"a": np.zeros(5000, np.float32), "b": np.ones(5000, np.float32)},
        {"c": np.zeros(5000, np.float32)},
    )
    for number in range(6):
        np.testing.assert_array_equal(bound.run(a=np.full(5000, number, np.float32)), np.full(5000, 2 * (number + 1)))
    assert graphs_live() > before
    ort_cuda_plugin.trim()
    assert graphs_live() <= before
    with changes() as counted:
        for number in range(6):
            bound.run(a=np.full(5000, number, np.float32))
    assert counted["graph_captures"] == 1


def test_runs_on_a_shared_stream_wait_for_a_capture() -> None:
    source = model([helper.make_node("Add", ["a", "b"], ["c"])], {"a": ["n"], "b": ["n"]}, {"c": ["n"]})
    session = captured(source, use_ep_level_unified_stream="1")
    threads, ids = 4, 8
    start = Barrier(threads)

    def work(index: int) -> None:
        start.wait()
        for graph_id in range(ids * index, ids * (index + 1)):
            size = 100 + graph_id
            bound = Bound(session, {"a": vector(size, 0), "b": vector(size, index)}, {"c": vector(size, 0)}, graph_id)
            for number in range(4):
                np.testing.assert_array_equal(bound.run(a=vector(size, number)), vector(size, number + index))

    with changes() as counted, ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, index) for index in range(threads)]:
            done.result()
    assert counted["graph_captures"] == threads * ids


def test_a_run_that_builds_a_plan_on_a_shared_stream_holds_up_no_other_use_of_the_session() -> None:
    """The plugin must serialize such Runs itself: other threads would wait for ONNX Runtime's lock holding the GIL."""
    code = """
    import sys, threading, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
    from ort_cuda_plugin.ep.nodes.fused_node import FusedNode
    plugin.register(emulate=True)
    options = {"enable_cuda_graph": 1, "use_ep_level_unified_stream": 1}
    session = plugin.session(bytes.fromhex(sys.argv[1]), emulate=True, provider_options=options)
    build, building, go_on = FusedNode.build, threading.Event(), threading.Event()
    def slow_build(self, *arguments):
        building.set()
        assert go_on.wait(100)
        build(self, *arguments)
    FusedNode.build = slow_build
    x = np.ones(8, np.float32)
    (vendor,) = {d.device.vendor_id for d in ort.get_ep_devices() if d.ep_name == plugin.get_ep_name()}
    binding = session.io_binding()
    for name in "abc":
        value = ort.OrtValue.ortvalue_from_numpy(x, "gpu", 0, vendor)
        (binding.bind_ortvalue_output if name == "c" else binding.bind_ortvalue_input)(name, value)
    thread = threading.Thread(target=session.run_with_iobinding, args=(binding,))
    thread.start()
    assert building.wait(100)
    session.io_binding()
    assert [i.name for i in session.get_inputs()] == ["a", "b"]
    go_on.set()
    thread.join(100)
    np.testing.assert_array_equal(value.numpy(), x + x)
    """
    python(code, add_model(dims=["n"]).hex(), env={"CUDA_VISIBLE_DEVICES": ""}, preloaded=True)
