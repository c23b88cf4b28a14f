"""Out of memory: the caches are freed first, then other sessions' optional memory; then the Run fails."""

from __future__ import annotations

import re

import onnx
import pytest
from onnx import TensorProto, helper

from isolated import python

START = """
import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
model = bytes.fromhex(sys.argv[1])
plugin.register(emulate=True)
MIB = 1 << 20
def session(**options):
    return plugin.session(model, emulate=True, provider_options=options)
def run(session, rows):  # inputs, outputs and intermediate tensors of `rows` x 4 KiB
    x = np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024) % 7
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected(x), rtol=1e-5)
def expected(x):
    for axis in (1, 0, 1):
        x = np.exp(x - x.max(axis, keepdims=True))
        x /= x.sum(axis, keepdims=True)
    return x
def fails(session, rows):
    try:
        session.run(None, {"x": np.zeros((rows, 1024), np.float32)})
    except Exception as error:
        return str(error)
    raise AssertionError("there was room")
def stats():
    return plugin.memory_stats()["device"]
"""


def softmax_chain() -> str:
    """Return a model of three Softmax nodes on [rows, 1024], along axes 1, 0 and 1, as hexadecimal digits."""
    names = ["x", "a", "b", "y"]
    nodes = [helper.make_node("Softmax", [names[i]], [names[i + 1]], axis=(1, 0, 1)[i]) for i in range(3)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 1024]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString()).hex()


def run(code: str, streams: str = "inline") -> str:
    """Run START and the code in a new process; return its log."""
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "ORT_CUDA_PLUGIN_EMULATE_MEMORY": "64M",
        "ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams,
    }
    return python(START + code, softmax_chain(), env=environment, preloaded=True).stderr


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_memory_that_other_shapes_left_makes_room(streams: str) -> None:
    code = """
first = session()
for rows in (1000, 2500, 300, 3000, 700, 2900):
    run(first, rows)
assert stats()["TotalAllocated"] <= 64 * MIB
"""
    run(code, streams)


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
@pytest.mark.parametrize("options", [{}, {"arena.use_cuda_mempool": 1}], ids=["arena", "mempool"])
def test_other_sessions_give_up_their_slabs(options: dict[str, int], streams: str) -> None:
    code = f"""
options = {options!r}
first, second = session(**options), session(**options)
for _ in range(5):
    run(first, 2500)  # its graph keeps a slab of 20 MiB
assert plugin.counters()["graphs_live"] == 1 and stats()["InUse"] >= 19 * MIB, (plugin.counters(), stats())
run(second, 3500)  # input, output and slab leave no room for it
assert plugin.counters()["graphs_live"] == 0
run(first, 2500)
"""
    run(code, streams)


def test_the_log_has_the_chunks_of_the_arena_by_size() -> None:
    code = """
first = session(automatic_cuda_graphs=0)
kept = [ort.OrtValue.ortvalue_from_numpy(np.zeros(n, np.uint8), "cuda", 0) for n in (3000, 4000, 300000)]
fails(first, 15000)
print(stats(), file=sys.stderr)
"""
    log = run(code)
    (dump,) = re.findall(r"the arena holds (\d+) regions of (\d+) bytes.*\n((?:  from .*\n)+)", log)
    bins = {
        int(size): [*map(int, counts)]
        for size, *counts in re.findall(
            r"from (\d+) bytes: (\d+) in use \((\d+) bytes\), (\d+) wait for a stream \((\d+) bytes\), "
            r"(\d+) free \((\d+) bytes\)",
            dump[2],
        )
    }
    assert sum(sum(counts[1::2]) for counts in bins.values()) <= int(dump[1])
    assert sum(counts[0] for counts in bins.values()) >= 3
    for size, (in_use, in_use_bytes, *_) in bins.items():
        assert in_use * size <= in_use_bytes <= in_use * 2 * size


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_what_does_not_fit_fails_with_the_statistics_and_the_next_run_works(streams: str) -> None:
    code = """
first = session()
run(first, 500)
message = fails(first, 15000)
for part in ("out of memory on emulated CUDA device 0", "bytes wanted; this process uses", "of the device's 67108864"):
    assert part in message, message
run(first, 500)
fails(first, 15000)
plugin.trim()
assert stats()["InUse"] == 0
run(first, 3000)
"""
    run(code, streams)


def test_the_limit_of_one_session_is_one_for_all_and_says_so() -> None:
    code = """
first = session(gpu_mem_limit=8 * MIB)
second = session()
run(first, 300)
message = fails(second, 1500)
assert "limit 8388608" in message, message
run(second, 300)
"""
    run(code)


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
@pytest.mark.parametrize("options", [{}, {"arena.use_cuda_mempool": 1}], ids=["arena", "mempool"])
def test_threads_that_compete_for_memory_get_right_results_or_a_clear_error(
    options: dict[str, int], streams: str
) -> None:
    code = f"""
import threading
options = {options!r}
sessions = [session(**options) for _ in range(2)]
failures, done = [], []
def work(seed):
    random = np.random.default_rng(seed)
    for _ in range(12):
        rows = int(random.choice([50, 400, 400, 900, 2000]))
        try:
            run(sessions[seed % 2], rows)
            done.append(rows)
        except Exception as error:
            if "out of memory on emulated CUDA device 0" not in str(error):
                failures.append(error)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(100)
assert not any(thread.is_alive() for thread in threads)
assert not failures and len(done) > 20, (failures, len(done))
run(sessions[0], 2000)
del sessions
plugin.unregister()
assert plugin.counters()["device_bytes_in_use"] == 0
"""
    run(code, streams)


def test_a_session_that_cannot_be_created_leaves_nothing_behind() -> None:
    code = """
import onnx
from onnx import helper, numpy_helper
from ort_cuda_plugin.ep import boundary
from ort_cuda_plugin.ep.device import open_device
from ort_cuda_plugin.ep.nodes import fused_node
def with_weights(count):  # x @ w0 @ w1 ..., 16 MiB each
    weights = [numpy_helper.from_array(np.full((2048, 2048), i + 1, np.float32), f"w{i}") for i in range(count)]
    names = ["x", *(f"t{i}" for i in range(count - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(count)]
    values = [helper.make_tensor_value_info(name, 1, ["n", 2048]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
for limited in (False, True):
    plugin.set_limit(0, 40 * MIB if limited else None)
    message = ""
    try:
        plugin.session(with_weights(5), emulate=True)
    except Exception as error:
        message = str(error)
    parts = ["a constant of FLOAT32[2048, 2048]: out of memory on emulated CUDA device 0: 16777216 bytes wanted",
             "Release sessions or tensors"] + ["or raise the limit (arena.max_mem)"] * limited
    assert all(part in message for part in parts), message
    (device,) = open_device._open.values()
    assert not boundary.PROVIDERS and not fused_node.FUSED_NODES and not device._loaded
    assert stats()["InUse"] == stats()["TotalAllocated"] == stats()["Weights"] == 0, stats()
    second = plugin.session(with_weights(2), emulate=True)
    assert stats()["Weights"] == 32 * MIB
    assert second.run(None, {"x": np.ones((1, 2048), np.float32)})[0][0, 0] == 2 * 2048 * 2048
    del second
"""
    run(code)


def test_a_kernel_that_the_device_has_no_memory_for_gets_what_the_arena_does_not_use() -> None:
    code = """
from ort_cuda_plugin.abi.core import lib
from ort_cuda_plugin.ep.device.open_device import _open
first = session()
run(first, 500)
(device,) = _open.values()
driver = device.driver
class Scarce:
    refused = 0
    def __getattr__(self, name):
        return getattr(driver, name)
    def ModuleLoadData(self, *arguments):
        if stats()["TotalAllocated"]:
            Scarce.refused += 1
            return lib.CUDA_ERROR_OUT_OF_MEMORY
        return driver.ModuleLoadData(*arguments)
device.driver = Scarce()
device._loaded.clear()  # as if these sessions had other kernels
second = session()
run(second, 500)
assert Scarce.refused > 0
"""
    run(code)


def test_what_intermediate_tensors_lack_memory_for_is_said() -> None:
    code = """
message = fails(session(), 5000)
wanted = "intermediate tensors: out of memory on emulated CUDA device 0: 40960000 bytes wanted"
assert "Status Message: " + wanted in message, message
"""
    run(code)


REASON = "out of memory on emulated CUDA device 0: {} bytes wanted; this process uses"


def expand(dim: int | str = 1) -> str:
    """Return a model of y = Expand(x, s) for x of shape [dim], as hexadecimal digits."""
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [dim]),
        helper.make_tensor_value_info("s", TensorProto.INT64, [1]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"]),
    ]
    graph = helper.make_graph([helper.make_node("Expand", ["x", "s"], ["y"], name="big")], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString()).hex()


@pytest.mark.parametrize("way", ["run", "bind_cpu_input", "bind_input", "ortvalue_from_numpy"])
def test_memory_for_a_copy_to_the_device_that_is_not_there_is_named_with_the_reason(way: str) -> None:
    code = f"""
way, reason = {way!r}, {REASON.format(122880000)!r}
big = np.zeros((30000, 1024), np.float32)
first = session()
binding = first.io_binding()
try:
    if way == "run":
        first.run(None, {{"x": big}})
    elif way == "bind_cpu_input":
        binding.bind_cpu_input("x", big)
    elif way == "bind_input":
        binding.bind_input("x", "cpu", 0, np.float32, big.shape, big.ctypes.data)
    else:
        ort.OrtValue.ortvalue_from_numpy(big, "cuda", 0)
except Exception as error:
    assert reason in str(error) and "Release sessions or tensors" in str(error), str(error)
else:
    raise AssertionError("there was room")
run(first, 500)
"""
    run(code)


@pytest.mark.parametrize("bound", [False, True], ids=["run", "bound"])
def test_an_output_without_room_is_named_by_its_node(bound: bool) -> None:
    code = f"""
expand = plugin.session(bytes.fromhex({expand()!r}), emulate=True)
feed = {{"x": np.zeros(1, np.float32), "s": np.array([30 << 20])}}
binding = expand.io_binding()
for name, value in feed.items():
    binding.bind_cpu_input(name, value)
binding.bind_output("y", "cuda", 0)
try:
    expand.run_with_iobinding(binding) if {bound} else expand.run(None, feed)
except Exception as error:
    wanted = "output 0, of node 'big (Expand)': " + {REASON.format(30 << 22)!r}
    assert wanted in str(error), str(error)
else:
    raise AssertionError("there was room")
"""
    run(code)


def test_a_value_that_was_made_without_memory_says_so_where_it_is_used() -> None:
    """ONNX Runtime creates such a value with a null pointer and reports that only in its log."""
    code = f"""
value = ort.OrtValue.ortvalue_from_shape_and_type([30 << 20], np.float32, "cuda", 0)
assert value.data_ptr() == 0
expand = plugin.session(bytes.fromhex({expand()!r}), emulate=True)
def as_output():
    binding = expand.io_binding()
    binding.bind_cpu_input("x", np.zeros(1, np.float32))
    binding.bind_cpu_input("s", np.array([30 << 20]))
    binding.bind_ortvalue_output("y", value)
    expand.run_with_iobinding(binding)
def as_input():
    plugin.session(bytes.fromhex({expand("n")!r}), emulate=True).run_with_ort_values(
        None, {{"x": value, "s": ort.OrtValue.ortvalue_from_numpy(np.array([1]))}})
for use, what in (
    (as_output, "output 0, of node 'big (Expand)': "),
    (as_input, "input 0 has no memory: "),
    (value.numpy, "cannot copy a tensor without memory: "),
):
    try:
        use()
    except Exception as error:
        assert what + {REASON.format(30 << 22)!r} in str(error), str(error)
    else:
        raise AssertionError(what)
run(session(), 500)
"""
    run(code)
