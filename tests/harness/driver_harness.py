"""Devices and kernels for tests of driver calls: the emulated device in both stream modes, and a GPU if available."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest

from emulator_harness import configured
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device, Module, Stream
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import KernelImage, Target

DEVICES = ["inline", "adversarial", pytest.param("cuda", marks=pytest.mark.gpu)]

INDEX = "    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x\n"
SPECS = {
    # Launches of x = a x + b do not commute, so the result shows their order.
    "affine": KernelSpec(
        "affine", ("*i32", "i32", "i32"), source=f"def kernel(x, a, b):\n{INDEX}    x[i] = int32(x[i] * a + b)\n"
    ),
    # Adds 1 to x[0], and sets a condition of a graph to whether x[0] is below `bound`.
    "count": KernelSpec(
        "count",
        ("*i32", "i32", "i64"),
        source="def kernel(x, bound, handle):\n    x[0] = int32(x[0] + 1)\n"
        "    set_conditional(handle, int32(1) if x[0] < bound else int32(0))\n",
    ),
    "add": KernelSpec(
        "add",
        ("*f32", "*f32", "*f32", "i32"),
        source=f"def kernel(a, b, c, n):\n{INDEX}    if i < n:\n        c[i] = a[i] + b[i]\n",
    ),
}


@contextmanager
def driver_device(name: str, seed: int = 0) -> Iterator[Device]:
    """Yield the device with this name in `DEVICES`. Skip the test if it needs a GPU and there is none."""
    if name != "cuda":
        with configured(adversarial=int(name == "adversarial"), seed=seed) as device:
            yield device
        return
    try:
        device = Device.cuda(0)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield device


@lru_cache
def compiled(name: str, target: Target) -> KernelImage:
    return compile_kernel(SPECS[name], target)


class Kernels:
    """The kernels of `SPECS`, loaded on one device."""

    def __init__(self, device: Device) -> None:
        target = Target.emulated() if device.is_emulated else Target.cuda(*device.compute_capability)
        self.modules: dict[str, tuple[Module, str]] = {}
        for name in SPECS:
            image = compiled(name, target)
            self.modules[name] = device.load(image.data), image.entry

    def function(self, name: str) -> Any:
        module, entry = self.modules[name]
        return module.function(entry)

    def launch(self, name: str, grid: int, block: int, arguments: Sequence[Any], stream: Stream | None = None) -> None:
        module, entry = self.modules[name]
        module.launch(entry, grid, block, arguments, stream=stream)


@contextmanager
def load_kernels(device: Device) -> Iterator[Kernels]:
    kernels = Kernels(device)
    yield kernels
    for module, _ in kernels.modules.values():
        module.unload()


def blocking_stream(device: Device) -> Stream:
    """Return a blocking stream: it synchronizes with the null stream."""
    stream = device.stream()
    stream.destroy()
    handle = ffi.new("CUstream *")
    device.call("StreamCreate", handle, 0)
    stream.handle = handle[0]
    return stream
