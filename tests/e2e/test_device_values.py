"""OrtValues in device memory: IO binding, copies with and without a stream, and memory use."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from device_models import add_and_double
from session_pair import ep_session


@pytest.fixture
def ep_device() -> ort.OrtEpDevice:
    return next(device for device in ort_cuda_plugin.register(emulate=True) if device.ep_metadata["emulated"] == "1")


@pytest.fixture
def on_device(ep_device: ort.OrtEpDevice) -> Callable[[np.ndarray], ort.OrtValue]:
    vendor = ep_device.memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id

    def put(array: np.ndarray) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(array, "gpu", 0, vendor)

    return put


def bytes_in_use() -> int:
    return ort_cuda_plugin.counters()["device_bytes_in_use"]


@pytest.mark.usefixtures("collected")
def test_a_value_on_the_device_is_its_array_and_frees_its_bytes(on_device: Callable[..., ort.OrtValue]) -> None:
    before = bytes_in_use()
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    value = on_device(x)
    assert bytes_in_use() > before
    np.testing.assert_array_equal(value.numpy(), x)
    del value
    assert bytes_in_use() == before


def test_host_code_cannot_read_device_memory(on_device: Callable[..., ort.OrtValue]) -> None:
    value = on_device(np.ones(4, np.float32))
    libc = ctypes.CDLL(None, use_errno=True)
    ends = os.pipe()
    try:
        # The system call fails with EFAULT, where a direct read would crash the process.
        assert libc.write(ends[1], ctypes.c_void_p(value.data_ptr()), 4) == -1
        assert ctypes.get_errno() == errno.EFAULT
    finally:
        for end in ends:
            os.close(end)


@pytest.mark.parametrize("options", [{}, {"single_nodes": "1"}])
def test_an_input_that_nobody_bound_is_named(options: dict[str, str]) -> None:
    """With single_nodes=1, the error has the number of the node's input instead of its name."""
    session = ort_cuda_plugin.session(add_and_double(), emulate=True, provider_options=options)
    binding = session.io_binding()
    binding.bind_cpu_input("a", np.ones(3, np.float32))
    binding.bind_output("c")
    name = "input 1" if options else "input 'b'"
    with pytest.raises(RuntimeError, match=f"Message: {name} has no value. Bind a value, or pass one to the Run"):
        session.run_with_iobinding(binding)


@pytest.mark.usefixtures("collected")
def test_bound_inputs_and_outputs_stay_on_the_device(on_device: Callable[..., ort.OrtValue]) -> None:
    session = ep_session(add_and_double())
    a, b, c = (np.full(100, value, np.float32) for value in (1, 2, 0))
    values = {"a": on_device(a), "b": on_device(b), "c": on_device(c)}
    binding = session.io_binding()
    binding.bind_ortvalue_input("a", values["a"])
    binding.bind_ortvalue_input("b", values["b"])
    binding.bind_ortvalue_output("c", values["c"])
    for _ in range(3):  # afterwards a CUDA graph exists and keeps memory
        session.run_with_iobinding(binding)
    before = ort_cuda_plugin.counters()
    for _ in range(5):
        session.run_with_iobinding(binding)
    after = ort_cuda_plugin.counters()
    assert after["copies_h2d"] == before["copies_h2d"]
    assert after["copies_d2h"] == before["copies_d2h"]
    assert after["device_bytes_in_use"] == before["device_bytes_in_use"]
    np.testing.assert_array_equal(values["c"].numpy(), 2 * (a + b))


@pytest.mark.usefixtures("collected")
def test_an_output_that_onnxruntime_allocates_feeds_the_next_run(
    on_device: Callable[..., ort.OrtValue], ep_device: ort.OrtEpDevice
) -> None:
    before = bytes_in_use()
    session = ep_session(add_and_double())
    x = np.arange(1000, dtype=np.float32)
    value, expected = on_device(x), x
    device = ort.OrtDevice.make("gpu", 0, ep_device.memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id)
    for _ in range(4):
        binding = session.io_binding()
        binding.bind_ortvalue_input("a", value)
        binding.bind_cpu_input("b", x)
        binding._iobinding.bind_output("c", device._get_c_device())
        session.run_with_iobinding(binding)
        [value] = binding.get_outputs()
        expected = 2 * (expected + x)
    np.testing.assert_array_equal(value.numpy(), expected)
    del value, binding, session
    gc.collect()
    assert bytes_in_use() == before


def test_tensors_are_copied_on_a_stream_of_the_device(
    on_device: Callable[..., ort.OrtValue], ep_device: ort.OrtEpDevice
) -> None:
    x = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    source = [ort.OrtValue.ortvalue_from_numpy(x + i) for i in range(3)]
    middle = [on_device(np.zeros_like(x)) for _ in range(3)]
    other = [on_device(np.zeros_like(x)) for _ in range(3)]
    back = [ort.OrtValue.ortvalue_from_numpy(np.zeros_like(x)) for _ in range(3)]
    stream = ep_device.create_sync_stream()
    for chosen in (stream, None):
        ort.copy_tensors(source, middle, chosen)
        ort.copy_tensors(middle, other, chosen)
        ort.copy_tensors(other, back, chosen)
        for i, value in enumerate(back):
            np.testing.assert_array_equal(value.numpy(), x + i)


def test_tensors_of_different_sizes_are_not_copied(on_device: Callable[..., ort.OrtValue]) -> None:
    small, large = on_device(np.zeros(3, np.float32)), on_device(np.zeros(4, np.float32))
    with pytest.raises(Exception, match=r"12 bytes into one of 16|[Ss]hape|size"):
        ort.copy_tensors([small], [large])


def test_memory_that_a_deferred_run_reads_is_not_given_to_another_session(
    on_device: Callable[..., ort.OrtValue],
) -> None:
    """A Run that is not waited for still reads an input that Python frees. The next session must not get it."""
    reader, writer = ep_session(add_and_double()), ep_session(add_and_double())
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    rng = np.random.default_rng(2)
    for _ in range(20):
        x, y = (rng.standard_normal(3000).astype(np.float32) for _ in range(2))
        read, result = on_device(x), on_device(np.zeros_like(x))
        binding = reader.io_binding()
        binding.bind_ortvalue_input("a", read)
        binding.bind_ortvalue_input("b", read)
        binding.bind_ortvalue_output("c", result)
        reader.run_with_iobinding(binding, options)
        binding.clear_binding_inputs()
        del read
        np.testing.assert_array_equal(writer.run(None, {"a": y, "b": y})[0], 4 * y)
        binding.synchronize_outputs()
        np.testing.assert_array_equal(result.numpy(), 4 * x)


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("graphs", [False, True])
def test_runs_of_many_shapes_keep_no_bytes_but_the_slab_of_a_graph(graphs: bool) -> None:
    options = {"automatic_cuda_graphs": int(graphs)}
    session = ort_cuda_plugin.session(add_and_double(), emulate=True, provider_options=options)
    rng = np.random.default_rng(3)
    before = bytes_in_use()
    for n in [1, 7, 0, 4096, 100_000, 3, 65, 2048]:
        x = rng.standard_normal(n).astype(np.float32)
        np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], 4 * x)
        assert bytes_in_use() == before or graphs
    ort_cuda_plugin.trim()
    assert bytes_in_use() == before
