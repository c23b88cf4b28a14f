"""Compiles kernels and runs them on the emulated device, for tests of the compile pipeline and of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ort_cuda_plugin.abi.device import Device, DeviceArray, Module
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target

scalars = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}


@lru_cache(maxsize=512)
def loaded(spec: KernelSpec, check: bool = False) -> Module:
    return Device.emulated(0).load(compile_kernel(spec, Target.emulated(check)).data)


def run(
    spec: KernelSpec,
    grid: Sequence[int],
    block: Sequence[int],
    *args: Any,
    shared: int = 0,
    check: bool = False,
) -> list[np.ndarray]:
    """Launch the kernel on device copies of the array arguments, and return their contents after the launch."""
    module = loaded(spec, check)
    device = module.device
    values: list[Any] = []
    for kind, arg in zip(spec.signature, args, strict=True):
        values.append(device.upload(arg) if kind.startswith("*") else scalars[kind](arg))
    module.launch(spec.symbol, grid, block, values, shared=shared)
    device.synchronize()
    return [device.download(value) for value in values if isinstance(value, DeviceArray)]


def kernel(name: str, signature: Sequence[str], source: str, **options: Any) -> KernelSpec:
    return KernelSpec(name, tuple(signature), source=source, **options)
