"""Kernels with 64-bit indices, which arrays of 2**31 elements need, compute what those with 32-bit indices do."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import kernel_harness
from kernel_harness import run_op
from ort_cuda_plugin.graph.cluster import CompiledCluster
from ort_cuda_plugin.graph.lowering import LoweringOptions
from ort_cuda_plugin.runtime.kernel import KernelSpec

RNG = np.random.default_rng(3)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


CASES = {
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
def test_wide_indices_do_not_change_the_result(op_type, monkeypatch):
    inputs, attributes, constant = CASES[op_type]
    kernels: list[set[KernelSpec]] = []

    class Recording(CompiledCluster):
        def kernels_added(self, variant) -> None:
            kernels[-1].update(variant.kernels)
            super().kernels_added(variant)

    results = []
    for wide in (False, True):
        kernels.append(set())
        made = partial(Recording, options=LoweringOptions(wide_indices=wide))
        monkeypatch.setattr(kernel_harness, "CompiledCluster", made)
        results.append(run_op(op_type, inputs, attributes, 18, constant=constant, dynamic=True))
    for narrow, wide in zip(*results, strict=True):
        np.testing.assert_array_equal(narrow, wide)
    # Normalization of a contiguous row addresses with 64 bits in any case.
    assert (kernels[0] == kernels[1]) == (op_type == "LayerNormalization")
