"""`bench/gpu_report.py`: what it makes of its sections. The commands that it calls have tests of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from c_programs import stand_ins

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu_measurements  # noqa: E402
import gpu_report  # noqa: E402
from gpu_report import Clock, Section  # noqa: E402

from ort_cuda_plugin.estimate import fit  # noqa: E402


def test_a_section_that_fails_does_not_stop_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str, clock: Clock) -> Section:
        raise OSError("no such thing")

    sections = {"a": broken, "b": lambda device, clock: Section({"n": 1}, [f"on {device}"])}
    monkeypatch.setattr(gpu_report, "SECTIONS", sections)
    target = tmp_path / "new" / "report"
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--device", "emulated", "--output", str(target), "--sections"])
    sys.argv += ["a", "b"]
    assert gpu_report.main() == 1
    text, data = target.with_suffix(".md").read_text(), json.loads(target.with_suffix(".json").read_text())
    assert "**Failed:** OSError: no such thing" in text
    assert "A rehearsal on the emulated device" in text
    assert text.index("## a") < text.index("on emulated")
    assert data["b"]["n"] == 1
    assert data["a"]["failure"] == "OSError: no such thing"


def test_a_section_that_crashes_or_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(device: str, clock: Clock) -> Section:
        return gpu_report.checked([sys.executable, "-c", "import time; time.sleep(60)"], 60)

    def crashes(device: str, clock: Clock) -> Section:
        os._exit(9)

    sections = {"hangs": hangs, "crashes": crashes, "works": lambda device, clock: Section(left_out="no need")}
    monkeypatch.setattr(gpu_report, "SECTIONS", sections)
    found = gpu_report.report("emulated", 60, ["crashes", "works"])
    monkeypatch.setattr(gpu_report, "MOST_SECONDS", 1.0)
    monkeypatch.setattr(gpu_report, "GRACE_SECONDS", 0.5)
    found |= gpu_report.report("emulated", 60, ["hangs"])
    assert found["hangs"].failure == "did not end within 2 s"
    assert found["crashes"].failure == "its process ended with exit code 9"
    assert found["works"].left_out == "no need"


def test_the_page_has_the_device_the_speeds_and_the_error_of_the_estimates() -> None:
    device = {"name": "GPU", "compute_capability": "9.0", "multiprocessors": 132, "memory_bytes": 80 << 30}
    device |= {"driver": "13.0", "libraries": {"cudnn": "9.12.0"}}
    entries = [{"what": f"gemm f16 {number}", "reason": "x" * 999} for number in range(20)]
    selftest = {"device": device, "counts": {"pass": 8, "FAIL": 1}, "seconds": 9.0, "quarantined": entries}
    sides = {"plugin": {"ratio": 1.0}, "cuda": {"ratio": 2.0}}
    reports = [
        {"model": "a", "batch": 1, "sides": sides},
        {"model": "b", "batch": 4, "sides": {**sides, "cuda": {"ratio": 0.5}}},
    ]
    found = {
        "selftest": Section({"report": selftest}, failure="1 of 9 checks failed"),
        "machine": Section({"versions": {"onnx": "1.19", "torch": "-"}}),
        "comparison": Section({"reports": reports}),
        "estimates": Section({"output": ["x", "90 measurements, 30 held out: median error 12%"]}),
        "sanitizer": Section(left_out="there is no compute-sanitizer"),
    }
    text = "\n".join(gpu_report.page(found))
    for line in (
        "| device | GPU, compute capability 9.0, 132 multiprocessors, 80.0 GiB, driver for CUDA 13.0 |",
        "| libraries | cudnn 9.12.0, onnx 1.19 |",
        "| passed | machine, comparison, estimates |",
        "| selftest | 8 pass, 1 FAIL in 9 s; 20 quarantined |",
        "| speed | CUDAExecutionProvider takes 1.00 times the plugin's time (geometric mean of 2); "
        "from 0.50 for b (batch 4) to 2.00 for a (batch 1) |",
        "| estimates | 90 measurements, 30 held out: median error 12% |",
        "- selftest: 1 of 9 checks failed",
        "- sanitizer: there is no compute-sanitizer",
        "- and 12 more",
    ):
        assert line in text.splitlines()
    assert len(text.splitlines()) < 40
    assert gpu_report.page({})[4:6] == ["| device | unknown |", "| libraries | unknown |"]


# ---- rehearsals ----


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def rehearsed(folder: Path, cache: Path, **environment: str) -> tuple[int, str, str]:
    """Make a report of the emulated device; return the exit code, the section "On one page", and the whole report."""
    for file in [*cache.glob("quarantine/*"), *cache.glob("refusals/*")]:
        file.unlink()
    command = [sys.executable, str(ROOT / "bench" / "gpu_report.py"), "--device", "emulated"]
    command += ["--output", str(folder / "report"), "--sections", "selftest", "calibration", "machine"]
    environment |= {"ORT_CUDA_PLUGIN_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {gpu_report.CHECKS_VARIABLE: "gemm"}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    text = (folder / "report.md").read_text()
    page = text[text.index("## Summary") :]
    assert page in done.stdout
    data = json.loads((folder / "report.json").read_text())
    assert list(data) == ["device", "selftest", "calibration", "machine"], "each section ran"
    return done.returncode, page, text


BROKEN = {
    "an old GPU": ("capability=7.5", "compute capability 7.5, expected 8.0 or newer"),
    "an old driver": ("driver=12.8", "supports CUDA 12.8, expected 13.0 or newer. Install driver R580 or newer"),
    "exclusive mode": ("exclusive=1", "its compute mode may be exclusive"),
}


@pytest.mark.parametrize(
    "name", ["exclusive mode", *(pytest.param(name, marks=pytest.mark.full) for name in [*BROKEN][:2])]
)
def test_a_device_that_cannot_be_used_is_named_on_the_page(name: str, tmp_path: Path, cache: Path) -> None:
    fault, reason = BROKEN[name]
    code, page, _ = rehearsed(tmp_path, cache, ORT_CUDA_PLUGIN_EMULATE_FAULTS=fault)
    assert code == 1
    failed = page[page.index("**Failed:**") :]
    assert reason in failed
    assert "| selftest | no report |" in page
    assert "machine" in page[page.index("| passed |") :].splitlines()[0]


@pytest.mark.full
def test_a_wrong_kernel_is_on_the_page(tmp_path: Path, cache: Path) -> None:
    code, page, _ = rehearsed(tmp_path, cache, ORT_CUDA_PLUGIN_EMULATE_FAULTS="kernel=matmul_32*_f16_*")
    assert code == 1
    assert "checks failed: product" in page
    assert "- gemm f16 simt 32x64x16: product" in page[page.index("**Quarantined:**") :]


@pytest.mark.full
def test_a_library_that_refuses_is_on_the_page(tmp_path: Path, cache: Path) -> None:
    libraries = str(stand_ins(tmp_path))
    code, page, text = rehearsed(
        tmp_path, cache, ORT_CUDA_PLUGIN_EMULATE_LIBRARIES=libraries, FAKE_FAULT="refused:product_bias_*"
    )
    assert code == 1
    assert "| libraries | cublaslt 13.1.2" in page
    assert "cuBLASLt refuses a matrix product of sizes" in page
    assert "library call" in text


@pytest.mark.full
def test_small_and_partitioned_devices_pass(tmp_path: Path, cache: Path) -> None:
    code, page, _ = rehearsed(tmp_path, cache, ORT_CUDA_PLUGIN_EMULATE_MEMORY="2G")
    assert (code, "2.0 GiB" in page) == (0, True), page
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    code, page, _ = rehearsed(
        tmp_path,
        cache,
        ORT_CUDA_PLUGIN_EMULATE_FAULTS=f"name={name};multiprocessors=16",
        ORT_CUDA_PLUGIN_EMULATE_MEMORY="10G",
    )
    assert code == 0, page
    assert f"| device | {name}, compute capability 9.0, 16 multiprocessors, 10.0 GiB, driver for CUDA 13.0 |" in page


def test_commands_end_in_time_and_say_how() -> None:
    slow = gpu_report.checked([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 2)
    assert slow.failure == "did not end within 2 s"
    assert "begun" in slow.lines
    assert gpu_report.checked([sys.executable, "-c", "raise SystemExit(3)"], 30).failure == "exit code 3"
    assert gpu_report.checked([sys.executable, "-c", "print('right')"], 30).lines == ["```", "right", "```"]
    assert Clock(time.monotonic() + 5).left(100) <= 5
    assert Clock(time.monotonic() - 5).left(100) == 1


def test_measurements_of_kernels_are_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [one for one in gpu_measurements.kernels() if one.op_type in ("Add", "Softmax")]
    small = [dataclasses.replace(one, shapes=tuple((4, 32) for _ in one.shapes)) for one in chosen[:3]]
    monkeypatch.setattr(gpu_measurements, "kernels", lambda largest: iter(small))
    file = tmp_path / "m.json"
    assert gpu_measurements.main(["--device", "emulated", "--output", str(file), "--runs", "1", "--models"]) == 0
    device, found = fit.read_measurements(file.read_text())
    assert device == "h100"
    assert [(one.name, len(one.work.steps)) for one in found] == [(one.name, 1) for one in small]
    assert all(one.seconds > 0 for one in found)


def test_there_are_a_hundred_kernels_of_all_families() -> None:
    kernels = list(gpu_measurements.kernels())
    assert len({kernel.name for kernel in kernels}) == len(kernels) >= 100
    assert {"Add", "Softmax", "ReduceSum", "Transpose", "MatMul", "Conv"} <= {kernel.op_type for kernel in kernels}
    assert list(gpu_measurements.kernels(16)) == []


def test_a_kernel_that_the_host_outlasts_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measurements, "measured", lambda *arguments: (1e-5, 0.9e-5))
    model = next(gpu_measurements.kernels()).model()
    assert gpu_measurements.measure("short", model, {}, 1, False) is None
