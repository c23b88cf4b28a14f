"""The part of an epilogue that a vendor library computes, and the part that stays a map."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import parser

from ort_cuda_plugin.clusters.cluster import CompiledCluster, Variant
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.plan.format import RecordKind
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from ort_cuda_plugin.program.steps.libraries import MATMUL, LibraryProblem, ProblemFlags

BIAS, RELU, GELU, RESIDUAL = ProblemFlags.BIAS, ProblemFlags.RELU, ProblemFlags.GELU, ProblemFlags.RESIDUAL
NONE = ProblemFlags(0)


@dataclass
class Chosen:
    problem: LibraryProblem
    flags: ProblemFlags
    maps: int
    text: str


def prepare(text: str, options: LoweringOptions | None = None) -> tuple[Variant, list[str]]:
    """Return the only plan of a model, and the texts of its program at each stage."""
    return prepare_model(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> chosen {text}'), options)


def prepare_model(model: onnx.ModelProto, options: LoweringOptions | None = None) -> tuple[Variant, list[str]]:
    onnx.checker.check_model(model, full_check=True)
    graph = read_model(onnx.shape_inference.infer_shapes(model))
    device = DeviceProperties(emulated=False, libraries=frozenset({"cublaslt", "cudnn"}))
    cluster = CompiledCluster(graph, device, options or LoweringOptions())
    texts: list[str] = []
    cluster.show_program = texts.append
    return cluster.prepare(), texts


def choose(text: str, *, fusion: bool = True, use_tf32: bool = True) -> Chosen:
    """Return the library call and the maps that are chosen for a model with one GEMM or convolution."""
    variant, texts = prepare(text, LoweringOptions(fusion=fusion, use_tf32=use_tf32))
    assert variant.plan is not None
    (problem,) = variant.problems
    kinds = [record.kind for record in variant.plan.records]
    assert kinds.count(RecordKind.LIBRARY) == 1
    (chosen,) = (text for text in texts if text.startswith("after emission"))
    return Chosen(problem, problem.flags & ~ProblemFlags.TF32, len(kinds) - 1, chosen)


TANH_GELU = """k = Constant<value_float = 0.7978845834732056>() c = Constant<value_float = 0.044714998453855515>()
    three = Constant<value_float = 3.0>() one = Constant<value_float = 1.0>() half = Constant<value_float = 0.5>()
    cube = Pow(h, three) q = Mul(c, cube) s = Add(h, q) t = Mul(s, k) u = Tanh(t) v = Add(one, u) m = Mul(v, half)
    y = Mul(m, h)"""
# The same function, since (1 + tanh(u)) / 2 = sigmoid(2 * u).
SIGMOID_GELU = """a = Constant<value_float = 1.5957691216057308>() c = Constant<value_float = 0.07135481282806396>()
    square = Mul(h, h) cube = Mul(square, h) k = Mul(h, a) q = Mul(cube, c) t = Add(k, q) u = Sigmoid(t)
    y = Mul(h, u)"""

PRODUCTS = {
    "a bias": ("y = Add(p, w)", BIAS, ""),
    "a bias and ReLU": ("h = Add(w, p) y = Relu(h)", BIAS | RELU, ""),
    "ReLU": ("y = Relu(p)", RELU, ""),
    "ReLU as a maximum": ("zero = Constant<value_float = 0.0>() y = Max(zero, p)", RELU, ""),
    "a bias and GELU by tanh": ('h = Add(p, w) y = Gelu<approximate = "tanh">(h)', BIAS | GELU, ""),
    "GELU by tanh": ('y = Gelu<approximate = "tanh">(p)', GELU, ""),
    "a bias and GELU in single operations": (f"h = Add(p, w) {TANH_GELU}", BIAS | GELU, ""),
    "a bias and GELU by the logistic function": (f"h = Add(p, w) {SIGMOID_GELU}", BIAS | GELU, ""),
    "a bias and GELU with rounded factors": (
        f"h = Add(p, w) {TANH_GELU}".replace("0.044714998453855515", "0.0447"),
        BIAS,
        "cannot include add, mul, tanh",
    ),
    "a bias and GELU by erf": ("h = Add(p, w) y = Gelu(h)", BIAS, "cannot include add, erf, mul"),
    "a residual": ("y = Add(p, residual)", RESIDUAL, ""),
    "a residual, a bias and ReLU": ("h = Add(p, w) i = Add(residual, h) y = Relu(i)", BIAS | RESIDUAL | RELU, ""),
    "a bias after a residual": ("h = Add(p, residual) y = Add(h, w)", BIAS | RESIDUAL, ""),
    "a factor": ("k = Constant<value_float = 0.125>() y = Mul(p, k)", NONE, ""),
    "a factor after a bias": ("k = Constant<value_float = 2.0>() h = Add(p, w) y = Mul(h, k)", BIAS,
                              "cannot include mul"),
    "a factor that no float32 holds": (
        "k = Constant<value_float = 1e30>() h = Mul(p, k) y = Mul(h, k)", NONE, "cannot include mul"),
    "a factor of zero": ("k = Constant<value_float = 0.0>() y = Mul(p, k)", NONE, "cannot include mul"),
    "a residual that is rounded": (
        "e = Cast<to = 10>(residual) f = Cast<to = 1>(e) y = Add(p, f)", NONE, "cannot include add"),
    "GELU in another type": (
        'h = Cast<to = 10>(p) g = Gelu<approximate = "tanh">(h) y = Cast<to = 1>(g)', NONE,
        "cannot include add, mul, tanh"),
    "two biases": ("h = Add(p, w) y = Add(h, w)", BIAS, "cannot include add"),
    "a bias after ReLU": ("h = Relu(p) y = Add(h, w)", RELU, "cannot include add"),
    "a bias for each row": ("y = Add(p, column)", NONE, "cannot include add"),
    "a residual that is transposed": ("t = Transpose(turned) y = Add(p, t)", NONE, "cannot include add"),
    "a residual that is computed": ("e = Exp(residual) y = Add(p, e)", NONE, "cannot include add, exp"),
    "a difference": ("y = Sub(p, residual)", NONE, "cannot include sub"),
    "a limit from above": ("six = Constant<value_float = 6.0>() zero = Constant<value_float = 0.0>() "
                           "y = Clip(p, zero, six)", RELU, "cannot include gt, where"),
    "a value that is used twice": ("h = Add(p, w) s = Sigmoid(h) y = Mul(h, s)", BIAS,
                                   "cannot include add, div, exp, mul, neg"),
    "another element type": ("h = Add(p, w) i = Cast<to = 10>(h) y = Cast<to = 1>(i)", BIAS, "another element type"),
    "a result that is transposed": ("h = Add(p, w) y = Transpose(h)", BIAS, "the library cannot write its strides"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_takes_what_cublaslt_has(name: str) -> None:
    rest, flags, leftover = PRODUCTS[name]
    shape = "[6, 4]" if "Transpose(h)" in rest else "[4, 6]"
    inputs = "float[4, 8] x, float[8, 6] b, float[6] w, float[4, 6] residual, float[6, 4] turned, float[4, 1] column"
    chosen = choose(f"({inputs}) => (float{shape} y) {{ p = MatMul(x, b) {rest} }}")
    assert chosen.flags == flags, chosen.text
    assert chosen.maps == bool(leftover), chosen.text
    assert f"a map follows: {leftover}" in chosen.text or leftover in chosen.text.partition("a map follows")[2]
    assert ("a map follows" in chosen.text) == bool(leftover)
    factor = {"a factor": 0.125, "a factor that no float32 holds": float(np.float32(1e30))}.get(name, 1.0)
    assert (chosen.problem.alpha, chosen.problem.beta) == (factor, float(RESIDUAL in flags))


def test_an_addend_with_a_factor_is_a_residual() -> None:
    chosen = choose(
        """(float[8, 4] x, float[8, 6] b, float[4, 6] c) => (float[4, 6] y)
        { y = Gemm<alpha = 0.5, beta = 2.0, transA = 1>(x, b, c) }"""
    )
    assert chosen.flags == RESIDUAL | ProblemFlags.A_TRANSPOSED
    assert (chosen.problem.alpha, chosen.problem.beta, chosen.maps) == (0.5, 2.0, 0)
    assert "cuBLASLt: product + times 0.5, residual times 2" in chosen.text


def test_a_value_that_is_stored_as_well_ends_what_the_library_does() -> None:
    chosen = choose(
        """(float[4, 8] x, float[8, 6] b, float[6] w) => (float[4, 6] h, float[4, 6] y)
        { p = MatMul(x, b) h = Add(p, w) y = Relu(h) }"""
    )
    assert (chosen.flags, chosen.maps) == (BIAS, 1)
    assert (
        "product + input bias (copied if not 16-byte aligned); a map follows: the call's result is stored"
        in chosen.text
    )


def test_without_fusion_a_library_takes_what_its_operator_does() -> None:
    text = """(float[4, 8] x, float[8, 6] b, float[6] w) => (float[4, 6] y) { p = Gemm(x, b, w) y = Relu(p) }"""
    assert (choose(text).flags, choose(text).maps) == (BIAS | RELU, 0)
    assert (choose(text, fusion=False).flags, choose(text, fusion=False).maps) == (BIAS, 1)


@pytest.mark.parametrize(
    ("dtype", "flags"), [("float16", BIAS | GELU), ("bfloat16", BIAS | GELU), ("float64", BIAS)], ids=str
)
def test_a_gelu_is_known_by_factors_that_are_numbers_of_its_type(dtype: str, flags: ProblemFlags) -> None:
    inputs = "float[4, 8] x, float[8, 6] b, float[6] w"
    text = f"({inputs}) => (float[4, 6] y) {{ p = MatMul(x, b) h = Add(p, w) {TANH_GELU} }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> chosen {text}')
    number = onnx.TensorProto.DataType.Value({"float64": "DOUBLE"}.get(dtype, dtype.upper()))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = number
    for node in model.graph.node:
        if node.op_type == "Constant":
            array = np.array(node.attribute[0].f, onnx.helper.tensor_dtype_to_np_dtype(number))
            node.attribute[0].CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(array)))
    variant, _ = prepare_model(model)
    assert [problem.flags & ~ProblemFlags.TF32 for problem in variant.problems] == [flags]


HALF = "float16[4, 8] x, float16[8, 6] b, float16[6] w, float16[4, 6] residual"


def test_a_narrow_value_is_stored_where_the_program_rounds_and_nowhere_else() -> None:
    text = "p = MatMul(x, b) h = Add(p, w) i = Add(h, residual) y = Sigmoid(i)"
    assert choose(f"({HALF}) => (float16[4, 6] y) {{ {text} }}").flags == BIAS | RESIDUAL
    # Gemm rounds only its result. The library cannot add beta * w, and would round the sums before the addition.
    variant, _ = prepare(f"({HALF}) => (float16[4, 6] y) {{ y = Gemm<beta = 0.5>(x, b, w) }}")
    assert not variant.problems


CONVOLUTIONS = {
    "nothing": ("y = Conv(x, k)", NONE, ""),
    "a bias": ("y = Conv(x, k, b)", BIAS, ""),
    "a bias and ReLU": ("c = Conv(x, k, b) y = Relu(c)", BIAS | RELU, ""),
    "a residual and ReLU": ("c = Conv(x, k, b) s = Add(c, r) y = Relu(s)", BIAS | RESIDUAL | RELU, ""),
    "ReLU without a bias": ("c = Conv(x, k) y = Relu(c)", BIAS | RELU, ""),
    "a residual without a bias": ("c = Conv(x, k) y = Add(r, c)", BIAS | RESIDUAL, ""),
    "a factor": (
        "two = Constant<value_float = 2.0>() c = Conv(x, k, b) y = Mul(c, two)",
        BIAS,
        "cannot include mul",
    ),
    "GELU": ('c = Conv(x, k, b) y = Gelu<approximate = "tanh">(c)', BIAS, "cannot include add, mul, tanh"),
    "sigmoid": ("c = Conv(x, k, b) y = Sigmoid(c)", BIAS, "cannot include add, div, exp, neg"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_takes_what_cudnn_has_compiled(name: str) -> None:
    rest, flags, leftover = CONVOLUTIONS[name]
    inputs = "float[2, 4, 7, 5] x, float[6, 4, 3, 3] k, float[6] b, float[2, 6, 5, 3] r"
    chosen = choose(f"({inputs}) => (float[2, 6, 5, 3] y) {{ {rest} }}", use_tf32=False)
    assert chosen.flags == flags, chosen.text
    assert chosen.maps == bool(leftover), chosen.text
    assert leftover in chosen.text.partition("a map follows")[2]
    assert chosen.problem.beta == float(RESIDUAL in flags)


CONCAT = """(float[2, 4, 7, 5] x, float[6, 4, 3, 3] k, float[6] b, float[2, 6, 5, 3] r, float[2, 3, 5, 3] other)
    => (float[2, 9, 5, 3] y) {{ {} y = Concat<axis = 1>(c, other) }}"""


def test_a_convolution_is_written_into_a_concatenation() -> None:
    chosen = choose(CONCAT.format("p = Conv(x, k, b) c = Relu(p)"), use_tf32=False)
    assert (chosen.flags, chosen.maps) == (BIAS | RELU, 1)  # the map copies the other part
    assert "a map follows" not in chosen.text
    # cuDNN has no engine for a residual whose strides differ from the result's.
    chosen = choose(CONCAT.format("p = Conv(x, k, b) c = Add(p, r)"), use_tf32=False)
    assert (chosen.flags, chosen.maps) == (BIAS | RESIDUAL, 2)
    assert "a map follows: the library cannot write its strides" in chosen.text


PARTS = """(float[99, 64, 28, 28] x, float[64, 64, 1, 1] a, float[{rows}, 64, 1, 1] b, float[{rows}] c,
    float[64, 64, 3, 3] d, float[64, {all}, 1, 1] e) => (float[99, 64, 28, 28] y) {{
    p = Conv(x, a) q = Relu(p) r = Conv<pads = [1, 1, 1, 1]>(q, d) s = Conv(q, b, c) {activation}
    u = Concat<axis = 1>(r, t) y = Conv(u, e) }}"""


@pytest.mark.parametrize(("activation", "is_product"), [("t = Relu(s)", True), ("g = Sigmoid(s) t = Mul(s, g)", False)])
def test_a_convolution_of_single_places_is_a_product_where_cudnn_would_copy_it(
    activation: str, is_product: bool
) -> None:
    """With SiLU, which cuDNN compiles and cuBLASLt lacks, the convolution stays with cuDNN."""
    variant, texts = prepare(PARTS.format(rows=224, all=288, activation=activation))
    kinds = [problem.kind for problem in variant.problems]
    assert kinds.count(MATMUL) == is_product, texts
    if is_product:
        (problem,) = (problem for problem in variant.problems if problem.kind == MATMUL)
        assert problem.flags & ~ProblemFlags.TF32 == BIAS | RELU | ProblemFlags.B_TRANSPOSED


def test_a_product_is_written_into_a_concatenation() -> None:
    chosen = choose(
        """(float[2, 4, 8] x, float[8, 6] b, float[6] w, float[2, 4, 6] r, float[2, 4, 3] other)
        => (float[2, 4, 9] y) { p = MatMul(x, b) h = Add(p, w) c = Add(h, r) y = Concat<axis = 2>(other, c) }"""
    )
    assert (chosen.flags, chosen.maps) == (BIAS | RESIDUAL, 1)
    assert "a map follows" not in chosen.text


def test_a_convolution_of_doubles_is_nothing_but_that() -> None:
    inputs = "double[2, 4, 7, 5] x, double[6, 4, 3, 3] k, double[6] b"
    chosen = choose(f"({inputs}) => (double[2, 6, 5, 3] y) {{ c = Conv(x, k, b) y = Relu(c) }}")
    assert (chosen.flags, chosen.maps) == (NONE, 1)
    assert "cuDNN's call cannot include add, max" in chosen.text


LAST, BIASED = ProblemFlags.CHANNELS_LAST, ProblemFlags.CHANNELS_LAST | BIAS
NETWORK = """(float[N, 4, 8, 6] x, float[8, 4, 3, 3] a, float[8] ab, float[8, 8, 1, 1] b, float[8, 8, 3, 3] c)
    => (float[N, 8, 8, 6] y) { p = Conv<pads = [1, 1, 1, 1]>(x, a, ab) q = Relu(p) r = Conv(q, b)
    s = Conv<pads = [1, 1, 1, 1]>(r, c) t = Add(s, q) u = Relu(t) v = Sigmoid(u) w = Conv(v, b) y = Mul(w, u) }"""


@pytest.mark.parametrize("dtype", [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16])
def test_images_between_convolutions_keep_their_channels_last(dtype: int) -> None:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> chosen {NETWORK.replace("N", "20000")}')
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = dtype
    variant, texts = prepare_model(model)
    flags = [problem.flags & ~ProblemFlags.TF32 for problem in variant.problems]
    assert flags == [BIASED | RELU, LAST, BIASED | RESIDUAL | RELU]  # the last call shares the second problem
    # The input and two of the weights are copied to channels last; the map that computes the output reorders it.
    (chosen,) = (text for text in texts if text.startswith("after emission"))
    assert variant.plan is not None
    kinds = [record.kind for record in variant.plan.records]
    assert (kinds.count(RecordKind.LIBRARY), len(kinds)) == (4, 4 + 5), chosen


def test_without_tensor_cores_convolutions_keep_the_models_order() -> None:
    variant, _ = prepare(NETWORK.replace("N", "2"), LoweringOptions(use_tf32=False))
    assert not any(problem.flags & LAST for problem in variant.problems)
