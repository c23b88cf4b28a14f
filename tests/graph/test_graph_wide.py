"""Kernels with 64-bit indices, for tensors of 2**31 and more elements. They compute what 32-bit kernels compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import kernel_harness
from kernel_harness import run_model, run_op
from ort_cuda_plugin.clusters.cluster import CompiledCluster, Variant
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.program.lowering.context import LoweringOptions

RNG = np.random.default_rng(3)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


CASES: dict[str, tuple[list[np.ndarray], dict[str, Any], tuple[int, ...]]] = {
    "Add": ([floats(3, 1, 5), floats(1, 4, 1)], {}, ()),
    "Transpose": ([floats(3, 4, 5)], {"perm": [2, 0, 1]}, ()),
    "Concat": ([floats(2, 3, 4), floats(2, 1, 4)], {"axis": 1}, ()),
    "Gather": ([floats(6, 5), ints(4, -1, 0)], {"axis": 0}, ()),
    "GatherElements": ([floats(3, 4), np.array([[1, 0, 2], [2, 2, 1]])], {"axis": 0}, ()),
    "Slice": ([floats(7, 6), ints(5, 0), ints(0, 6), ints(0, 1), ints(-2, 3)], {}, (1, 2, 3, 4)),
    "Expand": ([floats(3, 1), ints(2, 3, 4)], {}, (1,)),
    "ReduceSum": ([floats(3, 4, 5), ints(1)], {"keepdims": 0}, (1,)),
    "ReduceMax": ([floats(3, 4, 5), ints(0, 2)], {}, (1,)),
    "Softmax": ([floats(3, 4, 5)], {"axis": 1}, ()),
    "LayerNormalization": ([floats(6, 8), floats(8), floats(8)], {"axis": -1}, ()),
    "MatMul": ([floats(2, 1, 5, 7), floats(3, 7, 6)], {}, ()),
    "Gemm": ([floats(7, 5), floats(6, 7), floats(6)], {"transA": 1, "transB": 1, "alpha": 0.5}, ()),
    "Conv": ([floats(2, 4, 9, 8), floats(6, 4, 3, 3), floats(6)], {"strides": [2, 1], "pads": [1, 0, 0, 2]}, (1, 2)),
    "MaxPool": ([floats(2, 3, 9, 8)], {"kernel_shape": [3, 2], "strides": [2, 2]}, ()),
    "AveragePool": ([floats(2, 3, 9, 8)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, ()),
    "GlobalAveragePool": ([floats(2, 3, 9, 8)], {}, ()),
}


@pytest.mark.parametrize("op_type", CASES)
def test_wide_indices_do_not_change_the_result(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, attributes, constant = CASES[op_type]
    kernels: list[set[KernelSpec]] = []

    class Recording(CompiledCluster):
        def kernels_added(self, variant: Variant) -> None:
            kernels[-1].update(variant.kernels)
            super().kernels_added(variant)

    monkeypatch.setattr(kernel_harness, "CompiledCluster", Recording)
    results = []
    for wide in (False, True):
        kernels.append(set())
        options = LoweringOptions(wide_indices=wide)
        results.append(run_op(op_type, inputs, attributes, 18, constant=constant, dynamic=True, options=options))
    for narrow, wide in zip(*results, strict=True):
        np.testing.assert_array_equal(narrow, wide)
    # Reductions of contiguous rows always use 64-bit addresses, so both options give the same kernel.
    assert (kernels[0] == kernels[1]) == (op_type in ("LayerNormalization", "GlobalAveragePool"))


HUGE = 2**31 + 4096
FAR = """
<ir_version: 8, opset_import: ["": 18]>
far (uint8[n] x, int64[k] at, int64[k] from_end, int64[k, 1] tuples, int64[2] shape, int64[2] pairs)
    => (a, b, c, d, e, f, g, h, i)
{
    axis = Constant <value_ints = [0]> ()
    a = Gather (x, at)
    b = Gather (x, from_end)
    c = GatherElements (x, at)
    d = GatherND (x, tuples)
    e_start = Constant <value_ints = [2147483645]> ()
    e_end = Constant <value_ints = [2147483657]> ()
    e = Slice (x, e_start, e_end, axis)
    end = Constant <value_ints = [2147487744]> ()
    f_step = Constant <value_ints = [2147483648]> ()
    f = Slice (x, axis, end, axis, f_step)
    g_end = Constant <value_ints = [2]> ()
    g_step = Constant <value_ints = [-2147487736]> ()
    g = Slice (x, end, g_end, axis, g_step)
    pads = Constant <value_ints = [-2147487740, 2]> ()
    h = Pad (x, pads)
    rows = Reshape (x, shape)
    i = GatherND (rows, pairs)
}
"""


def test_elements_beyond_2_31_are_found() -> None:
    """The operators in `FAR` use offsets, strides, indices and coordinates that exceed 32 bits."""
    x = np.zeros(HUGE, np.uint8)
    far = np.array([0, 7, 2**31 - 1, 2**31, 2**31 + 5, HUGE - 1])
    x[far] = np.arange(1, 7)
    columns = HUGE // 2
    inputs = [x, far, far - HUGE, far[:, None], ints(2, columns), ints(1, columns - 1)]
    actual = run_model(onnx.parser.parse_model(FAR), inputs)
    slices = [x[2**31 - 3 : 2**31 + 9], x[:: 2**31], x[: 2 : -(2**31) - 4088]]
    expected = [*[x[far]] * 4, *slices, np.concatenate([x[-4:], [0, 0]]), x[-1]]
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(got, want)


REPEATED = """
<ir_version: 8, opset_import: ["": 18]>
repeated (int32[3] x, int64[2] shape, int64[1] start, int64[1] end, int64[2] place) => (sums, part, one, count)
{
    axis = Constant <value_ints = [0]> ()
    wide = Expand (x, shape)
    part = Slice (wide, start, end, axis)
    sums = ReduceSum <keepdims = 0> (part, axis)
    one = GatherND (wide, place)
    count = Size (wide)
}
"""


def test_views_of_more_than_2_31_elements() -> None:
    """Expand makes a view of 3 * 2**33 elements that repeats three stored ones. The results are small."""
    x, rows = np.array([3, -4, 5], np.int32), 2**33
    model = onnx.parser.parse_model(REPEATED)
    inputs = [x, ints(rows, 3), ints(2**32), ints(2**32 + 5), ints(rows - 1, 2)]
    sums, part, one, count = run_model(model, inputs)
    np.testing.assert_array_equal(sums, 5 * x)
    np.testing.assert_array_equal(part, np.broadcast_to(x, (5, 3)))
    assert (int(one), int(count)) == (5, 3 * rows)
