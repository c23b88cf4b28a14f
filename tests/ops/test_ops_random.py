"""Random operators: their distributions, their seeds, and Philox compared with its published test vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from emulator_harness import configured
from kernel_harness import run_model, run_op
from kernel_launch import run
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.kernels.codegen.source import Emitter
from ort_cuda_plugin.kernels.elementwise.random import philox_4x32
from ort_cuda_plugin.model.ir import DType, NodeError
from ort_cuda_plugin.model.onnx_graph import storage
from ort_cuda_plugin.ops.onnx.math.random import _largest_below
from ort_cuda_plugin.program.expressions.scalar import Scalar

Array = np.ndarray[Any, np.dtype[Any]]
HALVES = {np.float16: TensorProto.FLOAT16, ml_dtypes.bfloat16: TensorProto.BFLOAT16}
FLOATS = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE} | HALVES
N = 100_000
LIMIT = 1.95 / math.sqrt(N)
"""Kolmogorov-Smirnov statistic that one in a thousand samples of N numbers exceeds. Seeds are fixed."""


def draw(op_type: str, dtype: Any = np.float32, n: int = N, **attributes: Any) -> Array:
    """Return ``n`` numbers that a random operator without inputs draws, as float64."""
    info = helper.make_tensor_value_info("y", FLOATS[dtype], [n])
    node = helper.make_node(op_type, [], ["y"], shape=[n], dtype=FLOATS[dtype], **({"seed": 1.0} | attributes))
    graph = helper.make_graph([node], "g", [], [info])
    (y,) = run_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)]), [])
    result: Array = y.view(dtype).astype(np.float64)
    return result


def distance(sample: Array, distribution: Callable[[Array], Array]) -> float:
    """Return the Kolmogorov-Smirnov statistic: the largest difference between the distribution functions."""
    at = distribution(np.sort(sample))
    steps = np.arange(sample.size + 1) / sample.size
    return float(max((steps[1:] - at).max(), (at - steps[:-1]).max()))


@np.vectorize
def normal_distribution(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def correlation(a: Array, b: Array) -> float:
    return float(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1])


# ---- Philox ----

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""(counter, key, result): Random123's known answers for philox4x32-10."""


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    emit = Emitter()
    leaves = [Scalar(DType.UINT32, "leaf") for _ in range(6)]
    for number, leaf in enumerate(leaves):
        emit.bind(leaf, emit.assign(f"x[{number}]"))
    for number, word in enumerate(philox_4x32(leaves[:4], leaves[4:])):
        emit.store("y", str(number), word)
    source = "def kernel(x, y):\n" + "\n".join(emit.lines) + "\n"
    spec = KernelSpec("philox", ("*u32", "*u32"), source=source, launch_bounds=1)
    x = np.array(words(counter) + words(key), np.uint32)
    np.testing.assert_array_equal(run(spec, (1,), (1,), x, np.zeros(4, np.uint32))[1], words(answer))


# ---- distributions ----


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_are_distributed_as_asked(dtype: type[np.generic]) -> None:
    low, high = -2.0, 6.0
    y = draw("RandomUniform", dtype, low=low, high=high)
    grid = 2 * float(ml_dtypes.finfo(dtype).eps)
    assert distance(y, lambda x: (x - low) / (high - low)) < LIMIT + grid
    assert abs(y.mean() - 2) < 5 * math.sqrt(64 / 12 / N) + grid
    assert abs(y.var() - 64 / 12) < 0.1
    assert low <= y.min() < low + 0.01
    assert high - 0.1 < y.max() < high
    assert abs(correlation(y[1:], y[:-1])) < 5 / math.sqrt(N)


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_numbers_are_distributed_as_asked(dtype: type[np.generic]) -> None:
    mean, scale = 0.5, 2.0
    y = (draw("RandomNormal", dtype, mean=mean, scale=scale) - mean) / scale
    assert distance(y, normal_distribution) < LIMIT + 2 * float(ml_dtypes.finfo(dtype).eps)
    assert abs(y.mean()) < 5 / math.sqrt(N)
    assert abs(y.var() - 1) < 5 * math.sqrt(2 / N)
    assert abs((y**3).mean()) < 5 * math.sqrt(15 / N)
    assert abs((y**4).mean() - 3) < 5 * math.sqrt(96 / N)
    assert abs(correlation(y[1:], y[:-1])) < 5 / math.sqrt(N)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 2.0), (-1.0, 0.0), (-2.0, -1.0), (3.0, 3.0)])
def test_uniform_numbers_are_less_than_the_upper_limit(dtype: type[np.generic], low: float, high: float) -> None:
    y = draw("RandomUniform", dtype, low=low, high=high)
    assert low <= y.min() <= y.max() <= high
    assert y.max() < high or low == high


@pytest.mark.parametrize("x", [1.0, 0.0, -1.0, -2.0, 0.75, 1e-6, -3e-5, 1000.5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_number_below_another(dtype: type[np.generic], x: float) -> None:
    found = _largest_below(x, storage(np.empty(0, dtype))[1])
    assert float(dtype(found)) == found < x
    if float(dtype(x)) == x:
        assert found == float(np.nextafter(dtype(x), dtype(-np.inf)))


def test_small_and_large_results() -> None:
    assert run_op("RandomNormalLike", [np.zeros((), np.float32)], opset=22)[0].shape == ()
    assert run_op("RandomUniformLike", [np.zeros((0, 3), np.float32)], opset=22)[0].shape == (0, 3)
    x = np.zeros((3, 5, 7), np.int8)
    (y,) = run_op("RandomUniformLike", [x], {"dtype": TensorProto.DOUBLE}, opset=22, dynamic=True)
    assert y.shape == x.shape
    assert y.dtype == np.float64
    assert np.unique(y).size == y.size


def test_random_numbers_that_are_no_floats_name_the_node() -> None:
    with pytest.raises(NodeError, match=r"RandomNormalLike.*dtype must be a floating-point type, got INT8"):
        run_op("RandomNormalLike", [np.zeros(3, np.int8)], opset=22)
    wrong = r"RandomUniform.*low and high must be finite, with low at most high, got 2.0 and 1.0"
    with pytest.raises(NodeError, match=wrong):
        draw("RandomUniform", low=2.0, high=1.0)


# ---- Bernoulli and Multinomial ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_bernoulli_draws_ones_with_the_probability_of_each_element(dtype: type[np.generic], dynamic: bool) -> None:
    probabilities = np.array([0, 0.125, 0.5, 0.9375, 1], dtype)
    x = np.ascontiguousarray(np.broadcast_to(probabilities, (N // 5, 5)))
    y = run_op("Bernoulli", [x], {"seed": 1.0}, opset=22, dynamic=dynamic)[0].view(dtype).astype(np.float64)
    assert set(np.unique(y)) == {0, 1}
    assert (y[:, 0] == 0).all()
    assert (y[:, 4] == 1).all()
    expected = probabilities.astype(np.float64)
    deviation = 5 * np.sqrt(expected * (1 - expected) / len(y))
    assert (np.abs(y.mean(0) - expected) <= deviation).all()


@pytest.mark.parametrize("dtype", ["BOOL", "INT8", "UINT16", "INT64", "FLOAT16", "DOUBLE"])
def test_bernoulli_of_other_types(dtype: str) -> None:
    number = TensorProto.DataType.Value(dtype)
    (y,) = run_op("Bernoulli", [np.full(1000, 0.5, np.float32)], {"dtype": number, "seed": 2.0}, opset=22)
    assert y.dtype == helper.tensor_dtype_to_np_dtype(number)
    assert 400 < y.astype(int).sum() < 600


@pytest.mark.parametrize("dtype", FLOATS)
def test_multinomial_draws_classes_with_their_probabilities(dtype: type[np.generic]) -> None:
    weights = np.array([[1, 2, 3, 4, 6], [8, 0, 1, 0, 1]], np.float64)
    with np.errstate(divide="ignore"):
        logarithms = (np.log(weights) + 3).astype(dtype)
    (y,) = run_op("Multinomial", [logarithms], {"sample_size": N, "seed": 1.0}, opset=22)
    assert y.dtype == np.int32
    for row, drawn in zip(np.exp(logarithms.astype(np.float64)), y, strict=True):
        expected = row / row.sum()
        deviation = 5 * np.sqrt(expected * (1 - expected) / N)
        assert (np.abs(np.bincount(drawn, minlength=5) / N - expected) <= deviation).all()
    assert abs(correlation(*y)) < 5 / math.sqrt(N)


@pytest.mark.parametrize("classes", [1, 2, 3, 8, 9, 1000])
def test_multinomial_finds_every_class(classes: int) -> None:
    x = np.zeros((2, classes), np.float32)
    (y,) = run_op("Multinomial", [x], {"sample_size": 20 * classes, "dtype": 7, "seed": 3.0}, opset=22, dynamic=True)
    assert y.dtype == np.int64
    for drawn in y:
        counts = np.bincount(drawn, minlength=classes)
        assert counts.size == classes
        assert counts.min() > 0


def test_multinomial_never_draws_what_is_not_finite() -> None:
    x = np.array([[np.inf, 1, np.nan, 2, -np.inf], [np.nan] * 5], np.float32)
    (y,) = run_op("Multinomial", [x], {"sample_size": 1000}, opset=22)
    assert set(y[0]) == {1, 3}
    assert set(y[1]) == {4}


# ---- Dropout ----

RATIOS = [0.0, 0.25, 0.5, 1.0]
DROPPED = {**FLOATS, ml_dtypes.float8_e5m2: TensorProto.FLOAT8E5M2, ml_dtypes.float8_e4m3fn: TensorProto.FLOAT8E4M3FN}


@pytest.mark.parametrize("dtype", DROPPED)
@pytest.mark.parametrize("ratio", RATIOS)
def test_dropout_drops_its_ratio_and_scales_the_rest(dtype: type[np.generic], ratio: float) -> None:
    x = np.linspace(1, 4, N, dtype=np.float32).astype(dtype)
    inputs = [x, np.array(ratio, np.float32), np.array(True)]
    y, mask = run_op("Dropout", inputs, {"seed": 5}, opset=22, outputs=2)
    y = y.view(dtype).astype(np.float64)
    assert mask.dtype == np.bool_
    assert abs(mask.mean() - (1 - ratio)) <= 5 * math.sqrt(ratio * (1 - ratio) / N)
    real: Any = np.float64 if dtype is np.float64 else np.float32
    with np.errstate(divide="ignore"):
        scaled = (x.astype(real) * (1 / real(1 - ratio))).astype(dtype).astype(np.float64)
    np.testing.assert_allclose(y[mask], scaled[mask], rtol=2 * float(ml_dtypes.finfo(dtype).eps))
    assert (y[~mask] == 0).all()


@pytest.mark.parametrize("constant", [(), (1,), (1, 2)])
@pytest.mark.parametrize("training", [False, True])
def test_dropout_looks_on_the_device_whether_it_is_training(constant: tuple[int, ...], training: bool) -> None:
    x = np.ones((50, 20), np.float32)
    inputs: list[Array] = [x, np.array(0.5, np.float64), np.array(training)]
    y, mask = run_op("Dropout", inputs, opset=13, outputs=2, constant=constant, dynamic=True)
    assert 400 < mask.sum() < 600 if training else mask.all()
    np.testing.assert_array_equal(y, np.where(mask, 2, 0) if training else x)


@pytest.mark.parametrize("is_test", [0, 1])
@pytest.mark.parametrize("opset", [1, 6])
def test_the_first_versions_of_dropout_train_unless_they_are_told(opset: int, is_test: int) -> None:
    x = np.ones(1000, np.float32)
    y, mask = run_op("Dropout", [x], {"ratio": 0.75, "is_test": is_test}, opset=opset, outputs=2)
    assert mask.dtype == x.dtype
    assert mask.sum() == 1000 if is_test else 150 < mask.sum() < 350
    np.testing.assert_array_equal(y, mask if is_test else mask * 4)


def test_dropout_without_a_ratio_drops_half_and_refuses_an_impossible_one() -> None:
    (y,) = run_op("Dropout", [np.ones(1000, np.float32), None, np.array(True)], opset=13)
    assert 400 < np.count_nonzero(y) < 600
    with pytest.raises(NodeError, match=r"ratio must be in \[0, 1\], got 1.5"):
        run_op("Dropout", [y, np.array(1.5, np.float32), np.array(True)], opset=13, constant=[1])


# ---- seeds and Runs in sessions ----


def session(*nodes: onnx.NodeProto) -> ort.InferenceSession:
    """Return a session with nodes that read x (float64 [n]) and write y0, y1, ..."""
    x = helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["n"])
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.DOUBLE, ["n"]) for i in range(len(nodes))]
    graph = helper.make_graph(nodes, "g", [x], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    made = ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
    placed = {part.ep_name for part in made.get_provider_graph_assignment_info()}
    assert placed == {ort_cuda_plugin.get_ep_name()}
    return made


def node(index: int, op_type: str = "RandomUniformLike", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, ["x"], [f"y{index}"], **attributes)


def runs(made: ort.InferenceSession, *sizes: int) -> list[Array]:
    return [np.stack(made.run(None, {"x": np.zeros(size)})) for size in sizes]


def test_a_seed_gives_the_same_sequence_of_runs_in_every_session() -> None:
    first, second = (runs(session(node(0, seed=7.0)), 1000, 50, 1000) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.unique(np.concatenate(first, 1)).size == 2050
    (other,) = runs(session(node(0, seed=8.0)), 1000)
    assert abs(correlation(first[0], other)) < 5 / math.sqrt(1000)


def test_without_a_seed_sessions_nodes_and_runs_are_independent() -> None:
    sessions = [session(node(0), node(1)) for _ in range(2)]
    drawn = [y for made in sessions for rows in runs(made, 4000, 4000) for y in rows]
    assert np.unique(drawn).size == 8 * 4000
    for i, a in enumerate(drawn):
        assert distance(a, lambda x: x) < 2.3 / math.sqrt(4000)  # exceeded by 1 of 20,000 samples
        for b in drawn[:i]:
            assert abs(correlation(a, b)) < 6 / math.sqrt(4000)


def test_nodes_with_equal_seeds_draw_equal_numbers_as_in_onnx_runtime() -> None:
    ((a, b, c),) = runs(session(node(0, seed=1.0), node(1, seed=1.0), node(2, seed=2.0)), 100)
    np.testing.assert_array_equal(a, b)
    assert not np.isin(a, c).any()


def test_a_steady_run_counts_on_without_python() -> None:
    made = session(node(0, "RandomNormalLike", seed=1.0))
    runs(made, 10, 20)
    before = ort_cuda_plugin.counters()
    drawn = runs(made, *[10, 20] * 20)
    after = ort_cuda_plugin.counters()
    assert after["python_calls"] == before["python_calls"]
    assert after["copies_h2d"] - before["copies_h2d"] <= 40  # the inputs of 40 Runs
    assert np.unique(np.concatenate(drawn, 1)).size == 600


@pytest.mark.parametrize("adversarial", [0, 1])
def test_concurrent_runs_draw_different_numbers(adversarial: int) -> None:
    with configured(adversarial=adversarial, check=1):
        made = session(node(0, seed=1.0))
        expected = np.concatenate(runs(made, *[50] * 40), 1)
        made = session(node(0, seed=1.0))
        with ThreadPoolExecutor(4) as pool:
            drawn = np.concatenate(list(pool.map(lambda _: runs(made, 50)[0], range(40))), 1)
        assert findings() == []
        # Concurrent Runs draw the same 40 sequences in another order.
        np.testing.assert_array_equal(np.sort(drawn), np.sort(expected))
