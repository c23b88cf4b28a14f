"""Calibration: the probes, the rates that follow from their times, and who uses them."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from isolated import add_model
from ort_cuda_plugin.api import chosen_device, described_by
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.runs import profile
from ort_cuda_plugin.clusters.cluster import Variant
from ort_cuda_plugin.clusters.probes import probes
from ort_cuda_plugin.compiler.caches import calibration_cache
from ort_cuda_plugin.compiler.caches.calibration_cache import (
    CalibrationCache,
    calibrated_devices,
    calibration_of,
    store_probes,
    stored_calibration,
)
from ort_cuda_plugin.doctor.calibration import of_device
from ort_cuda_plugin.ep.device import open_device
from ort_cuda_plugin.ep.device.calibrating import calibrate
from ort_cuda_plugin.ep.device.open_device import OpenDevice, use_device
from ort_cuda_plugin.gpus import Gpu, closest, gpu, recognized
from ort_cuda_plugin.gpus.calibration import (
    LAUNCHES,
    OPERATIONS,
    Calibration,
    ProbedDevice,
    Sizes,
    derive,
    described,
    names,
    product_name,
)
from ort_cuda_plugin.gpus.library_times import Rates, library_time, tile_exponent
from ort_cuda_plugin.plugin_library import plugin_version
from ort_cuda_plugin.profiles.collect import NodeTime, Profile
from ort_cuda_plugin.program.device import DeviceProperties
from ort_cuda_plugin.schedule.cost_model import choose_tile_config

H100 = gpu("h100")
SIZES = Sizes.of(H100)
TRUTH = Calibration(
    launch_seconds=1.1e-6,
    start_seconds=4.0e-6,
    dram=2.8e12,
    l2=4.0e12,
    issue=0.7,
    mma=0.5,
    library=0.7,
    tf32=0.5,
)


def simulated(truth: Calibration, device: Gpu = H100, sizes: Sizes = SIZES) -> dict[str, float]:
    """Return the seconds of each probe on a GPU with the rates ``truth``."""
    wanted, gap = names(sizes), truth.launch_seconds
    latency = 1e-6
    chain = LAUNCHES * gap + latency
    instructions = sizes.elements * OPERATIONS / 32
    seconds = {
        wanted["one"]: gap + latency,
        wanted["chain"]: chain,
        wanted["dram"]: gap + latency + 2 * sizes.memory / truth.dram,
        wanted["l2"]: chain + LAUNCHES * 2 * sizes.cache / truth.l2,
        wanted["issue"]: gap + latency + instructions / (4 * device.multiprocessors * device.clock * truth.issue),
        wanted["mma"]: gap + truth.start_seconds + 2 * sizes.mma**3 / (device.flops["float16"] * truth.mma),
    }
    for product in sizes.products:
        kind, m, n, k = product
        key, share, size = ("tf32", truth.tf32, 4) if kind == "tf32" else ("float16", truth.library, 2)
        operations = device.flops[key] / device.multiprocessors * share
        work, _ = library_time(
            m, n, k, 1, size, Rates(device.multiprocessors, operations, device.l2_read, 2, tile_exponent(key))
        )
        seconds[product_name(product)] = LAUNCHES * (gap + truth.start_seconds + work)
    return seconds


def of_gpu(name: str = "NVIDIA H100 80GB HBM3", plugin: str = "2.0", **versions: str) -> ProbedDevice:
    """An H100, or a GPU with another name, with driver 13.0 unless another version is given."""
    known = {"driver": "13.0", "cublaslt": "13.1.0", "cudnn": "absent", "plugin": plugin} | versions
    return ProbedDevice.of(name, H100.compute_capability, H100.multiprocessors, known)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationCache:
    found = CalibrationCache(tmp_path / "calibrations")
    monkeypatch.setattr(calibration_cache, "calibration_cache", lambda: found)
    return found


@pytest.fixture
def device() -> OpenDevice:
    return use_device(described_by(chosen_device(True, {})))


def test_the_rates_of_a_simulated_gpu_are_found() -> None:
    found = derive(H100, SIZES, simulated(TRUTH))
    assert found is not None
    for field in fields(Calibration):
        # The incomplete last wave of the largest GEMM makes the rates that are derived from it less exact.
        rel = 0.15 if field.name in ("start_seconds", "library", "tf32") else 0.03
        assert getattr(found, field.name) == pytest.approx(getattr(TRUTH, field.name), rel=rel), field.name


def test_the_described_rates_change_nothing() -> None:
    found = described(H100)
    assert found.gpu(H100) == H100
    for field, value in vars(found.constants(H100)).items():
        assert value == pytest.approx(getattr(type(found.constants(H100)).at(H100.clock), field)), field


def test_without_a_library_its_rates_are_those_of_the_description() -> None:
    times = {name: seconds for name, seconds in simulated(TRUTH).items() if "library" not in name}
    found = derive(H100, SIZES, times)
    assert found is not None
    assert (found.library, found.tf32, found.start_seconds) == (
        H100.tensor_share,
        H100.tf32_share,
        described(H100).start_seconds,
    )
    assert found.dram == pytest.approx(TRUTH.dram)


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, 1e9, 1e-12], ids=str)
@pytest.mark.parametrize("kind", ["one", "chain", "dram", "l2", "issue", "mma"])
def test_hostile_times_are_refused(kind: str, value: float, caplog: pytest.LogCaptureFixture) -> None:
    times = simulated(TRUTH) | {names(SIZES)[kind]: value}
    with caplog.at_level(logging.WARNING):
        found = derive(H100, SIZES, times)
    if kind == "mma" and not value > 0:  # as if the device had no tensor cores
        assert found is not None
        assert found.mma == described(H100).mma
    elif kind == "one" and value == 1e-12:  # accepted: it is only subtracted from the other times
        assert found is not None
    else:
        assert found is None
    assert caplog.text == "" or "is not plausible" in caplog.text


def test_an_implausible_rate_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert derive(H100, SIZES, simulated(replace(TRUTH, dram=1e9))) is None
    assert "NVIDIA H100 80GB SXM: dram is not plausible: got 1e+09, expected about 3.08e+12" in caplog.text
    assert "run ort-cuda-plugin calibrate again" in caplog.text


def test_times_are_kept_for_a_device_with_its_versions(cache: CalibrationCache) -> None:
    store_probes(of_gpu(), simulated(TRUTH))
    assert stored_calibration(of_gpu()) == derive(H100, SIZES, simulated(TRUTH))
    assert stored_calibration(of_gpu(driver="13.1")) is None
    assert stored_calibration(of_gpu(plugin="2.1")) is None
    for bad in (math.nan, 0.0, -1.0, 1e9):
        with pytest.raises(ValueError, match="expected a time above 0 s"):
            store_probes(of_gpu(), {"one launch": bad})


def test_a_damaged_file_is_no_calibration(cache: CalibrationCache) -> None:
    store_probes(of_gpu(), simulated(TRUTH))
    assert calibrated_devices() == [of_gpu()]
    (file,) = cache.folder.glob("*.calibration")
    data = file.read_bytes()
    file.write_bytes(data[:-40] + bytes(40))
    assert calibrated_devices() == []
    assert stored_calibration(of_gpu()) is None
    for body in (b"", b"[]", b"{}", b"[2]", b"[" * 100000, *wrong_entries()):
        cache.write(file.stem, body)
        assert stored_calibration(of_gpu()) is None, body
        assert calibrated_devices() == [], body


def wrong_entries() -> list[bytes]:
    right: list[object] = [2, "a GPU", [9, 0], 132, {"driver": "1"}, {"one launch": 1e-6}]
    replaced: list[tuple[int, object]] = [(0, 1), (1, 7), (2, [9]), (2, [9, "0"]), (3, 0), (3, True), (4, ["driver"])]
    replaced += [(4, {"driver": 1}), (5, []), (5, {"one launch": 0}), (5, {"one launch": True}), (5, {"x" * 1000: 1})]
    return [json.dumps([*right[:at], value, *right[at + 1 :]]).encode() for at, value in replaced]


def test_the_name_of_the_driver_tells_gpus_of_one_shape_apart() -> None:
    shape = H100.compute_capability, H100.multiprocessors
    assert [recognized(name, *shape).key for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")] == ["h100", "h200"]
    assert recognized("NVIDIA GeForce RTX 4090", (8, 9), 128).key == "rtx4090"
    assert recognized("NVIDIA H100 PCIe", (9, 0), 114).key == ""  # no exact match: 114 multiprocessors, not 132
    assert recognized("an unknown GPU", *shape) == closest(*shape)


def test_an_estimate_uses_the_latest_calibration_of_such_a_gpu_by_this_plugin(cache: CalibrationCache) -> None:
    assert calibration_of(H100, "2.0") is None
    store_probes(of_gpu("NVIDIA H200"), simulated(TRUTH))
    store_probes(of_gpu(plugin="1.0"), simulated(TRUTH))
    assert calibration_of(H100, "2.0") is None
    before = {*cache.folder.iterdir()}
    store_probes(of_gpu(driver="12.8"), simulated(TRUTH))
    (file,) = {*cache.folder.iterdir()} - before
    os.utime(file, (1, 1))
    faster = replace(TRUTH, dram=3.2e12)
    store_probes(of_gpu(), simulated(faster))
    assert calibration_of(H100, "2.0") == (of_gpu(), derive(H100, SIZES, simulated(faster)))
    store_probes(of_gpu(), simulated(replace(TRUTH, dram=1e9)))  # not plausible
    os.utime(file, (1, 1))
    assert calibration_of(H100, "2.0") == (of_gpu(driver="12.8"), derive(H100, SIZES, simulated(TRUTH)))


def test_estimate_says_whose_rates_it_uses(
    cache: CalibrationCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A memory-bound model takes twice as long on a GPU whose memory has half the rate."""
    (tmp_path / "m.onnx").write_bytes(add_model(dims=(1 << 26,)))
    file = tmp_path / "estimate.json"
    command = ["estimate", str(tmp_path / "m.onnx"), "--json", str(file)]

    def estimated(*options: str) -> tuple[float, str, str]:
        assert main([*command, *options]) == 0
        data = json.loads(file.read_text())
        return data["seconds"], data["calibrated"], capsys.readouterr().out

    described_seconds, calibrated, printed = estimated()
    assert (calibrated, "calibrated" in printed, "calibrate`" in printed) == ("", False, False)
    slow = replace(described(H100), dram=0.5 * described(H100).dram)
    store_probes(of_gpu(plugin=plugin_version()), simulated(slow))
    seconds, calibrated, printed = estimated()
    assert seconds == pytest.approx(2 * described_seconds, rel=0.05)
    assert calibrated.startswith("NVIDIA H100 80GB HBM3 (cublaslt 13.1.0, cudnn absent, driver 13.0, plugin ")
    assert "NVIDIA H100 80GB SXM, calibrated, estimated" in printed
    assert f"`ort-cuda-plugin calibrate` has measured the rates on {calibrated}." in " ".join(printed.split())
    assert estimated("--uncalibrated")[:2] == (described_seconds, "")
    assert estimated("--device", "h200")[1] == ""


def test_profile_shows_the_calibrated_estimate(
    cache: CalibrationCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.onnx").write_bytes(add_model(dims=(1 << 20,)))
    command = ["profile", str(tmp_path / "m.onnx"), "--device", "emulated", "--runs", "1"]
    store_probes(of_gpu(plugin=plugin_version()), simulated(TRUTH))
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "On NVIDIA H100 80GB SXM, calibrated, the estimate is" in printed
    assert "they took" not in printed  # times of the emulated device are not compared


def test_profile_of_a_gpu_compares_its_times_with_its_calibration(
    cache: CalibrationCache, device: OpenDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated device is profiled; then the profile and the device are those of an H100."""
    path = tmp_path / "m.onnx"
    path.write_bytes(add_model(dims=(1 << 20,)))
    info = replace(
        device.info, emulated=False, name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), multiprocessors=132
    )
    h100 = object.__new__(OpenDevice)
    h100.info = info
    monkeypatch.setattr(profile, "use_device", lambda asked: {info: h100}[asked])
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys("ab", (1 << 20,))
    with pytest.raises(LookupError, match=r"the GPU is not calibrated\. Run `ort-cuda-plugin calibrate`"):
        profile.estimate_for(path, "", shapes, info)
    store_probes(h100.probed, simulated(TRUTH))
    h100.forget_calibration()
    estimate = profile.estimate_for(path, "", shapes, info)
    assert estimate is not None
    assert estimate.calibrated == str(h100.probed)
    assert profile.estimate_for(path, "none", shapes, info) is None
    assert profile.estimate_for(path, "h200", shapes, info) != estimate
    node = NodeTime("add", "Add", microseconds=20.0, share=1.0, steps=1, estimated=19.0)
    found = Profile("m", info.name, 20.0, 20.0, 0.0, 1.0, (), (node,), (), (), gpu=estimate.label, is_emulated=False)
    (line,) = profile.summary(found)[2:]
    assert line.startswith("On NVIDIA H100 80GB SXM, calibrated, the estimate is ")
    assert line.endswith(" us for 1 of these nodes; they took 20.0 us.")


def test_doctor_says_whether_a_gpu_is_calibrated(cache: CalibrationCache) -> None:
    def found(ordinal: int = 0) -> tuple[str, str, str]:
        finding = of_device(of_gpu(), ordinal)
        assert finding.subject == "calibration of NVIDIA H100 80GB HBM3"
        return finding.severity.value, finding.text, finding.advice

    severity, text, advice = found()
    assert (severity, advice) == ("note", "run `ort-cuda-plugin calibrate`")
    assert "not calibrated" in text
    assert found(1)[2] == "run `CUDA_VISIBLE_DEVICES=1 ort-cuda-plugin calibrate`"
    store_probes(of_gpu("NVIDIA H200"), simulated(TRUTH))
    assert "not calibrated" in found()[1]
    store_probes(of_gpu(driver="12.8", plugin="1.9"), simulated(TRUTH))
    severity, text, advice = found()
    assert (severity, advice) == ("note", "run `ort-cuda-plugin calibrate`")
    assert "measured with other versions: driver 12.8 (now 13.0), plugin 1.9 (now 2.0)" in text
    store_probes(of_gpu(), simulated(replace(TRUTH, dram=1e9)))
    assert "a rate is not plausible" in found()[1]
    store_probes(of_gpu(), simulated(TRUTH))
    severity, text, advice = found()
    assert (severity, advice) == ("ok", "")


def test_the_rates_decide_between_a_library_and_our_kernel() -> None:
    libraries = DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt"}))
    assert choose_tile_config(libraries, "f16", 4096, 4096, 1, 2048, along_k=True) is None
    slow = replace(described(H100), library=0.2)
    calibrated = replace(libraries, calibration=slow)
    chosen = [choose_tile_config(calibrated, "f16", 4096, 4096, 1, 2048, along_k=True) for _ in range(2)]
    assert chosen[0] is not None
    assert chosen[0] == chosen[1]
    same = replace(libraries, calibration=described(H100))
    for m in (16, 128, 384, 1024):
        assert choose_tile_config(same, "f16", m, 768, 1, 768) == choose_tile_config(libraries, "f16", m, 768, 1, 768)


def test_a_chain_has_a_launch_for_each_of_its_steps() -> None:
    made = probes(DeviceProperties(), Sizes.tiny())
    counts = {name: len(program.plan.records) for name, program in made.items() if program.plan is not None}
    wanted = names(Sizes.tiny())
    assert counts[wanted["chain"]] - counts[wanted["one"]] == LAUNCHES - 1
    with_libraries = DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt"}))
    gemms = {product_name(product) for product in SIZES.products}
    assert len(gemms) == 12
    programs = probes(with_libraries, SIZES)
    assert gemms <= set(programs)
    assert all(programs[name].problems for name in gemms)


def test_the_emulated_device_runs_the_probes_and_keeps_the_described_rates(
    device: OpenDevice, cache: CalibrationCache
) -> None:
    times = calibrate(device)
    assert set(times) == set(names(Sizes.tiny()).values())
    assert all(0 < seconds < 10 for seconds in times.values())
    assert device.properties().calibration is None
    assert calibrated_devices() == []


def test_an_injected_clock_calibrates_a_gpu(
    device: OpenDevice, cache: CalibrationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated device is described as a GPU, and the injected clock runs no probe."""
    monkeypatch.setattr(device, "info", replace(device.info, emulated=False, compute_capability=(9, 0)))
    monkeypatch.setattr(open_device, "load_libraries", frozenset)
    device.forget_calibration()
    sizes, known = device.probe_sizes, device.described
    truth = replace(described(known), dram=0.5 * known.dram, launch_seconds=2e-6)
    seconds = simulated(truth, known, sizes)

    def clock(_: OpenDevice, programs: Sequence[Variant]) -> list[float | None]:
        found = [seconds[name] for name in names(sizes).values()]
        assert len(programs) == len(found)
        return [*found[:-1], None]  # the last probe fails

    try:
        assert device.properties().calibration is None
        times = calibrate(device, clock)
        assert len(times) == len(names(sizes)) - 1
        found = device.properties().calibration
        assert found is not None
        assert found.dram == pytest.approx(0.5 * known.dram)
        assert found.launch_seconds == pytest.approx(2e-6)
        assert found.mma == described(known).mma
        assert device.properties() == device.properties()
    finally:
        device.forget_calibration()


def test_the_command_prints_the_probes(
    capsys: pytest.CaptureFixture[str], cache: CalibrationCache, device: OpenDevice
) -> None:
    assert main(["calibrate", "--device", "emulated"]) == 0
    printed = capsys.readouterr().out
    assert f"{LAUNCHES} launches" in printed
    assert "say nothing about a GPU" in printed
