"""Fusion: fused programs compute the bits of unfused ones, with the expected number of launches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import ort_cuda_plugin
from encoder import encoder
from fused_bits import ENCODERS, TYPES, as_type, differences, source_of, uncontracted
from kernel_harness import run_model
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model, storage
from ort_cuda_plugin.passes.table import PASSES
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from ort_cuda_plugin.program.steps.steps import Attend, Contract, Convolve, Map, Rows
from pass_programs import case, programs_after
from programs.states import DEVICES, record
from random_models import ModelMaker, feed


@pytest.fixture
def without_contraction() -> Iterator[None]:
    with uncontracted():
        yield


def compare(model: onnx.ModelProto, inputs: list[np.ndarray], *, dynamic: bool = False) -> None:
    assert not differences(model, inputs, dynamic=dynamic)


@pytest.mark.usefixtures("without_contraction")
@pytest.mark.parametrize(("name", "dtype"), [("encoder", "float16"), ("light_squeezenet", "float16")])
def test_a_network_has_the_same_bits_fused(name: str, dtype: str) -> None:
    """Compare two networks in float16. The script tests/harness/fused_bits.py compares all of them in all types."""
    model, inputs = source_of(name, dtype)
    compare(model, inputs, dynamic=name in ENCODERS)


@pytest.mark.usefixtures("without_contraction")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(8))
def test_a_random_model_has_the_same_bits_fused(seed: int, dtype: str) -> None:
    maker = ModelMaker(seed + 100 * list(TYPES).index(dtype), foreign=False)
    model = as_type(maker.model(20), TYPES[dtype])
    arrays = feed(2, 3, seed)
    inputs = [
        arrays[value.name].astype(onnx.helper.tensor_dtype_to_np_dtype(TYPES[dtype])) for value in model.graph.input
    ]
    assert all(storage(x)[1].name == dtype.upper() for x in inputs)
    compare(model, inputs, dynamic=bool(seed % 2))


# ---- numbers of launches ----


def launches(model: onnx.ModelProto, *, fusion: bool = True) -> int:
    """Return the number of records (launches, copies, library calls) in the plan of a model with static shapes."""
    cluster = CompiledCluster(read_model(model), DeviceProperties(), LoweringOptions(fusion=fusion))
    plan = cluster.prepare().plan
    assert plan is not None
    return len(plan.records)


def program(text: str) -> onnx.ModelProto:
    """Parse a graph in ONNX's textual syntax; return its model with inferred shapes."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> fused {text}')
    onnx.checker.check_model(model)
    return onnx.shape_inference.infer_shapes(model)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


LAYER_NORM = """axes = Constant<value_ints = [-1]>() two = Constant<value_float = 2.0>()
    eps = Constant<value_float = 1e-5>() mean = ReduceMean(h, axes) d = Sub(h, mean)
    squared = Pow(d, two) variance = ReduceMean(squared, axes)
    shifted = Add(variance, eps) deviation = Sqrt(shifted) normal = Div(d, deviation) scaled = Mul(normal, w)
    y = Add(scaled, w)"""
GELU = """k = Constant<value_float = 1.4142>() one = Constant<value_float = 1.0>()
    half = Constant<value_float = 0.5>()
    e = Div(h, k) f = Erf(e) g = Add(f, one) m = Mul(h, g) y = Mul(m, half)"""
TANH_GELU = """c = Constant<value_float = 0.044715>() r = Constant<value_float = 0.79788>()
    three = Constant<value_float = 3.0>() one = Constant<value_float = 1.0>() half = Constant<value_float = 0.5>()
    cube = Pow(h, three) q = Mul(cube, c) s = Add(h, q) t = Mul(s, r) u = Tanh(t) v = Add(u, one) m = Mul(h, v)
    y = Mul(m, half)"""
SUM = "(float[4, 8] x, float[4, 8] r, float[8] w) => (float[4, 8] y{more}) {{ h = Add(x, r) {rest} }}"
PRODUCT = "(float[4, 8] x, float[8, 6] b, float[6] w) => (float[4, 6] y) {{ p = MatMul(x, b) h = Add(w, p) {rest} }}"

PROGRAMS = {
    "a chain": ("(float[4, 8] x) => (float[4, 8] y) { a = Relu(x) b = Neg(a) c = Add(b, x) y = Sigmoid(c) }", 1),
    "a decomposed LayerNormalization of a sum": (SUM.format(more="", rest=LAYER_NORM), 1),
    "a product with bias and GELU": (PRODUCT.format(rest=GELU), 1),
    "a product with bias and GELU by tanh": (PRODUCT.format(rest=TANH_GELU), 1),
    "a softmax between maps": (
        """(float[4, 8] x, float[4, 8] m) => (float16[4, 8] y)
        { k = Constant<value_float = 0.125>() a = Mul(x, k) b = Add(a, m) p = Softmax(b) y = Cast<to = 10>(p) }""",
        1,
    ),
    "a sum that is needed twice": (SUM.format(more=", float[4, 8] h", rest=LAYER_NORM), 1),
    "parts of a concatenation": (
        """(float[4, 8] x, float[8, 6] b) => (float[4, 20] y)
        { r = Relu(x) p = MatMul(r, b) n = Neg(p) t = Tanh(n) y = Concat<axis = 1>(r, n, t) }""",
        2,
    ),
    "heads of a transposed product": (
        """(float[2, 4, 8] x, float[8, 6] b) => (float[2, 3, 4, 2] y)
        { s = Constant<value_ints = [2, 4, 3, 2]>() p = MatMul(x, b) h = Reshape(p, s)
          t = Transpose<perm = [0, 2, 1, 3]>(h) y = Neg(t) }""",
        1,
    ),
    # Two launches: w is an input, so each Run packs it for the convolution.
    "shuffled channels of a convolution": (
        """(float[2, 6, 9, 10] x, float[8, 6, 1, 1] w, float[8] b) => (float[2, 8, 9, 10] y)
        { s = Constant<value_ints = [2, 2, 4, 9, 10]>() e = Constant<value_ints = [2, 8, 9, 10]>()
          c = Conv(x, w, b) a = Relu(c) h = Reshape(a, s) t = Transpose<perm = [0, 2, 1, 3, 4]>(h)
          y = Reshape(t, e) }""",
        2,
    ),
    "shuffled channels of a convolution in groups of one": (
        """(float[2, 6, 9, 10] x, float[6, 1, 3, 3] w) => (float[2, 6, 7, 8] y)
        { s = Constant<value_ints = [2, 2, 3, 7, 8]>() e = Constant<value_ints = [2, 6, 7, 8]>()
          c = Conv<group = 6>(x, w) h = Reshape(c, s) t = Transpose<perm = [0, 2, 1, 3, 4]>(h)
          y = Reshape(t, e) }""",
        2,
    ),
    "copies of pasts and of what is new": (
        """(float[2, 4] a, float[2, 4] b, float[2, 3] c, float[2, 3] d) => (float[2, 7] x, float[2, 7] y)
        { x = Concat<axis = 1>(a, c) y = Concat<axis = 1>(b, d) }""",
        2,
    ),
    "a fill that comes before what is written over it": (
        """(float[4, 8] a, float[4, 8] b) => (float[4, 8] x, float[6, 8] y)
        { p = Constant<value_ints = [1, 0, 1, 0]>() one = Constant<value_float = 1.0>()
          x = Relu(a) n = Neg(b) y = Pad(n, p, one) }""",
        2,
    ),
    "a map of a concatenation of what can take it in": (
        """(float[4, 8] x, float[8, 6] b, float[14] s, float[4, 14] z) => (float[4, 14] y)
        { p = MatMul(x, b) c = Concat<axis = 1>(p, x) m = Mul(c, s) r = Relu(m) y = Sub(z, r) }""",
        2,
    ),
    "a map of parts that meet again in one step": (
        """(float[3, 1] a, float[3, 1] b, float[3, 2] z) => (float[3, 2] y)
        { n = Neg(b) c = Concat<axis = 1>(a, n) y = Mul(c, z) }""",
        1,
    ),
    "a map of a concatenation of inputs": (
        """(float[4, 8] a, float[4, 8] b) => (float[8, 8] y) { c = Concat<axis = 0>(a, b) y = Relu(c) }""",
        2,
    ),
    "a map of a concatenation that is needed itself": (
        """(float[4, 8] x, float[8, 6] b) => (float[4, 14] y, float[4, 14] c)
        { p = MatMul(x, b) c = Concat<axis = 1>(p, x) y = Relu(c) }""",
        3,
    ),
    "a map of what is written over a fill": (
        """(float[4, 8] a) => (float[6, 8] y)
        { p = Constant<value_ints = [1, 0, 1, 0]>() one = Constant<value_float = 1.0>()
          n = Neg(a) q = Pad(n, p, one) e = Exp(q) y = Neg(e) }""",
        3,
    ),
    "poolings of one image beside each other": (
        """(float[1, 3, 8, 9] x) => (float[1, 9, 4, 4] y)
        { p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)
          q = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(x) r = Neg(q) y = Concat<axis = 1>(p, q, r) }""",
        3,
    ),
    "a convolution and a pooling of a part of a concatenation": (
        """(float[1, 3, 9, 9] x, float[5, 3, 3, 3] w, float[20, 5, 3, 3] v)
        => (float[1, 8, 9, 9] y, float[1, 20, 7, 7] z, float[1, 5, 7, 7] q)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c) y = Concat<axis = 1>(x, r) z = Conv(r, v)
          q = MaxPool<kernel_shape = [3, 3]>(r) }""",
        5,
    ),
    "a pooling that a concatenation repeats": (
        """(float[1, 3, 8, 9] x) => (float[1, 6, 4, 4] y)
        { p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) y = Concat<axis = 1>(p, p) }""",
        2,
    ),
    "poolings of two images": (
        """(float[2, 3, 8, 9] x) => (float[2, 6, 4, 4] y)
        { p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) n = Neg(x)
          q = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(n) y = Concat<axis = 1>(p, q) }""",
        4,
    ),
    "one element with more dimensions than what follows": (
        """(float[2, 2, 2] x, float[1, 1, 1] w) => (float[8] y)
        { s = Constant<value_ints = [8]>() a = Add(x, w) h = Reshape(a, s) y = Tanh(h) }""",
        1,
    ),
    "one element with more dimensions than a row program": (
        """(float[4, 2] x, float[1, 1, 1] w) => (float[2, 2, 2] y)
        { s = Constant<value_ints = [2, 2, 2]>() a = Softmax(x) h = Reshape(a, s) y = Add(h, w) }""",
        1,
    ),
    "one element with more dimensions than a product, and one element as a result": (
        """(float[1, 5] x, float[5, 1] v, float[1, 1, 1] w) => (float[1, 1, 1] y)
        { s = Constant<value_ints = [1, 1, 1]>() a = MatMul(x, v) h = Reshape(a, s) y = Add(h, w) }""",
        1,
    ),
    "a map of which one result is summed and another added to the sums": (
        """(float[1, 3, 8, 9] x, float[3, 3, 3, 3] w) => (float[1, 3, 7, 8] y)
        { p = MaxPool<kernel_shape = [2, 2]>(x) s = Sigmoid(p) e = Exp(s) c = Conv<pads = [1, 1, 1, 1]>(e, w)
          y = Add(c, s) }""",
        4,
    ),
    "a map of which one result is a product's factor and another added to the product": (
        """(float[4, 8] x, float[8, 8] w) => (float[4, 8] y)
        { a = Constant<value_int = 1>() o = CumSum(x, a) s = Sigmoid(o) e = Exp(s) c = MatMul(e, w)
          y = Add(c, s) }""",
        3,
    ),
    "attention whose probabilities are added to its result": (
        """(float[2, 4, 8] q, float[2, 8, 8] k, float[2, 8, 8] v) => (float[2, 4, 8] y)
        { s = MatMul(q, k) p = Softmax(s) o = MatMul(p, v) y = Add(o, p) }""",
        3,
    ),
    "attention whose probabilities have a second factor": (
        """(float[2, 8, 8] q, float[2, 8, 8] k) => (float[2, 8, 8] y)
        { s = MatMul(q, k) n = Neg(s) p = Softmax(n) y = MatMul(p, p) }""",
        3,
    ),
    "attention whose scores are added to its result": (
        """(float[2, 4, 8] q, float[2, 8, 8] k, float[2, 8, 8] v) => (float[2, 4, 8] y)
        { s = MatMul(q, k) p = Softmax(s) o = MatMul(p, v) y = Add(o, s) }""",
        3,
    ),
    "attention whose repeated keys are added to its result": (
        """(float[1, 4, 8, 8] q, float[1, 2, 8, 8] k, float[1, 2, 8, 8] v) => (float[1, 4, 8, 8] y)
        { axis = Constant<value_ints = [2]>() times = Constant<value_ints = [1, 2, 2, 8, 8]>()
          heads = Constant<value_ints = [1, 4, 8, 8]>()
          k1 = Unsqueeze(k, axis) k2 = Expand(k1, times) k3 = Reshape(k2, heads) t = Transpose<perm = [0, 1, 3, 2]>(k3)
          v1 = Unsqueeze(v, axis) v2 = Expand(v1, times) v3 = Reshape(v2, heads)
          s = MatMul(q, t) p = Softmax(s) o = MatMul(p, v3) y = Add(o, k3) }""",
        2,
    ),
    "a row of few elements, and what it is subtracted from": (
        """(float[4, 8] x) => (float[4, 8] y)
        { axes = Constant<value_ints = [1]>() m = ReduceMax<keepdims = 1>(x, axes) d = Sub(x, m) y = Exp(d) }""",
        1,
    ),
}


@pytest.mark.usefixtures("without_contraction")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_takes_so_many_launches_and_has_the_bits_of_the_unfused_one(name: str) -> None:
    text, expected = PROGRAMS[name]
    model = program(text)
    assert launches(model) == expected < launches(model, fusion=False)
    sizes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input]
    compare(model, [weights(*shape, seed=seed) for seed, shape in enumerate(sizes)])


@pytest.mark.parametrize("libraries", [(), ("cublaslt", "cudnn")], ids=["own kernels", "libraries"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_a_plan_for_a_gpu(name: str, libraries: tuple[str, ...]) -> None:
    device = DeviceProperties.gpu((8, 0), libraries=frozenset(libraries))
    assert CompiledCluster(read_model(program(PROGRAMS[name][0])), device).prepare().plan is not None


def test_attention_stays_float32_for_a_gemm_that_also_adds_its_result() -> None:
    one = case("tf32_as_scaled_f16.attention")
    last = one.model.graph.node[-1]
    result, attention = last.output[0], last.input[0]
    last.output[0] = "product"
    one.model.graph.node.append(onnx.helper.make_node("Add", ["product", attention], [result]))
    assert "attention %33 f16" in one.expected
    programs = programs_after(one.model, one.device)
    assert re.search(r"attention +%\d+ f32", programs["tf32_as_scaled_f16"])


ATTENTION = """(float[2, rows, 64] q, float[2, keys, 64] k, float[2, keys, 64] v) => (float[2, rows, 64] y)
{ t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }"""
PROMPT, FEW_KEYS, MANY_KEYS, NEXT_TOKEN = (300, 300), (1, 100), (1, 300), (1, 301)  # query rows, keys


@pytest.mark.parametrize(
    ("planned", "served", "others"),
    [
        (PROMPT, [PROMPT], [MANY_KEYS]),
        (FEW_KEYS, [FEW_KEYS], [PROMPT, MANY_KEYS]),
        (MANY_KEYS, [MANY_KEYS, NEXT_TOKEN], [PROMPT, FEW_KEYS]),
    ],
)
def test_a_prompt_and_single_tokens_have_plans_of_their_own(
    planned: tuple[int, int], served: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    def inputs(sizes: tuple[int, int]) -> list[np.ndarray]:
        rows, keys = sizes
        return [np.zeros((2, count, 64), np.float32) for count in (rows, keys, keys)]

    recorded = record(program(ATTENTION), inputs(planned), DEVICES["sm_90"])
    assert all(recorded.values(inputs(sizes)) is not None for sizes in served)
    assert all(recorded.values(inputs(sizes)) is None for sizes in others)


def test_split_kv_gets_a_further_plan_when_the_keys_have_grown() -> None:
    text = ATTENTION.replace("float[", "float16[")

    def inputs(keys: int) -> list[np.ndarray]:
        return [np.zeros((2, count, 64), np.float16) for count in (1, keys, keys)]

    recorded = record(program(text), inputs(300), DEVICES["sm_90"])
    assert recorded.values(inputs(1000)) is not None
    assert recorded.values(inputs(5000)) is None


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("(float16[rows, 64] x, float16[64, 64] w) => (float16[rows, 64] y) { y = MatMul(x, w) }", [(64,), (64, 64)]),
        (
            "(float16[n, 64, 1, 1] x, float16[64, 64, 1, 1] w) => (float16[n, 64, 1, 1] y) { y = Conv(x, w) }",
            [(64, 1, 1), (64, 64, 1, 1)],
        ),
    ],
    ids=["GEMM", "convolution"],
)
def test_small_medium_and_large_tiles_have_plans_of_their_own(text: str, shapes: list[tuple[int, ...]]) -> None:
    def inputs(rows: int) -> list[np.ndarray]:
        return [np.zeros((rows, *shapes[0]), np.float16), np.zeros(shapes[1], np.float16)]

    for planned, served in ((8, [8, 64]), (65, [65, 1024]), (5000, [5000, 9999])):
        recorded = record(program(text), inputs(planned), DEVICES["sm_90"])
        assert [n for n in (8, 64, 65, 1024, 5000, 9999) if recorded.values(inputs(n)) is not None] == served


def test_a_chain_of_three_hundred_operators_is_one_launch() -> None:
    steps = " ".join(f"x{i + 1} = {'Sin' if i % 2 else 'Add'}(x{i}{'' if i % 2 else ', x0'})" for i in range(300))
    model = program(f"(float[4, 8] x0) => (float[4, 8] x300) {{ {steps} }}")
    assert launches(model) == 1
    (fused,) = run_model(model, [weights(4, 8)], options=LoweringOptions(fusion=True))
    assert np.isfinite(fused).all()


def test_integers_that_wrap_in_the_middle_of_a_kernel_are_what_they_are_in_memory() -> None:
    """x * x wraps to a negative int64. In the fused kernel, LLVM must not assume that squares are nonnegative."""
    model = program(
        """(int64[3] x, int64[3] y) => (int64[3] z)
        { s = Mul(x, x) p = Mul(x, y) n = Neg(s) d = Div(s, p) e = Sub(d, n) a = Abs(e) z = Max(a, d) }"""
    )
    x, y = np.array([4611686011984936971, 3037000500, -5]), np.array([4611686057082093541, -3037000499, 2**62])
    assert launches(model) == 1
    with np.errstate(over="ignore"):
        square, product = x * x, x * y
        quotient = np.trunc(square / product).astype(np.int64)
        wanted = np.maximum(np.abs(quotient + square), quotient)
    (actual,) = run_model(model, [x, y], options=LoweringOptions(fusion=True))
    np.testing.assert_array_equal(actual, wanted)


def test_a_chain_of_remainders_of_constants_is_one_launch_and_compiles() -> None:
    """LLVM's compile time would double with each division by a constant nested in another."""
    divisors = [3, 1, 2, 1, 2, 2, 3, 3, 2, 2, 2, 3, 1, 2] * 3
    names = " ".join(f"c{value} = Constant<value_ints = [{value}]>()" for value in (1, 2, 3))
    steps = " ".join(f"m{i} = Mod(x{i}, c{d}) x{i + 1} = Add(m{i}, c{d})" for i, d in enumerate(divisors))
    model = program(f"(int64[1] x0) => (int64[1] x{len(divisors)}) {{ {names} {steps} }}")
    assert launches(model) == 1
    wanted = np.array([-7])
    (actual,) = run_model(model, [wanted], options=LoweringOptions(fusion=True))
    for divisor in divisors:
        wanted = wanted % divisor + divisor
    np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("decomposed", [False, True])
def test_an_encoder_takes_seven_steps_a_layer(decomposed: bool) -> None:
    """One program for any batch and length: four GEMMs, two normalizations and attention per layer."""
    counts = []
    for layers in (2, 3):
        model = onnx.shape_inference.infer_shapes(encoder(layers, 48, 3, decomposed=decomposed))
        counts.append(int(programs_after(model)["attention_fusion"].split()[2]))
    assert counts[1] - counts[0] <= 7
    assert counts[0] <= 2 * 7 + 8


@pytest.mark.parametrize(("second", "stored"), [("2.0", 1), ("3.0", 2)])
def test_results_that_are_equal_are_stored_once(second: str, stored: int) -> None:
    """CSE compares constants by value: equal constants need not be the same object."""
    model = program(
        f"""(float[9, 8] x, float[8, 6] a, float[8, 6] b) => (float[9, 6] y, float[9, 6] z)
        {{ k = Constant<value_float = 2.0>() l = Constant<value_float = {second}>() e = Exp(x)
          s = Mul(e, k) t = Mul(e, l) y = MatMul(s, a) z = MatMul(t, b) }}"""
    )
    text = programs_after(model)["common_subexpression_elimination"]
    (line,) = (line for line in text.splitlines() if " map " in line)
    assert line.split("<-")[0].count("f32[") == stored
    compare(model, [weights(9, 8), weights(8, 6, seed=1), weights(8, 6, seed=2)])


@pytest.mark.usefixtures("without_contraction")
@pytest.mark.parametrize("squares", ["Pow(h, two)", "Mul(h, h)"])
def test_what_is_made_of_what_a_step_reads_is_not_stored(squares: str) -> None:
    """The GEMM stores h, and the normalization computes the square of h itself instead of loading it."""
    model = program(
        f"""(float[9, 8] x, float[8, 6] a, float[6] w) => (float[9, 6] y)
        {{ two = Constant<value_float = 2.0>() axes = Constant<value_ints = [-1]>() eps = Constant<value_float = 1e-5>()
          h = MatMul(x, a) q = {squares} m = ReduceMean(q, axes) v = Add(m, eps) r = Sqrt(v) n = Div(h, r) s = Mul(n, w)
          y = Add(s, h) }}"""
    )
    text = programs_after(model)["rematerialization"]
    lines = [line.split("<-") for line in text.splitlines() if "<-" in line]
    assert [sides[0].count("f32[") for sides in lines] == [1, 1], text
    compare(model, [weights(9, 8), weights(8, 6, seed=1), weights(6, seed=2)])


@pytest.mark.parametrize(
    "producer", ["p = Exp(x)", "p = Softmax(x)", "p = MatMul(x, a)", "t = Exp(x) p = Transpose(t)"]
)
@pytest.mark.parametrize("axes", ["[0]", "[1]", "[0, 1]"])
def test_a_result_that_one_reader_reads_backwards_is_stored_forwards_for_the_others(producer: str, axes: str) -> None:
    ones = "[" + ", ".join("-1" for _ in axes.split(",")) + "]"
    ends = ones.replace("-1", "-100")
    model = program(
        f"""(float[8, 8] x, float[8, 8] a) => (float[16, 8] y, float[8, 8] z)
        {{ first = Constant<value_ints = {ones}>() end = Constant<value_ints = {ends}>()
          axes = Constant<value_ints = {axes}>() step = Constant<value_ints = {ones}>() {producer}
          back = Slice(p, first, end, axes, step) z = Neg(back) y = Concat<axis = 0>(back, p) }}"""
    )
    compare(model, [weights(8, 8), weights(8, 8, seed=1)])


def test_a_reduction_stays_where_the_copy_beside_it_is_left_out() -> None:
    """A step copies ``a`` into the Concat and reduces it. Concat elimination removes only the copy."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]> g (int64[n] i, int64[m] j) => (float[m, 2] y, float[n] z)
        <float[3, 2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, float[0, 2] none = {}, int64[1] axes = {1}>
        { a = Gather(w, i) b = Concat<axis = 0>(none, a) y = Gather(b, j) s = ReduceSum<keepdims = 0>(b, axes)
          z = Cos(s) }"""
    )
    rows, columns = np.array([2, 0, 1]), np.array([1, 1])
    compare(model, [rows, columns], dynamic=True)


def test_a_step_between_two_others_that_needs_the_first_keeps_its_place() -> None:
    """Add must not fuse with Relu: it also reads the sum of a Gather, which reads Relu's result."""
    model = program(
        """(float[4, 8] x, int64[3] i) => (float[4, 8] y)
        { a = Relu(x) g = Gather(a, i) s = ReduceSum<keepdims = 0>(g) b = Add(a, s) y = Neg(b) }"""
    )
    inputs = [weights(4, 8), np.array([0, 2, 3])]
    (fused,) = run_model(model, inputs, options=LoweringOptions(fusion=True))
    a = np.maximum(inputs[0], 0)
    np.testing.assert_allclose(fused, -(a + a[inputs[1]].sum()), rtol=1e-5)


def test_the_option_turns_fusion_on_and_off() -> None:
    data = program(PROGRAMS["a chain"][0]).SerializeToString()
    counts = []
    for fusion in (0, 1):
        session = ort_cuda_plugin.session(
            data, emulate=True, provider_options={"fusion": fusion, "automatic_cuda_graphs": 0}
        )
        before = ort_cuda_plugin.counters()["launches"]
        session.run(None, {"x": weights(4, 8)})
        counts.append(ort_cuda_plugin.counters()["launches"] - before)
    assert counts == [4, 1]


def test_explain_names_all_passes_and_shows_as_a_diff_what_one_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "chain.onnx"
    onnx.save(program(PROGRAMS["a chain"][0]), path)
    assert main(["explain", str(path), "--program", "--device", "emulated"]) == 0
    out = capsys.readouterr().out
    assert "after lowering: 4 steps" in out
    header = "changed by vertical_fusion: 1 steps, 128 B read, 128 B written\n"
    fusion, emission = out.split(header)[1].split("after emission")
    lines = fusion.strip().splitlines()
    assert lines[0] == "@@ -0,4 +0,1 @@"
    assert [line[0] for line in lines[1:]] == ["-"] * 8 + ["+"] * 2, fusion
    assert lines[-1] == f"+ {'':28} Relu, Neg, Add, Sigmoid"
    assert "Relu" in emission
    changed, same, absent = [line for line in emission.splitlines() if line.startswith("passes that ")]
    assert changed == "passes that changed the program: vertical_fusion, emission"
    assert same.startswith("passes that changed nothing: dead_code_elimination, sink_through_concat, rematerialization")
    assert absent.startswith("passes that did not run here: squeeze_excite_fusion, fold_dequantize_of_integers, ")
    named = {name for line in (changed, same, absent) for name in line.partition(": ")[2].split(", ")}
    assert named == {each.name for each in PASSES}


@pytest.mark.parametrize("step", [Map, Rows, Contract, Attend, Convolve])
def test_a_step_holds_data_and_no_functions(step: type[Map]) -> None:
    assert not [field.name for field in dataclasses.fields(step) if "Callable" in str(field.type)]


def test_a_kernel_has_no_more_parameters_than_devices_allow() -> None:
    """A convolution fuses only those of twenty operations whose addresses and strides fit into kernel parameters."""
    shapes = [(3, 1, 5, 1), (1, 4, 1, 6), (3, 4, 1, 1), (1, 1, 5, 6), (3, 1, 1, 6)] * 4
    inputs = {"x": (3, 2, 5, 6), "w": (4, 2, 1, 1)} | {f"b{i}": shape for i, shape in enumerate(shapes)}
    lines = [f"t{i + 1} = {('Add', 'Mul')[i % 2]} (t{i}, b{i})" for i in range(len(shapes))]
    declared = ", ".join(f"float{list(shape)} {name}" for name, shape in inputs.items())
    model = program(f"({declared}) => (float[3, 4, 5, 6] t{len(shapes)}) {{ t0 = Conv (x, w) {' '.join(lines)} }}")
    fed = [weights(*shape, seed=i) for i, shape in enumerate(inputs.values())]
    fused, plain = (run_model(model, fed, options=LoweringOptions(fusion=fusion)) for fusion in (True, False))
    np.testing.assert_allclose(fused[0], plain[0], rtol=1e-4, atol=1e-4)
