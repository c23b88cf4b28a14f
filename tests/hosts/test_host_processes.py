"""Threads, processes and registrations of a host in Python, each in a process that may crash.

Where ONNX Runtime itself does not survive something, the test shows that with the CPU provider alone.
"""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from onnx import helper

from device_models import model
from isolated import add_model, python

START = """
import gc, os, signal, subprocess, sys, threading, time
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
model = bytes.fromhex(sys.argv[1])
x = np.arange(1 << 12, dtype=np.float32)
feeds = {"a": x, "b": x}
def check(session):
    np.testing.assert_array_equal(session.run(None, feeds)[0], x + x)
"""
MODEL = add_model(dims=["n"]).hex()
STREAMS = pytest.mark.parametrize("streams", ["inline", "adversarial"])


def run(code: str, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(START + code, MODEL, *arguments, env=environment, check=check, timeout=120, preloaded=True)


# ---- the end of the process while other threads work ----

WORK = """
def runs():
    session = plugin.session(model, emulate=True)
    while True:
        session.run(None, feeds)
        working.set()
def sizes():
    session, n = plugin.session(model, emulate=True), 1
    while True:
        n += 1
        session.run(None, {"a": x[:n], "b": x[:n]})
        working.set()
def sessions():
    while True:
        check(plugin.session(model, emulate=True))
        working.set()
working = threading.Event()
for work in (runs, runs, sizes, sessions):
    threading.Thread(target=work, daemon=True).start()
working.wait()
"""
ENDS = {
    "os._exit(5)": 5,
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)": -signal.SIGTERM,
    "sys.exit(5)": 5,
    "raise KeyError('mine')": 1,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_while_daemon_threads_run_models(end: str) -> None:
    expected = {ENDS[end]}
    if end.startswith(("sys", "raise")):
        # Before 3.14, Python ends a daemon thread that requests the GIL during the exit, and C++ code on the thread's
        # stack then aborts the process. The CPU provider alone aborts too.
        expected |= {-signal.SIGABRT}
    assert run(WORK + end, check=False).returncode in expected


def test_a_process_that_ends_while_kernels_compile_leaves_no_helper(tmp_path: Path) -> None:
    code = """
import psutil
from ort_cuda_plugin.compiler.library import kernel_library
kernel_library.worker_pays_seconds = 0.01  # for a helper even where this process would be enough
os.sched_getaffinity = lambda pid: range(3)
def ended(self, index, image):
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
kernel_library.Compilation.finish = ended
plugin.session(bytes.fromhex(sys.argv[2]), emulate=True)
"""
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0), helper.make_node("Softmax", ["x"], ["z"])]
    softmax_and_sum = model(nodes, {"x": [64, 100]}, {"y": [], "z": [64, 100]})
    done = run(code, softmax_and_sum.hex(), check=False, ORT_CUDA_PLUGIN_CACHE_DIR=str(tmp_path))
    assert done.returncode == -signal.SIGTERM, done.stderr
    helpers = [int(pid) for pid in done.stdout.split()]
    assert helpers, done.stderr
    for pid in helpers:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout=60)  # it ends when its kernel is compiled


# ---- run_async ----

ASYNC = """
done, wrong = threading.Semaphore(0), []
def arrived(results, expected, error):
    try:
        if error:
            wrong.append(error)
        else:
            np.testing.assert_array_equal(results[0], expected)
    except BaseException as exception:
        wrong.append(repr(exception))
    finally:
        done.release()
def start(session, count):
    for i in range(count):
        y = x + i
        session.run_async(None, {"a": y, "b": y}, arrived, y + y)
def wait(count):
    for i in range(count):
        assert done.acquire(timeout=60), i
session = plugin.session(model, emulate=True)
"""


@STREAMS
def test_asynchronous_runs_end_right_whatever_goes_meanwhile(streams: str) -> None:
    code = """
start(session, 200)
wait(200)
start(session, 200)
del session
gc.collect()
plugin.unregister()
wait(200)
assert not wrong, wrong[:3]
session = plugin.session(model, emulate=True)
def next_one(results, rest, error):
    if rest and not error:
        session.run_async(None, feeds, next_one, rest - 1)
    else:
        arrived(results, x + x, error)
session.run_async(None, feeds, next_one, 20)
wait(1)
assert not wrong, wrong
session.run_async(None, {"a": x, "b": x[:3]}, arrived, None)
wait(1)
assert "cannot be broadcast" in str(wrong.pop())
check(session)
"""
    run(ASYNC + code, ORT_CUDA_PLUGIN_EMULATE_STREAMS=streams)


def test_an_exception_in_a_callback_is_reported_and_nothing_else_happens() -> None:
    code = """
def raises(results, data, error):
    raise ZeroDivisionError("a mistake of the application")
unraisable = []
sys.unraisablehook = lambda args: (unraisable.append(args.exc_value), done.release())
for _ in range(10):
    session.run_async(None, feeds, raises, None)
wait(10)
assert {str(error) for error in unraisable} == {"a mistake of the application"}
check(session)
start(session, 10)
wait(10)
assert not wrong, wrong
"""
    run(ASYNC + code)


# ---- processes ----

POOL = """
import multiprocessing
def work(index):
    try:
        check(plugin.session(model, emulate=True))
        return "ok"
    except Exception as error:
        return "forked" if "was forked from a process that used the CUDA plugin" in str(error) else str(error)
if __name__ == "__main__":
    method, before = sys.argv[2:]
    if before != "imported":
        plugin.register(emulate=True)
    if before == "used":
        check(plugin.session(model, emulate=True))
    with multiprocessing.get_context(method).Pool(2) as pool:
        print(*set(pool.map(work, range(4))))
"""


@pytest.mark.parametrize(
    ("method", "before", "outcome"),
    [
        ("fork", "imported", "ok"),
        ("fork", "registered", "forked"),
        ("spawn", "used", "ok"),
        ("forkserver", "used", "ok"),
    ],
)
def test_workers_of_a_pool(method: str, before: str, outcome: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # the start method spawn imports it
    program.write_text(START + POOL)
    code = f"sys.argv[0] = {str(program)!r}; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    assert run(code, method, before).stdout == f"{outcome}\n"


def test_a_fork_while_threads_run_gives_the_child_errors_and_the_parent_goes_on() -> None:
    code = """
busy, idle = plugin.session(model, emulate=True), plugin.session(model, emulate=True)
check(busy)  # no thread imports anything afterwards: the child would wait for it
stop = threading.Event()
def runs():
    while not stop.is_set():
        check(busy)
def sizes():
    n = 1
    while not stop.is_set():
        n += 1
        busy.run(None, {"a": x[:n], "b": x[:n]})
threads = [threading.Thread(target=work) for work in (runs, runs, sizes)]
for thread in threads: thread.start()
calls = [lambda: check(idle), lambda: plugin.session(model, emulate=True), plugin.memory_stats]
for _ in range(15):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        for index, call in enumerate(calls):
            try:
                call()
                os._exit(10 + index)
            except Exception as error:
                if "was forked" not in str(error):
                    os.write(2, str(error).encode())
                    os._exit(20 + index)
        plugin.trim()
        plugin.counters()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code and (print("child:", code, flush=True), os._exit(1))
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
stop.set()
for thread in threads: thread.join()
check(busy)
check(idle)
"""
    run(code)


def test_a_fork_while_another_thread_registers_does_not_hang_the_child() -> None:
    code = """
from ort_cuda_plugin import api
check(plugin.session(model, emulate=True))
with api._registration:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            plugin.session(model, emulate=True)
        except Exception as error:
            os._exit(0 if "was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run(code)


# ---- registrations ----

THREADS = """
mistakes = []
def loop(work):
    for _ in range(40):
        try:
            work()
        except (RuntimeError, ort.capi.onnxruntime_pybind11_state.Fail):
            pass
        except BaseException as error:
            mistakes.append(repr(error))
def run(*works):
    threads = [threading.Thread(target=loop, args=(work,), daemon=True) for work in works]
    for thread in threads: thread.start()
    for thread in threads: thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    assert not mistakes, mistakes[:3]
def register(): plugin.register(emulate=True)
def unregister(): plugin.unregister()
def directly():
    ort.register_execution_provider_library("direct.virtual", plugin.get_library_path())
    ort.unregister_execution_provider_library("direct.virtual")
def values(): ort.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32), "cuda", 0)
def devices(): assert all(device.emulated for device in plugin.devices())
"""


@pytest.mark.parametrize("package", ["ort_cuda_plugin", "nothing"])
def test_a_registration_does_not_wait_for_threads_that_wait_for_onnxruntime(package: str) -> None:
    """Threads with Python's GIL wait for the lock that ONNX Runtime holds while it registers a library."""
    code = f"""
import {package if package != "nothing" else "sys"}
import threading, time, sys, numpy as np, onnxruntime as ort
path, stop = sys.argv[2], False
def values():
    while not stop:
        try: ort.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32), "cuda", 0)
        except RuntimeError: pass
def register():
    for _ in range(3):
        ort.register_execution_provider_library("direct.virtual", path)
        ort.unregister_execution_provider_library("direct.virtual")
    ort.register_execution_provider_library("direct.virtual", path)
threads = [threading.Thread(target=work, daemon=True) for work in (values, values, register)]
for thread in threads: thread.start()
threads[2].join(60)
assert not threads[2].is_alive(), "a deadlock"
stop = True
for thread in threads: thread.join(60)
(device,) = [device for device in ort.get_ep_devices() if device.ep_metadata.get("emulated") == "1"]
options = ort.SessionOptions()
options.add_provider_for_devices([device], {{}})
session = ort.InferenceSession(bytes.fromhex(sys.argv[1]), options, enable_fallback=0)
x = np.ones(4, np.float32)
assert session.run(None, {{"a": x, "b": x}})[0].tolist() == [2] * 4
"""
    import ort_cuda_plugin

    python(code, MODEL, ort_cuda_plugin.get_library_path(), timeout=180, preloaded=True)


def test_devices_and_registrations_of_threads_go_on_beside_each_other() -> None:
    run(THREADS + "run(register, unregister, directly, devices, values, devices, values)\n")


DIRECTLY = """
path, name = plugin.get_library_path(), plugin.get_ep_name()
def offered():
    return [device for device in ort.get_ep_devices() if device.ep_name == name]
def session_on(device):
    options = ort.SessionOptions()
    options.add_provider_for_devices([device], {})
    session = ort.InferenceSession(model, options, enable_fallback=0)
    check(session)
    return session
"""


def test_two_registrations_of_the_library_are_independent() -> None:
    code = """
ort.register_execution_provider_library("one.virtual", path)
try:
    ort.register_execution_provider_library("one.virtual", path)
except Exception as error:
    assert "already registered" in str(error), error
else:
    raise AssertionError("no error")
ort.register_execution_provider_library("two.virtual", path)
sessions = [session_on(device) for device in offered()]
assert len(sessions) == 2
ort.unregister_execution_provider_library("one.virtual")
sessions += [session_on(device) for device in offered()]
assert len(sessions) == 3
ort.unregister_execution_provider_library("two.virtual")
assert not offered()
for session in sessions: check(session)
del sessions, session
gc.collect()
check(plugin.session(model, emulate=True))
"""
    run(DIRECTLY + code)


def test_threads_register_and_unregister_while_sessions_run() -> None:
    code = """
session = plugin.session(model, emulate=True)
stop, errors = threading.Event(), []
def guarded(work):
    try:
        while not stop.is_set():
            work()
    except BaseException as error:
        errors.append(error)
def again():
    plugin.register(emulate=True)
    plugin.unregister()
works = [lambda: check(session)] * 2 + [again] * 3
threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
for thread in threads: thread.start()
for _ in range(30): again()
stop.set()
for thread in threads: thread.join()
assert not errors, errors
check(session)
del session
check(plugin.session(model, emulate=True))
"""
    run(code)
