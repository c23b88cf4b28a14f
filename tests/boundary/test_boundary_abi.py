"""The ABI tables, the exports of the library, and its answers to hosts that it cannot serve."""

from __future__ import annotations

import subprocess

import pytest

from isolated import python
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.abi.core import PluginError, attach, core, ffi
from ort_cuda_plugin.abi.declarations import since, slots
from ort_cuda_plugin.abi.structs import CALLBACK_STRUCTS
from ort_cuda_plugin.abi.tables import FUNCTION_TABLES


@pytest.mark.parametrize("table", FUNCTION_TABLES)
def test_every_function_of_a_table_stands_at_its_slot(table: str) -> None:
    for slot in slots(table):
        assert ffi.offsetof(table, slot.name) == 8 * slot.index, slot.name


@pytest.mark.parametrize("struct", CALLBACK_STRUCTS)
def test_every_member_of_a_callback_struct_is_declared(struct: str) -> None:
    assert [name for name, _ in ffi.typeof(struct).fields] == [slot.name for slot in slots(struct)]


def test_a_slot_knows_the_version_that_added_it() -> None:
    assert since("OrtApi", "KernelContext_GetSyncStream") == 28
    assert since("OrtApi", "CreateStatus") == 1
    with pytest.raises(KeyError, match="NoSuchSlot"):
        since("OrtApi", "NoSuchSlot")


def test_the_library_exports_what_onnx_runtime_calls_and_needs_no_python() -> None:
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", get_library_path()], capture_output=True, text=True, check=True
    )
    assert sorted(line.split()[-1] for line in exported.stdout.splitlines()) == [
        "CreateEpFactories",
        "RegisterCustomOps",
        "ReleaseEpFactory",
    ]
    dynamic = subprocess.run(["readelf", "-d", get_library_path()], capture_output=True, text=True, check=True).stdout
    assert "libpython" not in dynamic
    assert "NODELETE" in dynamic


# Stands in for ONNX Runtime: has only GetVersionString, GetApi and, from GetApi(1), CreateStatus.
FAKE_HOST = """
import ctypes, sys
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.abi.core import PluginError, attach, core, ffi
asked, said = [], []
@ffi.callback("OrtStatus *(OrtErrorCode, const char *)")
def create_status(code, message):
    said.append((code, ffi.string(message).decode()))
    return ffi.cast("OrtStatus *", 0x1234)
api = ffi.new("OrtApi *")
api.CreateStatus = create_status
@ffi.callback("const OrtApi *(uint32_t)")
def get_api(version):
    asked.append(version)
    return api if version == 1 else ffi.NULL
version = ffi.new("char[]", sys.argv[1].encode())
base = ffi.new("OrtApiBase *")
base.GetApi = get_api
get_version = ffi.callback("const char *(void)", lambda: version)
base.GetVersionString = get_version
create = ctypes.CDLL(get_library_path()).CreateEpFactories
create.restype = ctypes.c_void_p
def call(name=b"x", base=base, factories=True, room=4, count=True):
    out, number = ffi.new("OrtEpFactory *[4]"), ffi.new("size_t *", 77)
    out[0] = ffi.cast("OrtEpFactory *", 0x5678)
    address = lambda p: ctypes.c_void_p(int(ffi.cast("uintptr_t", p)))
    status = create(name, address(base) if base else None, None, address(out) if factories else None,
                    ctypes.c_size_t(room), address(number) if count else None)
    return status, out[0], number[0]
"""


@pytest.mark.parametrize(("version", "message"), [("1.25.2", "1.26 or newer; this is 1.25.2"), ("2.0", "this is 2.0")])
def test_a_host_that_is_too_old_or_unknown_gets_a_status(version: str, message: str) -> None:
    done = python(
        FAKE_HOST
        + "status, factory, count = call()\n"
        + "assert status == 0x1234 and factory == ffi.NULL and count == 0\n"
        + "assert asked == [1], asked\n"
        + "print(said)",
        version,
    )
    assert message in done.stdout


def test_a_host_that_lies_about_its_version_gets_a_status() -> None:
    done = python(FAKE_HOST + "assert call()[0] == 0x1234; assert asked == [1, 26]; print(said)", "1.26.0")
    assert "does not offer API version 26" in done.stdout


def test_missing_arguments_are_answered_and_not_followed() -> None:
    python(
        FAKE_HOST
        + "assert call(base=None)[0] is None\n"
        + "assert call(base=None, name=None)[0] is None\n"
        + "for bad in ({'factories': False}, {'room': 0}, {'count': False}):\n"
        + "    assert call(**bad)[0] == 0x1234, bad\n"
        + "assert len(said) == 3 and all('room for no factory' in text for _, text in said)",
        "1.31.0",
    )


def test_a_library_of_another_build_is_refused() -> None:
    stale = ffi.new("ocp_core *", {"abi": core().abi ^ 1})
    with pytest.raises(PluginError, match=r"different builds\. Run build_plugin\.py"):
        attach(int(ffi.cast("uintptr_t", stale)))


def test_a_second_copy_of_the_library_is_refused() -> None:
    copy = ffi.new("ocp_core *", core()[0])
    with pytest.raises(PluginError, match="two copies"):
        attach(int(ffi.cast("uintptr_t", copy)))
