"""Real GPUs: what the factory offers for them, and one model on each."""

from __future__ import annotations

import pytest

from isolated import add_model, python
from ort_cuda_plugin.ep.device.devices import DeviceInfo, cuda_devices

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> list[DeviceInfo]:
    devices, why = cuda_devices()
    if not devices:
        pytest.skip(why)
    return devices


def test_every_gpu_is_offered_with_its_ordinal_and_bus_id(gpus: list[DeviceInfo]) -> None:
    code = """
    import ort_cuda_plugin as plugin
    from ort_cuda_plugin.ep.device.devices import cuda_devices
    offered = plugin.register(emulate=False)
    assert plugin.devices() == cuda_devices()[0][:8]
    for device, info in zip(offered, plugin.devices(), strict=True):
        assert device.ep_options["device_id"] == device.ep_metadata["cuda_device_id"] == str(info.ordinal)
        assert device.device.vendor_id == 0x10DE and device.ep_metadata["emulated"] == "0"
        assert info.pci_bus_id and info.memory_bytes > 1 << 30 and info.compute_capability >= (7, 0)
    """
    python(code, env={"ORT_CUDA_PLUGIN_EMULATE": "0"})


def test_a_model_runs_on_every_gpu(gpus: list[DeviceInfo]) -> None:
    code = """
    import sys, numpy as np, ort_cuda_plugin as plugin
    for info in plugin.devices():
        options = {"device_id": info.ordinal}
        session = plugin.session(bytes.fromhex(sys.argv[1]), emulate=False, provider_options=options)
        x = np.arange(8, dtype=np.float32)
        for _ in range(5):
            np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
    """
    python(code, add_model().hex(), env={"ORT_CUDA_PLUGIN_EMULATE": "0"})


def test_gpu_and_emulated_device_work_side_by_side(gpus: list[DeviceInfo]) -> None:
    code = """
    import sys, numpy as np, ort_cuda_plugin as plugin
    model = bytes.fromhex(sys.argv[1])
    sessions = [plugin.session(model, emulate=emulate) for emulate in (False, True)]
    x = np.arange(8, dtype=np.float32)
    for session in sessions * 3:
        np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
    """
    python(code, add_model().hex(), env={"ORT_CUDA_PLUGIN_EMULATE": "0"})
