"""Sessions on several devices: results, copies between devices, memory of each device, order of work, concurrent Runs.

Each test is a process of its own with four emulated devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isolated import python

FOUR = {"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "", "ORT_CUDA_PLUGIN_EMULATE_WORKERS": "1"}
CHECKED = {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": "adversarial", "ORT_CUDA_PLUGIN_EMULATE_CHECK": "1"}
STREAMS = pytest.mark.parametrize("streams", [{}, CHECKED], ids=["inline", "adversarial"])

PREAMBLE = """
import gc, sys, threading
sys.path.insert(0, "tests/harness")
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from staged_models import CASES, layers, numbers, parsed
ort.set_default_logger_severity(3)
def session(model, ids=None, rules=None, **more):
    options = {"device_ids": ids, "device_of": rules, **more}
    return plugin.session(model, emulate=True, provider_options={k: v for k, v in options.items() if v is not None})
def counted(action):
    before = plugin.counters()
    result = action()
    after = plugin.counters()
    return result, {name: after[name] - before[name] for name in after}
def used(ordinal):
    return plugin.memory_stats(plugin.devices()[ordinal])["device"]
"""


def run(code: str, env: dict[str, str] | None = None) -> None:
    python(PREAMBLE + code, env=FOUR | (env or {}), preloaded=True)


@STREAMS
def test_results_are_those_of_one_device(streams: dict[str, str]) -> None:
    """The layers are divided by the plugin, and by rules that send each tensor to another device and back."""
    run(
        """
model, x = layers(4), {"x": numbers(5, 16)}
(expected,) = session(model).run(None, x)
back_and_forth = "/layer.0/*:0,/layer.1/*:1,/layer.2/*:0,/layer.3/*:1"
for ids, rules, copies in [
    ("0,1", None, 2), ("0,1,2,3", None, 4), ("2,0", None, 2),
    ("0,1", back_and_forth, 4), ("1,0", back_and_forth, 4), ("3,0,1", "t?:1", 2),
    ("0,1", "*:0", 0), ("0,1", "*:1", 2),
]:
    made = session(model, ids, rules)
    for _ in range(4):
        (y,), change = counted(lambda: made.run(None, x))
        np.testing.assert_array_equal(y, expected)
        assert change["copies_peer"] == copies, (ids, rules, change)
        assert change["bytes_peer"] == copies * 5 * 16 * 4
    del made
gc.collect()
assert plugin.counters()["device_bytes_in_use"] == 0
""",
        streams,
    )


@STREAMS
def test_each_kind_of_value_crosses_between_devices(streams: dict[str, str]) -> None:
    run(
        """
from itertools import product
for name, (text, feeds) in CASES.items():
    model = parsed(text).SerializeToString()
    expected = session(model).run(None, feeds)
    for ids in ("0,1", "2,1,0"):
        made = session(model, ids)
        for _ in range(3):
            for got, right in zip(made.run(None, feeds), expected, strict=True):
                np.testing.assert_array_equal(got, right, err_msg=f"{name} on {ids}", strict=True)
    print(name)
""",
        streams,
    )


def test_a_shape_crosses_without_its_tensor() -> None:
    """The second device needs only the shape of b, and computes the shape arithmetic again."""
    run(
        """
text, feeds = CASES["shape arithmetic"]
model = parsed(text).SerializeToString()
made = session(model, "0,1", "a:0,b:0,c:0,d:1,e:1,y:1")
made.run(None, feeds)
_, change = counted(lambda: made.run(None, feeds))
assert change["host_value_reads"] == 0 and change["python_calls"] == 0, change
assert change["copies_peer"] == 3, change  # c and w to device 1, y to device 0
assert change["bytes_peer"] == 4 * (12 * 8 + 8 * 8 + 12 * 8)
model = parsed("(float[n, 8] x, float[8, 8] w) => (float[n, 8] p, int64[2] s, float[k] z) {"
               "a = MatMul(x, w)  p = Tanh(a)  s = Shape(p)  f = Cast<to = 1>(s)  g = Neg(f)  z = Exp(g) }")
feeds = {"x": numbers(3, 8), "w": numbers(8, 8)}
model = model.SerializeToString()
made = session(model, "0,1", "p:0,a:0,s:1,f:1,g:1,z:1")
results, change = counted(lambda: made.run(None, feeds))
for got, right in zip(results, session(model).run(None, feeds), strict=True):
    np.testing.assert_array_equal(got, right)
assert change["bytes_peer"] == 16 + 8, change  # s and z to device 0, but not p to device 1
"""
    )


@STREAMS
def test_a_run_reads_its_inputs_before_it_writes_outputs_into_their_memory(streams: dict[str, str]) -> None:
    run(
        """
text = ("(float[4, 8] x, float[4, 8] s, float[8, 8] w) => (float[4, 8] t, float[4, 8] y) {"
        "t = Add(s, x)  a = MatMul(x, w)  b = Tanh(a)  c = Mul(b, w0)  d = Exp(c)  y = Sub(d, s) }")
model = parsed(text.replace("w0", "x")).SerializeToString()
x, s, w = numbers(4, 8), numbers(4, 8, seed=1), numbers(8, 8, seed=2)
def states(made):
    state = ort.OrtValue.ortvalue_from_numpy(s, "cuda", 0)
    found = []
    for _ in range(4):
        binding = made.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_cpu_input("w", w)
        binding.bind_ortvalue_input("s", state)
        binding.bind_ortvalue_output("t", state)
        binding.bind_output("y", "cpu")
        made.run_with_iobinding(binding)
        found += [state.numpy(), binding.get_outputs()[1].numpy()]
    return found
expected = states(session(model))
for rules in (
    "t:0,a:1,b:1,c:0,d:0,y:0", "t:0,a:1,b:1,c:1,d:1,y:1", "t:1,a:0,b:0,c:0,d:0,y:0", "t:1,a:0,b:0,c:1,d:1,y:0"
):
    for got, right in zip(states(session(model, "0,1", rules)), expected, strict=True):
        np.testing.assert_array_equal(got, right, err_msg=rules)
""",
        streams,
    )


@STREAMS
def test_outputs_that_share_a_buffer_do_not_change_what_later_stages_read(streams: dict[str, str]) -> None:
    run(
        """
text = ("(float[4, 8] x) => (float[4, 8] p, float[4, 8] q, float[4, 8] r) {"
        "p = Tanh(x)  a = Exp(p)  q = Neg(a)  b = Mul(q, p)  r = Sin(b) }")
model, x = parsed(text).SerializeToString(), numbers(4, 8)
p = np.tanh(x)
r = np.sin(-np.exp(p) * p)
made = session(model, "0,1", "p:0,a:1,q:0,b:1,r:1")
buffer = ort.OrtValue.ortvalue_from_numpy(np.zeros((4, 8), np.float32), "cuda", 0)
for _ in range(3):
    binding = made.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output("p", buffer)
    binding.bind_ortvalue_output("q", buffer)
    binding.bind_output("r", "cpu")
    made.run_with_iobinding(binding)
    np.testing.assert_allclose(binding.get_outputs()[2].numpy(), r, rtol=1e-5, atol=1e-6)
    assert any(np.allclose(buffer.numpy(), right, atol=1e-6) for right in (p, -np.exp(p)))
""",
        streams,
    )


def test_weights_are_on_the_device_that_reads_them() -> None:
    run(
        """
model = layers(4, width=64)
made = session(model, "0,1,2", "/layer.0/*:0,/layer.1/*:1,/layer.2/*:1,/layer.3/*:2")
bytes_of = [used(ordinal)["InUse"] for ordinal in range(4)]
assert bytes_of == [4 * 64 * 64, 8 * 64 * 64, 4 * 64 * 64, 0], bytes_of
"""
    )


def test_a_model_that_does_not_fit_on_one_device_runs_on_two() -> None:
    """The weights take 8 MiB, and a device has 6 MiB."""
    run(
        """
from onnxruntime import InferenceSession
model, x = layers(8, width=512), {"x": numbers(2, 512)}
try:
    session(model)
except Exception as error:
    assert "memory" in str(error), error
else:
    raise AssertionError("fits")
gc.collect()
made = session(model, "0,1")
(right,) = InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, x)
for _ in range(3):
    np.testing.assert_allclose(made.run(None, x)[0], right, rtol=1e-4, atol=1e-5)
weights = [used(ordinal)["InUse"] >> 20 for ordinal in (0, 1)]
assert weights == [4, 4], weights
del made
gc.collect()
try:
    session(layers(16, width=512), "0,1")
except Exception as error:
    said = "the weights of the model (16.8 MB) do not fit into the available memory of the devices (6.3 MB"
    assert said in str(error), error
else:
    raise AssertionError("fits")
""",
        {"ORT_CUDA_PLUGIN_EMULATE_MEMORY": str(6 << 20)},
    )


@STREAMS
@pytest.mark.parametrize("shared", [0, 1])
def test_concurrent_runs_with_different_shapes(streams: dict[str, str], shared: int) -> None:
    run(
        f"""
model = layers(3)
made = session(model, "0,1,2", use_ep_level_unified_stream={shared})
plain = session(model)
feeds = [{{"x": numbers(rows, 16, seed=rows)}} for rows in (1, 3, 6, 7)]
expected = [plain.run(None, each)[0] for each in feeds]
failures = []
def work(first):
    try:
        for number in range(first, first + 8):
            np.testing.assert_array_equal(made.run(None, feeds[number % 4])[0], expected[number % 4])
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
made = plain = None
gc.collect()
assert plugin.counters()["device_bytes_in_use"] == 0 and plugin.counters()["graphs_live"] == 0
""",
        streams,
    )


def test_memory_is_used_again_only_after_a_copy_has_read_it() -> None:
    """Device 1 has room for one Run. A second Run takes the memory of the first one, whose result is still copied."""
    run(
        """
model = layers(2)
made = session(model, "0,1", automatic_cuda_graphs=0, arena_extend_strategy="kSameAsRequested")
plain = session(model)
plugin.set_limit(1, 5 << 20)
feeds = [{"x": numbers(1 << 15, 16, seed=seed)} for seed in (1, 2)]
expected = [plain.run(None, each)[0] for each in feeds]
options = ort.RunOptions()
options.add_run_config_entry("disable_synchronize_execution_providers", "1")
results = []
for feed in feeds:
    results.append(made.io_binding())
    results[-1].bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(feed["x"], "cuda", 0))
    results[-1].bind_output("t1", "cuda", 0)
for binding in results:
    thread = threading.Thread(target=made.run_with_iobinding, args=(binding, options))
    thread.start()
    thread.join()
for binding, right in zip(results, expected, strict=True):
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), right)
assert used(1)["TotalAllocated"] < 4 * used(1)["MaxAllocSize"], "a Run needs two tensors of this size on device 1"
""",
        CHECKED,
    )


def test_a_run_is_in_its_second_stage_while_another_is_in_its_first() -> None:
    """A plugin's function in the second stage waits until a second Run is in the first stage."""
    run(
        """
from onnx import TensorProto, helper
from plugins import ProbeCreator
from ort_cuda_plugin.custom.plugin import register_creator
second_is_in_first, order = threading.Event(), []
def enqueue(_, __, inputs, outputs, workspace, stream):
    array = stream.read(inputs[0])
    run = int(array.reshape(-1)[0]) % 10
    stage = 0 if inputs[0].size == 4 else 1
    order.append((run, stage))
    if (run, stage) == (1, 1):
        assert second_is_in_first.wait(60), order
    if (run, stage) == (2, 0):
        second_is_in_first.set()
    stream.write(outputs[0], array)
register_creator(ProbeCreator(enqueue=enqueue))
nodes = [
    helper.make_node("Probe", ["x"], ["a"], "first", domain="test.plugins", each_run=1),
    helper.make_node("Concat", ["a", "a"], ["b"], "double", axis=0),
    helper.make_node("Probe", ["b"], ["y"], "second", domain="test.plugins", each_run=1),
]
infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name, size in (("x", "n"), ("y", "m"))]
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("test.plugins", 1)]
graph = helper.make_graph(nodes, "probes", infos[:1], infos[1:])
model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
made = session(model, "0,1", "first:0,double:0,second:1")
made.run(None, {"x": np.full(4, 3, np.float32)})
def one():
    made.run(None, {"x": np.full(4, 1, np.float32)})
thread = threading.Thread(target=one)
thread.start()
while (1, 1) not in order:
    thread.join(0.01)
(y,) = made.run(None, {"x": np.full(4, 2, np.float32)})
thread.join()
np.testing.assert_array_equal(y, np.full(8, 2))
assert order.index((2, 0)) > order.index((1, 1)), order
"""
    )


def test_each_stage_has_a_cuda_graph() -> None:
    run(
        """
text = ("(float[n, 64] x) => (float[n, 64] y) { zero = Constant<value_int = 0>()  a = Softmax(x)  b = CumSum(a, zero)"
        " c = Softmax(b)  d = CumSum(c, zero)  e = Softmax(d)  f = CumSum(e, zero)  y = Softmax(f) }")
model, x = parsed(text).SerializeToString(), {"x": numbers(3, 64)}
(right,) = session(model, automatic_cuda_graphs=0).run(None, x)
made = session(model, "0,1", "a:0,b:0,c:0,d:1,e:1,f:1,y:1", min_num_runs_before_cuda_graph_capture=1)
def runs():
    for _ in range(3):
        np.testing.assert_array_equal(made.run(None, x)[0], right)
_, change = counted(runs)
assert (change["graph_captures"], change["graph_replays"]) == (2, 4), change
""",
        CHECKED,
    )


def test_a_run_that_the_application_captures_is_refused() -> None:
    run(
        """
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device, Stream
device = Device.emulated(0)
stream = Stream(device)
address = int(ffi.cast("uintptr_t", stream.handle))
model, x = layers(2), numbers(3, 16)
made = session(model, "0,1", user_compute_stream=address)
arrays = {"x": device.upload(x), "t1": device.upload(np.zeros_like(x))}
binding = made.io_binding()
plugin.bind_input(binding, "x", arrays["x"])
plugin.bind_output(binding, "t1", arrays["t1"])
made.run_with_iobinding(binding)
device.call("StreamBeginCapture", stream.handle, 1)
try:
    made.run_with_iobinding(binding)
except Exception as error:
    assert "the session runs on several devices, and a CUDA graph of the whole Run cannot capture that" in str(error)
else:
    raise AssertionError("captured")
graph = ffi.new("CUgraph *")
device.call("StreamEndCapture", stream.handle, graph)
device.call("GraphDestroy", graph[0])
made.run_with_iobinding(binding)
np.testing.assert_array_equal(arrays["t1"].copy_to(np.empty_like(x)), session(model).run(None, {"x": x})[0])
del made, binding
gc.collect()
"""
    )


def test_sessions_share_the_weights_of_each_device() -> None:
    run(
        """
model = layers(4, width=64)
sessions = [session(model, "0,1")]
one = [used(ordinal)["InUse"] for ordinal in (0, 1)]
assert one == [8 * 64 * 64, 8 * 64 * 64], one
sessions += [session(model, "0,1"), session(model, "1,0", "/layer.0/*:0,/layer.1/*:0,/layer.2/*:1,/layer.3/*:1")]
assert [used(ordinal)["InUse"] for ordinal in (0, 1)] == one
"""
    )


def test_a_search_runs_on_the_first_device() -> None:
    run(
        """
import searches
prompt = np.arange(8, dtype=np.int32).reshape(2, 4) % 9 + 1
decoder, weights = searches.small_decoder()
model = searches.search_model(
    "GreedySearch", {"input_ids": prompt, "max_length": np.array([7], np.int32)}, ["sequences"], {"decoder": decoder},
    weights, outer=False, constant=["max_length"], eos_token_id=searches.VOCABULARY, pad_token_id=0,
)
(expected,) = session(model).run(None, {"input_ids": prompt})
made = session(model, "0,1")
(found,), change = counted(lambda: made.run(None, {"input_ids": prompt}))
np.testing.assert_array_equal(found, expected)
assert change["copies_peer"] == 0
"""
    )


def test_the_device_of_each_cluster_is_explained() -> None:
    run(
        """
found = plugin.explain(layers(4), emulate=True, provider_options={"device_ids": "1,2", "device_of": "/layer.3/*:2"})
places = [(verdict.device, verdict.cluster.rpartition("_")[2]) for verdict in found]
assert places == [(1, "stage0")] * 6 + [(2, "stage1")] * 2, places
assert str(found[-1]) == "/layer.3/Tanh (Tanh): CudaPluginExecutionProvider on device 2", str(found[-1])
assert [verdict.device for verdict in plugin.explain(layers(1), emulate=True)] == [None, None]
# the CPU provider runs the casts; each part of the model on the plugin is divided
text, _ = CASES["nodes of the CPU provider"]
found = plugin.explain(parsed(text).SerializeToString(), emulate=True, provider_options={"device_ids": "0,1"})
assert {verdict.device for verdict in found if verdict.supported} == {0, 1}
assert {verdict.device for verdict in found if not verdict.supported} == {None}
"""
    )


def test_the_command_explain_shows_the_device(tmp_path: Path) -> None:
    done = python(
        PREAMBLE
        + """
from ort_cuda_plugin.cli import main
path = sys.argv[1] + "/model.onnx"
open(path, "wb").write(layers(2))
arguments = ["explain", path, "--device", "emulated", "--option", "device_ids=0,1,device_of=/layer.0/*:0,/layer.1/*:1"]
assert main(arguments) == 0
assert main([*arguments, "--json"]) == 0
assert main([*arguments, "--program"]) == 0
""",
        str(tmp_path),
        env=FOUR | {"COLUMNS": "200"},
        preloaded=True,
    )
    assert done.stdout.count("CudaPluginExecutionProvider, device 0") == 2, done.stdout
    assert done.stdout.count("CudaPluginExecutionProvider, device 1") == 2
    assert done.stdout.count('"device": 1') == 2
    assert "_stage0" in done.stdout
    assert "_stage1" in done.stdout


def test_a_pattern_that_matches_no_node_is_warned_of() -> None:
    done = python(
        PREAMBLE
        + """
ort.set_default_logger_severity(2)
session(layers(2), "0,1", "/layer.0/*:0,/layer.7/*:1")
""",
        env=FOUR,
        preloaded=True,
    )
    assert "device_of: the pattern '/layer.7/*' matches no node of the plugin, and no result of one" in done.stderr
    assert "'/layer.0/*'" not in done.stderr


def test_a_device_that_is_lost_fails_the_run_that_uses_it() -> None:
    run(
        """
from faults import Fault, Faults
model, x = layers(2), {"x": numbers(3, 16)}
made = session(model, "0,1", automatic_cuda_graphs=0)
made.run(None, x)
faults = Faults()
faults.arm(Fault("MemcpyPeerAsync", 1, 719, "lost"))
for said in ("cuMemcpyPeerAsync", "CUDA device 1 is lost"):
    try:
        made.run(None, x)
    except Exception as error:
        assert said in str(error), error
    else:
        raise AssertionError("succeeded")
made = None
gc.collect()
"""
    )
