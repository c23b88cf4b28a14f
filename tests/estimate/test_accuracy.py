"""The performance model against published times: its error by size class, and where the error is stated."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from ort_cuda_plugin import gpus, models, networks
from ort_cuda_plugin.estimate.gather import optimized, work_of_model
from ort_cuda_plugin.estimate.model import estimate
from ort_cuda_plugin.estimate.work import Access, LibraryStep, Region, Work
from ort_cuda_plugin.gpus import accuracy
from ort_cuda_plugin.gpus.constants import Constants
from ort_cuda_plugin.model.ir import DType

DOCUMENT = Path(__file__).parents[2] / "docs" / "estimates.md"
PUBLISHED = json.loads(accuracy.FILE.read_text(encoding="utf-8"))
TYPES = {"float16": DType.FLOAT16, "bfloat16": DType.BFLOAT16, "tf32": DType.FLOAT32}
MAX_FACTOR = 1.5


def test_no_size_class_is_off_by_more_than_half() -> None:
    for error in accuracy.errors():
        assert 1 / MAX_FACTOR <= error.mean <= MAX_FACTOR, error


def test_no_published_time_is_off_by_more_than_half() -> None:
    for one in accuracy.comparisons():
        assert 1 / MAX_FACTOR <= one.ratio <= MAX_FACTOR, one


def test_each_measurement_names_a_source() -> None:
    for name, rows in PUBLISHED.items():
        if name != "sources":
            assert all(row["source"] in PUBLISHED["sources"] for row in rows), name


def test_the_document_has_the_table_of_errors() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "\n".join(accuracy.markdown()) in text
    assert accuracy.error_text().partition(" (docs")[0] in " ".join(text.split())


@pytest.mark.parametrize("number", [0, 25, 30, 51, 60])
def test_the_table_compares_the_estimates_of_library_calls(number: int) -> None:
    entry = PUBLISHED["products"][number]
    m, n, k, dtype = entry["m"], entry["n"], entry["k"], TYPES[entry["type"]]
    sizes = [m * k * dtype.itemsize, k * n * dtype.itemsize, m * n * dtype.itemsize]
    regions = tuple(Region(kind, kind, size) for kind, size in zip(("input", "weight", "output"), sizes, strict=True))
    a, b, c = (Access(i, 0, sizes[i]) for i in range(3))
    flags = frozenset({"TF32"})
    step = LibraryStep(("n",), (a, b), (c,), "matmul", dtype.onnx, flags, 0, (m, n, k, k, n, n, 1, 0, 0, 0, 1 << 25))
    gpu = gpus.gpu(entry["gpu"])
    # The model counts the DRAM accesses of the second of two Runs, which finds a part of the operands in the L2.
    found = estimate(Work(regions, (step,)), gpu).seconds - Constants.launch_seconds
    assert found == pytest.approx(accuracy.comparisons()[number].estimate, rel=0.15)


def test_starts_of_kernels_scale_with_the_clock() -> None:
    a100, h100 = (Constants.at(gpus.gpu(name).clock) for name in ("a100", "h100"))
    assert h100 == Constants()
    assert a100.product_seconds * gpus.gpu("a100").clock == pytest.approx(h100.product_seconds * gpus.gpu("h100").clock)


def test_ranges_are_as_wide_as_the_largest_error() -> None:
    low, high = accuracy.step_range(1e-5)
    assert low * high == pytest.approx(1e-10)
    assert high / 1e-5 == max(one.factor for one in accuracy.errors() if one.name != accuracy.NETWORK)
    run_low, run_high = accuracy.run_range(1e-5)
    assert run_low * run_high == pytest.approx(1e-10)
    assert run_high / 1e-5 == max(one.factor for one in accuracy.errors())
    assert accuracy.range_text((3.14e-6, 4.5e-6)) == "3.1-4.5"


def test_the_stated_errors_are_the_largest_of_kernels_and_of_networks() -> None:
    ratios: dict[str, list[float]] = {name: [] for name in ("kernels", accuracy.NETWORK)}
    for one in accuracy.comparisons():
        ratios[one.work if one.work == accuracy.NETWORK else "kernels"].append(max(one.ratio, 1 / one.ratio))
    stated = f"up to {max(ratios['kernels']):.2f} for kernels and {max(ratios[accuracy.NETWORK]):.2f} for networks"
    assert stated in accuracy.error_text()


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(PUBLISHED["networks"])))
def test_the_stored_estimates_of_networks_are_those_of_the_model(number: int, tmp_path: Path) -> None:
    entry = PUBLISHED["networks"][number]
    gpu = gpus.gpu(entry["gpu"])
    model = networks.build(entry["network"])
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {name: array.shape for name, array in models.random_inputs(model, dims=entry["sizes"]).items()}
    found = estimate(work_of_model(optimized(tmp_path / "model.onnx"), shapes, gpu=gpu), gpu)
    assert found.seconds * 1e3 == pytest.approx(entry["estimated"], rel=0.02)
