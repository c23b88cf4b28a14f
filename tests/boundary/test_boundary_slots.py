"""Every slot of the structs for ONNX Runtime, called with hostile arguments, at two negotiated versions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import onnxruntime
import pytest

import build_plugin
from isolated import python

# Opens a libonnxruntime beside Python's, and gives the plugin an OrtApiBase that states the version in argv[2].
HOST = """
import ctypes, sys
import ort_cuda_plugin
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.declarations import slots
library, stated = sys.argv[1], sys.argv[2]
version = int(stated.split(".")[1])
get_base = ctypes.CDLL(library).OrtGetApiBase
get_base.restype = ctypes.c_void_p
real = ffi.cast("const OrtApiBase *", get_base())
text = ffi.new("char[]", stated.encode())
get_version = ffi.callback("const char *(void)", lambda: text)
base = ffi.new("OrtApiBase *", {"GetApi": real.GetApi, "GetVersionString": get_version})
api = real.GetApi(version)
env = ffi.new("OrtEnv **")
assert api.CreateEnv(3, b"host", env) == ffi.NULL
plugin = ctypes.CDLL(get_library_path())
plugin.CreateEpFactories.restype = plugin.ReleaseEpFactory.restype = ctypes.c_void_p
out, count = ffi.new("OrtEpFactory *[4]"), ffi.new("size_t *")
address = lambda p: ctypes.c_void_p(int(ffi.cast("uintptr_t", p)))
def failure(status):
    assert status != ffi.NULL
    result = int(api.GetErrorCode(status)), ffi.string(api.GetErrorMessage(status)).decode()
    api.ReleaseStatus(status)
    return result
def ok(status):
    assert status == ffi.NULL, failure(status)
status = plugin.CreateEpFactories(b"x.virtual", address(base), None, address(out), ctypes.c_size_t(4), address(count))
assert status is None, failure(ffi.cast("OrtStatus *", status))
assert count[0] == 1
factory = out[0]
assert factory.ort_version_supported == version
NOT_IMPLEMENTED = 9
def metadata():
    offered = ffi.new("OrtEpDevice *[8]")
    ok(factory.GetSupportedDevices(factory, ffi.NULL, 0, offered, 8, count))
    assert count[0] == 1
    return ffi.new("const OrtKeyValuePairs *[]", [api.EpDevice_EpMetadata(offered[0])])
"""

FACTORY = """
for slot in slots("OrtEpFactory")[1:]:
    assert (getattr(factory, slot.name) != ffi.NULL) == (slot.since <= version), slot.name
assert ffi.string(factory.GetName(factory)) == b"CudaPluginExecutionProvider"
assert ffi.string(factory.GetVendor(factory))
assert ffi.string(factory.GetVersion(factory)).decode() == ort_cuda_plugin.__version__
assert factory.GetVendorId(factory) == 0x10DE
assert factory.IsStreamAware(factory)
number = ffi.new("size_t *", 7)
ok(factory.GetSupportedDevices(factory, ffi.NULL, 0, ffi.NULL, 0, number)); assert number[0] == 0
number[0] = 7
ok(factory.GetNumCustomOpDomains(factory, number)); assert number[0] == 0
ok(factory.GetCustomOpDomains(factory, ffi.NULL, 0))
compatibility = ffi.new("OrtCompiledModelCompatibility *", 3)
ok(factory.ValidateCompiledModelCompatibilityInfo(factory, ffi.NULL, 0, ffi.NULL, compatibility))
assert compatibility[0] == 0
ok(factory.GetHardwareDeviceIncompatibilityDetails(factory, ffi.NULL, ffi.NULL))
importer = ffi.new("OrtExternalResourceImporterImpl **", ffi.cast("OrtExternalResourceImporterImpl *", 8))
status = factory.CreateExternalResourceImporterForDevice(factory, ffi.NULL, importer)
code, message = failure(status)
assert code == 2 and "the device is not one that CudaPluginExecutionProvider offers" in message
assert importer[0] == ffi.NULL
assert failure(factory.InitGraphicsInterop(factory, ffi.NULL, ffi.NULL))[0] == NOT_IMPLEMENTED
ok(factory.DeinitGraphicsInterop(factory, ffi.NULL))
if version >= 28:
    ok(factory.SelectBestModelCandidate(factory, ffi.NULL, ffi.NULL, 3, ffi.NULL, number)); assert number[0] == 0
    assert "expected at least one compiled model, got none" in failure(
        factory.SelectBestModelCandidate(factory, ffi.NULL, ffi.NULL, 0, ffi.NULL, number))[1]
factory.ReleaseAllocator(factory, ffi.NULL)
factory.ReleaseEp(factory, ffi.NULL)
ep = ffi.new("OrtEp **", ffi.cast("OrtEp *", 8))
options = ffi.new("OrtSessionOptions **")
ok(api.CreateSessionOptions(options))
message = failure(factory.CreateEp(factory, ffi.NULL, ffi.NULL, 0, options[0], ffi.NULL, ep))[1]
assert "selected no device" in message and ep[0] == ffi.NULL, message
assert plugin.ReleaseEpFactory(None) is None
assert plugin.ReleaseEpFactory(address(factory)) is None
print("end")
"""

EP = """
options, ep = ffi.new("OrtSessionOptions **"), ffi.new("OrtEp **")
ok(api.CreateSessionOptions(options))
ok(factory.CreateEp(factory, ffi.NULL, metadata(), 1, options[0], ffi.NULL, ep))
ep = ep[0]
assert ep.ort_version_supported == version
for slot in slots("OrtEp")[1:]:
    assert slot.since <= version or getattr(ep, slot.name) == ffi.NULL, slot.name
assert ffi.string(ep.GetName(ep)) == b"CudaPluginExecutionProvider"
layout = ffi.new("OrtEpDataLayout *", 1)
ok(ep.GetPreferredDataLayout(ep, layout)); assert layout[0] == 0
flag = ffi.new("bool *")
ok(ep.IsConcurrentRunSupported(ep, flag)); assert flag[0]
ok(ep.OnRunStart(ep, ffi.NULL))
ok(ep.Sync(ep))
assert not ep.IsGraphCaptureEnabled(ep) and not ep.IsGraphCaptured(ep, 0)
assert failure(ep.ReplayGraph(ep, 0))[0] == NOT_IMPLEMENTED
registry = ffi.new("const OrtKernelRegistry **")
ok(ep.GetKernelRegistry(ep, registry)); assert registry[0] != ffi.NULL
if version >= 27:
    device = ffi.new("const OrtMemoryDevice **")
    ok(ep.GetDefaultMemoryDevice(ep, device)); assert device[0] != ffi.NULL
ok(ep.Compile(ep, ffi.NULL, ffi.NULL, 0, ffi.NULL, ffi.NULL))
ep.ReleaseNodeComputeInfos(ep, ffi.NULL, 0)
none = ffi.new("OrtNodeComputeInfo *[2]")
ep.ReleaseNodeComputeInfos(ep, none, 2)
# A compilation that fails leaves nothing for ORT to release, whatever stood there.
graphs, nodes = ffi.new("const OrtGraph *[1]"), ffi.new("const OrtNode *[1]")
none[0] = ffi.cast("OrtNodeComputeInfo *", 8)
contexts = ffi.new("OrtNode *[1]", [ffi.cast("OrtNode *", 8)])
import ort_cuda_plugin.ep.session_state as session_state
def broken(*arguments): raise ValueError("deliberate")
session_state.read_graph = broken
code, message = failure(ep.Compile(ep, graphs, nodes, 1, none, contexts))
assert (code, message) == (2, "deliberate") and none[0] == ffi.NULL and contexts[0] == ffi.NULL
factory.ReleaseEp(factory, ep)
assert plugin.ReleaseEpFactory(address(factory)) is None
print("end")
"""


# Captures Runs without nodes into CUDA graphs and replays them.
CAPTURE = """
options, ep = ffi.new("OrtSessionOptions **"), ffi.new("OrtEp **")
ok(api.CreateSessionOptions(options))
ok(api.AddSessionConfigEntry(options[0], b"ep.cudapluginexecutionprovider.enable_cuda_graph", b"1"))
ok(factory.CreateEp(factory, ffi.NULL, metadata(), 1, options[0], ffi.NULL, ep))
ep = ep[0]
def run_options(graph):
    out = ffi.new("OrtRunOptions **")
    ok(api.CreateRunOptions(out))
    if graph is not None:
        ok(api.AddRunConfigEntry(out[0], b"gpu_graph_id", graph))
    return out[0]
def run(graph=None):
    made = run_options(graph)
    ok(ep.OnRunStart(ep, made))
    ok(ep.OnRunEnd(ep, made, True))
    api.ReleaseRunOptions(made)
assert ep.IsGraphCaptureEnabled(ep)
assert ep.GetGraphCaptureNodeAssignmentPolicy(ep) == 1  # ALLOW_CPU_FOR_SHAPES
assert "no CUDA graph 0" in failure(ep.ReplayGraph(ep, 0))[1]
for text in (b"two", b"-2", b"1x", b"99999999999"):
    code, message = failure(ep.OnRunStart(ep, run_options(text)))
    assert code == 2 and "gpu_graph_id" in message, message
for _ in range(4):
    run(b"-1")
assert not ep.IsGraphCaptured(ep, -1)
for graph in (None, b"7"):
    number = int(graph or 0)
    for count in range(3):
        assert not ep.IsGraphCaptured(ep, number), count
        run(graph)
    assert ep.IsGraphCaptured(ep, number)
    ok(ep.ReplayGraph(ep, number))
assert ort_cuda_plugin.counters()["graphs_live"] == 2
if version >= 27:
    ok(ep.ReleaseCapturedGraph(ep, 7))
    ok(ep.ReleaseCapturedGraph(ep, 8))
    assert not ep.IsGraphCaptured(ep, 7) and ep.IsGraphCaptured(ep, 0)
    assert "no CUDA graph 7" in failure(ep.ReplayGraph(ep, 7))[1]
    for _ in range(3):
        run(b"7")
    assert ep.IsGraphCaptured(ep, 7)
import threading
elsewhere = []
thread = threading.Thread(target=lambda: elsewhere.append(ep.IsGraphCaptured(ep, 0)))
thread.start(); thread.join()
assert elsewhere == [False]
factory.ReleaseEp(factory, ep)
assert ort_cuda_plugin.counters()["graphs_live"] == 0
assert plugin.ReleaseEpFactory(address(factory)) is None
print("end")
"""


@pytest.fixture(scope="module")
def library() -> str:
    return str(next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.1.*")))


@pytest.mark.parametrize("version", ["1.26.0", "1.30.0"])
@pytest.mark.parametrize("code", [FACTORY, EP, CAPTURE], ids=["factory", "ep", "capture"])
def test_every_slot_answers(library: str, version: str, code: str) -> None:
    assert python(HOST + code, library, version).stdout == "end\n"


#: Parameters and bodies of the functions of a fake driver with two GPUs.
GPUS = {
    "cuDriverGetVersion": "int *out) { *out = 13000; return 0; }",
    "cuDeviceGetCount": "int *out) { *out = 2; return 0; }",
    "cuDeviceGet": "int *out, int ordinal) { *out = ordinal; return 0; }",
    "cuDeviceGetName": "char *out) { out[0] = 'G'; out[1] = 0; return 0; }",
    "cuDeviceGetAttribute": "int *out) { *out = 9; return 0; }",
    "cuDeviceGetPCIBusId": 'char *out, int n, int device) { return snprintf(out, n, "0000:6%d:0B.0", device) <= 0; }',
}
MATCH = """
from ort_cuda_plugin.abi.core import lib
from ort_cuda_plugin.abi.host import KeyValuePairs
def hardware(kind, **entries):
    out = ffi.new("OrtHardwareDevice **")
    with KeyValuePairs(entries) as pairs:
        ok(api.GetEpApi().CreateHardwareDevice(kind, 0x10DE, 5, b"NVIDIA", pairs, out))
    return out[0]
cpu = hardware(lib.OrtHardwareDeviceType_CPU, pci_bus_id="0000:60:0b.0")
gpu = hardware(lib.OrtHardwareDeviceType_GPU, pci_bus_id="0000:61:0b.0")
nameless = hardware(lib.OrtHardwareDeviceType_GPU, card_idx="no such card")
found, offered = ffi.new("const OrtHardwareDevice *[]", [nameless, cpu, gpu]), ffi.new("OrtEpDevice *[8]")
ok(factory.GetSupportedDevices(factory, found, 3, offered, 8, count))
assert count[0] == 2
made, known = [api.EpDevice_Device(offered[i]) for i in range(2)]
assert known == gpu and made not in (nameless, cpu, gpu)
def entries(pairs):
    keys, values, number = ffi.new("const char *const **"), ffi.new("const char *const **"), ffi.new("size_t *")
    api.GetKeyValuePairs(pairs, keys, values, number)
    return {ffi.string(keys[0][i]).decode(): ffi.string(values[0][i]).decode() for i in range(number[0])}
assert entries(api.HardwareDevice_Metadata(made)) == {"name": "G", "pci_bus_id": "0000:60:0b.0"}
assert entries(api.EpDevice_EpOptions(offered[1])) == {"device_id": "1"}
described = entries(api.EpDevice_EpMetadata(offered[1]))
from ort_cuda_plugin.ep.device.devices import DeviceInfo, cuda_devices
from ort_cuda_plugin.ep.factory import registrations
assert DeviceInfo.from_metadata(described).metadata().items() <= described.items()
assert [DeviceInfo.from_metadata(described)] == cuda_devices()[0][1:] == list(registrations()[0].devices[1:])
assert plugin.ReleaseEpFactory(address(factory)) is None
assert registrations() == []
print("end")
"""


def test_a_gpu_is_matched_by_bus_id_and_created_where_onnxruntime_found_none(library: str, tmp_path: Path) -> None:
    source = (build_plugin.SOURCES / "driver" / "cuda.c").read_text()
    names = {*re.findall(r'MEMBER\(\w+, "(\w+)"\)', source), "cuModuleLoadData"}
    functions = [f"int {name}({GPUS.get(name, 'void) { return 0; }')}" for name in sorted(names)]
    (tmp_path / "cuda.c").write_text("#include <stdio.h>\n" + "\n".join(functions))
    command = [*build_plugin.compiler(), "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(command, check=True, cwd=tmp_path)
    code = HOST.replace('b"x.virtual"', 'b"x"') + MATCH
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "ORT_CUDA_PLUGIN_EMULATE": "0"}
    assert python(code, library, "1.30.0", env=environment).stdout == "end\n"


def test_what_another_onnxruntime_of_the_process_registered_is_named(library: str) -> None:
    code = """
metadata()
import onnxruntime
for call in (lambda: ort_cuda_plugin.session(b"", emulate=True), lambda: ort_cuda_plugin.register(emulate=False)):
    try:
        call()
    except RuntimeError as error:
        assert "is already registered in another ONNX Runtime of this process" in str(error), error
    else:
        raise AssertionError("no error")
assert [device.emulated for device in ort_cuda_plugin.devices()] == [True]
print("end")
"""
    assert python(HOST + code, library, "1.30.0").stdout == "end\n"


def test_a_host_with_a_provider_of_that_name_keeps_it(library: str) -> None:
    code = """
own = ffi.new("char[]", b"CUDAExecutionProvider")
names = ffi.new("char *[1]", [own])
@ffi.callback("OrtStatus *(char ***, int *)")
def available(out, length):
    out[0], length[0] = names, 1
    return ffi.NULL
@ffi.callback("OrtStatus *(char **, int)")
def release(given, length):
    assert given == names and length == 1
    return ffi.NULL
table = ffi.new("OrtApi *", api[0])
table.GetAvailableProviders, table.ReleaseAvailableProviders = available, release
@ffi.callback("const OrtApi *(uint32_t)")
def get_api(version):
    return table
base = ffi.new("OrtApiBase *", {"GetApi": get_api, "GetVersionString": get_version})
assert plugin.ReleaseEpFactory(address(factory)) is None
def create(name):
    status = plugin.CreateEpFactories(name, address(base), None, address(out), ctypes.c_size_t(4), address(count))
    return "" if status is None else failure(ffi.cast("OrtStatus *", status))[1]
assert "this ONNX Runtime has a CUDAExecutionProvider of its own" in create(b"CUDAExecutionProvider.virtual")
assert create(b"x.virtual") == "" and count[0] == 1
print("end")
"""
    assert python(HOST + code, library, "1.30.0").stdout == "end\n"
