"""Row programs with rows in registers on a GPU: vector accesses for any length and address."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import parser

from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.reduction import vector_io as row_moves
from ort_cuda_plugin.kernels.reduction.row_in_registers import RowForm, row_height
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering

GPU = DeviceProperties(emulated=False)
TEXT = """<ir_version: 10, opset_import: ["" : 20]> rows
    (float[R, C] x, float[C] w, float16[R, C] h, float[R, 1] k)
    => (float[R, C] norm, float16[R, C] soft, int64[R] best, float[R, 1] most)
    { norm = LayerNormalization(x, w, w) soft = Softmax<axis = -1>(h)
      best = ArgMax<axis = 1, keepdims = 0>(x) scaled = Mul(x, k) least = Abs(scaled) most = ReduceMin(least, last) }"""
LAST = "{ last = Constant<value_ints = [1]>() norm"


def rows_model(rows: int, columns: int) -> Any:
    text = TEXT.replace("{ norm", LAST).replace("[R", f"[{rows}").replace("C]", f"{columns}]")
    return parser.parse_model(text)


@pytest.mark.parametrize(
    ("shape", "dynamic"),
    [((9, 33), False), ((5, 384), False), ((9, 192), False), ((3, 1030), True), ((2, 3001), False)],
    ids=str,
)
def test_rows_of_all_lengths(shape: tuple[int, int], dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 192 elements takes only some lanes of a warp, and the last warp has fewer rows than the others."""
    small = replace(GPU, multiprocessors=1)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: small if shape[1] == 192 else GPU)
    rng = np.random.default_rng(0)
    # Without small numbers in a row, its results are wrong if lanes past its end contribute.
    x = (rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape)).astype(np.float32)
    w, k = rng.standard_normal(shape[1], np.float32), rng.uniform(1, 2, (shape[0], 1)).astype(np.float32)
    h = rng.standard_normal(shape).astype(np.float16)
    norm, soft, best, most = run_model(rows_model(*shape), [x, w, h, k], dynamic)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-5) * w + w
    np.testing.assert_allclose(norm, expected, rtol=1e-5, atol=1e-5)
    e = np.exp(h.astype(np.float64) - h.max(1, keepdims=True))
    np.testing.assert_allclose(soft, e / e.sum(1, keepdims=True), rtol=2e-3, atol=1e-4)
    np.testing.assert_array_equal(best, x.argmax(1))
    np.testing.assert_array_equal(most, np.abs(x * k).min(1, keepdims=True))


@pytest.mark.parametrize("columns", [150, 1100])
def test_neighboring_rows_whose_elements_are_apart_share_a_block(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    text = f"""<ir_version: 10, opset_import: ["" : 20]> rows (float[2, {columns}, 37] x)
        => (float[2, {columns}, 37] soft, float[2, 1, 37] mean)
        {{ soft = Softmax<axis = 1>(x) axes = Constant<value_ints = [1]>() mean = ReduceMean(x, axes) }}"""
    x = np.random.default_rng(0).standard_normal((2, columns, 37), np.float32)
    soft, mean = run_model(parser.parse_model(text), [x])
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(soft, e / e.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(1, keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_a_thread_has_neighboring_rows_that_are_vectors(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operand is a slice that begins at a tensor's second element, so its vectors are misaligned."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: replace(GPU, multiprocessors=multiprocessors))
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]> rows
        (float[3, 150, 64] x, float[3, 150, 68] z, float16[3, 150, 64] h, uint8[3, 150, 48] u, float[64] w)
        => (float[3, 64] sum, float16[3, 64] mean, uint8[3, 48] most)
        { axes = Constant<value_ints = [1]>() last = Constant<value_ints = [2]>()
          from = Constant<value_ints = [1]>() to = Constant<value_ints = [65]>() part = Slice(z, from, to, last)
          scaled = Mul(x, w) both = Add(scaled, part) sum = ReduceLogSumExp<keepdims = 0>(both, axes)
          mean = ReduceMean<keepdims = 0>(h, axes) most = ReduceMax<keepdims = 0>(u, axes) }""")
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((3, 150, 64), np.float32), rng.standard_normal((3, 150, 68), np.float32)
    h, w = rng.standard_normal((3, 150, 64)).astype(np.float16), rng.standard_normal(64, np.float32)
    u = rng.integers(0, 200, (3, 150, 48), np.uint8)
    total, mean, most = run_model(model, [x, z, h, u, w])
    both = x.astype(np.float64) * w + z[:, :, 1:65]
    np.testing.assert_allclose(total, np.log(np.exp(both).sum(1)), rtol=1e-5)
    np.testing.assert_allclose(mean, h.astype(np.float64).mean(1), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(most, u.max(1))


def test_vectors_of_rows_are_read_by_wide_loads() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> rows (float16[64, 49, 2048] x) => (float16[64, 2048] y)
        { axes = Constant<value_ints = [1]>() y = ReduceMean<keepdims = 0>(x, axes) }"""
    (spec,) = CompiledCluster(read_model(parser.parse_model(text)), GPU).prepare().kernels
    image = compile_kernel(spec, Target.cuda(9, 0))
    assert image.metadata["stack_bytes"] == 0
    accesses = image.ptx.decode()
    assert "ld.global.v4" in accesses
    assert "st.global.v4" in accesses


@pytest.mark.parametrize(
    ("rows", "columns", "threads"),
    [(600, 384, 32), (4096, 2000, 128), (64, 16000, 512), (64, 384, 64), (64, 768, 96), (64, 2000, 256)],
)
def test_a_row_is_read_and_written_once_by_vectors(rows: int, columns: int, threads: int) -> None:
    """If there are few rows, more threads work on each."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]> rows
        (float16[{rows}, {columns}] x) => (float16[{rows}, {columns}] y) {{ y = Softmax<axis = -1>(x) }}"""
    cluster = CompiledCluster(read_model(parser.parse_model(text)), GPU)
    plan = cluster.prepare()
    (spec,) = plan.kernels
    assert cluster.traffic is not None
    assert cluster.traffic.asked == cluster.traffic.compulsory
    image = compile_kernel(spec, Target.cuda(9, 0))
    assert image.metadata["stack_bytes"] == 0
    lines = [line.split()[0] for line in image.ptx.decode().splitlines() if "global.v4" in line]
    loads, stores = (sum(line.startswith(kind) for line in lines) for kind in ("ld.", "st."))
    assert loads == stores == -(-columns // (8 * threads))


def test_blocks_have_few_rows_where_more_leave_multiprocessors_idle() -> None:
    ctx = Lowering(GPU)
    assert [row_height(ctx, rows) for rows in (100, 600, 5000)] == [1, 2, 4]


def test_lanes_cover_a_row() -> None:
    form = RowForm(32, 4, 3)
    columns = [eval(form.column(str(e)), {"lane": lane}) for lane in range(32) for e in range(form.lanes)]
    assert sorted(columns) == list(range(form.capacity))


NORM = """<ir_version: 10, opset_import: ["" : 20]> norm
    (float16[R, 64] x, float16[64, C] m, float16[C] w, float16[C] c) => (float16[R, C] y)
    { z = MatMul(x, m) y = LayerNormalization(z, w, c) }"""


def norm_source(columns: int) -> str:
    """Return the source of the kernel that normalizes the rows of the GEMM's result."""
    model = parser.parse_model(NORM.replace("C]", f"{columns}]").replace("[R", "[4000"))
    return CompiledCluster(read_model(model), GPU).prepare().kernels[-1].source


def test_what_later_passes_need_is_loaded_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as registers suffice, the loads of scale and bias overlap with those of the row."""
    source = norm_source(384)
    assert source.count("load_lanes(") == 3
    assert source.rindex("load_lanes(") < source.index("shfl_xor")
    monkeypatch.setattr(row_moves, "AHEAD_REGISTERS", 12)
    source = norm_source(384)
    assert source[: source.index("shfl_xor")].count("load_lanes(") == 2
    assert source.count("load_lanes(") == 3


def test_whole_rows_of_the_plugins_own_memory_are_vectors_without_a_question() -> None:
    """Only accesses to the application's memory, which may have any alignment, check it at run time."""
    source = norm_source(384)
    loads = [line for line in source.splitlines() if "load_lanes(" in line]
    known, asked = ({line.split(", ")[2] for line in loads if (", True, " in line) == is_known} for is_known in (1, 0))
    assert len(known) == 1
    assert len(asked) == 2
    assert all(f"is_aligned({pointer}, 8)" in source for pointer in asked)
    assert "load_row(" in norm_source(380)
