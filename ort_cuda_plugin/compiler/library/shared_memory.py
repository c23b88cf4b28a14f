"""Shared memory of a compiled kernel: the declared bytes, and whether launches may request dynamic bytes."""

from __future__ import annotations

import re

from ort_cuda_plugin.compiler.foreign import ForeignKernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import BuiltKernel, KernelImage

_OF_THE_LAUNCH = re.compile(r"\bshared\.array\((?:[^()]*\bshape\s*=)?\s*\(?\s*0\b")
IN_LAUNCH = "shared_bytes_in_launch"
"""Key in the metadata of stored kernels; its value is 1 if a launch may request dynamic shared memory, else 0."""


def may_ask_in_launch(spec: KernelSpec) -> bool:
    """Return whether a launch of the kernel may request dynamic shared memory, besides what its code declares."""
    if isinstance(spec, BuiltKernel):
        return bool(spec.image.metadata.get(IN_LAUNCH, 1))
    if isinstance(spec, ForeignKernel):
        return True
    return "shared.array" in spec.source and _OF_THE_LAUNCH.search(spec.source) is not None


def declared_bytes(image: KernelImage) -> int:
    """Return the bytes of shared memory that the kernel's code declares. For PTX, which the driver compiles, parse the
    PTX.
    """
    known = image.metadata.get("static_shared_bytes")
    if known is not None or image.data.startswith(b"\x7fELF"):
        return known or 0
    arrays = re.findall(rb"\.shared \.align (\d+) \.b8 \w+\[(\d+)\]", image.data)
    return sum(-(-int(size) // int(align)) * int(align) for align, size in arrays)
