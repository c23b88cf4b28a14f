"""Vectorized elementwise kernels for a GPU: bit-identical to scalar ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

from kernel_harness import make_model, run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.codegen import vectors
from ort_cuda_plugin.kernels.elementwise import vector_map
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties(emulated=False)
HEAD = '<ir_version: 10, opset_import: ["" : 21]> vectors'
ROWS = f"""{HEAD} (float[R, C] x, float[R, C] z, float[C] b, float[R, 1] k, float[1] s, float16[R, C] h)
    => (float[R, C] dense, float16[R, C] halves, float[R, C] swapped, bool[R, C] flags, float[Q] odd)
    {{ p = Add(x, b) q = Mul(p, k) dense = Sub(q, s)
      c = Add(h, h) halves = Neg(c)
      flags = Greater(x, z)
      t = Transpose<perm = [1, 0]>(z) u = Reshape(t, rc) swapped = Mul(u, x)
      f = Reshape(x, flat) o = Slice(f, one, most) odd = Abs(o) }}"""
"""A bias and a factor per row, float16, bool, a transposed operand, and a slice that begins between vectors."""


def rows_model(rows: int | str, columns: int | str, odd: int | str) -> Any:
    text = ROWS.replace("[R", f"[{rows}").replace("C]", f"{columns}]").replace("[Q]", f"[{odd}]")
    head, body = text.split("{ p =")
    constants = "rc = Shape(x) flat = Constant<value_ints = [-1]>() one = Constant<value_ints = [1]>() "
    constants += "most = Constant<value_ints = [9223372036854775807]>() "
    return parser.parse_model(f"{head}{{ {constants} p ={body}")


@pytest.mark.parametrize(
    ("shape", "dynamic"), [((70, 64), False), ((300, 49), False), ((37, 62), True)], ids=["rows", "odd_rows", "dynamic"]
)
def test_vectors_change_no_bit(shape: tuple[int, int], dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows, columns = shape
    x, z = (rng.standard_normal(shape, np.float32) for _ in range(2))
    b, k, s = (rng.standard_normal(size, np.float32) for size in (columns, (rows, 1), 1))
    h = rng.standard_normal(shape).astype(np.float16)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    model = rows_model(*shape, rows * columns - 1)
    dense, halves, swapped, flags, odd = run_model(model, [x, z, b, k, s, h], dynamic)
    monkeypatch.setattr(vector_map, "FEW_ELEMENTS", 1 << 40)
    by_element = run_model(model, [x, z, b, k, s, h], dynamic)
    for result, other in zip((dense, halves, swapped, flags, odd), by_element, strict=True):
        np.testing.assert_array_equal(result, other)
    np.testing.assert_array_equal(halves, -(h + h))
    np.testing.assert_array_equal(swapped, z.T.reshape(shape) * x)
    np.testing.assert_array_equal(flags, x > z)
    np.testing.assert_array_equal(odd, np.abs(x.reshape(-1)[1:]))


TYPES = f"""{HEAD} (uint8[N] u, int64[N] i, double[N] d, bool[N] c, float[N] x)
    => (float[N] wide, uint8[N] bytes, double[N] doubles, int64[N] longs, float[N] picked)
    {{ wide = Cast<to = 1>(u) bytes = BitwiseNot(u)
      doubles = Mul(d, d) longs = Add(i, i) picked = Where(c, x, wide) }}"""


def test_every_width_ends_where_the_tensor_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    n = 4321
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    u, i = rng.integers(0, 256, n).astype(np.uint8), rng.integers(-(2**62), 2**62, n)
    d, x = rng.standard_normal(n), rng.standard_normal(n).astype(np.float32)
    c = x > 0
    model = parser.parse_model(TYPES)
    wide, inverted, doubles, longs, picked = run_model(model, [u, i, d, c, x], dynamic=True)
    np.testing.assert_array_equal(wide, u.astype(np.float32))
    np.testing.assert_array_equal(inverted, ~u)
    np.testing.assert_array_equal(doubles, d * d)
    np.testing.assert_array_equal(longs, i + i)
    np.testing.assert_array_equal(picked, np.where(c, x, wide))


def kernels(text: str, device: DeviceProperties = GPU) -> list[KernelSpec]:
    return CompiledCluster(read_model(parser.parse_model(f"{HEAD} {text}")), device).prepare().kernels


def test_the_kernels_of_the_comparison_have_vectors() -> None:
    cluster = CompiledCluster(read_model(rows_model(70, 64, 70 * 64 - 1)), GPU)
    sources = [spec.source for spec in cluster.prepare().kernels]
    assert all("lanes_of" in source for source in sources)
    assert sum("load_lanes" in source for source in sources) > 2


def test_ptx_has_accesses_of_16_bytes() -> None:
    text = """(float16[64, 384] h, float16[384] b, float[8, 64, 6, 32] x) => (float16[64, 384] g, float[8, 6, 64, 32] t)
        { s = Add(h, b) g = Relu(s) t = Transpose<perm = [0, 2, 1, 3]>(x) }"""
    for spec in kernels(text):
        image = compile_kernel(spec, Target.cuda(9, 0))
        ptx = image.ptx.decode()
        assert "ld.global.v4" in ptx
        assert "st.global.v4" in ptx
        assert image.metadata["stack_bytes"] == 0


GATHER = f"""{HEAD} (float16[50, 64] h, float[50, 66] x, int64[90] i)
    => (float16[90, 64] rows, float[90, 64] pieces, float[90, 66] odd)
    {{ rows = Gather(h, i) from = Constant<value_ints = [1]>() to = Constant<value_ints = [65]>()
      s = Slice(x, from, to, from) pieces = Gather(s, i) odd = Gather(x, i) }}"""


def test_rows_are_gathered_by_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    h, x = rng.standard_normal((50, 64)).astype(np.float16), rng.standard_normal((50, 66), np.float32)
    i = rng.integers(-50, 50, 90)
    i[7] = 50
    model = parser.parse_model(GATHER)
    sources = [spec.source for spec in CompiledCluster(read_model(model), GPU).prepare().kernels]
    # The second table's rows never begin at multiples of 16 bytes; the third one's 66 elements take vectors of two.
    assert len(sources) == 3
    assert all("load_row" in source for source in sources)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    results = run_model(model, [h, x, i])
    inside = (i != 50)[:, None]
    tables: list[Any] = [h, x[:, 1:65], x]
    for result, table in zip(results, tables, strict=True):
        np.testing.assert_array_equal(result, np.where(inside, table[i % 50], 0))


def test_a_cache_grows_by_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    batch, rows, heads, size, past = 2, 3, 2, 16, 21
    new = [rng.standard_normal((batch, rows, heads * size), np.float32) for _ in range(3)]
    before = [rng.standard_normal((batch, heads, past, size), np.float32) for _ in range(2)]
    lengths = np.array([past + rows - 1, 10 + rows - 1], np.int32)
    inputs = [*new, *before, lengths, np.array(past + rows, np.int32)]
    attributes = {"num_heads": heads, "kv_num_heads": heads}
    model = make_model("GroupQueryAttention", inputs, attributes, domain="com.microsoft", outputs=3)
    by_element = run_model(model, inputs)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    by_vectors = run_model(model, inputs)
    assert any("store_row" in spec.source for spec in CompiledCluster(read_model(model), GPU).prepare().kernels)
    for result, other in zip(by_vectors[1:], by_element[1:], strict=True):
        np.testing.assert_array_equal(result, other)
    np.testing.assert_allclose(by_vectors[0], by_element[0], rtol=1e-5, atol=1e-5)


def test_blocks_are_small_where_large_ones_leave_multiprocessors_idle() -> None:
    few, many = (DeviceProperties(emulated=False, multiprocessors=count) for count in (16, 132))
    assert vectors.vector_threads(few, 16384) == 256
    assert vectors.vector_threads(many, 16384) == 64
    assert vectors.vector_threads(many, 16384, vector_map.FEWER_BLOCKS) == 128


@pytest.mark.parametrize(("size", "vectors"), [(224, 1), (1024, 2)])
def test_threads_that_seek_each_element_have_one_vector_of_a_small_image(size: int, vectors: int) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]> image
        (float16[1, 5, {size}, {size}] x) => (float16[1, {size}, {size}, 5] y)
        {{ y = Transpose<perm = [0, 2, 3, 1]>(x) }}""")
    (spec,) = CompiledCluster(read_model(model), GPU).prepare().kernels
    assert f"first_element(8, {vectors})" in spec.source


def test_vectors_of_the_plan_s_own_memory_need_no_code_for_single_elements() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]> pooled
        (float16[2, 16, 24, 24] x) => (float16[2, 16, 24, 24] y) <float16[16, 16, 1, 1] w = {0}> {
        p = Conv(x, w) q = MaxPool<kernel_shape = [3, 3], dilations = [2, 2], pads = [2, 2, 2, 2]>(p)
        y = Conv(q, w) }""")
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((16, 16, 1, 1), np.float16), "w"))
    kernels = CompiledCluster(read_model(model), GPU).prepare().kernels
    (source,) = [spec.source for spec in kernels if spec.name == "maxpool"]
    assert source.count("load_lanes_inside(") == 9
    assert "load_row(" not in source
    assert "store_row(" not in source


def test_quotients_by_a_number_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A division by a float32 constant becomes products with the same bits; a runtime divisor stays a division."""
    x, c = np.random.default_rng(2).standard_normal((64, 96), np.float32), np.array(2**0.5, np.float32)
    model = make_model("Div", [x, c], {})
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    for known in (False, True):
        if known:
            model.graph.input.pop()
            model.graph.initializer.append(numpy_helper.from_array(c, "x1"))
        (spec,) = CompiledCluster(read_model(model), GPU).prepare().kernels
        assert ("quotient_by_f32" in spec.source) == known
        (actual,) = run_model(model, [x, c][: len(model.graph.input)])
        np.testing.assert_array_equal(actual, x / c)
