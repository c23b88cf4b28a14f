"""Termination of session creation: each loop of a pass has a measure that decreases in every iteration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from contributed import noise
from kernel_harness import Array, run_model
from ort_cuda_plugin.program.termination import Measure, NoProgressError

EPILOGUES = {
    "none": (),
    "bias": ("Add({}, bias)",),
    "factor": ("Mul({}, bias)",),
    "residual": ("Add({}, r)",),
    "another residual": ("Add({}, q)",),
    "scaled residual": ("Mul({}, bias)", "Add({}, r)"),
    "column": ("Add({}, c)",),
    "function": ("Relu({})",),
}
"""Epilogues of a GEMM as ONNX nodes; {} is its result [3, 8]. r and q are [3, 8], c is [3, 1], bias is [8]."""


def reference(model: ModelProto, inputs: list[Array]) -> list[Array]:
    feeds = {value.name: array for value, array in zip(model.graph.input, inputs, strict=True)}
    return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, feeds)]


def test_products_of_one_tensor_with_any_two_epilogues_are_compiled_and_right() -> None:
    lines, results = [], []
    pairs = list(itertools.combinations_with_replacement(EPILOGUES, 2))
    for number, pair in enumerate(pairs):
        lines.append(f"x{number} = Add(x, n{number})")
        for side, name in enumerate(pair):
            y = f"a{number}_{side}"
            lines.append(f"{y} = MatMul(x{number}, w{side})")
            for step in EPILOGUES[name]:
                lines.append(f"{y}_ = {step.format(y)}")
                y += "_"
            lines.append(f"y{number}_{side} = Softmax({y})")
            results.append(f"float[3, 8] y{number}_{side}")
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[3, 5] x, float[3, 8] r, float[3, 8] q, float[3, 1] c)'
        f" => ({', '.join(results)}) {{ {' '.join(lines)} }}"
    )
    constants = {"w0": noise(5, 8, seed=1), "w1": noise(5, 8, seed=2), "bias": noise(8, seed=3)}
    constants |= {f"n{number}": np.array(number, np.float32) for number in range(len(pairs))}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    inputs = [noise(3, 5, seed=4), noise(3, 8, seed=5), noise(3, 8, seed=6), noise(3, 1, seed=7)]
    for got, want in zip(run_model(model, inputs), reference(model, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "joined",
    [
        pytest.param("Concat<axis = 0>(p)", id="one input"),
        pytest.param("Concat<axis = 0>(p, nothing)", id="an empty one beside it"),
        pytest.param("Max(p)", id="the maximum of one"),
        pytest.param("Slice(p, zero, one)", id="a slice of all"),
        pytest.param("Reshape(p, one)", id="a reshape"),
        pytest.param("Tile(p, one)", id="one tile"),
        pytest.param("Expand(p, one)", id="an expansion"),
    ],
)
def test_shape_arithmetic_that_gives_back_its_input_ends(joined: str) -> None:
    """The device computes the product of the sizes, and Reshape gets it by a read-back. Lowering must terminate."""
    text = f"s = Shape(x) i = Cast<to = 6>(s) p = ReduceProd(i) j = {joined} k = Cast<to = 7>(j) y = Reshape(x, k)"
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n, m] x) => (float[k] y)'
        f" <int32[0] nothing = {{}}, int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {text} }}"
    )
    x = noise(2, 3, seed=1)
    np.testing.assert_array_equal(run_model(model, [x], dynamic=True)[0], x.reshape(-1))


def test_a_measure_that_does_not_fall_is_an_error_that_names_its_loop() -> None:
    measure = Measure[tuple[int, ...]]("fuse")
    measure.fall((3, 0))
    measure.fall((3, -1))
    measure.fall((2, 5))
    with pytest.raises(NoProgressError, match=r"^fuse: .* made no progress: got .* \(2, 5\), expected .* \(2, 5\)"):
        measure.fall((2, 5))
