"""Flash attention on tensor cores: results on the emulated device, and its machine code on GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np
import onnx
import pytest

from contributed import BFLOAT16, FLOAT, FLOAT16, TOLERANCES, Array, node_model, noise, rounded
from emulator_harness import configured
from kernel_harness import make_model, run_model
from ort_cuda_plugin.cli.models.kernel_report import report
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.ops.onnx.attention import attention
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from ort_cuda_plugin.program.steps.trace import Step
from ort_cuda_plugin.schedule import flash as flash_schedule

TOKENS, HEADS, KV_HEADS = 70, 4, 2
TF32_TOLERANCE = 2e-3
"""For operands rounded to TF32's 11 significant bits, with values of about 1."""


@pytest.fixture
def checked() -> Iterator[None]:
    """Fill shared memory with NaN at each launch, and fail a launch that reads what its block has not written there."""
    with configured(check=1):
        yield


def prompt(size: int, real: int) -> tuple[onnx.ModelProto, list[Array]]:
    """Return GroupQueryAttention of a prompt, whose rows and keys take several tiles that are not all full."""
    parts: list[Array | None] = [
        rounded(noise(1, TOKENS, heads * size, seed=i), real) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    ]
    inputs = [*parts, None, None, np.array([TOKENS - 1], np.int32), np.array(TOKENS, np.int32)]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "local_window_size": 50}
    model = onnx.load_from_string(
        node_model("GroupQueryAttention", inputs, attributes, [FLOAT], constant=[6], real=real)
    )  # fmt: skip
    given = [x for i, x in enumerate(inputs) if x is not None and i != 6]
    for info, x in zip(model.graph.input, given, strict=True):
        info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, info.type.tensor_type.elem_type, x.shape))
    return model, given


def attended(q: Array, k: Array, v: Array, size: int) -> Array:
    q, k, v = (x.reshape(TOKENS, -1, size).astype(np.float64) for x in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, HEADS // KV_HEADS, 1)) / np.sqrt(size)
    distance = np.arange(TOKENS)[None] - np.arange(TOKENS)[:, None]
    weights = np.exp(np.where((distance <= 0) & (distance > -50), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    result: Array = np.einsum("hqk,khd->qhd", weights, np.repeat(v, HEADS // KV_HEADS, 1)).reshape(1, TOKENS, -1)
    return result


def test_small_matrices_give_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    real, size = FLOAT16, 32
    monkeypatch.setattr(flash_schedule, "has_tensor_cores", lambda ctx: True)
    model, inputs = prompt(size, real)
    kernels = CompiledCluster(read_model(model), DeviceProperties()).prepare().kernels
    assert any(kernel.name.startswith("matrix_stream") for kernel in kernels)
    actual = run_model(model, inputs)[0]
    np.testing.assert_allclose(
        actual, attended(inputs[0], inputs[1], inputs[2], size), TOLERANCES[real], TOLERANCES[real]
    )


def test_attention_of_ai_onnx_gives_the_same_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit heads use flash attention on a GPU with any mask, past and lengths."""
    q, k, v, past_k, past_v = (
        noise(2, heads, length, 80, seed=i).astype(ml_dtypes.bfloat16)
        for i, (heads, length) in enumerate(((4, 20), (2, 70), (2, 70), (2, 9), (2, 9)))
    )
    inputs = [q, k, v, np.random.default_rng(7).random((2, 1, 20, 79)) < 0.6, past_k, past_v]
    model = make_model("Attention", inputs, {"is_causal": 1, "softcap": 2.0}, 23, outputs=3)

    def run() -> Array:
        bits = run_model(model, inputs)[0].astype(np.uint32) << 16
        result: Array = bits.view(np.float32)
        return result

    plain = run()
    monkeypatch.setattr(attention, "prefers_flash_attention", lambda ctx, q, k, v: True)
    monkeypatch.setattr(flash_schedule, "has_tensor_cores", lambda ctx: True)
    kernels = CompiledCluster(read_model(model), DeviceProperties()).prepare().kernels
    assert any(kernel.name.startswith("matrix_stream") for kernel in kernels)
    np.testing.assert_allclose(run(), plain, TOLERANCES[BFLOAT16], TOLERANCES[BFLOAT16])


def test_parts_of_keys_are_added_up_with_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[Array | None] = [
        *(noise(1, TOKENS, heads * 40, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))),
        *(None, None, np.array([TOKENS - 1], np.int32), np.array(TOKENS, np.int32), None, None, None, None),
        noise(HEADS, seed=5),
    ]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    model = onnx.load_from_string(node_model("GroupQueryAttention", inputs, attributes, [FLOAT], constant=[6]))
    given = [x for i, x in enumerate(inputs) if x is not None and i != 6]
    for info, x in zip(model.graph.input, given, strict=True):
        info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, info.type.tensor_type.elem_type, x.shape))
    whole = run_model(model, given)[0]
    monkeypatch.setattr(flash_schedule, "EMULATED_SPLIT_KEYS", 16)
    kernels = CompiledCluster(read_model(model), DeviceProperties()).prepare().kernels
    assert any(kernel.name == "merge_4_parts" for kernel in kernels)
    np.testing.assert_allclose(run_model(model, given)[0], whole, 1e-5, 1e-6)


STEPS = """<ir_version: 10, opset_import: ["" : 20]> half
    (float16[2, ROWS, 4, 32] q, float16[2, KEYS, 4, 32] k, float16[2, KEYS, 4, 32] v, float16[2, 1, 1, KEYS] mask)
    => (float16[2, ROWS, 128] y)
    { scale = Constant<value = float16 {12288}>() flat = Constant<value_ints = [0, 0, 128]>()
      a = Transpose<perm = [0, 2, 1, 3]>(q) b = Transpose<perm = [0, 2, 3, 1]>(k) c = Transpose<perm = [0, 2, 1, 3]>(v)
      s = MatMul(a, b) t = Mul(s, scale) u = Add(t, mask) w = Softmax(u) o = MatMul(w, c)
      z = Transpose<perm = [0, 2, 1, 3]>(o) y = Reshape(z, flat) }"""
"""Attention as exporters write it; 12288 is 1/8 as the bits of a float16."""


@pytest.mark.parametrize(
    ("rows", "keys", "form"),
    [(100, 70, "matrix_stream"), (3, 300, "matrix_stream_16x64x64_4_split")],
    ids=["many", "few"],
)
def test_steps_that_are_attention_are_one_walk(
    monkeypatch: pytest.MonkeyPatch, rows: int, keys: int, form: str
) -> None:
    """On a GPU without cuDNN the plugin's kernels are used. A row with all keys masked gives NaN, like Softmax."""
    device = DeviceProperties.gpu((8, 0))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    model = onnx.shape_inference.infer_shapes(
        onnx.parser.parse_model(STEPS.replace("ROWS", str(rows)).replace("KEYS", str(keys)))
    )
    assert CompiledCluster(read_model(model), device).prepare().kernels[0].name.startswith(form)
    q, k, v = (noise(2, length, 4, 32, seed=i).astype(np.float16) for i, length in enumerate((rows, keys, keys)))
    mask = np.where(np.arange(keys) % 3 == 0, -np.inf, noise(2, 1, 1, keys, seed=3)).astype(np.float16)
    mask[1] = -np.inf
    wide = [x.astype(np.float64) for x in (q, k, v, mask)]
    scores = np.exp(np.einsum("bqhd,bkhd->bhqk", wide[0], wide[1]) / 8 + wide[3])[:1]
    weights = scores / scores.sum(-1, keepdims=True)
    expected = np.einsum("bhqk,bkhd->bqhd", weights, wide[2][:1]).reshape(1, rows, 128)
    actual = run_model(model, [q, k, v, mask])[0]
    np.testing.assert_allclose(actual[:1], expected, TOLERANCES[FLOAT16], TOLERANCES[FLOAT16])
    assert np.isnan(actual[1]).all()


def test_the_kernel_for_gpus_keeps_sums_in_registers() -> None:
    model, _ = prompt(128, FLOAT16)
    cluster = CompiledCluster(read_model(model), DeviceProperties(emulated=False))
    (spec,) = (kernel for kernel in cluster.prepare().kernels if kernel.name.startswith("matrix_stream"))
    (usage,) = report([spec], [Target.cuda(8, 0)])
    assert usage.stack == usage.spill_stores == usage.spill_loads == 0
    assert usage.static_shared <= 48 << 10


REPEATED = """<ir_version: 10, opset_import: ["" : 20]> heads
    (TYPE[2, 6, ROWS, 48] q, TYPE[2, 2, keys, 48] k, TYPE[2, 2, keys, 48] v, TYPE[ROWS, keys] mask)
    => (TYPE[2, 6, ROWS, 48] y)
    { scale = Constant<value = TYPE {SCALE}>() axis = Constant<value_ints = [2]>()
      wide = Constant<value_ints = [1, 1, 3, 1, 1]>() flat = Constant<value_ints = [2, 6, -1, 48]>()
      ku = Unsqueeze(k, axis) ke = Expand(ku, wide) kr = Reshape(ke, flat) kt = Transpose<perm = [0, 1, 3, 2]>(kr)
      vu = Unsqueeze(v, axis) ve = Expand(vu, wide) vr = Reshape(ve, flat)
      s = MatMul(q, kt) t = Mul(s, scale) u = Add(t, mask) w = Softmax(u) y = MatMul(w, vr) }"""
"""Grouped-query attention as exporters write it: keys and values are repeated for three heads; the scale is 1/8."""


@pytest.mark.parametrize(
    ("rows", "keys", "real"), [(1, 700, FLOAT16), (27, 70, FLOAT16), (2, 300, FLOAT)], ids=["few", "many", "floats"]
)
def test_repeated_heads_are_read_where_they_were(
    monkeypatch: pytest.MonkeyPatch, rows: int, keys: int, real: int
) -> None:
    dtype, device = np.float32 if real == FLOAT else np.float16, DeviceProperties.gpu((8, 0))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    number = {"TYPE": np.dtype(dtype).name.replace("float32", "float"), "SCALE": "0.125" if real == FLOAT else "12288"}
    text = REPEATED.replace("ROWS", str(rows))
    for name, value in number.items():
        text = text.replace(name, value)
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    seen: list[str] = []

    def watch(name: str, steps: Sequence[Step]) -> None:
        if name == "gqa_broadcast_elimination":
            seen.extend(type(step).__name__ for step in steps)

    cluster = CompiledCluster(read_model(model), device)
    cluster.watch = watch
    cluster.prepare()
    assert seen == ["Attend"]
    q, k, v = (
        noise(2, heads, length, 48, seed=i).astype(dtype)
        for i, (heads, length) in enumerate(((6, rows), (2, keys), (2, keys)))
    )
    mask = np.where(np.arange(rows * keys).reshape(rows, keys) % 3 == 0, -np.inf, noise(rows, keys, seed=3)).astype(
        dtype
    )
    wide = [x.astype(np.float64) for x in (q, np.repeat(k, 3, 1), np.repeat(v, 3, 1), mask)]
    scores = np.exp(np.einsum("bhqd,bhkd->bhqk", wide[0], wide[1]) / 8 + wide[3])
    expected = np.einsum("bhqk,bhkd->bhqd", scores / scores.sum(-1, keepdims=True), wide[2])
    actual = run_model(model, [q, k, v, mask])[0]
    np.testing.assert_allclose(actual, expected, TOLERANCES[real], TOLERANCES[real])


SELF = """<ir_version: 10, opset_import: ["" : 20]> half
    (TYPE[BATCH, TOKENS, HEADS, SIZE] q, TYPE[BATCH, TOKENS, HEADS, SIZE] k, TYPE[BATCH, TOKENS, HEADS, SIZE] v MASK)
    => (TYPE[BATCH, HEADS, TOKENS, SIZE] y)
    { scale = Constant<value = TYPE {SCALE}>()
      a = Transpose<perm = [0, 2, 1, 3]>(q) b = Transpose<perm = [0, 2, 3, 1]>(k) c = Transpose<perm = [0, 2, 1, 3]>(v)
      s = MatMul(a, b) t = Mul(s, scale) ADDED w = Softmax(u) y = MatMul(w, c) }"""
"""Self-attention; the scale is 1/8."""


def self_attention(batch: int | str, tokens: int | str, heads: int, size: int, real: int, mask: str) -> onnx.ModelProto:
    name, scale = {FLOAT: ("float", "0.125"), FLOAT16: ("float16", "12288"), BFLOAT16: ("bfloat16", "15872")}[real]
    added = f", {name}[{mask}] m" if mask else ""
    known = {"TYPE": name, "SCALE": scale, "BATCH": batch, "TOKENS": tokens, "HEADS": heads, "SIZE": size}
    text = SELF.replace("ADDED", "u = Add(t, m)" if mask else "u = Identity(t)").replace("MASK", added)
    for word, value in known.items():
        text = text.replace(word, str(value))
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "multiprocessors", "mask", "form"),
    [
        (17, 1, 64, 132, "", "16x128x64_8_once_f16"),
        (130, 1, 48, 132, "TOKENS, TOKENS", "16x256x64_8_once_bf16"),
        (197, 3, 64, 30, "", "32x256x64_8_once_f16"),
        (300, 1, 32, 12, "TOKENS, TOKENS", "32x128x64_8_f16"),
        (100, 2, 64, 4, "TOKENS, TOKENS", "96x128x64_4_once_f16"),
        (200, 1, 64, 4, "TOKENS, TOKENS", "96x64x64_4_f16"),
        (260, 1, 64, 6, "", "96x128x64_4_bf16"),
        (70, 2, 80, 132, "", "64x32x128_bf16"),
        (140, 2, 64, 2, "TOKENS, TOKENS", "64x32x64_f16"),
        (17, 1, 64, 132, "", "16x128x64_4_once_f32"),
        (128, 2, 16, 132, "1, 1, 1, TOKENS", "16x128x64_4_once_f32"),
        (130, 1, 48, 132, "TOKENS, TOKENS", "16x64x64_4_f32"),
        (300, 1, 32, 12, "TOKENS, TOKENS", "32x64x64_4_f32"),
        (260, 1, 64, 10, "", "32x64x64_4_f32"),
        (200, 1, 64, 4, "TOKENS, TOKENS", "96x64x64_4_f32"),
        (140, 2, 64, 2, "TOKENS, TOKENS", "128x32x64_f32"),
        (200, 1, 48, 1, "", "128x32x64_f32"),
        (60, 3, 48, 2, "", "64x32x64_f32"),
    ],
)
def test_blocks_of_each_size_attend(
    monkeypatch: pytest.MonkeyPatch, tokens: int, heads: int, size: int, multiprocessors: int, mask: str, form: str
) -> None:
    """Rows and keys do not fill their tiles. A row with all keys masked by -inf gives NaN, like Softmax."""
    device = DeviceProperties.gpu((8, 0), multiprocessors)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    real = {"f32": FLOAT, "f16": FLOAT16, "bf16": BFLOAT16}[form.rsplit("_", 1)[1]]
    dtype = {FLOAT: np.float32, FLOAT16: np.float16, BFLOAT16: ml_dtypes.bfloat16}[real]
    model = self_attention(1, tokens, heads, size, real, mask)
    (spec,) = CompiledCluster(read_model(model), device).prepare().kernels
    assert spec.name == f"matrix_stream_{form}"
    inputs = [noise(1, tokens, heads, size, seed=i).astype(dtype) for i in range(3)]
    q, k, v = (x.astype(np.float64) for x in inputs)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 8
    if mask:
        shape = [tokens if word == "TOKENS" else 1 for word in mask.split(", ")]
        left_out = np.arange(math.prod(shape)).reshape(shape) % 5 == 0
        left_out |= (np.arange(shape[-2]) == 3)[:, None]
        inputs.append(np.where(left_out, -np.inf, noise(*shape, seed=4)).astype(dtype))
        scores = scores + inputs[-1].astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("bhqk,bkhd->bhqd", weights / weights.sum(-1, keepdims=True), v)
    actual = run_model(model, inputs)[0]
    if real == BFLOAT16:
        actual = (actual.astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(actual[:, :, 3]).all() == mask.startswith("TOKENS")
    tolerance = TF32_TOLERANCE if real == FLOAT else TOLERANCES[real]
    np.testing.assert_allclose(actual, expected, tolerance, tolerance)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("real", [FLOAT16, FLOAT], ids=["halves", "floats"])
@pytest.mark.parametrize("offset", [0, 1], ids=["whole", "odd"])
def test_rows_that_begin_anywhere_are_attended_to(monkeypatch: pytest.MonkeyPatch, offset: int, real: int) -> None:
    """The operands are columns of a wider tensor, whose rows begin at multiples of 16 bytes or only of one element.

    What lies after the last key must not be multiplied, not even by 0: 0 times infinity is NaN.
    """
    device = DeviceProperties.gpu((8, 0))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    text = """<ir_version: 10, opset_import: ["" : 20]> parts (float16[2, 50, 113] x) => (float16[2, 50, 32] y)
        { one = Constant<value_ints = [2]>() qb = Constant<value_ints = [B0]>() qe = Constant<value_ints = [E0]>()
          kb = Constant<value_ints = [B1]>() ke = Constant<value_ints = [E1]>()
          vb = Constant<value_ints = [B2]>() ve = Constant<value_ints = [E2]>()
          q = Slice(x, qb, qe, one) k = Slice(x, kb, ke, one) v = Slice(x, vb, ve, one)
          t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, t) w = Softmax(s) y = MatMul(w, v) }"""
    text = text.replace("113", str(112 + offset))
    for number in range(3):
        text = text.replace(f"B{number}", str(32 * number + offset)).replace(
            f"E{number}", str(32 * number + 32 + offset)
        )
    if real == FLOAT:
        text = text.replace("float16", "float")
    form, dtype, tolerance = {
        FLOAT16: ("8_once_f16", np.float16, TOLERANCES[FLOAT16]),
        FLOAT: ("4_once_f32", np.float32, TF32_TOLERANCE),
    }[real]
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    kernels = CompiledCluster(read_model(model), device).prepare().kernels
    assert [kernel.name for kernel in kernels] == [f"matrix_stream_16x128x64_{form}"]
    x = (noise(2, 50, 112 + offset) / 2).astype(dtype)
    x[:, -1, offset + 64] = np.inf
    q, k, v = np.split(x[..., offset : offset + 96].astype(np.float64), 3, -1)
    weights = np.exp(q @ k.swapaxes(1, 2))
    expected = weights @ v / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(run_model(model, [x])[0], expected, tolerance, tolerance)


@pytest.mark.parametrize("real", [FLOAT16, FLOAT], ids=["halves", "floats"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_forms_of_few_blocks_keep_all_in_registers(capability: tuple[int, int], real: int) -> None:
    specs = []
    halves_only = [(197, 12, ""), (1500, 16, ""), (1500, 16, "1, 1, 1, 1500")]
    for tokens, multiprocessors, mask in (
        (100, 132, "100, 100"),
        (300, 12, "300, 300"),
        (1500, 16, "1500, 1500"),
        *([(130, 12, "130, 130"), (1500, 4, "1500, 1500")] if real == FLOAT else halves_only),
    ):
        model = self_attention(1, tokens, 1, 64, real, mask)
        device = DeviceProperties.gpu(capability, multiprocessors)
        specs += CompiledCluster(read_model(model), device).prepare().kernels
    of_decoders = CompiledCluster(read_model(prompt(64, real)[0]), DeviceProperties.gpu(capability, 4))
    specs += [spec for spec in of_decoders.prepare().kernels if spec.name.startswith("matrix_stream")]
    halves = {"16x128x64", "32x128x64", "32x256x64", "96x128x64", "96x64x64"}
    floats = {"16x128x64", "16x64x64", "32x64x64", "96x128x64", "96x64x64", "128x32x64"}
    assert {spec.name.split("_")[2] for spec in specs} == (floats if real == FLOAT else halves)
    for usage in report(specs, [Target.cuda(*capability)]):
        assert usage.stack == usage.spill_stores == usage.spill_loads == 0, usage


LIBRARIES = frozenset({"cublaslt", "cudnn"})


def program_of(model: onnx.ModelProto, options: LoweringOptions | None = None) -> tuple[str, list[str]]:
    """Return the text of the plan's last program, on a GPU with libraries, and the kernels' names."""
    cluster = CompiledCluster(read_model(model), DeviceProperties.gpu((9, 0), libraries=LIBRARIES), options)
    texts: list[str] = []
    cluster.show_program = texts.append
    return "".join(texts) if (found := cluster.prepare()) and texts else "", [kernel.name for kernel in found.kernels]


@pytest.mark.parametrize(
    ("batch", "tokens", "form"), [(1, 128, "16x128x64_8_once"), (1, 197, "32x256x64_8_once"), (1, 500, "96x128x64_4")]
)
def test_rules_prefer_few_blocks_to_cudnn(batch: int, tokens: int, form: str) -> None:
    program, kernels = program_of(self_attention(batch, tokens, 12, 64, FLOAT16, ""))
    assert kernels == [f"matrix_stream_{form}_f16"]
    assert "all its blocks run at once; chosen by rules" in program
    program, _ = program_of(self_attention(batch, tokens, 12, 64, FLOAT16, ""), LoweringOptions(deterministic=True))
    assert "all its blocks run at once; chosen by rules, since deterministic=1 forbids measuring" in program


@pytest.mark.parametrize(("batch", "tokens", "size"), [(16, 197, 64), (1, 2000, 64), (1, 197, 128)])
def test_rules_leave_many_blocks_to_cudnn(batch: int, tokens: int, size: int) -> None:
    program, kernels = program_of(self_attention(batch, tokens, 12, size, FLOAT16, ""))
    assert not kernels
    assert "cuDNN: attention (chosen by rules, not measured)" in program


def test_a_guard_says_that_blocks_are_few() -> None:
    cluster = CompiledCluster(
        read_model(self_attention("batch", 128, 12, 64, FLOAT16, "")),
        DeviceProperties.gpu((9, 0), libraries=LIBRARIES),
    )
    shape = (128, 12, 64)
    for batch, kernels in ((1, 1), (2, 1), (64, 0), (1, 1)):
        variant = cluster.build([(batch, *shape)] * 3, [])
        assert len(variant.kernels) == kernels
        assert len(variant.problems) == 1 - kernels
