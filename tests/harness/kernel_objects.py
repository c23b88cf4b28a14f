"""Flags of the C compiler for kernel objects of the emulated device, on the CPU of the machine."""

from __future__ import annotations

import platform

IS_AARCH64 = platform.machine() == "aarch64"

_CPU_FLAGS = (
    # Outline atomics are calls of functions in libgcc, with which kernel objects are not linked.
    "-mno-outline-atomics" if IS_AARCH64 else "-fcf-protection=none",
)
KERNEL_FLAGS = ("-mcmodel=large", "-fno-pic", "-fno-pie", "-fno-stack-protector", *_CPU_FLAGS)
"""The large code model is that of the kernel compiler."""
OTHER_CODE_MODELS = {
    model: (f"-mcmodel={model}", "-fPIC", "-g", *_CPU_FLAGS) for model in ("small", "medium")[: 1 if IS_AARCH64 else 2]
}
"""Flags for the other code models that the C compiler has for the CPU: name -> flags."""
