"""Compiles applications' CUDA C++, PTX and LTO-IR kernels for the emulated device, by translating their PTX."""

from __future__ import annotations

from typing import Any

from ..foreign import ForeignCodeError, ForeignKernel, ptx_of
from ..kernel import KernelSpec
from ..ptx.parser import Function, Module
from ..targets import KernelImage, Target

CAPABILITY = (9, 0)
"""The compute capability for which CUDA C++ is compiled, unless the emulated target executes PTX of another one."""


def compile_for(compiler: Any, spec: KernelSpec, target: Target, cache: Any) -> KernelImage:
    """Compile a kernel for ``target``.

    Foreign code without a Python version is compiled here if the target is the emulated device. All other kernels are
    compiled by ``compiler``, the module `ort_cuda_plugin.compiler.compile`, which imports Numba. Raises
    KernelCompileError.
    """
    if not isinstance(spec, ForeignKernel) or not target.is_emulated or spec.source:
        image: KernelImage = compiler.compile_kernel(spec, target, cache)
        return image
    try:
        ptx, entry = ptx_of(spec.foreign, target.compute_capability if target.executes_ptx else CAPABILITY)
        module: Module = compiler.parse(ptx)
        check_parameters(spec, module.functions.get(entry), entry)
        image = compiler.compile_ptx_kernel(module, entry, target)
    except (ForeignCodeError, compiler.PtxError) as error:
        raise compiler.KernelCompileError(spec, str(error)) from error
    return image


def check_parameters(spec: ForeignKernel, function: Function | None, entry: str) -> None:
    """Raise ForeignCodeError unless the PTX has the kernel ``entry``, with the parameters of the kernel's signature."""
    if function is None or not function.is_entry:
        raise ForeignCodeError(f"the code has no kernel {entry!r}")
    own = [parameter.size for parameter in function.arguments]
    wanted = [8 if parameter.startswith("*") else int(parameter[1:]) // 8 for parameter in spec.signature]
    if own != wanted:
        raise ForeignCodeError(
            f"the parameters in the code have {own} bytes, those of the declared signature {wanted}. Correct the "
            "signature"
        )
