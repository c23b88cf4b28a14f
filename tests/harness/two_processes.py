"""Runs an exporter and an importer of CUDA IPC, each in a process of its own, which talk through a pipe.

Both are functions of the code that a test gives::

    def exporter(other): ...
    def importer(other): ...

``other`` is a ``multiprocessing.connection.Connection``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import pytest

from isolated import python
from ort_cuda_plugin.ep.device.devices import cuda_devices

_PROLOGUE = """
import faulthandler, gc, os, sys, traceback
from multiprocessing import Pipe
import numpy as np

EMULATE = os.environ["ORT_CUDA_PLUGIN_EMULATE"] == "1"

def start():
    import onnxruntime as ort
    import ort_cuda_plugin
    ort_cuda_plugin.register(emulate=EMULATE)
    from ort_cuda_plugin import ipc
    return ort, ipc

def open_device():
    from ort_cuda_plugin.abi.device import Device
    return Device.emulated() if EMULATE else Device.cuda()

def value_of(ort, array):
    return ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0)

def refused(call, *arguments):
    try:
        call(*arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")
"""

_EPILOGUE = """
faulthandler.dump_traceback_later(200, exit=True)
ours, theirs = Pipe()
child = os.fork()  # before onnxruntime starts threads
(theirs if child else ours).close()
failed = True
try:
    (exporter if bool(child) == exporter_is_parent else importer)(ours if child else theirs)
    failed = False
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
if child:
    ours.close()
    failed |= os.waitpid(child, 0)[1] != 0
    sys.exit(failed)
os._exit(failed)
"""


MODES = ["inline", "adversarial", "adversarial-check", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Devices: the emulated device with its modes, and a GPU if available."""


def run_pair(
    code: str, mode: str = "inline", exporter_is_parent: bool = True, env: Mapping[str, str] | None = None
) -> list[str]:
    """Run the functions ``exporter`` and ``importer`` of ``code``, and return the lines that they print.

    They may call ``start()``, which registers the device of `MODES` and returns the modules ``onnxruntime`` and
    ``ort_cuda_plugin.ipc``; ``open_device()``, for driver calls; ``value_of(ort, array)``, a copy on the device; and
    ``refused(call, *arguments)``, the text of the call's error. The child process may end before its parent.

    Skips the test if it needs a GPU and there is none.
    """
    if mode == "cuda" and not cuda_devices()[0]:
        pytest.skip(cuda_devices()[1])
    streams = mode.removesuffix("-check")
    settings = {
        "ORT_CUDA_PLUGIN_EMULATE": str(int(mode != "cuda")),
        "ORT_CUDA_PLUGIN_EMULATE_SEMAPHORE_SECONDS": "120",
        "ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams if mode != "cuda" else "inline",
        "ORT_CUDA_PLUGIN_EMULATE_SEED": "7",
        "ORT_CUDA_PLUGIN_EMULATE_CHECK": str(int(mode != streams)),
    }
    epilogue = _EPILOGUE.replace("exporter_is_parent", str(exporter_is_parent))
    program = _PROLOGUE + textwrap.dedent(code) + epilogue
    return python(program, env=settings | dict(env or {}), preloaded=True).stdout.splitlines()
