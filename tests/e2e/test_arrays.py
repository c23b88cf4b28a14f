"""Zero-copy exchange with other array libraries: binding their arrays, and exporting OrtValues to them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from device_models import add_and_double, model
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device, DeviceArray


@pytest.fixture
def device() -> Device:
    return Device.emulated()


@pytest.fixture
def session() -> ort.InferenceSession:
    return ort_cuda_plugin.session(add_and_double(), emulate=True)


class Foreign:
    """An array of another library: ``__cuda_array_interface__`` of a `DeviceArray`, with some entries replaced."""

    def __init__(self, array: DeviceArray, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


class ForeignDlpack:
    """An array that supports only DLPack. It records the stream for which it was requested."""

    def __init__(self, value: ort.OrtValue) -> None:
        self.value = value
        self.asked_for_stream: object = None

    def __dlpack__(self, *, stream: object = None) -> object:
        self.asked_for_stream = stream
        return self.value.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.value.__dlpack_device__()
        return device


def vendor_id() -> int:
    offered = ort_cuda_plugin.register(emulate=True)
    emulated = next(device for device in offered if device.ep_metadata["emulated"] == "1")
    return int(emulated.memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id)


def on_device(array: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array, "gpu", 0, vendor_id())


def contents(value: ort.OrtValue, dtype: type[np.generic]) -> np.ndarray:
    """Copy a device value to the host; interpret its bytes as ``dtype``, which has the same element size."""
    out = np.empty(value.shape(), dtype)
    Device.emulated().call(
        "MemcpyDtoHAsync", ffi.cast("void *", out.ctypes.data), value.data_ptr(), out.nbytes, ffi.NULL
    )
    Device.emulated().call("StreamSynchronize", ffi.NULL)
    return out


def copies() -> int:
    counted = ort_cuda_plugin.counters()
    return counted["copies_h2d"] + counted["copies_d2h"] + counted["copies_d2d"]


def test_device_arrays_are_inputs_and_outputs_without_a_copy(device: Device, session: ort.InferenceSession) -> None:
    x = np.arange(24, dtype=np.float32)
    a, b, c = device.upload(x), device.upload(x + 1), device.empty(24, np.float32)
    binding = session.io_binding()
    ort_cuda_plugin.bind_input(binding, "a", a)
    ort_cuda_plugin.bind_input(binding, "b", b)
    ort_cuda_plugin.bind_output(binding, "c", c)
    before = copies()
    session.run_with_iobinding(binding)
    assert copies() == before
    np.testing.assert_array_equal(device.download(c), 2 * (2 * x + 1))
    a.copy_from(x * 10)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(device.download(c), 2 * (11 * x + 1))


def test_dlpack_arrays_are_inputs_and_say_when_they_are_ready(device: Device, session: ort.InferenceSession) -> None:
    x = np.arange(5, dtype=np.float32)
    array = ForeignDlpack(on_device(x))
    binding = session.io_binding()
    for name in ("a", "b"):
        ort_cuda_plugin.bind_input(binding, name, array)
    assert array.asked_for_stream == 1  # DLPack's number of the default stream
    binding.bind_output("c")
    before = copies()
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], 4 * x)
    assert copies() == before + 1


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int64", "uint32", "bool"])
def test_element_types_pass_both_protocols(device: Device, dtype: str) -> None:
    proto = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)]
    session = ort_cuda_plugin.session(model(nodes, {"x": ["n"]}, {"y": ["m"]}, proto), emulate=True)
    x = np.array([0, 1, 1, 0, 1]).astype(dtype)
    y = device.empty(10, dtype)
    for array in (device.upload(x), ForeignDlpack(on_device(x)) if dtype != "bool" else device.upload(x)):
        binding = session.io_binding()
        ort_cuda_plugin.bind_input(binding, "x", array)
        ort_cuda_plugin.bind_output(binding, "y", y)
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(device.download(y), np.tile(x, 2))


def test_bfloat16_passes_by_dlpack_and_not_by_the_interface() -> None:
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)]
    made = model(nodes, {"x": ["n"]}, {"y": ["m"]}, TensorProto.BFLOAT16)
    session = ort_cuda_plugin.session(made, emulate=True)
    bits = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)
    host = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    first, second = (
        ort.OrtValue.ortvalue_from_shape_and_type([size], TensorProto.BFLOAT16, "gpu", 0, vendor_id())
        for size in (6, 12)
    )
    for value, array in ((host, first), (first, second)):
        binding = session.io_binding()
        if array is first:
            binding.bind_ortvalue_input("x", value)
        else:
            ort_cuda_plugin.bind_input(binding, "x", ort_cuda_plugin.as_cuda_array(value))
        ort_cuda_plugin.bind_output(binding, "y", ForeignDlpack(array))
        session.run_with_iobinding(binding)
    np.testing.assert_array_equal(contents(second, np.uint16), np.tile(bits, 4))
    with pytest.raises(AttributeError, match="Use DLPack"):
        _ = ort_cuda_plugin.as_cuda_array(second).__cuda_array_interface__


def test_the_binding_keeps_the_arrays_alive(device: Device, session: ort.InferenceSession) -> None:
    x = np.arange(100, dtype=np.float32)
    binding = session.io_binding()
    alive = []
    for name in ("a", "b"):
        array = Foreign(device.upload(x))
        alive.append(weakref.ref(array))
        ort_cuda_plugin.bind_input(binding, name, array)
        del array
    gc.collect()
    assert all(reference() is not None for reference in alive)
    binding.bind_output("c")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], 4 * x)
    del binding
    gc.collect()
    assert all(reference() is None for reference in alive)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"strides": (8,)}, ValueError, "C-contiguous"),
        ({"typestr": "<c8"}, TypeError, "has no device tensors of this element type"),
        ({"typestr": "<M8[s]"}, TypeError, "has no device tensors of this element type"),
        ({"mask": object()}, TypeError, "mask"),
        ({"data": (0x10, False)}, ValueError, "is not in the memory of any"),
        ({"shape": (0,), "data": (0, False)}, ValueError, "without elements"),
    ],
)
def test_what_cannot_be_bound_is_refused_with_the_input_s_name(
    device: Device, session: ort.InferenceSession, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    array = Foreign(device.upload(np.ones(4, np.float32)), **changes)
    with pytest.raises(error, match=f"input 'a': .*{words}"):
        ort_cuda_plugin.bind_input(session.io_binding(), "a", array)


def test_a_read_only_array_is_an_input_and_no_output(device: Device, session: ort.InferenceSession) -> None:
    array = device.upload(np.ones(4, np.float32))
    foreign = Foreign(array, data=(array.address, True))
    ort_cuda_plugin.bind_input(session.io_binding(), "a", foreign)
    with pytest.raises(ValueError, match="output 'c': the array is read-only"):
        ort_cuda_plugin.bind_output(session.io_binding(), "c", foreign)


def test_host_arrays_are_named_as_what_they_are(session: ort.InferenceSession) -> None:
    with pytest.raises(TypeError, match="with __cuda_array_interface__ or __dlpack__; got ndarray"):
        ort_cuda_plugin.bind_input(session.io_binding(), "a", np.ones(4, np.float32))
    with pytest.raises(TypeError, match=r"expected an onnxruntime\.OrtValue, got ndarray"):
        ort_cuda_plugin.as_cuda_array(np.zeros(3))
    with pytest.raises(TypeError, match="expected a tensor in device memory"):
        ort_cuda_plugin.as_cuda_array(ort.OrtValue.ortvalue_from_numpy(np.ones(4, np.float32)))


def test_results_are_arrays_of_both_protocols(device: Device, session: ort.InferenceSession) -> None:
    x = np.arange(6, dtype=np.float32)
    result = ort_cuda_plugin.as_cuda_array(on_device(x))
    interface = result.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["data"]) == (
        (6,),
        "<f4",
        (result.value.data_ptr(), False),
    )
    assert result.__dlpack_device__() == (2, 0)
    binding = session.io_binding()
    for name in ("a", "b"):
        ort_cuda_plugin.bind_input(binding, name, result)
    binding.bind_output("c")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], 4 * x)
    with pytest.raises(BufferError):
        result.__dlpack__(copy=True)
