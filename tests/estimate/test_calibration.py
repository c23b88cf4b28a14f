"""Calibration: the probes, the rates that follow from their times, and who uses them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ort_cuda_plugin.api import chosen_device, described_by
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.clusters.cluster import Variant
from ort_cuda_plugin.clusters.probes import probes
from ort_cuda_plugin.compiler.caches import calibration_cache
from ort_cuda_plugin.compiler.caches.calibration_cache import store_probes, stored_calibration
from ort_cuda_plugin.compiler.caches.timing_cache import TimingCache
from ort_cuda_plugin.ep.device import open_device
from ort_cuda_plugin.ep.device.calibrating import calibrate
from ort_cuda_plugin.ep.device.open_device import OpenDevice, use_device
from ort_cuda_plugin.gpus import Gpu, gpu
from ort_cuda_plugin.gpus.calibration import (
    LAUNCHES,
    OPERATIONS,
    Calibration,
    Sizes,
    derive,
    described,
    names,
    product_name,
)
from ort_cuda_plugin.gpus.library_times import Rates, library_time, tile_exponent
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TimingCache:
    found = TimingCache(tmp_path / "timings")
    monkeypatch.setattr(calibration_cache, "timing_cache", lambda: found)
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


def test_times_are_kept_for_a_device_with_its_versions(cache: TimingCache) -> None:
    store_probes("a GPU, driver 1", simulated(TRUTH))
    assert stored_calibration("a GPU, driver 1", H100, SIZES) == derive(H100, SIZES, simulated(TRUTH))
    assert stored_calibration("a GPU, driver 2", H100, SIZES) is None
    for bad in (math.nan, 0.0, -1.0, 1e9):
        with pytest.raises(ValueError, match="expected a time above 0 s"):
            store_probes("a GPU, driver 1", {"one launch": bad})


def test_a_damaged_file_is_no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: TimingCache) -> None:
    store_probes("a GPU", simulated(TRUTH))
    (file,) = (tmp_path / "timings").glob("*.times")
    data = file.read_bytes()
    file.write_bytes(data[:-40] + bytes(40))
    monkeypatch.setattr(calibration_cache, "timing_cache", lambda: TimingCache(tmp_path / "timings"))
    assert stored_calibration("a GPU", H100, SIZES) is None


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
    device: OpenDevice, cache: TimingCache
) -> None:
    times = calibrate(device)
    assert set(times) == set(names(Sizes.tiny()).values())
    assert all(0 < seconds < 10 for seconds in times.values())
    assert device.properties().calibration is None


def test_an_injected_clock_calibrates_a_gpu(
    device: OpenDevice, cache: TimingCache, monkeypatch: pytest.MonkeyPatch
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
        return [*found[:-1], None]  # the last probe fails at first

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
    capsys: pytest.CaptureFixture[str], cache: TimingCache, device: OpenDevice
) -> None:
    assert main(["calibrate", "--device", "emulated"]) == 0
    printed = capsys.readouterr().out
    assert f"{LAUNCHES} launches" in printed
    assert "say nothing about a GPU" in printed
    (file,) = cache.folder.glob("*.times")
    assert "one launch" in json.dumps(file.read_bytes().decode("latin-1"))
