"""Losses, normalizations, attention, Einsum and recurrent operators, compared with ONNX's reference or NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.program.lowering.context import DeviceProperties


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(
    op_type: str,
    inputs: Sequence[np.ndarray | None],
    attributes: Mapping[str, Any] | None = None,
    opset: int = 24,
    *,
    outputs: int = 1,
    tolerance: float = 1e-5,
    dynamic: Sequence[bool] = (False, True),
) -> None:
    """Compare an operator with ONNX's reference, with static and with dynamic shapes."""
    model = make_model(op_type, inputs, attributes, opset, outputs=outputs)
    given = [x for x in inputs if x is not None]
    names = [value.name for value in model.graph.input]
    expected = ReferenceEvaluator(model).run(None, dict(zip(names, given, strict=True)))
    for hidden in dynamic:
        for actual, wanted in zip(run_model(model, given, hidden), expected, strict=True):
            assert actual.shape == np.shape(wanted)
            np.testing.assert_allclose(actual, np.asarray(wanted), tolerance, tolerance)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3), (2, 3, 2, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_equals_the_reference(shape: tuple[int, ...], reduction: str, weighted: bool) -> None:
    labels = np.random.default_rng(1).integers(0, shape[1], (shape[0], *shape[2:]))
    weights = np.abs(random(shape[1], seed=2)) + 0.5 if weighted else None
    attributes = {"reduction": reduction, "ignore_index": 1}
    check("SoftmaxCrossEntropyLoss", [random(*shape), labels, weights], attributes, outputs=2)


def test_labels_that_are_no_class_count_as_ignored() -> None:
    scores = np.log(np.array([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]], np.float32))
    labels = np.array([0, 2, -100], np.int64)
    (loss,) = run_op("NegativeLogLikelihoodLoss", [scores, labels], {"reduction": "none"})
    np.testing.assert_allclose(loss, [np.log(2), 0, 0], 1e-6)


@pytest.mark.parametrize("opset", [12, 21])
def test_hardmax_marks_the_first_maximum(opset: int) -> None:
    x = np.array([[1, 3, 3], [-np.inf, -np.inf, -np.inf], [2, 0, 1]], np.float32)
    (actual,) = run_op("Hardmax", [x], {"axis": 1}, opset)
    np.testing.assert_array_equal(actual, [[0, 1, 0], [1, 0, 0], [1, 0, 0]])


def test_lp_normalization_leaves_zeros() -> None:
    x = np.array([[3, -4], [0, 0]], np.float32)
    for p, expected in ((1, [[3 / 7, -4 / 7], [0, 0]]), (2, [[0.6, -0.8], [0, 0]])):
        np.testing.assert_allclose(run_op("LpNormalization", [x], {"p": p})[0], np.array(expected), 1e-6)


@pytest.mark.parametrize(("opset", "parameters"), [(18, 2), (21, 6)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_group_normalization(opset: int, parameters: int, dtype: type[np.generic]) -> None:
    x, scale, bias = (y.astype(dtype) for y in (random(3, 6, 2, 4), random(parameters), random(parameters, seed=3)))
    grouped = x.astype(np.float64).reshape(3, 2, -1)
    normalized = grouped - grouped.mean(2, keepdims=True)
    normalized = (normalized / np.sqrt((normalized**2).mean(2, keepdims=True) + 1e-5)).reshape(3, 6, 2, 4)
    factor, offset = (np.repeat(y.astype(np.float64), 6 // parameters).reshape(1, 6, 1, 1) for y in (scale, bias))
    expected = normalized * factor + offset
    tolerance = 1e-5 if dtype is np.float32 else 4e-3
    for dynamic in (False, True):
        (actual,) = run_op("GroupNormalization", [x, scale, bias], {"num_groups": 2}, opset, dynamic=dynamic)
        np.testing.assert_allclose(actual, expected, tolerance, tolerance)


def test_mean_variance_normalization() -> None:
    check("MeanVarianceNormalization", [random(2, 3, 4, 2)], {"axes": [0, 2, 3]})


def test_swiglu() -> None:
    a, b = random(3, 4), random(3, 4, seed=1)
    (actual,) = run_op("SwiGLU", [a, b], {"alpha": 1.5}, 28)
    np.testing.assert_allclose(actual, a / (1 + np.exp(-1.5 * a)) * b, 1e-5, 1e-6)


@pytest.mark.parametrize(
    "attributes",
    [{}, {"is_causal": 1}, {"softcap": 2.0, "qk_matmul_output_mode": 1}, {"scale": 0.3, "qk_matmul_output_mode": 3}],
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_with_a_past_equals_the_reference(attributes: dict[str, Any], heads: tuple[int, ...]) -> None:
    query, shared = heads
    q, k, v = random(2, query, 3, 8), random(2, shared, 3, 8, seed=1), random(2, shared, 3, 4, seed=2)
    past = random(2, shared, 2, 8, seed=3), random(2, shared, 2, 4, seed=4)
    mask = random(3, 5, seed=5) > -0.5
    check("Attention", [q, k, v, mask, *past], attributes, outputs=4)


def test_attention_of_queries_without_keys_is_zero() -> None:
    q = random(1, 2, 3, 8)
    mask = np.array([[True, True, True], [False, False, False], [True, False, False]])
    (actual,) = run_op("Attention", [q, q, q, mask], opset=23)
    assert not actual[:, :, 1].any()
    assert actual[:, :, 0].all()


def test_attention_reads_only_the_valid_keys_of_a_cache() -> None:
    q, k, v = random(2, 6, 12), random(2, 5, 12, seed=1), random(2, 5, 12, seed=2)
    attributes = {"q_num_heads": 3, "kv_num_heads": 3, "is_causal": 1}
    check("Attention", [q, k, v, None, None, None, np.array([5, 3], np.int64)], attributes)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("dim", [0, 4])
def test_rotary_embedding(interleaved: int, dim: int) -> None:
    half = (dim or 8) // 2
    cos, sin = random(10, half, seed=1), random(10, half, seed=2)
    positions = np.array([[3, 0, 9], [1, 2, 3]], np.int64)
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": dim}
    check("RotaryEmbedding", [random(2, 5, 3, 8), cos, sin, positions], attributes)
    check("RotaryEmbedding", [random(2, 3, 40), cos[positions], sin[positions]], {**attributes, "num_heads": 5})


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter(mode: str) -> None:
    start = np.array([1, 2 if mode == "linear" else 3], np.int64)
    check("TensorScatter", [random(2, 3, 4, 5), random(2, 3, 2, 5, seed=1), start], {"mode": mode})


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij->ji", [(2, 3)]),
        ("ii->i", [(3, 3)]),
        ("...ii->...", [(2, 3, 3)]),
        ("ij,jk", [(2, 3), (3, 4)]),
        ("bhqd,bhkd->bhqk", [(2, 2, 3, 4), (2, 2, 5, 4)]),
        ("b...d,dk->b...k", [(2, 3, 2, 4), (4, 5)]),
        ("...ij,...jk->...ik", [(2, 1, 2, 3), (4, 3, 2)]),
        ("i,j->ij", [(2,), (3,)]),
        ("ij,ik,k->j", [(2, 3), (2, 4), (4,)]),
        ("ij,kl->il", [(2, 3), (4, 5)]),
        ("ijk->", [(2, 3, 2)]),
    ],
)
def test_einsum_equals_numpy(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [random(*shape, seed=number) for number, shape in enumerate(shapes)]
    for dtype in (np.float32, np.int32):
        operands = [(4 * x).astype(dtype) for x in inputs]
        for dynamic in (False, True):
            (actual,) = run_op("Einsum", operands, {"equation": equation}, dynamic=dynamic)
            expected = np.einsum(equation, *operands)
            assert actual.shape == expected.shape
            np.testing.assert_allclose(actual, expected, 1e-5, 1e-5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result


def step(
    kind: str, x: np.ndarray, weights: Sequence[np.ndarray], hidden: np.ndarray, cell: np.ndarray, linear: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute one step of one sequence by ONNX's definition in float64; return the hidden state and the cell."""
    w, r, wb, rb, peepholes = weights
    a, b = w @ x + wb, r @ hidden + rb
    if kind == "RNN":
        return np.tanh(a + b), cell
    if kind == "GRU":
        size = len(hidden)
        z, reset = sigmoid((a + b)[: 2 * size]).reshape(2, size)
        inner = reset * b[2 * size :] if linear else r[2 * size :] @ (reset * hidden) + rb[2 * size :]
        return (1 - z) * np.tanh(a[2 * size :] + inner) + z * hidden, cell
    i, o, f, c = (a + b).reshape(4, -1)
    pi, po, pf = peepholes.reshape(3, -1)
    cell = sigmoid(f + pf * cell) * cell + sigmoid(i + pi * cell) * np.tanh(c)
    return sigmoid(o + po * cell) * np.tanh(cell), cell


@pytest.mark.parametrize(
    ("direction", "dynamic", "size", "emulated"),
    [("forward", True, 8, True), ("reverse", False, 5, True), ("bidirectional", True, 5, True)]
    + [("bidirectional", True, 5, False)],
)
@pytest.mark.parametrize(("kind", "linear"), [("RNN", 0), ("GRU", 0), ("GRU", 1), ("LSTM", 0)])
def test_recurrent_operators_stop_at_each_sequences_length(
    monkeypatch: pytest.MonkeyPatch, kind: str, linear: int, direction: str, dynamic: bool, size: int, emulated: bool
) -> None:
    """Test the emulated device's kernels with 8 and 5 hidden elements (a full and a partial strip), and a GPU's."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties(emulated=emulated))
    steps, batch, width = 4, 3, 2
    count, gates = 1 + (direction == "bidirectional"), {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    shapes = [
        (steps, batch, width),
        (count, gates * size, width),
        (count, gates * size, size),
        (count, 2 * gates * size),
    ]
    x, w, r, b = (random(*shape, seed=seed) for seed, shape in enumerate(shapes))
    h0, c0 = random(count, batch, size, seed=7), random(count, batch, size, seed=8)
    peepholes = random(count, 3 * size, seed=9)
    lengths = np.array([4, 2, 0], np.int32)
    y, last_h, last_c = np.zeros((steps, count, batch, size)), h0.astype(np.float64), c0.astype(np.float64)
    for d in range(count):
        parameters = [v.astype(np.float64) for v in (w[d], r[d], *np.split(b[d], 2), peepholes[d])]
        for n, length in enumerate(lengths):
            order = range(length) if d == 0 and direction != "reverse" else reversed(range(length))
            for t in order:
                last_h[d, n], last_c[d, n] = step(kind, x[t, n], parameters, last_h[d, n], last_c[d, n], linear)
                y[t, d, n] = last_h[d, n]
    expected = [y, last_h, last_c]
    inputs, attributes = [x, w, r, b, lengths, h0], {"direction": direction, "hidden_size": size}
    if kind == "LSTM":
        inputs += [c0, peepholes]
    if kind == "GRU":
        attributes["linear_before_reset"] = linear
    actual = run_op(kind, inputs, attributes, 22, outputs=3 if kind == "LSTM" else 2, dynamic=dynamic)
    for got, want in zip(actual, expected, strict=False):
        np.testing.assert_allclose(got, want, 1e-5, 1e-5)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_batchwise_layout_is_the_other_one_transposed(kind: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    x, w, r = random(4, 3, 2), random(1, gates * 5, 2, seed=1), random(1, gates * 5, 5, seed=2)
    h0 = random(1, 3, 5, seed=3)
    plain = run_op(kind, [x, w, r, None, None, h0], {"hidden_size": 5}, 22, outputs=2)
    swapped = [x.swapaxes(0, 1), w, r, None, None, h0.swapaxes(0, 1)]
    batchwise = run_op(kind, swapped, {"hidden_size": 5, "layout": 1}, 22, outputs=2)
    np.testing.assert_allclose(batchwise[0], plain[0].transpose(2, 0, 1, 3), 1e-5, 1e-6)
    np.testing.assert_allclose(batchwise[1], plain[1].swapaxes(0, 1), 1e-5, 1e-6)


def test_activations_take_their_parameters_in_order_and_clip_comes_first() -> None:
    x, w, r = random(1, 2, 3), random(2, 4, 3, seed=1), np.zeros((2, 4, 4), np.float32)
    attributes = {
        "direction": "bidirectional",
        "hidden_size": 4,
        "activations": ["Affine", "LeakyRelu"],
        "activation_alpha": [2.0, 0.5],
        "activation_beta": [1.0],
        "clip": 0.5,
    }
    (y,) = run_op("RNN", [x, w, r], attributes, 22)
    first, second = (np.clip(x[0] @ w[d].T, -0.5, 0.5) for d in range(2))
    np.testing.assert_allclose(y[0, 0], 2 * first + 1, 1e-5, 1e-6)
    np.testing.assert_allclose(y[0, 1], np.where(second < 0, 0.5 * second, second), 1e-5, 1e-6)


def test_clip_bounds_the_gates_of_lstm_and_not_its_cell() -> None:
    """Compare with the CPU provider, since ONNX's reference ignores clip."""
    x, w, r = random(2, 1, 3), random(1, 8, 3, seed=1), random(1, 8, 2, seed=2)
    given = [x, w, r, np.array([[[2.0, -3.0]]], np.float32)]
    inputs = [*given[:3], None, None, None, given[3]]
    model = make_model("LSTM", inputs, {"hidden_size": 2, "clip": 0.4}, 14, outputs=3)
    model.ir_version = 8
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.input]
    expected = session.run(None, dict(zip(names, given, strict=True)))
    for actual, wanted in zip(run_model(model, given, False), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, 1e-5, 1e-6)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("per_head", [False, True])
def test_linear_attention(rule: str, per_head: bool) -> None:
    query, key, value = random(2, 3, 16), random(2, 3, 8, seed=1), random(2, 3, 6, seed=2)
    past = random(2, 2, 4, 3, seed=3)
    decay = -np.abs(random(2, 3, 2 if per_head else 8, seed=4)) if "gated" in rule else None
    beta = sigmoid(random(2, 3, 1 if per_head else 2, seed=5)) if "delta" in rule else None
    attributes = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}
    check("LinearAttention", [query, key, value, past, decay, beta], attributes, 27, outputs=2)


@pytest.mark.parametrize(("kind", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_recurrent_operators_of_float16_sum_in_float32(kind: str, gates: int) -> None:
    size = 64
    x, w, r = random(6, 2, 3), random(1, gates * size, 3, seed=1) / 4, random(1, gates * size, size, seed=2) / 8
    halves = [v.astype(np.float16) for v in (x, w, r)]
    (actual,) = run_op(kind, halves, {"hidden_size": size}, 22)
    (expected,) = run_op(kind, [v.astype(np.float32) for v in halves], {"hidden_size": size}, 22)
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual, expected, 4e-3, 2e-3)


@pytest.mark.parametrize("softmax_precision", [None, 1])
def test_attention_of_float16_stays_in_range(softmax_precision: int | None) -> None:
    # Without scaling, the scores of these queries and keys exceed the range of float16.
    q = np.full((1, 1, 2, 64), 40, np.float16)
    k = np.stack([q[0, 0, 0], q[0, 0, 0] / 2])[None, None]
    v = random(1, 1, 2, 4).astype(np.float16)
    attributes = {} if softmax_precision is None else {"softmax_precision": softmax_precision}
    for dynamic in (False, True):
        (actual,) = run_op("Attention", [q, k, v], attributes, 23, dynamic=dynamic)
        np.testing.assert_allclose(actual, np.broadcast_to(v[:, :, :1], actual.shape), 1e-3, 1e-3)


def test_empty_sequences() -> None:
    q, k = np.zeros((1, 2, 0, 4), np.float32), random(1, 2, 3, 4)
    assert run_op("Attention", [q, k, k], opset=23)[0].shape == (1, 2, 0, 4)
    (y,) = run_op("Attention", [k, q, q], opset=23)
    np.testing.assert_array_equal(y, np.zeros((1, 2, 3, 4)))
    h0 = random(1, 2, 5)
    outputs = run_op(
        "RNN",
        [np.zeros((0, 2, 3), np.float32), random(1, 5, 3), random(1, 5, 5), None, None, h0],
        {"hidden_size": 5},
        22,
        outputs=2,
    )
    assert outputs[0].shape == (0, 1, 2, 5)
    np.testing.assert_array_equal(outputs[1], h0)


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("past", [False, True])
def test_causal_conv_with_state(activation: str, past: bool) -> None:
    state = random(2, 3, 3, seed=2) if past else None
    inputs = [random(2, 3, 5), random(3, 1, 4, seed=1), random(3, seed=3), state]
    check("CausalConvWithState", inputs, {"activation": activation}, 27, outputs=2)
