"""The limit of kernels' dynamic shared memory: it is raised only for kernels whose launches use dynamic memory."""

from __future__ import annotations

from typing import Any

import pytest

from ort_cuda_plugin.compiler.compile import KernelCompileError, compile_kernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library.shared_memory import IN_LAUNCH, declared_bytes
from ort_cuda_plugin.compiler.targets import BuiltKernel, KernelImage, Target
from ort_cuda_plugin.ep.device.devices import emulated_devices
from ort_cuda_plugin.ep.device.open_device import OpenDevice

BODY = """def kernel(x):
    tile = cuda.shared.array({arguments})
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    x[i] = tile[31 - i]
"""
DECLARED, ASKED, NAMED, TUPLE, TYPED, TOO_MUCH = (
    KernelSpec("turn", ("*f32",), BODY.format(arguments=arguments), 32)
    for arguments in (
        "32, float32",
        "0, float32",
        "shape=0, dtype=float32",
        "(0,), float32",
        "dtype=float32, shape=0",
        "12289, float32",
    )
)


class Recorder:
    """The emulated device's driver; notes the limits that are set for functions."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.allowed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def FuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.allowed.append(value)
        return int(self.driver.FuncSetAttribute(function, attribute, value))


@pytest.mark.parametrize(
    ("spec", "metadata", "allowed"),
    [
        (DECLARED, None, []),
        (ASKED, None, [227 << 10]),
        (NAMED, None, [227 << 10]),
        (TUPLE, None, [227 << 10]),
        (TYPED, None, [227 << 10]),
        (DECLARED, {IN_LAUNCH: 0}, []),
        (DECLARED, {}, [(227 << 10) - 128]),  # an image that an earlier version stored
        (ASKED, {IN_LAUNCH: 1}, [227 << 10]),
    ],
)
def test_only_kernels_whose_launch_asks_are_allowed_more(
    spec: KernelSpec, metadata: dict[str, int] | None, allowed: list[int]
) -> None:
    device = OpenDevice(emulated_devices()[0])
    recorder = device.driver = Recorder(device.driver)
    if metadata is not None:
        image = compile_kernel(spec, Target.emulated())
        stored = KernelImage(image.data, image.entry, image.target, {**image.metadata, **metadata})
        spec = BuiltKernel(spec.name, spec.signature, spec.source, image=stored)
    device.release_kernels(device.acquire_kernels([spec]))
    assert recorder.allowed == allowed


def test_what_ptx_declares_is_read() -> None:
    """For an architecture that no toolkit knows there is only PTX, from which the declared size is parsed."""
    image = compile_kernel(DECLARED, Target.cuda(99, 0))
    assert "static_shared_bytes" not in image.metadata
    assert declared_bytes(image) == 128
    assert declared_bytes(compile_kernel(ASKED, Target.cuda(99, 0))) == 0


@pytest.mark.parametrize("target", [Target.emulated(), Target.cuda(9, 0)])
def test_a_kernel_that_declares_too_much_says_so(target: Target) -> None:
    with pytest.raises(KernelCompileError, match=r"49168 bytes of shared memory, more than|too much shared data"):
        compile_kernel(TOO_MUCH, target)
