"""Compiles kernels: Python function -> Numba -> LLVM IR -> cubin, or an object for the host CPU (emulated device).

Only this module, and those that it imports from `ort_cuda_plugin.compiler`, use Numba and llvmlite. A process imports
Numba and llvmlite only when it has to compile a kernel.
"""

from __future__ import annotations

import builtins
import dis
import linecache
import math
import re
import struct
import types as python_types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba import cuda
from numba.core.errors import NumbaError
from numba.cuda import cuda_paths, libdevice, types
from numba.cuda.compiler import _compile_pyfunc_with_fixup
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.core.errors import NumbaError as CudaNumbaError
from numba.cuda.cudadrv import nvvm

from ort_cuda_plugin.compiler import front_end, intrinsics
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.elf import Elf
from ort_cuda_plugin.compiler.foreign import ForeignCodeError, ForeignKernel, compile_foreign
from ort_cuda_plugin.compiler.host import counts
from ort_cuda_plugin.compiler.host import entry as host_entry
from ort_cuda_plugin.compiler.host import ir as host_ir
from ort_cuda_plugin.compiler.host.stack_frame import frame_bytes
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.nvidia_packages import NVJITLINK, NVVM, load_library, nvidia_files
from ort_cuda_plugin.compiler.ptx.parser import Module, PtxError, parse
from ort_cuda_plugin.compiler.ptx.translate import llvm_module
from ort_cuda_plugin.compiler.targets import KernelImage, Target, resource_usage
from ort_cuda_plugin.compiler.toolchain import closest_capability, ir_key, supported_capabilities

from ..abi.errors import Error

scalar_types = {"i32": types.int32, "i64": types.int64, "f32": types.float32, "f64": types.float64}
element_types = {
    **scalar_types,
    "f16": types.uint16,
    "bf16": types.uint16,
    "f8e4m3fn": types.uint8,
    "f8e4m3fnuz": types.uint8,
    "f8e5m2": types.uint8,
    "f8e5m2fnuz": types.uint8,
    "f8e8m0": types.uint8,
    "f4e2m1": types.uint8,
    "b1": types.uint8,
    "i2": types.int8,
    "i4": types.int8,
    "u2": types.uint8,
    "u4": types.uint8,
    "i8": types.int8,
    "i16": types.int16,
    "u8": types.uint8,
    "u16": types.uint16,
    "u32": types.uint32,
    "u64": types.uint64,
}


class KernelCompileError(Error):
    """A kernel does not compile. The message names the kernel and, if known, the line of its source."""

    ort_code = 6  # ORT_RUNTIME_EXCEPTION

    def __init__(self, spec: KernelSpec, reason: str, filename: str = "", line: int = 0) -> None:
        place = f" ({filename}, line {line})" if line else ""
        source = linecache.getline(filename, line).strip() if line else ""
        shown = f"\n    {source}" if source else ""
        owner = f" of {spec.owner}" if spec.owner else ""
        super().__init__(f"kernel {spec.name!r}{owner}{place}: {reason}{shown}")
        self.spec, self.filename, self.line = spec, filename, line


def compile_kernel(spec: KernelSpec, target: Target, cache: KernelCache | None = None) -> KernelImage:
    """Compile one kernel. Raises KernelCompileError. Needs no device. Threads may call it concurrently.

    If ``cache`` has the kernel's LLVM IR, Numba does not run; otherwise the IR is stored in ``cache``.
    """
    if isinstance(spec, ForeignKernel):
        try:
            if not target.is_emulated:
                return compile_foreign(spec, target)
            if not spec.source:
                raise ForeignCodeError("the kernel has no counterpart in Numba, which the emulated device would run")
        except ForeignCodeError as error:
            raise KernelCompileError(spec, str(error)) from error
    # Hold Numba's own lock, so that no other compilation in this process runs with the patches of `kernel_ir`.
    with global_compiler_lock:
        ir = kernel_ir(spec) if cache is None else cached_ir(spec, cache)
        return compile_emulated(spec, ir, target) if target.is_emulated else compile_cuda(spec, ir, target)


# ---- Python function of a kernel ----


@lru_cache(maxsize=1)
def kernel_namespace() -> dict[str, Any]:
    """Return the names that kernel sources can use: intrinsics, types, ``cuda``, ``math``."""
    names: dict[str, Any] = {"cuda": cuda, "libdevice": libdevice, "math": math, "__builtins__": builtins}
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"):
        names[name] = getattr(types, name)
    names.update({name: getattr(intrinsics, name) for name in intrinsics.__all__})
    return names


def kernel_function(spec: KernelSpec) -> Callable[..., None]:
    """Execute the kernel's source, and return the Python function that it defines. Raises KernelCompileError."""
    filename = f"<kernel {spec.symbol}>"
    linecache.cache[filename] = (len(spec.source), None, spec.source.splitlines(keepends=True), filename)
    namespace = dict(kernel_namespace())
    try:
        exec(compile(spec.source, filename, "exec"), namespace)
    except SyntaxError as error:
        raise KernelCompileError(spec, error.msg, filename, error.lineno or 0) from error
    function = namespace.get("kernel")
    if not isinstance(function, python_types.FunctionType):
        raise KernelCompileError(spec, "the source defines no function `kernel`", filename)
    return function


# ---- LLVM IR ----


@dataclass(frozen=True)
class KernelIR:
    """The LLVM IR of a kernel and its device functions: one text per module, as numba-cuda passes them to NVVM."""

    modules: tuple[str, ...]
    mangled_name: str


def parameter_type(entry: str) -> types.Type:
    return types.CPointer(element_types[entry[1:]]) if entry.startswith("*") else scalar_types[entry]


@lru_cache(maxsize=64)
def kernel_ir(spec: KernelSpec) -> KernelIR:
    """Compile the kernel's source to LLVM IR with Numba's front end.

    The most recent results are cached, because reports compile one kernel for several architectures. Raises
    KernelCompileError.
    """
    function = kernel_function(spec)
    bounds = (spec.launch_bounds, spec.resident) if spec.resident else spec.launch_bounds
    signature = types.void(*(parameter_type(entry) for entry in spec.signature))
    try:
        with front_end.front_end_of_kernels():
            library, _ = _compile_pyfunc_with_fixup(
                function,
                signature,
                device=False,
                abi="numba",
                cc=front_end.compute_capability,
                launch_bounds=bounds or None,
            )
            result = KernelIR(tuple(library.llvm_strs), library._entry_name)
            del library, _  # the garbage collector, which now resumes, can free them at once
        return result
    except (NumbaError, CudaNumbaError, NameError, TypeError, ValueError, NotImplementedError) as error:
        filename, line, reason = explain(function, error)
        raise KernelCompileError(spec, reason, filename, line) from error


def cached_ir(spec: KernelSpec, cache: KernelCache) -> KernelIR:
    key = ir_key(spec)
    texts = cache.load_ir(key)
    if texts is not None:
        return KernelIR(tuple(texts[1:]), texts[0])
    ir = kernel_ir(spec)
    cache.store_ir(key, [ir.mangled_name, *ir.modules])
    return ir


max_error_lines = 20


def explain(function: Callable[..., None], error: Exception) -> tuple[str, int, str]:
    """Return (file, line, reason) of an error that Numba raised, parsed from the error's text."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    shown = text.split('\nFile "')[0].split("\nDuring: ")[0].splitlines()
    shown = [line for line in shown if line.strip() and not line.startswith("Failed in ")]
    reason = "\n".join(shown[:max_error_lines]) or type(error).__name__
    if "NRT required" in text:
        reason = "the kernel creates an array: use as many indices as an array has dimensions, and create no arrays"
    if place := re.search(r'File "([^"]+)", line (\d+)', text):
        return place[1], int(place[2]), reason
    line = function.__code__.co_firstlineno
    if name := re.search(r"name '(\w+)' is not defined", text):
        for instruction in dis.get_instructions(function):
            line = (instruction.positions and instruction.positions.lineno) or line
            if instruction.argval == name[1]:
                break
    return function.__code__.co_filename, line, reason


# ---- cubins and PTX for GPUs ----


ADVICE = '; `pip install "ort-cuda-plugin[cuda]"` installs the compilers for GPUs'


def find_nvvm(spec: KernelSpec) -> None:
    """Load NVVM and libdevice. Raises KernelCompileError if one of the two is missing.

    Numba's own search for libdevice would also require NVRTC and other libraries, which are not needed here.
    """
    load_library(NVVM)
    try:
        if nvvm.LibDevice._cache_ is None and (path := _libdevice()):
            nvvm.LibDevice._cache_ = Path(path).read_bytes()
        nvvm.LibDevice()
        nvvm.NVVM()
    except Exception as error:  # Numba and cuda-bindings raise different types for a missing library
        raise KernelCompileError(spec, f"NVVM cannot be loaded ({error}){ADVICE}") from error


def _libdevice() -> str | Path | None:
    installed = next(nvidia_files("*/nvvm/libdevice/libdevice.10.bc"), None)
    return installed or cuda_paths._get_libdevice_path().info


def find_linker(spec: KernelSpec) -> None:
    """Check that nvJitLink is installed; without it, cuda-core would search for a driver. Raises KernelCompileError."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    load_library(NVJITLINK)
    try:
        load_nvidia_dynamic_lib("nvJitLink")
    except DynamicLibNotFoundError as error:
        raise KernelCompileError(spec, f"nvJitLink is not installed{ADVICE}") from error


def with_short_rounding(ptx: bytes, capability: tuple[int, int]) -> bytes:
    """Return the PTX; from sm_90 on, with its roundings to TF32 replaced by the instruction that rounds half to even.

    Rounding half away from zero (``cvt.rna``) takes three machine instructions on all GPUs.
    """
    return ptx.replace(b"cvt.rna.tf32.f32", b"cvt.rn.tf32.f32") if capability >= (9, 0) else ptx


def compile_ptx(spec: KernelSpec, ir: KernelIR, target: Target) -> bytes:
    """Compile the kernel's IR to PTX with NVVM. Raises KernelCompileError."""
    modules = [text.replace(ir.mangled_name, spec.symbol) for text in ir.modules]
    try:
        capability = closest_capability(target.compute_capability)
    except ValueError as error:
        raise KernelCompileError(spec, str(error)) from error
    find_nvvm(spec)
    try:
        ptx = nvvm.compile_ir(modules, arch="compute_{}{}".format(*capability), opt=3).strip(b"\0 \n")
    except Exception as error:
        advice = "" if spec.owner else ". Report the model"
        raise KernelCompileError(spec, f"NVVM does not compile the kernel: {error}{advice}") from error
    return with_short_rounding(ptx, capability)


def compile_cuda(spec: KernelSpec, ir: KernelIR, target: Target) -> KernelImage:
    """Compile LLVM IR to a cubin, or to PTX for the driver if the architecture is newer than the toolkit.

    Raises KernelCompileError.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx = compile_ptx(spec, ir, target)
    if target.compute_capability > supported_capabilities()[-1]:
        return KernelImage(bytes(ptx) + b"\0", spec.symbol, target, {}, bytes(ptx))
    find_linker(spec)
    options = LinkerOptions(arch=target.arch, verbose=True)
    linker = Linker(ObjectCode.from_ptx(ptx), options=options)
    try:
        cubin = linker.link("cubin").code
    except Exception as error:
        raise KernelCompileError(
            spec, f"nvJitLink does not link the kernel: {error}\n{linker.get_error_log()}"
        ) from error
    return KernelImage(bytes(cubin), spec.symbol, target, resource_usage(linker.get_info_log()), bytes(ptx))


# ---- objects for the emulated device ----


@lru_cache(maxsize=1)
def host_target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static",
        codemodel="large",
    )


def optimize(module: llvm.ModuleRef, configure: Callable[[llvm.ModulePassManager], None]) -> None:
    builder = llvm.create_pass_builder(host_target_machine(), llvm.create_pipeline_tuning_options(3))
    passes = llvm.create_new_module_pass_manager()
    configure(passes)
    passes.run(module, builder)


function_head = re.compile(r"^(define [^\n]*\)(?: (?:local_)?unnamed_addr)?)", re.MULTILINE)
"""The head of a function definition, up to its attributes.

Attributes are added in the text, since llvmlite below 0.48 can add attributes only to the result of a function.
"""


def inline_into_kernel(prepared: Sequence[str], kernel: str, count: bool = False) -> str:
    """Return one module in which all functions are inlined into the kernel, with local variables in registers."""
    main = None
    for text in prepared:
        module = llvm.parse_assembly(function_head.sub(r"\1 alwaysinline", text))
        if main is None:
            main = module
        else:
            main.link_in(module)
    assert main is not None
    main.triple = llvm.get_process_triple()
    main.data_layout = str(host_target_machine().target_data)
    for function in main.functions:
        if not function.is_declaration and function.name != kernel:
            function.linkage = "internal"

    def configure(passes: llvm.ModulePassManager) -> None:
        passes.add_always_inliner_pass()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        passes.add_global_dead_code_eliminate_pass()

    optimize(main, configure)
    if count:
        # In counting mode, optimize as NVVM does, so that a value that the IR loads repeatedly counts as one load.
        options = llvm.create_pipeline_tuning_options(2)
        options.loop_vectorization = options.slp_vectorization = False
        builder = llvm.create_pass_builder(host_target_machine(), options)
        builder.getModulePassManager().run(main, builder)
    return str(main)


MAX_DECLARED_SHARED = 48 << 10
"""Maximum bytes of shared memory that a kernel may declare statically, on every device."""


def excess_shared_memory(static_bytes: int) -> str:
    """Return why a kernel that declares ``static_bytes`` of shared memory is rejected; "" if it is accepted."""
    if static_bytes <= MAX_DECLARED_SHARED:
        return ""
    return (
        f"it declares {static_bytes} bytes of shared memory, more than the {MAX_DECLARED_SHARED} that a kernel can "
        "declare. Request the bytes in the launch instead, and declare an array of size 0 in the kernel"
    )


def emulated_ir(spec: KernelSpec, ir: KernelIR, target: Target) -> str:
    """Return the LLVM IR of a kernel for the emulated device, before optimization. Raises KernelCompileError."""
    sizes = [0 if entry.startswith("*") else int(entry[1:]) // 8 for entry in spec.signature]
    try:
        if target.executes_ptx:
            module = parse(compile_ptx(spec, ir, target).decode())
            text, shared = ptx_kernel_module(module, spec.symbol, sizes, target)
        else:
            shared = host_ir.SharedMemory()
            prepared = [host_ir.prepare_module(text, shared, target.check) for text in ir.modules]
            shared.finish()
            inlined = inline_into_kernel(prepared, ir.mangled_name, target.count)
            modes = (target.check, target.contract, target.count)
            text = host_ir.kernel_module(inlined, ir.mangled_name, spec.symbol, sizes, shared, *modes)
    except (host_entry.UnsupportedIR, PtxError) as error:
        raise KernelCompileError(spec, f"the emulated device does not support {error}") from error
    if reason := excess_shared_memory(shared.static_bytes):
        raise KernelCompileError(spec, reason)
    return text


def ptx_kernel_module(
    module: Module, kernel: str, sizes: list[int], target: Target
) -> tuple[str, host_ir.SharedMemory]:
    """Return (LLVM IR for the emulated device, layout of shared memory) of a kernel of a PTX module.

    ``sizes`` are the ``parameter_bytes`` of `kernel_module`. Raises PtxError and UnsupportedIR.
    """
    module.check = target.check
    ir, static_bytes = llvm_module(module, kernel, [size == 0 for size in sizes], target.contract)
    shared = host_ir.SharedMemory({"": 0}, static_bytes)
    inlined = inline_into_kernel([ir], kernel, target.count)
    # contract=False: the translation of PTX has already marked the operations that may fuse to an FMA
    return host_ir.kernel_module(
        inlined, kernel, kernel, sizes, shared, target.check, contract=False, count=target.count
    ), shared


OPTIMIZATION_LEVEL = 1
"""LLVM's optimization level for the emulated device. Kernels run as fast as with level 3, and compile in three quarters
of the time.
"""


def optimized_module(texts: Sequence[str]) -> llvm.ModuleRef:
    """Return one module of the texts from `emulated_ir`, optimized and ready for code generation."""
    module, *others = (llvm.parse_assembly(text) for text in texts)
    for other in others:
        module.link_in(other)
    module.triple = llvm.get_process_triple()
    module.data_layout = str(host_target_machine().target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(OPTIMIZATION_LEVEL)
    options.slp_vectorization = True  # turns the register tiles of GEMMs into SIMD vectors
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(host_target_machine(), options)
    builder.getModulePassManager().run(module, builder)
    return module


def compile_emulated(spec: KernelSpec, ir: KernelIR, target: Target) -> KernelImage:
    return emulated_image(spec.symbol, emulated_ir(spec, ir, target), target)


def compile_ptx_kernel(module: Module, kernel: str, target: Target) -> KernelImage:
    """Compile a kernel of a PTX module for the emulated device. Raises PtxError."""
    return emulated_image(kernel, ptx_kernel_text(module, kernel, target), target)


def compile_ptx_module(module: Module, target: Target) -> bytes:
    """Compile all kernels of a PTX module into one object, in which they share global variables. Raises PtxError."""
    kernels = [name for name, function in module.functions.items() if function.is_entry and function.is_defined]
    if not kernels:
        raise PtxError(1, module.target, "the module has no kernel")
    return emulated_object(kernels, [ptx_kernel_text(module, kernel, target) for kernel in kernels])


def ptx_kernel_text(module: Module, kernel: str, target: Target) -> str:
    """Return the LLVM IR of a PTX module's kernel for the emulated device, before optimization. Raises PtxError."""
    function = module.functions[kernel]
    sizes = [0 if parameter.is_pointer else parameter.size for parameter in function.parameters]
    try:
        text, shared = ptx_kernel_module(module, kernel, sizes, target)
    except host_entry.UnsupportedIR as error:
        raise PtxError(function.line, kernel, f"the emulated device does not support {error}") from error
    if reason := excess_shared_memory(shared.static_bytes):
        raise PtxError(function.line, kernel, reason)
    return text


def emulated_object(symbols: Sequence[str], texts: Sequence[str]) -> bytes:
    """Return an object file with the code of kernels for the emulated device. ``texts`` has the LLVM IR of each kernel.

    The kernels' ``.meta`` constants get the stack bytes, which are known only from the machine code.
    """
    data = bytearray(host_target_machine().emit_object(optimized_module(texts)))
    elf = Elf(bytes(data))
    for symbol in symbols:
        code = elf.symbol(symbol)
        start = elf.symbol_offset(code)
        stack = frame_bytes(bytes(data[start : start + code.size]), elf.machine)
        struct.pack_into("<I", data, elf.symbol_offset(elf.symbol(f"{symbol}.meta")) + 12, stack)
    return bytes(data)


def emulated_image(symbol: str, text: str, target: Target) -> KernelImage:
    """Return the image of one kernel for the emulated device; ``text`` is its LLVM IR."""
    data = emulated_object([symbol], [text])
    elf = Elf(data)
    mode, static_shared, stack = struct.unpack_from("<III", data, elf.symbol_offset(elf.symbol(f"{symbol}.meta")) + 4)
    return KernelImage(
        data,
        symbol,
        target,
        {
            "fibers": mode,
            "static_shared_bytes": static_shared,
            "stack_bytes": stack,
            **(counts.metadata(text) if target.count else {}),
        },
    )
