"""Horizontal fusion: small convolutions of one image in one launch; each result keeps its own tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper, parser

import ort_cuda_plugin
from contexts import compile_model, load, nothing_compiled
from contributed import Array, noise
from emulator_harness import configured
from kernel_harness import run_model
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate.gather import LIBRARIES, work_of_model
from ort_cuda_plugin.estimate.work import KernelStep, LibraryStep
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from test_integer_gemm import Model, by_onnx_runtime, codes

GPU = DeviceProperties.gpu((9, 0))
HEAD = '<ir_version: 10, opset_import: ["" : 20]> g (T[N, 32, 12, 12] x) => (T[N, C, 12, 12] y{outputs}) {{'
MODULE = """r = Relu(x) a = Conv(r, wa, ba) one = Relu(a)
    b = Conv(r, wb, bb) three = Relu(b) c = Conv(r, wc, bc) five = Relu(c)
    threes = Conv<pads = [1, 1, 1, 1]>(three, w3) fives = Conv<pads = [2, 2, 2, 2]>(five, w5)
    p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(r) pool = Conv(p, wp)
    y = Concat<axis = 1>(one, threes, fives, pool)"""
SHAPES = {
    "wa": (24, 32, 1, 1),
    "ba": (24,),
    "wb": (16, 32, 1, 1),
    "bb": (16,),
    "wc": (8, 32, 1, 1),
    "bc": (8,),
    "w3": (32, 16, 3, 3),
    "w5": (16, 8, 5, 5),
    "wp": (16, 32, 1, 1),
}


def network(
    body: str = MODULE,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    dtype: type[np.generic] = np.float16,
    images: int | str = 2,
    outputs: str = "",
) -> ModelProto:
    text = f"{HEAD.format(outputs=outputs)} {body} }}".replace("T[", f"{np.dtype(dtype).name.replace('32', '')}[")
    model = parser.parse_model(text.replace("[N", f"[{images}"))
    for seed, (name, shape) in enumerate(shapes.items()):
        data = noise(*shape, seed=seed, scale=0.2).astype(dtype)
        model.graph.initializer.append(numpy_helper.from_array(data, name))
    return model


def launches(model: ModelProto) -> list[str]:
    """Return the names of the convolution kernels that a Run launches if no library is available."""
    steps = work_of_model(model, {}, libraries=frozenset()).steps
    return [step.kernel.name for step in steps if isinstance(step, KernelStep) and step.kernel.name.startswith("conv")]


def compare(model: ModelProto, actual: list[Array], x: Array) -> None:
    """Compare with the CPU provider's results. TF32 has as many significand bits as float16."""
    cpu = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for one, wanted in zip(actual, cpu.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), np.asarray(wanted, np.float32), 1e-2, 1e-2)


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize(("dtype", "images"), [(np.float16, 2), (np.float16, "N"), (np.float32, 1)])
def test_a_module_has_the_results_of_separate_ones(
    monkeypatch: pytest.MonkeyPatch, dtype: type[np.generic], images: int | str, fusion: bool
) -> None:
    """A concatenation reads one of the merged results, convolutions read the others."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    x = noise(2 if images == "N" else int(images), 32, 12, 12, seed=9).astype(dtype)
    with configured(check=1):
        actual = run_model(network(dtype=dtype, images=images), [x], images == "N", LoweringOptions(fusion=fusion))
    compare(network(dtype=dtype, images=len(x)), actual, x)


def test_a_module_has_one_convolution_for_each_image() -> None:
    assert sorted(name[:6] for name in launches(network())) == ["conv0d", "conv0d", "conv2d", "conv2d"]
    work = work_of_model(network(), {}, libraries=LIBRARIES)
    assert not any(isinstance(step, LibraryStep) for step in work.steps)


PAIR = "r = Relu(x) a = Conv(r, wa, ba) one = Relu(a) b = Conv(r, wb, bb) two = Relu(b) y = Concat<axis = 1>({})"
APART = {
    "another activation": PAIR.replace("Relu(b)", "Sigmoid(b)"),
    "an activation of one": PAIR.replace("Relu(b)", "Identity(b)"),
    "other windows": PAIR.replace("Conv(r, wb", "Conv<pads = [1, 1, 1, 1]>(r, w3"),
    "another image": PAIR.replace("Conv(r, wb", "Conv(s, wb").replace("a =", "s = Sigmoid(x) a ="),
    "weights of the Run": PAIR.replace("b =", "m = ReduceMax(x) wm = Mul(wb, m) b =").replace("r, wb", "r, wm"),
    "a residual": PAIR.replace("two = Relu(b)", "h = Slice(r, zero, end, axes) d = Add(b, h) two = Relu(d)"),
    "what reads the first": PAIR.replace("b =", "m = ReduceMax(one) q = Mul(r, m) b =").replace("r, wb", "q, wb"),
}
TOGETHER = {
    "a pair": PAIR,
    "a pooling between them": PAIR.replace("b =", "p = MaxPool<kernel_shape = [1, 1]>(r) b =").replace("{}", "{}, p"),
    "weights of both": PAIR.replace("r, wb, bb", "r, wa, ba"),
    "a factor of each": PAIR.replace("Relu(a)", "Mul(a, k)").replace("Relu(b)", "Mul(b, l)"),
    "a factor of each channel": PAIR.replace("Relu(a)", "Mul(a, fa)").replace("Relu(b)", "Mul(b, fb)"),
    "windows": PAIR.replace("Conv(r, wa", "Conv<pads = [1, 1, 1, 1]>(r, v3").replace(
        "Conv(r, wb", "Conv<pads = [1, 1, 1, 1]>(r, w3"
    ),
    "groups of channels of another image": PAIR.replace("r = Relu(x)", "t = Relu(x) r = Concat<axis = 1>(t, x)")
    .replace("wa,", "va,")
    .replace("wb,", "vb,"),
}
MORE = {
    "wa": (24, 32, 1, 1),
    "ba": (24,),
    "wb": (16, 32, 1, 1),
    "bb": (16,),
    "w3": (16, 32, 3, 3),
    "v3": (24, 32, 3, 3),
    "k": (),
    "l": (),
    "fa": (24, 1, 1),
    "fb": (16, 1, 1),
    "va": (24, 64, 1, 1),
    "vb": (16, 64, 1, 1),
}


def pair(body: str, parts: str, outputs: str = "") -> ModelProto:
    model = network(body.format(parts), MORE, outputs=outputs)
    for name, numbers in (("zero", [0]), ("end", [16]), ("axes", [1])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
    return model


@pytest.mark.parametrize(
    ("body", "count"), [pytest.param(x, n, id=name) for n, xs in ((2, APART), (1, TOGETHER)) for name, x in xs.items()]
)
def test_those_are_one_that_differ_in_what_is_known_of_channels(
    monkeypatch: pytest.MonkeyPatch, body: str, count: int
) -> None:
    """A concatenation may have the convolutions' results in any order."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    x = noise(2, 32, 12, 12, seed=9).astype(np.float16)
    model = pair(body, "two, x, one")
    assert len(launches(model)) == count
    with configured(check=1):
        actual = run_model(model, [x])
    compare(model, actual, x)


def test_a_result_may_be_an_output_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    x = noise(2, 32, 12, 12, seed=9).astype(np.float16)
    model = pair(PAIR, "two, one", ", float16[2, 24, 12, 12] one")
    assert len(launches(model)) == 1
    with configured(check=1):
        actual = run_model(model, [x])
    compare(model, actual, x)


def test_large_ones_are_a_librarys() -> None:
    """Without a library they are one launch; with one they are two calls."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float16[64, 256, 56, 56] x) => (float16[64, 128, 56, 56] y) {'
        " r = Relu(x) a = Conv(r, wa) b = Conv(r, wb) y = Concat<axis = 1>(a, b) }"
    )
    for name in ("wa", "wb"):
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((64, 256, 1, 1), np.float16), name))
    assert len(launches(model)) == 1
    calls = [step for step in work_of_model(model, {}, libraries=LIBRARIES).steps if isinstance(step, LibraryStep)]
    assert len(calls) == 2


@pytest.mark.parametrize(("parts", "calls"), [(1, 1), (2, 0)])
def test_several_may_be_ours_where_one_is_a_librarys(parts: int, calls: int) -> None:
    """One merged launch is predicted to take less time than two library calls."""
    names = "ab"[:parts]
    body = " ".join(f"{name} = Conv(r, w{name})" for name in names)
    model = network(
        f"r = Relu(x) {body} y = Concat<axis = 1>({', '.join(names)}, x)",
        {f"w{name}": (64, 32, 1, 1) for name in names},
        np.float32,
        64,
    )
    work = work_of_model(model, {}, libraries=LIBRARIES)
    assert sum(isinstance(step, LibraryStep) for step in work.steps) == calls


def test_a_compiled_model_has_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_90")
    model = network()
    compile_model(model.SerializeToString(), tmp_path / "m_ctx.onnx")
    x = noise(2, 32, 12, 12, seed=9).astype(np.float16)
    with nothing_compiled():
        compare(model, load(tmp_path / "m_ctx.onnx").run(None, {"x": x}), x)


@pytest.mark.parametrize("images", [1, 40])
def test_convolutions_of_codes_are_one(monkeypatch: pytest.MonkeyPatch, images: int) -> None:
    """The convolutions are merged for one image and for many, also if their results have different scales."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    model = Model()
    shape = (images, 32, 12, 12)
    _, image, _ = model.operands(shape, "int8", 1)
    results = []
    for number, channels in enumerate((24, 16, 40)):
        w = model.weights(codes((channels, 32, 1, 1), "int8", number), 0, seed=number)
        bias = model.constant(np.random.default_rng(number).normal(0, 1, channels).astype(np.float32))
        y = model.node("Relu", model.node("Conv", image, w, bias))
        results.append(model.quantized(y, 0.02 + 0.01 * number, np.int8(number - 100))[1])
    joined = model.node("Concat", results[2], results[0], axis=1)
    pooled = model.node("MaxPool", results[1], kernel_shape=[3, 3], strides=[3, 3])
    x = codes(shape, "int8", 1)
    proto = model.proto({"x": x}, [joined, pooled])
    assert len(launches(proto)) == 1
    with configured(check=1):
        actual = run_model(proto, [x])
    for one, wanted, scale in zip(actual, by_onnx_runtime(proto, {"x": x}), (0.04, 0.03), strict=True):
        far = np.abs(one - wanted) > scale / 2
        assert far.mean() < 1e-3
        assert np.abs(one - wanted).max() < 1.01 * scale


BRANCHES = """<ir_version: 10, opset_import: ["" : 20]> g (float16[2, 32, 12, 12] x, bool flag)
    => (float16[2, C, 12, 12] z) { z = If (flag) <
        then_branch = g1 () => (float16[2, C, 12, 12] y) { MODULE },
        else_branch = g2 () => (float16[2, D, 12, 12] e) { e = Concat<axis = 1>(x, x) }> }"""


def test_a_branch_has_one_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_90")
    model = parser.parse_model(BRANCHES.replace("MODULE", MODULE))
    model.graph.initializer.extend(network().graph.initializer)
    ort_cuda_plugin.register(emulate=True)
    sessions = [
        ort.InferenceSession(model.SerializeToString(), providers=[*first, "CPUExecutionProvider"])
        for first in (["CudaPluginExecutionProvider"], [])
    ]
    x = noise(2, 32, 12, 12, seed=9).astype(np.float16)
    for flag in (True, False):
        actual, wanted = (session.run(None, {"x": x, "flag": np.array(flag)}) for session in sessions)
        np.testing.assert_allclose(actual[0].astype(np.float32), wanted[0].astype(np.float32), 1e-2, 1e-2)


def test_a_copy_with_channels_of_zeros_is_not_that_of_a_depthwise_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties.gpu((9, 0)))
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float16[b, 4, n] x, float16[4, 4, 1] v, float16[4, 1, 1] w) => (float16[b, 4, n] y, float16[b, 4, n] z)
        { z = Conv<group = 4>(x, w) y = Conv(x, v) }"""
    )
    shapes = ((2, 4, 5), (4, 4, 1), (4, 1, 1))
    x, v, w = (noise(*shape, seed=seed).astype(np.float16) for seed, shape in enumerate(shapes))
    with configured(check=True):
        y, z = run_model(model, [x, v, w])
    np.testing.assert_allclose(y, np.einsum("bcn,oc->bon", x, v[..., 0]), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(z, x * w[:, 0], rtol=1e-2, atol=1e-2)
