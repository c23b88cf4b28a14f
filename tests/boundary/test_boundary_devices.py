"""Devices: matching with ONNX Runtime's hardware devices, metadata, and what the log says."""

from __future__ import annotations

from pathlib import Path

from isolated import add_model, python
from ort_cuda_plugin.abi.core import core, ffi
from ort_cuda_plugin.ep.device.devices import DeviceInfo, emulated_devices


def test_metadata_describe_the_whole_device() -> None:
    info = DeviceInfo(3, False, "GPU", (9, 0), 80 << 30, "13.0", "0000:65:00.0", 132, 232448)
    assert DeviceInfo.from_metadata(info.metadata()) == info
    (emulated, *_) = emulated_devices()
    assert DeviceInfo.from_metadata(emulated.metadata()) == emulated
    assert emulated.emulated
    assert emulated.pci_bus_id == ""


def pci_bus_id_of_card(index: str, folder: Path) -> str:
    found = ffi.new("char[32]")
    core().card_bus_id(str(folder).encode(), index.encode(), found)
    return str(ffi.string(found).decode())


def test_the_bus_id_of_a_card_is_that_of_its_pci_device(tmp_path: Path) -> None:
    device = tmp_path / "devices" / "pci0000:64" / "0000:65:00.0"
    device.mkdir(parents=True)
    (tmp_path / "card1").mkdir()
    (tmp_path / "card1" / "device").symlink_to(device)
    assert pci_bus_id_of_card("1", tmp_path) == "0000:65:00.0"
    assert pci_bus_id_of_card("2", tmp_path) == ""
    assert pci_bus_id_of_card("", tmp_path) == ""


def test_the_log_says_why_a_node_is_left_to_others() -> None:
    code = """
    import sys, onnxruntime as ort, ort_cuda_plugin as plugin
    options = ort.SessionOptions()
    options.log_severity_level = 1
    model = bytes.fromhex(sys.argv[1])
    from onnx import helper, TensorProto, load_model_from_string
    model = load_model_from_string(model)
    model.graph.node.append(helper.make_node("StringNormalizer", ["m"], ["q"], name="words"))
    model.graph.input.append(helper.make_tensor_value_info("m", TensorProto.STRING, [2]))
    model.graph.output.append(helper.make_tensor_value_info("q", TensorProto.STRING, [2]))
    plugin.session(model.SerializeToString(), emulate=True, sess_options=options,
                   provider_options={"do_copy_in_default_stream": 0})
    """
    log = python(code, add_model().hex(), preloaded=True).stderr
    assert "StringNormalizer node 'words' is left to other providers (dtype): " in log
    assert "the plugin runs 1 of 2 nodes (fused nodes: 1)" in log
    assert "options that the plugin ignores: do_copy_in_default_stream (the plugin orders each copy before" in log
