"""Kernels that applications pass as CUDA C++, PTX, cubins or LTO-IR.

NVRTC compiles CUDA C++ to PTX, and nvJitLink links PTX and LTO-IR to cubins; neither needs a GPU. The emulated device
runs ``source``, a version of the kernel in Python for Numba. Without ``source`` it executes the PTX, and cannot run a
cubin.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ort_cuda_plugin.compiler.elf import Elf
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.nvidia_packages import NVRTC, load_library
from ort_cuda_plugin.compiler.targets import KernelImage, Target, resource_usage
from ort_cuda_plugin.compiler.toolchain import joined_digest, supported_capabilities

from ..abi.errors import Error

KINDS = ("cuda", "ptx", "cubin", "ltoir")


class ForeignCodeError(Error):
    """The given code cannot be compiled as a kernel; the message says why, and what to do."""


@dataclass(frozen=True)
class ForeignCode:
    """An application's code for GPUs.

    Attributes:
        kind: one of `KINDS`.
        images: pairs (architecture, code). The architecture is a name such as "sm_90", or "" for all architectures.
        entry: the kernel's name in the code: in CUDA C++ an ``extern "C"`` name, or an expression such as
            ``scale<float>``.
        options: options of NVRTC, such as "--use_fast_math".
    """

    kind: str
    images: tuple[tuple[str, bytes], ...] = field(repr=False)
    entry: str
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields. Raises ValueError if the images cannot be code of this kind."""
        if self.kind not in KINDS:
            raise ValueError(f"kernel {self.entry}: got the kind {self.kind!r}, expected one of {', '.join(KINDS)}")
        for arch, _ in self.images:
            if not isinstance(arch, str) or not re.fullmatch(r"|sm_\d{2,3}[af]?", arch):
                raise ValueError(f"kernel {self.entry}: {arch!r} is not an architecture: use a name such as sm_90")
            if not arch and self.kind == "cubin":
                raise ValueError(f"kernel {self.entry}: a cubin is for one architecture: give {{'sm_90': cubin}}")
        for arch, data in self.images:
            if not isinstance(data, bytes):
                shown = arch or "all architectures"
                raise ValueError(
                    f"kernel {self.entry}: the code for {shown} has type {type(data).__name__}, expected bytes"
                )
            if self.kind == "cubin":
                try:
                    _sections(data, self.entry, arch)
                except ForeignCodeError as error:
                    raise ValueError(f"kernel {self.entry}: {error}") from error
        if not self.images:
            raise ValueError(f"kernel {self.entry}: got no code, expected code for at least one architecture")
        if self.options and self.kind != "cuda":
            raise ValueError(f"kernel {self.entry}: options are for CUDA C++, not for {self.kind}")

    def image_for(self, compute_capability: tuple[int, int]) -> bytes | None:
        """Return the newest code that runs on a GPU with ``compute_capability``; None if there is none.

        A cubin must be for the same major version and not for a newer minor one; PTX and LTO-IR must be for the same
        architecture or an older one. Code for sm_90a runs on sm_90 only, code for sm_100f within its major version.
        """
        fitting = [
            (*_number(arch), data)
            for arch, data in self.images
            if not arch or self._fits(_number(arch), arch[-1:], compute_capability)
        ]
        return max(fitting, key=lambda row: row[:2])[2] if fitting else None

    def _fits(self, made_for: tuple[int, int], suffix: str, device: tuple[int, int]) -> bool:
        if suffix == "a":
            return made_for == device
        same_family = made_for[0] == device[0] and made_for <= device
        return same_family if self.kind == "cubin" or suffix == "f" else made_for <= device


def _number(arch: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", arch)
    return (int(digits[:-1]), int(digits[-1])) if digits else (0, 0)


@dataclass(frozen=True)
class ForeignKernel(KernelSpec):
    """A kernel with `ForeignCode` for GPUs. ``source`` is its Python version for the emulated device, or ""."""

    foreign: ForeignCode = field(kw_only=True)
    tools = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime")

    @cached_property
    def digest(self) -> str:
        """Return the hex SHA-256 of every field except ``owner`` and ``resident``."""
        code = self.foreign
        images = [f"{arch} {base64.b64encode(data).decode()}" for arch, data in code.images]
        own = repr((self.name, self.signature, self.source, self.launch_bounds))
        return joined_digest(own, code.kind, code.entry, *code.options, "images", *images)

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> Mapping[str, Any]:
        """Return the kernel's fields as values that JSON can represent, for `from_json`."""
        images = [[arch, base64.b64encode(data).decode()] for arch, data in self.foreign.images]
        own = {name: value for name, value in asdict(self).items() if name != "foreign"}
        return {**own, "foreign": {**asdict(self.foreign), "images": images}}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> ForeignKernel:
        """Decode a kernel from `to_json`."""
        code = dict(fields["foreign"])
        code["images"] = tuple((arch, base64.b64decode(data)) for arch, data in code["images"])
        code["options"] = tuple(code["options"])
        own = {**fields, "signature": tuple(fields["signature"]), "foreign": ForeignCode(**code)}
        return ForeignKernel(**own)


def compile_foreign(spec: ForeignKernel, target: Target) -> KernelImage:
    """Return a cubin; PTX if the GPU's architecture is newer than the toolkit. Raises ForeignCodeError."""
    code = spec.foreign
    data = _image_for(code, target)
    if code.kind == "cubin":
        return _image(spec, bytes(data), code.entry, target, {})
    entry, ptx = code.entry, b""
    if code.kind == "cuda":
        ptx, entry = _compile_cuda(code, data, target)
    elif code.kind == "ptx":
        ptx = bytes(data).strip(b"\0 \n")
    return _linked(spec, ptx, data, entry, target)


def _image_for(code: ForeignCode, target: Target) -> bytes:
    """Return the code for the target's architecture. Raises ForeignCodeError if there is none."""
    data = code.image_for(target.compute_capability)
    if data is None:
        raise ForeignCodeError(
            f"the code is for {', '.join(arch for arch, _ in code.images)}, none of which runs on {target.capability}: "
            f"add code for {target.capability}"
        )
    return data


def ptx_of(code: ForeignCode, capability: tuple[int, int]) -> tuple[str, str]:
    """Return (PTX, the kernel's name in it) of the code for an architecture. Raises ForeignCodeError."""
    if code.kind == "cubin":
        raise ForeignCodeError(
            "a cubin is machine code of a GPU, which the emulated device cannot run: give CUDA C++, PTX or LTO-IR, or "
            "a counterpart in Numba or NumPy"
        )
    target = Target.cuda(*capability)
    data = _image_for(code, target)
    if code.kind == "cuda":
        ptx, entry = _compile_cuda(code, data, target)
        return ptx.decode(), entry
    if code.kind == "ptx":
        return bytes(data).strip(b"\0 \n").decode(), code.entry
    from cuda.core import Linker, LinkerOptions, ObjectCode

    try:
        options = LinkerOptions(arch=target.arch, link_time_optimization=True, ptx=True)
        linked = Linker(ObjectCode.from_ltoir(bytes(data)), options=options).link("ptx")
    except Exception as error:
        raise ForeignCodeError(f"nvJitLink does not link the LTO-IR: {error}") from error
    return bytes(linked.code).strip(b"\0 \n").decode(), code.entry


def _compile_cuda(code: ForeignCode, source: bytes, target: Target) -> tuple[bytes, str]:
    """Compile CUDA C++; return (PTX, mangled name of the entry). Raises ForeignCodeError."""
    try:
        from cuda.bindings import nvrtc

        load_library(NVRTC)
        nvrtc.nvrtcVersion()
    except Exception as error:
        raise ForeignCodeError(
            f"NVRTC, which compiles CUDA C++, cannot be used ({type(error).__name__}: {error}): "
            '`pip install "ort-cuda-plugin[nvrtc]"` installs it'
        ) from error

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != 0:
            raise ForeignCodeError(f"a call of NVRTC failed: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
        return result[1] if len(result) > 1 else None

    def text(size: Any, get: Any, program: Any) -> bytes:
        data: bytes = b" " * checked(size(program))
        checked(get(program, data))
        return data.rstrip(b"\0 \n")

    program = checked(nvrtc.nvrtcCreateProgram(bytes(source), f"{code.entry}.cu".encode(), 0, [], []))
    try:
        major, minor = _newest_known(nvrtc, target.compute_capability)
        checked(nvrtc.nvrtcAddNameExpression(program, code.entry.encode()))
        options = [
            f"--gpu-architecture=compute_{major}{minor}".encode(),
            *(o.encode() for o in code.options),
            *_headers(),
        ]
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if failed != 0:
            log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise ForeignCodeError(f"NVRTC does not compile the code: {log.decode(errors='replace')}")
        entry = checked(nvrtc.nvrtcGetLoweredName(program, code.entry.encode())).decode()
        return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), entry
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _headers() -> list[bytes]:
    """Return NVRTC options with the folders of the installed CUDA headers, such as cuda_fp16.h."""
    from cuda.pathfinder import find_nvidia_header_directory

    folders = [find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    return [f"--include-path={folder}".encode() for folder in folders if folder]


def _newest_known(nvrtc: Any, compute_capability: tuple[int, int]) -> tuple[int, int]:
    """Return the newest architecture up to ``compute_capability`` that NVRTC knows; its PTX runs on newer GPUs too.

    If NVRTC names none, return ``compute_capability``.
    """
    failed, *rest = nvrtc.nvrtcGetSupportedArchs()
    known = [divmod(number, 10) for number in (rest[-1] if failed == 0 and rest else ())]
    older = [each for each in known if each <= compute_capability]
    return max(older, default=compute_capability)


def _linked(spec: ForeignKernel, ptx: bytes, data: bytes, entry: str, target: Target) -> KernelImage:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    if ptx and target.compute_capability > supported_capabilities()[-1]:
        return KernelImage(ptx + b"\0", entry, target, {}, ptx)
    lto = spec.foreign.kind == "ltoir"
    try:
        code = ObjectCode.from_ltoir(bytes(data)) if lto else ObjectCode.from_ptx(ptx)
        linker = Linker(code, options=LinkerOptions(arch=target.arch, verbose=True, link_time_optimization=lto or None))
    except Exception as error:
        raise ForeignCodeError(f"nvJitLink does not read the code: {error}") from error
    try:
        cubin = bytes(linker.link("cubin").code)
    except Exception as error:
        raise ForeignCodeError(f"nvJitLink does not link the code: {error}\n{linker.get_error_log()}") from error
    return _image(spec, cubin, entry, target, resource_usage(linker.get_info_log()), ptx)


def _image(
    spec: ForeignKernel, cubin: bytes, entry: str, target: Target, usage: Mapping[str, int], ptx: bytes = b""
) -> KernelImage:
    """Return the image, whose metadata has the bytes of shared memory that the entry declares.

    Raises ForeignCodeError if the cubin lacks the entry, or if its parameters differ from the kernel's signature.
    """
    sections = _sections(cubin, entry, target.arch)
    shared = sections.get(f".nv.shared.{entry}", 0)
    wanted = [8 if parameter.startswith("*") else int(parameter[1:]) // 8 for parameter in spec.signature]
    own = _parameter_bytes(cubin, entry)
    if own and own != wanted:
        raise ForeignCodeError(
            f"the parameters in the code have {own} bytes, those of the declared signature {wanted}. Correct the "
            "signature"
        )
    return KernelImage(cubin, entry, target, {**usage, "static_shared_bytes": shared}, ptx)


_PARAMETER_INFO = 4, 0x17
"""Format and attribute number of a parameter's record in a cubin (.nv.info). It has an index, an offset, and a word
with the size.
"""


def _parameter_bytes(cubin: bytes, entry: str) -> list[int]:
    """Return the size of each parameter of the entry, in bytes; empty if the cubin has no such records."""
    elf = Elf(cubin)
    records = next((elf.contents(each) for each in elf.sections if each.name == f".nv.info.{entry}"), b"")
    found: dict[int, int] = {}
    at = 0
    while at + 4 <= len(records):
        kind, number, value = struct.unpack_from("<BBH", records, at)
        at += 4
        if (kind, number) == _PARAMETER_INFO and at + 12 <= len(records):
            _, place, _, word = struct.unpack_from("<IHHI", records, at)
            found[place] = word >> 18
        at += value if kind == 4 else 0
    return [found[place] for place in sorted(found)]


def _sections(cubin: bytes, entry: str, arch: str) -> dict[str, int]:
    """Return {name: size in bytes} of a cubin's sections. Raises ForeignCodeError for other data, or if the entry is
    missing.
    """
    try:
        sections = {section.name: section.size for section in Elf(cubin).sections}
    except ValueError as error:
        raise ForeignCodeError(f"the image for {arch} is not a cubin: {error}") from error
    if f".text.{entry}" not in sections:
        found = ", ".join(sorted(name[6:] for name in sections if name.startswith(".text."))) or "none"
        raise ForeignCodeError(f"the code has no kernel {entry!r}. Kernels in the code: {found}")
    return sections
