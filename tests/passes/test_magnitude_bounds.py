"""Bounds on the magnitude of tensors hold for the results of models, and are unknown where inputs decide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from kernel_harness import Array, run_model
from ort_cuda_plugin.passes.analysis.magnitude_bounds import MagnitudeBounds
from ort_cuda_plugin.program.device import DeviceProperties
from ort_cuda_plugin.program.steps.steps import Map
from ort_cuda_plugin.program.steps.tensor import BufferKind, Tensor
from programs.states import record

W = (np.random.default_rng(1).standard_normal((16, 8)) * 5).astype(np.float32)
FILTERS = np.random.default_rng(2).standard_normal((4, 2, 3)).astype(np.float32)
NORM = "n = LayerNormalization(x, g, z)"
CONSTANTS = {
    "g": np.full(16, 2, np.float32),
    "z": np.zeros(16, np.float32),
    "w": W,
    "f": FILTERS,
    "axis": np.array([-1]),
    "two": np.array(2, np.float32),
    "shape": np.array([2, 2, 8]),
    "chosen": np.array([True, False] * 8),
}


@dataclass(frozen=True)
class Case:
    """``bound`` is the expected bound; None: unknown."""

    body: str
    bound: float | None
    output: str = "float[2, 16] y"


CASES = {
    "a normalization with a scale": Case("y = LayerNormalization(x, g, z)", 8),
    "a product with weights": Case(f"{NORM} y = MatMul(n, w)", 8 * np.abs(W).sum(0).max(), "float[2, 8] y"),
    "a product with weights on the left": Case(
        f"{NORM} t = Transpose(n) v = Transpose(w) y = MatMul(v, t)", 8 * np.abs(W).sum(0).max(), "float[8, 2] y"
    ),
    "a product of two bounded tensors": Case(f"{NORM} t = Transpose(n) y = MatMul(n, t)", 16 * 64, "float[2, 2] y"),
    "a convolution": Case(
        f"{NORM} r = Reshape(n, shape) y = Conv(r, f)", 8 * np.abs(FILTERS).sum((1, 2)).max(), "float[2, 4, 6] y"
    ),
    "a sum and a square": Case(f"{NORM} s = Add(n, n) y = Pow(s, two)", 256),
    "a third power": Case(f"{NORM} s = Mul(n, n) y = Mul(s, n)", 512),
    "an exponential": Case(f"{NORM} y = Exp(n)", np.exp(8 * 1.001)),
    "a sum of a row": Case(f"{NORM} y = ReduceSum(n, axis)", 16 * 8, "float[2, 1] y"),
    "a mean of a row": Case(f"{NORM} y = ReduceMean(n, axis)", 8, "float[2, 1] y"),
    "a maximum of a row": Case(f"{NORM} y = ReduceMax(n, axis)", 8, "float[2, 1] y"),
    "a softmax": Case("y = Softmax(x)", 1),
    "activations": Case("t = Tanh(x) s = Sigmoid(x) y = Sub(t, s)", 2),
    "a selection": Case(f"{NORM} t = Tanh(x) y = Where(chosen, n, t)", 8),
    "a square root of an absolute value": Case(f"{NORM} a = Abs(n) y = Sqrt(a)", np.sqrt(8)),
    "an input": Case("y = Neg(x)", None),
    "a quotient": Case(f"{NORM} y = Div(n, x)", None),
    "a logarithm": Case(f"{NORM} a = Abs(n) y = Log(a)", None),
    "a bounded and an unknown part": Case(f"{NORM} y = Concat<axis = 1>(n, x)", None, "float[2, 32] y"),
    "a product with an input": Case(f"{NORM} t = Transpose(x) y = MatMul(n, t)", None, "float[2, 2] y"),
}  # fmt: skip


def model(case: Case) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 20]> bounded (float[2, 16] x) => ({case.output}) {{ {case.body} }}'
    made = parser.parse_model(text)
    read = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in CONSTANTS.items() if name in read
    )
    return onnx.shape_inference.infer_shapes(made)


def bound_of_output(made: onnx.ModelProto, x: Array) -> float | None:
    """Return the bound of the model's output after lowering."""
    bounds, outputs = MagnitudeBounds(), dict[int, Tensor]()
    for step in record(made, [x], DeviceProperties()).states[0].steps:
        bounds.note(step)
        if isinstance(step, Map):
            outputs |= {y.buffer.index: y for _, y in step.all_outputs if y.buffer.kind is BufferKind.OUTPUT}
    return bounds.of(outputs[0])


@pytest.mark.parametrize("name", CASES)
def test_a_bound_holds_and_is_as_small_as_the_facts_allow(name: str) -> None:
    case = CASES[name]
    made = model(case)
    spike = np.zeros((2, 16), np.float32)
    spike[:, 3] = 1e4  # the normalized row has the largest element that is possible
    found = bound_of_output(made, spike)
    if case.bound is None:
        assert found is None
        return
    assert found is not None
    assert case.bound <= found <= 1.02 * case.bound
    for x in (spike, (np.random.default_rng(0).standard_normal((2, 16)) * 100).astype(np.float32)):
        (result,) = run_model(made, [x])
        assert np.abs(result).max() <= found
