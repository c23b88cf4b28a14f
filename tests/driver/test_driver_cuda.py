"""The driver table for libcuda: names against a stand-in library, constants and layouts against CUDA's header."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import build_plugin
from isolated import python
from ort_cuda_plugin.abi.core import core

HEADER = build_plugin.SOURCES / "driver" / "driver.h"
SOURCE = build_plugin.SOURCES / "driver" / "cuda.c"
SYMBOLS = [*re.findall(r'MEMBER\(\w+, "(\w+)"\)', SOURCE.read_text()), "cuModuleLoadData"]
#: Members that are NULL in the real driver's table.
EMULATED_ONLY = {"LastErrorText", "ReuseMemory", "RedZone"}


def stand_in(folder: Path, missing: str = "") -> dict[str, str]:
    """Return an environment in which libcuda.so.1 is a library whose functions return their index in SYMBOLS."""
    functions = [f"int {name}(void) {{ return {i}; }}" for i, name in enumerate(SYMBOLS) if name != missing]
    (folder / "cuda.c").write_text("\n".join(functions))
    return compiled(folder)


def compiled(folder: Path) -> dict[str, str]:
    """Return an environment in which libcuda.so.1 is the folder's cuda.c, compiled."""
    command = [*build_plugin.compiler(), "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(command, check=True, cwd=folder)
    return {"LD_LIBRARY_PATH": str(folder)}


def test_each_member_is_the_function_of_its_name(tmp_path: Path) -> None:
    code = """
    from ort_cuda_plugin.abi.core import core, ffi
    table = core().driver_cuda(ffi.NULL)
    for member in dir(table):
        function = ffi.cast("int (*)(void)", getattr(table, member))
        print(member, function() if function else -1)
    """
    done = python(code, env=stand_in(tmp_path))
    members = dict(line.split() for line in done.stdout.splitlines())
    assert {member for member in members if members[member] == "-1"} == EMULATED_ONLY
    members = {member: index for member, index in members.items() if member not in EMULATED_ONLY}
    assert len(members) == len(SYMBOLS)
    for member, index in members.items():
        plain = re.sub(r"_v\d$", "", SYMBOLS[int(index)])
        assert plain == {"GraphInstantiate": "cuGraphInstantiateWithFlags"}.get(member, f"cu{member}")


def test_a_driver_that_lacks_a_function_is_named_too_old(tmp_path: Path) -> None:
    code = "from ort_cuda_plugin.abi.device import Device; Device.cuda()"
    done = python(code, env=stand_in(tmp_path, missing="cuGraphExecKernelNodeSetParams_v2"), check=False)
    text = "libcuda.so.1 has no cuGraphExecKernelNodeSetParams_v2: the driver is too old (CUDA 13 is needed, R580 or "
    assert text in done.stderr


def test_a_driver_before_cuda_13_has_no_device_for_us(tmp_path: Path) -> None:
    code = """
    from ort_cuda_plugin.ep.device.devices import cuda_devices
    print(*cuda_devices())
    """
    for version, found in ((12090, "the NVIDIA driver supports CUDA 12.9, .*R580 or newer"), (13000, ".* no device")):
        numbers = {"cuDriverGetVersion": version, "cuDeviceGetCount": 0}
        functions = [f"int {name}(void) {{ return 0; }}" for name in SYMBOLS if name not in numbers]
        functions += [f"int {name}(int *out) {{ *out = {n}; return 0; }}" for name, n in numbers.items()]
        (tmp_path / "cuda.c").write_text("\n".join(functions))
        done = python(code, env=compiled(tmp_path))
        assert re.fullmatch(rf"\[\] {found}", done.stdout.strip()), done.stdout


def test_gpus_for_which_kernels_do_not_compile_are_refused_by_name(tmp_path: Path) -> None:
    code = """
    from ort_cuda_plugin.abi.core import core, ffi, new_error
    infos, count, error = ffi.new("ocp_device_info[4]"), ffi.new("uint32_t *"), new_error()
    print(core().list_devices(0, infos, 4, count, error), count[0], infos[0].ordinal)
    print(ffi.string(error.text).decode())
    from ort_cuda_plugin.ep.device.devices import cuda_devices
    devices, why = cuda_devices()
    print([device.ordinal for device in devices], why == ffi.string(error.text).decode())
    """
    old = "GPU {} (Old) has compute capability 7.5, expected 8.0 or newer"
    one, two = old.format(0), f"{old.format(0)}; {old.format(1)}"
    for count, expected, reason, listed in (  # one old GPU; two old GPUs and a newer one
        (1, "6 0 0", one, "[] True"),
        (3, "0 1 2", two, "[2] True"),
    ):
        numbers = {"cuDriverGetVersion": 13000, "cuDeviceGetCount": count}
        functions = [f"int {name}(int *out) {{ *out = {n}; return 0; }}" for name, n in numbers.items()]
        functions += [
            "int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }",
            'int cuDeviceGetName(char *name, int room, int device) { strcpy(name, "Old"); return 0; }',
            "int cuDeviceGetAttribute(int *out, int attribute, int device) {"
            " *out = attribute == 75 ? 7 + device / 2 : 5; return 0; }",
        ]
        made = {re.split(r"[ (]", function)[1] for function in functions}
        functions += [f"int {name}(void) {{ return 0; }}" for name in SYMBOLS if name not in made]
        (tmp_path / "cuda.c").write_text("\n".join(["#include <string.h>", *functions]))
        assert python(code, env=compiled(tmp_path)).stdout.splitlines() == [expected, reason, listed]


def test_without_a_driver_the_reason_names_the_library(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    code = "from ort_cuda_plugin.abi.device import Device; Device.cuda()"
    done = python(code, env={"LD_LIBRARY_PATH": str(tmp_path)}, check=False)
    assert re.search(r"RuntimeError: no CUDA driver: libcuda\.so\.1 cannot be loaded: .*", done.stderr)


def test_the_emulator_has_every_function() -> None:
    """C sets members that the initializer of a table leaves out to NULL."""
    table = core().driver_emulator()
    assert [member for member in dir(table) if not getattr(table, member)] == []


def cuda_header() -> Path:
    spec = find_spec("nvidia")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for folder in spec.submodule_search_locations:
        for path in Path(folder).glob("*/include/cuda.h"):
            return path
    pytest.skip("the CUDA headers from PyPI are not installed")


def test_numbers_layouts_and_signatures_are_those_of_the_cuda_header(tmp_path: Path) -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    constants = re.findall(r"\b(CU_\w+|CUDA_\w+) = (\d+)", text)
    assert len(constants) > 40
    lines = ["#include <cuda.h>", "#include <stddef.h>"]
    lines += [f'_Static_assert((int){name} == {value}, "{name}");' for name, value in constants]
    lines += re.findall(r"typedef union \{[^}]*\} \w+;", text)  # stand for unions without a name of their own
    structs = re.findall(r"typedef struct \{([^}]*)\} (\w+);", text)
    assert [name for _, name in structs] == [
        "CUDA_KERNEL_NODE_PARAMS",
        "CUDA_MEMCPY3D",
        "CUDA_MEMSET_NODE_PARAMS",
        "CUDA_CONDITIONAL_NODE_PARAMS",
        "CUgraphNodeParams",
        "CUmemLocation",
        "CUmemPoolProps",
        "CUDA_EXTERNAL_MEMORY_HANDLE_DESC",
        "CUDA_EXTERNAL_MEMORY_BUFFER_DESC",
        "CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC",
        "CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS",
        "CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS",
        "CUipcEventHandle",
        "CUipcMemHandle",
        "CUuuid",
    ]
    for body, struct in structs:
        lines.append(f"typedef struct {{ {body} }} our_{struct};")
        lines.append(f'_Static_assert(sizeof(our_{struct}) == sizeof({struct}), "{struct}");')
        for name in re.findall(r"(\w+)[,;]", body):  # skips arrays: headers use reserved bytes later
            same = f"offsetof(our_{struct}, {name}) == offsetof({struct}, {name})"
            lines.append(f'_Static_assert({same}, "{name}");')
    # driver.h declares CUDA's enumerations as int; here their parameters get CUDA's types, so that the types are equal.
    enums = {
        "int status": "CUstreamCaptureStatus status",
        "int *status": "CUstreamCaptureStatus *status",
        "int *type": "CUgraphNodeType *type",
        "int mode": "CUstreamCaptureMode mode",
        "int *mode": "CUstreamCaptureMode *mode",
        "int attribute, CUdeviceptr": "CUpointer_attribute attribute, CUdeviceptr",
        "int attribute, CUdevice": "CUdevice_attribute attribute, CUdevice",
        "int attribute, int value": "CUfunction_attribute attribute, int value",
        "int attribute, void": "CUmemPool_attribute attribute, void",
    }
    table = re.search(r"typedef struct ocp_driver \{(.*)\} ocp_driver;", text, flags=re.DOTALL)
    assert table is not None
    for ours, theirs in enums.items():
        table = re.match(r"(.*)", table[1].replace(ours, theirs), flags=re.DOTALL)
        assert table is not None
    members = re.findall(r"CUresult \(\*(\w+)\)\(([^;]*)\);", table[1])
    assert len(members) == len(SYMBOLS)
    by_name = {re.sub(r"_v\d$", "", symbol): symbol for symbol in SYMBOLS}
    for member, parameters in members:
        symbol = by_name[{"GraphInstantiate": "cuGraphInstantiateWithFlags"}.get(member, f"cu{member}")]
        parameters = parameters.replace(", size_t image_bytes", "")
        lines.append(f"CUresult (*check_{member})({parameters}) = {symbol};")
    (tmp_path / "check.c").write_text("\n".join(lines) + "\n")
    include = ["-I", str(cuda_header().parent)]
    # Without __CUDA_API_VERSION_INTERNAL, macros of the header rename cuMemAlloc to cuMemAlloc_v2, for example.
    command = [
        *build_plugin.compiler(),
        "-Werror",
        "-D__CUDA_API_VERSION_INTERNAL",
        *include,
        "-fsyntax-only",
        "check.c",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
