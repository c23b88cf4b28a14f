"""Process exit, forks, and Python errors inside of a callback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isolated import ROOT, add_model, python

START = """
import sys, os, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
model = bytes.fromhex(sys.argv[1])
x = np.arange(8, dtype=np.float32)
feeds = {"a": x, "b": x}
def run(session):
    np.testing.assert_array_equal(session.run(None, feeds)[0], x + x)
"""
MODEL = add_model().hex()


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_exiting_with_live_sessions_exits_with_0(streams: str) -> None:
    code = """
    session = plugin.session(model, emulate=True)
    run(session)
    import builtins; builtins.kept = session  # outlives the modules
    other = plugin.session(model, emulate=True)
    cycle = [other]; cycle.append(cycle); del other
    print("end")
    """
    done = python(
        START + code.replace("\n    ", "\n"), MODEL, env={"ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams}, preloaded=True
    )
    assert done.stdout == "end\n"
    assert not done.stderr


def test_a_forked_child_gets_an_error_and_the_parent_goes_on() -> None:
    code = """
session = plugin.session(model, emulate=True)
run(session)
child = os.fork()
if child == 0:
    plugin.trim()
    for attempt in (lambda: run(session), lambda: plugin.session(model, emulate=True), plugin.memory_stats,
                    lambda: plugin.set_limit(0, 1 << 20), lambda: plugin.require(session)):
        try:
            attempt()
        except Exception as error:
            if "was forked" not in str(error):
                print(error, flush=True)
                os._exit(2)
        else:
            os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
run(session)
"""
    python(START + code, MODEL, preloaded=True)


def test_an_error_inside_compile_reaches_the_user() -> None:
    code = """
from ort_cuda_plugin.ep.nodes.fused_node import FusedNode
def broken(self, *arguments):
    raise KeyError("a mistake of ours")
FusedNode.prepare = broken
try:
    plugin.session(model, emulate=True)
except Exception as error:
    assert "KeyError: 'a mistake of ours' (<string>:" in str(error), error
else:
    raise AssertionError("no error")
"""
    python(START + code, MODEL, preloaded=True)


def test_an_error_inside_a_run_reaches_the_user_and_the_session_recovers() -> None:
    dynamic = add_model(dims=["n"]).hex()
    code = """
from ort_cuda_plugin.ep.nodes.fused_node import FusedNode
session = plugin.session(model, emulate=True)
build = FusedNode.build
def broken(self, *arguments):
    raise ZeroDivisionError("a mistake of ours")
FusedNode.build = broken
try:
    run(session)
except Exception as error:
    assert "ZeroDivisionError: a mistake of ours" in str(error), error
else:
    raise AssertionError("no error")
FusedNode.build = build
run(session)
"""
    python(START + code, dynamic, preloaded=True)


def test_an_error_while_claiming_is_what_session_raises() -> None:
    code = """
from ort_cuda_plugin.ep import claiming
def broken(*arguments, **named):
    raise RuntimeError("cannot claim")
claiming.claim = broken
try:
    plugin.session(model, emulate=True)
except RuntimeError as error:
    assert "no node of the model runs" in str(error) and "cannot claim" in str(error), error
else:
    raise AssertionError("no error")
"""
    python(START + code, MODEL, preloaded=True)


def test_nodes_that_another_provider_has_are_left_to_it() -> None:
    code = """
plugin.register(emulate=True)
from ort_cuda_plugin.ep import boundary
session = ort.InferenceSession(model, providers=["CPUExecutionProvider", plugin.get_ep_name()])
run(session)
(provider,) = boundary.PROVIDERS.values()
reasons = [verdict.reason for verdict in provider.verdicts]
assert reasons == ["ONNX Runtime has assigned the node to CPUExecutionProvider"]
"""
    done = python(START + code, MODEL, preloaded=True)
    assert "already assigned" not in done.stderr


def test_a_model_that_no_node_of_runs_is_refused_with_the_reasons() -> None:
    code = """
from onnx import helper, TensorProto
value = lambda name: helper.make_tensor_value_info(name, TensorProto.STRING, [2])
node = helper.make_node("Identity", ["a"], ["b"], name="words")
graph = helper.make_graph([node], "g", [value("a")], [value("b")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
try:
    plugin.session(model, emulate=True, sess_options=options)
except RuntimeError as error:
    assert "Identity node 'words' (" in str(error), error
else:
    raise AssertionError("no error")
"""
    python(START + code, MODEL, preloaded=True)


def test_steady_runs_call_no_python() -> None:
    code = """
import threading
session = plugin.session(model, emulate=True)
run(session)
before = plugin.counters()
for _ in range(20):
    run(session)
threads = [threading.Thread(target=run, args=(session,)) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
after = plugin.counters()
assert after["python_calls"] == before["python_calls"] > 0
assert after["runs"] - before["runs"] == 24 and after["launches"] - before["launches"] == 24
plugin.reset_counters()
reset = plugin.counters()
assert reset["python_calls"] == reset["runs"] == 0 and reset["streams_live"] == after["streams_live"]
"""
    python(START + code, MODEL, preloaded=True)


def test_out_of_device_memory_is_an_error_and_nothing_is_lost() -> None:
    code = """
session = plugin.session(model, emulate=True)
run(session)
before = plugin.counters()["device_bytes_in_use"]
big = np.ones(1 << 20, np.float32)  # 4 MiB, so that inputs fit and the output does not
for wanted in (big, np.ones(1 << 22, np.float32)):
    try:
        session.run(None, {"a": wanted, "b": wanted})
    except Exception as error:
        assert "out of memory on emulated CUDA device 0" in str(error) or "Allocation failed" in str(error), error
    else:
        raise AssertionError("no error")
run(session)
assert plugin.counters()["device_bytes_in_use"] == before
"""
    dynamic = add_model(dims=["n"]).hex()
    log = python(START + code, dynamic, env={"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "9M"}, preloaded=True).stderr
    assert "out of memory on emulated CUDA device 0: 4194304 bytes wanted" in log


# SIGINT arrives while C code runs; Python handles it in the first line of the next callback.
INTERRUPTED = """
import ctypes, functools, operator, signal
from onnxruntime.capi import _pybind_state
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
send = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGINT)
def interrupt_before(call):
    seen = []
    try:
        try:
            list(map(operator.call, [send, call]))
        except Exception as error:
            assert "KeyboardInterrupt" in str(error), error
            seen.append("error")
        sum(range(1))  # Python looks at signals when a call has returned
    except KeyboardInterrupt:
        seen.append("interrupt")
    return seen
options = ort.SessionOptions()
options.add_provider_for_devices(plugin.register(emulate=True)[:1], {})
def new_session():
    return _pybind_state.InferenceSession(options, model, False, False)
"""


def test_an_interrupt_before_a_callback_reaches_the_application() -> None:
    code = """
from ort_cuda_plugin.ep import boundary
session = new_session()
seen = interrupt_before(functools.partial(session.initialize_session, [], [], set()))  # create_ep
assert "interrupt" in seen  # ONNX Runtime's Python goes on with the CPU provider after this error
assert len(boundary.PROVIDERS) == 0
session = new_session()
session.initialize_session([], [], set())
seen = interrupt_before(functools.partial(session.run, ["c"], feeds, None))  # build_variant
assert seen == ["error"], seen
np.testing.assert_array_equal(session.run(["c"], feeds, None)[0], x + x)
assert len(boundary.PROVIDERS) == 1
held = [session]
del session
seen = interrupt_before(held.clear)  # release_ep
assert seen == ["interrupt"], seen
assert len(boundary.PROVIDERS) == 0
table = type(boundary.PROVIDERS)
pop, first = table.pop, [True]
def interrupted_pop(self, handle):
    if first and first.pop():
        raise KeyboardInterrupt
    return pop(self, handle)
table.pop = interrupted_pop
session = new_session()
session.initialize_session([], [], set())
try:
    del session
    sum(range(1))
except KeyboardInterrupt:
    assert len(boundary.PROVIDERS) == 0
else:
    raise AssertionError("no interrupt")
"""
    done = python(START + INTERRUPTED + code, add_model(dims=["n"]).hex(), preloaded=True)
    assert "Exception ignored" not in done.stderr


def test_a_session_at_the_limit_of_recursion_is_an_error() -> None:
    code = """
run(plugin.session(model, emulate=True))  # the kernel is compiled
def create(depth):
    if depth:
        return create(depth - 1)
    session = new_session()
    session.initialize_session([], [], set())
    return session.run(["c"], feeds, None)
outcomes = set()
for depth in range(900, sys.getrecursionlimit()):
    try:
        create(depth)
        outcomes.add("ok")
    except Exception as error:
        assert "recursion" in str(error), error
        outcomes.add("error")
print(*sorted(outcomes))
"""
    done = python(START + INTERRUPTED + code, MODEL)
    assert done.stdout == "error ok\n"


def test_a_model_in_the_format_of_onnxruntime_runs(tmp_path: Path) -> None:
    code = """
path = sys.argv[2]
options = ort.SessionOptions()
options.optimized_model_filepath = path
ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
session = plugin.session(path, emulate=True)
run(session)
assert plugin.counters()["launches"] > 0
assert [verdict.supported for verdict in plugin.explain(path, emulate=True)] == [True]
"""
    python(START + code, MODEL, str(tmp_path / "add.ort"), preloaded=True)


@pytest.mark.parametrize("module", ["ort_cuda_plugin.model.ir", "ort_cuda_plugin.ops.onnx.nn.conv", "numba.core.types"])
def test_an_interrupt_in_the_middle_of_an_import_leaves_it_whole(tmp_path: Path, module: str) -> None:
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
todo = {sys.argv[2]}
def interrupt(event, arguments):
    if event == "import" and arguments[0] in todo:
        todo.remove(arguments[0])
        signal.raise_signal(signal.SIGINT)
sys.addaudithook(interrupt)
try:
    try:
        run(plugin.session(model, emulate=True))
    except Exception as error:
        assert "KeyboardInterrupt" in str(error), error
        sum(range(1))  # where it comes as itself
        raise KeyboardInterrupt
except KeyboardInterrupt:
    run(plugin.session(model, emulate=True))
else:
    raise AssertionError("no interrupt")
assert plugin.counters()["kernels_compiled"] > 0 and not todo
"""
    python(START + code, MODEL, module, env={"ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path)})


def test_nothing_is_imported_where_a_signal_can_interrupt_it(tmp_path: Path) -> None:
    code = """
import threading
np.testing.assert_array_equal(0, 0)  # imports itself
imported = []
main = threading.current_thread()
def note(event, arguments):
    if event == "import" and threading.current_thread() is main:
        imported.append(arguments[0])
import ort_cuda_plugin.uninterrupted  # which does it
sys.addaudithook(note)
session = plugin.session(model, emulate=True)
run(session)
del session
plugin.unregister()
assert imported == [], imported
"""
    python(START + code, add_model(dims=["n"]).hex(), env={"ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path)})


def test_interrupts_at_any_time_leave_a_process_that_makes_sessions() -> None:
    """Runs bench/interrupts.py with few interrupts."""
    command = [sys.executable, str(ROOT / "bench" / "interrupts.py"), "--json", "--jobs", "1"]
    command += ["--count", "6", "--rounds", "2", "--step", "500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert json.loads(done.stdout)["interrupts"] == 6
