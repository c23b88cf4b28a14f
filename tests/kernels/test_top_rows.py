"""TopK on a GPU, which first selects from parts of rows, against NumPy and stock ONNX Runtime on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from kernel_harness import Array, make_model, run_op
from ort_cuda_plugin.cli.models.kernel_report import report
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.scan_sort import merge_sort
from ort_cuda_plugin.kernels.scan_sort import top_k as top_rows
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties(emulated=False)
SMALL = ((32, 2), (64, 2))


def numbers(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return few distinct values, with NaN, infinities and zeros of both signs if ``dtype`` has them.

    The plugin orders NaN as the largest value, unlike ONNX Runtime's CPU provider.
    """
    x = np.random.default_rng(len(shape)).integers(-60, 60, shape).astype(dtype)
    if np.dtype(dtype).kind not in "iu":
        for place, value in enumerate((np.nan, -0.0, 0.0, -np.inf, np.inf)):
            x.reshape(-1)[place * 3 :: 97] = value
    return x


def on_cpu(x: Array, k: int, attributes: dict[str, int]) -> list[Array]:
    model = make_model("TopK", [x, np.array([k])], attributes, 21, outputs=2)
    model.ir_version = 10
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, {"x0": x, "x1": np.array([k])})
    return results


@pytest.mark.parametrize(
    ("dtype", "shape", "axis", "k", "largest"),
    [
        (np.float32, (2, 1537), 1, 40, 1),
        (np.int64, (3, 131, 2), 1, 20, 0),
        (ml_dtypes.bfloat16, (2, 300), 1, 7, 0),
        (np.uint8, (0, 100), 1, 1, 0),
    ],
)
def test_parts_of_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, shape: tuple[int, ...], axis: int, k: int, largest: int
) -> None:
    """Blocks are so small that a row takes several launches; a part may have fewer elements than k."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    monkeypatch.setattr(top_rows, "_FORMS", SMALL)
    monkeypatch.setattr(top_rows, "_PART_FORMS", SMALL)
    x, attributes = numbers(shape, dtype), {"axis": axis, "largest": largest}
    actual = run_op("TopK", [x, np.array([k])], attributes, 24, outputs=2, constant=(1,), dynamic=True)
    wide = x.astype(np.float64)
    order = np.lexsort((-wide if largest else wide, np.isnan(wide) != bool(largest)), axis)
    places = np.take(order, range(k), axis)
    np.testing.assert_array_equal(actual[1], places)
    assert actual[0].tobytes() == np.take_along_axis(x, places, axis).tobytes()


def test_one_block_sorts_what_two_have_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    x = np.nan_to_num(numbers((1, 9001), np.float32), nan=7)
    values, places = run_op("TopK", [x, np.array([600])], {}, outputs=2, constant=(1,))
    expected = on_cpu(x, 600, {})
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(places, expected[1])


def test_more_rows_are_sorted_than_a_grid_is_high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    monkeypatch.setattr(top_rows, "MOST", 0)
    monkeypatch.setattr(merge_sort, "PIECE", 4)
    monkeypatch.setattr(merge_sort, "THREADS", 4)
    x = np.random.default_rng(3).integers(-9, 9, (65537, 6)).astype(np.int32)
    values, places = run_op("TopK", [x, np.array([6])], {"largest": 0}, outputs=2, constant=(1,))
    expected = np.argsort(x, 1, kind="stable")
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


def test_kernels_keep_keys_in_registers() -> None:
    """The largest blocks sort the widest keys without spills; a k above what a block sorts uses the full sort."""
    x = np.zeros((1, 20000))
    names = []
    for k in (2048, 2049):
        model = make_model("TopK", [x, np.array([k])], {}, outputs=2, constant=(1,))
        names.append(list(CompiledCluster(read_model(model), GPU).prepare().kernels))
    assert [spec.name for spec in names[0]] == ["select_f64_8192", "top_f64_8192"]
    assert names[1][0].name.startswith("sort")
    for usage in report(names[0], [Target.cuda(9, 0)]):
        assert usage.stack == usage.spill_stores == usage.spill_loads == 0
