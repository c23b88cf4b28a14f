"""Each environment variable changes something that can be observed. Processes read them at their start."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from c_programs import build_host
from isolated import HARNESS, add_model, python
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.doctor.variables import EMULATED, VARIABLES

PREFIX = "ORT_CUDA_PLUGIN_"

SEEN = """
import json, sys
from pathlib import Path
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
aspect, model, folder = sys.argv[1], bytes.fromhex(sys.argv[2]), Path(sys.argv[3])

def offered():
    "What a plain registration offers."
    return [(device.ep_name, device.ep_metadata["emulated"]) for device in plugin.register()]

def devices():
    return [dict(device.ep_metadata) for device in plugin.register(emulate=True)]

def ran():
    "The provider of a session that has run."
    from ort_cuda_plugin.ep.provider import last_provider
    global session
    session = plugin.session(model, emulate=True)
    x = np.ones(8, np.float32)
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
    return last_provider()

def files():
    "Files that a session writes."
    ran()
    return sorted(str(path.relative_to(folder)).split("/")[0] for path in folder.rglob("*") if path.is_file())

def kernels():
    "The device for which kernels are made, and what they are compiled for."
    device = ran().device
    return [repr(device.properties()), device.target.arch]

def libraries():
    "The libraries that the device offers, with stand-ins in the folder."
    from c_programs import stand_ins
    stand_ins(folder)
    return sorted(ran().device.properties().libraries)

def verified():
    "How many programs are verified."
    from ort_cuda_plugin.program.analysis.verify import Verifier
    calls, verify = [], Verifier.__call__
    Verifier.__call__ = lambda *arguments: (calls.append(1), verify(*arguments))[1]
    ran()
    return len(calls) > 0

def watched():
    "Whether progress is shown while a session lives."
    from ort_cuda_plugin.progress.events import is_watched
    ran()
    return is_watched()

def order():
    "Which of two streams is the last to write a byte, twenty times, and whether work is done when it is enqueued."
    from ort_cuda_plugin.abi.device import Device, Stream
    device = Device.emulated()
    first, second, found = Stream(device), Stream(device), []
    for _ in range(20):
        array = device.empty(1, np.uint8)
        for value, stream in ((1, first), (2, second)):
            device.call("MemsetD8Async", array.address, value, 1, stream.handle)
        done = first.query()
        first.synchronize()
        second.synchronize()
        found.append((done, int(array.copy_to(np.empty(1, np.uint8))[0])))
    return found

def waited():
    "Whether a stream waits for a semaphore that is signaled after 1.5 seconds."
    import threading
    from ort_cuda_plugin.abi.device import CudaError, Device, Stream
    from timelines import ImportedTimeline, Timeline
    device, timeline = Device.emulated(), Timeline()
    stream = Stream(device)
    ImportedTimeline(device, timeline).wait(stream, 1)
    threading.Timer(1.5, timeline.signal, [1]).start()
    try:
        stream.synchronize()
    except CudaError as error:
        return error.name
    return timeline.value

def loaded():
    "How many plans a session of a compiled model builds."
    from contexts import compile_model, load
    from ort_cuda_plugin.ep.provider import last_provider
    compile_model(model, folder / "m_ctx.onnx")
    before = plugin.counters()["plan_variants_built"]
    load(folder / "m_ctx.onnx", host_code=False)
    return plugin.counters()["plan_variants_built"] - before

print(json.dumps(globals()[aspect]()))
"""


@dataclass(frozen=True)
class Effect:
    """A value of a variable, in which FOLDER stands for an empty folder, and the function in SEEN that observes its
    effect while the variables ``given`` are set, too.
    """

    value: str
    aspect: str
    given: Mapping[str, str] = field(default_factory=dict)


EFFECTS = {
    "AS": Effect("CUDAExecutionProvider", "offered", {"EMULATE": "1"}),
    "CACHE_DIR": Effect("FOLDER/cache", "files"),
    "CONTEXT_ALLOW_HOST_CODE": Effect("1", "loaded"),
    "EMULATE": Effect("1", "offered"),
    "EMULATE_CHECK": Effect("1", "kernels"),
    "EMULATE_DEVICES": Effect("2", "devices"),
    "EMULATE_FAULTS": Effect("multiprocessors=7", "devices"),
    "EMULATE_LIBRARIES": Effect("FOLDER", "libraries"),
    "EMULATE_LOWERING": Effect("sm_90", "kernels"),
    "EMULATE_MEMORY": Effect("1G", "devices"),
    "EMULATE_PROFILE": Effect("FOLDER/profile", "files"),
    "EMULATE_SEED": Effect("3", "order", {"EMULATE_STREAMS": "adversarial"}),
    "EMULATE_SEMAPHORE_SECONDS": Effect("1", "waited"),
    "EMULATE_STREAMS": Effect("adversarial", "order"),
    "EMULATE_WORKERS": Effect("3", "devices"),
    "KERNEL_MANIFEST": Effect("FOLDER/manifest", "files"),
    "PROGRESS": Effect("1", "watched"),
    "VERIFY": Effect("1", "verified"),
}


@cache
def seen(aspect: str, given: tuple[tuple[str, str], ...], folder: Path) -> object:
    unset = dict.fromkeys((name for name in VARIABLES if name != f"{PREFIX}CACHE_DIR"), "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    variables = {PREFIX + name: value.replace("FOLDER", str(folder)) for name, value in given}
    environment = unset | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HARNESS)} | variables
    return json.loads(python(SEEN, aspect, add_model().hex(), str(folder), env=environment).stdout)


def test_the_effect_of_each_variable_is_known() -> None:
    known = {f"{PREFIX}{name}" for name in (*EFFECTS, "PYTHON")}
    assert known == set(VARIABLES), "a variable without an observation of what it decides"


@pytest.mark.parametrize("name", sorted(EFFECTS))
def test_a_variable_decides_something(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    effect = EFFECTS[name]
    folder = tmp_path_factory.getbasetemp() / "seen"
    without = seen(effect.aspect, tuple(effect.given.items()), folder)
    assert without != seen(effect.aspect, (*effect.given.items(), (name, effect.value)), folder)


def test_the_interpreter_of_a_host_is_the_one_that_the_variable_names(tmp_path: Path) -> None:
    host = build_host("arena_host", tmp_path)
    library = Path(shutil.copy(get_library_path(), tmp_path))
    said = [
        subprocess.run([host, library], env=environment, capture_output=True, text=True, timeout=600).stderr
        for environment in ({}, {f"{PREFIX}PYTHON": "/nonexistent/python"})
    ]
    assert "/nonexistent/python" not in said[0]
    assert "/nonexistent/python cannot be executed" in said[1]


def test_the_table_has_the_numbers_of_devices_that_the_emulator_takes() -> None:
    state = (HARNESS.parents[1] / "csrc_shim" / "emulator" / "state.h").read_text()
    most = state.split("#define EMU_MAX_DEVICES ")[1].split()[0]
    (row,) = (variable for variable in EMULATED if variable.name.endswith("_DEVICES"))
    assert row.takes == f"1 to {most}"
