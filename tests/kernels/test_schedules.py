"""Schedules as data: each field changes the launches, and different schedules have different texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, parser

from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.device import DeviceProperties
from ort_cuda_plugin.program.lowering.context import Lowering, Make, Tactic, Tuner
from ort_cuda_plugin.program.steps.schedule import (
    AttentionTile,
    Choice,
    Engine,
    Schedule,
    Tile,
    WeightLayout,
    describe,
    schedule_data,
    schedule_text,
)
from ort_cuda_plugin.program.steps.steps import Sums
from ort_cuda_plugin.program.steps.tensor import Tensor
from ort_cuda_plugin.schedule import choose
from ort_cuda_plugin.schedule.choose import candidates

GPU = DeviceProperties.gpu((9, 0))
LIBRARIES = DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt", "cudnn"}))
EMULATED = DeviceProperties()


def model(text: str, weights: Sequence[tuple[str, Sequence[int]]] = (), kind: int = TensorProto.FLOAT16) -> ModelProto:
    loaded: ModelProto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> g {text}')
    for name, shape in weights:
        size = 1
        for dim in shape:
            size *= dim
        loaded.graph.initializer.append(helper.make_tensor(name, kind, shape, [1] * size))
    return loaded


PRODUCT = model("(float16[200, 256] x) => (float16[200, 80] y) { y = MatMul(x, w) }", [("w", (256, 80))])
ROW = model("(float16[3, 256] x) => (float16[3, 80] y) { y = MatMul(x, w) }", [("w", (256, 80))])
SOME_ROWS = model("(float16[rows, 256] x) => (float16[rows, 80] y) { y = MatMul(x, w) }", [("w", (256, 80))])
ROW_TF32 = model("(float[1, 256] x) => (float[1, 80] y) { y = MatMul(x, w) }", [("w", (256, 80))], TensorProto.FLOAT)
CODES = model("(int8[64, 64] x) => (int32[64, 64] y) { y = MatMulInteger(x, w) }", [("w", (64, 64))], TensorProto.INT8)
FEW_COLUMNS = model("(float[64, 32] x, float[32, 2] w) => (float[64, 2] y) { y = MatMul(x, w) }")
IMAGE = model("(float16[1, 32, 9, 9] x) => (float16[1, 48, 7, 7] y) { y = Conv(x, w) }", [("w", (48, 32, 3, 3))])
SOME_PIXELS = model(
    "(float[1, 3, a, b] x) => (float[1, 48, c, d] y) { y = Conv(x, w) }", [("w", (48, 3, 3, 3))], TensorProto.FLOAT
)
ATTENTION = model(
    """(float16[2, 64, 32] q, float16[2, 64, 32] k, float16[2, 64, 32] v) => (float16[2, 64, 32] y)
    { t = Transpose<perm=[0, 2, 1]>(k) s = MatMul(q, t) p = Softmax<axis=-1>(s) y = MatMul(p, v) }"""
)


class Fixed(Tuner):
    """A tuner that chooses ``schedule``, if given, and collects all candidates in ``found``."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule
        self.found: list[Choice] = []

    def choice(self, ctx: Lowering, step: Sums, choices: Sequence[Choice]) -> Choice | None:
        self.found += choices
        return None if self.schedule is None else Choice(self.schedule, "the test says so")

    def fastest(
        self, ctx: Lowering, problem: str, inputs: Sequence[Tensor | None], names: Sequence[str], make: Make
    ) -> Tactic | None:
        return None


def launches(program: ModelProto, device: DeviceProperties, schedule: Schedule) -> list[object]:
    """Return kernel, grid, block and shared memory of the plan's launches; for other steps the name of their type."""
    cluster = CompiledCluster(read_model(program), device, tuner=Fixed(schedule))
    steps: list[Any] = []
    cluster.watch = lambda name, found: steps.append(found)
    cluster.prepare()
    last = steps[-1]
    return [
        (step.kernel.digest, repr(step.grid), step.block, repr(step.shared_bytes))
        if hasattr(step, "kernel")
        else type(step).__name__
        for step in last
    ]


SIMT = Schedule(Engine.SIMT, Tile(64, 64, gap=4))
MMA = Schedule(Engine.MMA, Tile(32, 64, 32, thread_m=4, thread_n=4), "f16")
GEMV = Schedule(Engine.GEMV)
MULTI_PASS = Schedule(Engine.MULTI_PASS, AttentionTile(16, 64, 64, 64, tile_gap=4))
FLASH_MMA = Schedule(Engine.FLASH_MMA, AttentionTile(32, 128, 64, 256, warp_rows=32, stages=2))


@dataclass(frozen=True)
class Pair:
    """A schedule, and another value for one of its fields that leads to different launches of the model."""

    model: ModelProto
    device: DeviceProperties
    first: Schedule
    value: Any


SCHEDULE_FIELDS = {
    "engine": Pair(ROW, GPU, MMA, Engine.GEMV),
    "tile": Pair(PRODUCT, GPU, MMA, Tile(64, 64, 32, thread_m=8, thread_n=4)),
    "operands": Pair(CODES, GPU, SIMT, "i8"),
    "split_k": Pair(PRODUCT, GPU, MMA, 2),
    "sliced_k": Pair(PRODUCT, GPU, MMA, 2),
    "weights": Pair(PRODUCT, GPU, MMA, WeightLayout.ALONG_K),
    "is_transposed": Pair(FEW_COLUMNS, EMULATED, SIMT, True),
    "gemv_rows": Pair(SOME_ROWS, GPU, MMA, 4),
    "im2col_pixels": Pair(SOME_PIXELS, EMULATED, SIMT, 32),
}
TILE_FIELDS = {
    "m": Pair(PRODUCT, GPU, SIMT, 32),
    "n": Pair(PRODUCT, GPU, SIMT, 32),
    "k": Pair(PRODUCT, GPU, SIMT, 8),
    "thread_m": Pair(PRODUCT, GPU, SIMT, 4),
    "thread_n": Pair(PRODUCT, GPU, SIMT, 4),
    "chunk": Pair(PRODUCT, GPU, SIMT, 8),
    "gap": Pair(PRODUCT, GPU, SIMT, 2),
}
ATTENTION_TILE_FIELDS = {
    "m": Pair(ATTENTION, GPU, MULTI_PASS, 32),
    "keys": Pair(ATTENTION, GPU, MULTI_PASS, 128),
    "width": Pair(ATTENTION, GPU, MULTI_PASS, 128),
    "threads": Pair(ATTENTION, GPU, MULTI_PASS, 32),
    "resident": Pair(ATTENTION, GPU, MULTI_PASS, True),
    "gap": Pair(ATTENTION, GPU, MULTI_PASS, 3),
    "tile_gap": Pair(ATTENTION, GPU, MULTI_PASS, 0),
    "warp_rows": Pair(ATTENTION, GPU, FLASH_MMA, 16),
    "stages": Pair(ATTENTION, GPU, FLASH_MMA, 1),
}


@pytest.mark.parametrize("name", [field.name for field in fields(Schedule)])
def test_each_field_of_a_schedule_changes_a_launch(name: str) -> None:
    pair = SCHEDULE_FIELDS[name]
    second = replace(pair.first, **{name: pair.value})
    assert launches(pair.model, pair.device, pair.first) != launches(pair.model, pair.device, second)


@pytest.mark.parametrize("name", [field.name for field in fields(Tile)])
def test_each_field_of_a_tile_changes_a_launch(name: str) -> None:
    pair = TILE_FIELDS[name]
    second = replace(pair.first, tile=replace(pair.first.gemm_tile, **{name: pair.value}))
    assert launches(pair.model, pair.device, pair.first) != launches(pair.model, pair.device, second)


@pytest.mark.parametrize("name", [field.name for field in fields(AttentionTile)])
def test_each_field_of_a_tile_of_attention_changes_a_launch(name: str) -> None:
    pair = ATTENTION_TILE_FIELDS[name]
    second = replace(pair.first, tile=replace(pair.first.attention_tile, **{name: pair.value}))
    assert launches(pair.model, pair.device, pair.first) != launches(pair.model, pair.device, second)


@pytest.mark.parametrize("layout", list(WeightLayout))
def test_each_layout_of_weights_changes_a_launch(layout: WeightLayout) -> None:
    is_f16 = layout in (WeightLayout.F16_ALONG_K, WeightLayout.F16_ALONG_N)
    first = replace(GEMV, weights=WeightLayout.ALONG_K if layout is WeightLayout.STORED else WeightLayout.STORED)
    program = ROW_TF32 if is_f16 else ROW
    assert launches(program, GPU, first) != launches(program, GPU, replace(first, weights=layout))


DEPTHWISE = model(
    "(float16[1, 32, 9, 9] x) => (float16[1, 32, 7, 7] y) { y = Conv<group=32>(x, w) }", [("w", (32, 1, 3, 3))]
)
UPSAMPLED = model(
    "(float16[1, 32, 4, 4] x) => (float16[1, 16, 9, 9] y) { y = ConvTranspose<strides=[2, 2]>(x, w) }",
    [("w", (32, 16, 3, 3))],
)
SMALL_IMAGE = model(
    "(float[2, 64, 3, 3] x) => (float[2, 48, 3, 3] y) { y = Conv<pads=[1, 1, 1, 1]>(x, w) }",
    [("w", (48, 64, 3, 3))],
    TensorProto.FLOAT,
)
SHARED_KEYS = model(
    """(float[1, 8, 1, 64] q, float[1, 2, 2048, 64] k, float[1, 2, 2048, 64] v) => (float[1, 8, 1, 64] y)
    { y = Attention(q, k, v) }"""
)
PROGRAMS = [
    PRODUCT,
    ROW,
    CODES,
    FEW_COLUMNS,
    IMAGE,
    ATTENTION,
    SHARED_KEYS,
    DEPTHWISE,
    UPSAMPLED,
    SMALL_IMAGE,
    ROW_TF32,
]
DEVICES = [GPU, LIBRARIES, EMULATED]


def test_candidates_are_launched_differently_and_have_all_engines() -> None:
    """Each engine occurs, and no two candidates of a step lead to equal launches: neither would be of use."""
    engines = set()
    for program in PROGRAMS:
        for device in DEVICES:
            noting = Fixed()
            cluster = CompiledCluster(read_model(program), device, tuner=noting)
            steps: list[Any] = []
            cluster.watch = lambda name, found, steps=steps: steps.append(found)
            cluster.prepare()
            taken = [step.schedule for found in steps for step in found if getattr(step, "schedule", None) is not None]
            engines |= {schedule.engine for schedule in (*taken, *(choice.schedule for choice in noting.found))}
            found = {choice.schedule for choice in noting.found} if program not in (ATTENTION, SHARED_KEYS) else set()
            made = {schedule: tuple(launches(program, device, schedule)) for schedule in found}
            assert len(set(made.values())) == len(made), made
    assert engines == set(Engine)


SOME_IMAGES = model(
    """(float16[n, 16, 8, 8] x, float16[n, 24, 8, 8] r) => (float16[n, 24, 8, 8] y)
    { c = Conv<pads=[1, 1, 1, 1]>(x, w) s = Add(c, r) y = Relu(s) }""",
    [("w", (24, 16, 3, 3))],
)
RESIDUAL = model(
    """(float16[rows, 7, 256] x, float16[7, rows, 80] r) => (float16[rows, 7, 80] y)
    { t = Transpose<perm=[1, 0, 2]>(r) p = MatMul(x, w) y = Add(p, t) }""",
    [("w", (256, 80))],
)
SOME_KEYS = model(
    """(float16[b, q, 64] x, float16[b, k, 64] z) => (float16[b, q, 64] y)
    { t = Transpose<perm=[0, 2, 1]>(z) s = MatMul(x, t) p = Softmax<axis=-1>(s) y = MatMul(p, z) }"""
)


@pytest.mark.parametrize("program", [SOME_ROWS, SOME_IMAGES, RESIDUAL, SOME_KEYS])
@pytest.mark.parametrize("device", DEVICES)
def test_to_list_candidates_guards_and_records_nothing(
    monkeypatch: pytest.MonkeyPatch, program: ModelProto, device: DeviceProperties
) -> None:
    asked = []

    def noting(ctx: Lowering, step: Sums) -> list[Choice]:
        before = dict(ctx.trace.guards), list(ctx.trace.steps)
        found = candidates(ctx, step)
        asked.append(step)
        assert (ctx.trace.guards, ctx.trace.steps) == before
        return found

    monkeypatch.setattr(choose, "candidates", noting)
    sizes = {"rows": 40, "n": 2, "b": 2, "q": 100, "k": 100}
    shapes = [
        [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        for value in program.graph.input
    ]
    CompiledCluster(read_model(program), device, tuner=Fixed()).build(shapes, [])
    assert asked


# ---- schedules as data ----

TILES = st.builds(Tile, *[st.integers(1, 512)] * 7)
ATTENTION_TILES = st.builds(AttentionTile, *[st.integers(1, 512)] * 4, st.booleans(), *[st.integers(0, 64)] * 4)
SCHEDULES = st.builds(
    Schedule,
    st.sampled_from(Engine),
    st.none() | TILES | ATTENTION_TILES,
    st.sampled_from(["", "f16", "tf32", "i8"]),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from(WeightLayout),
    st.booleans(),
    st.integers(0, 8),
    st.integers(0, 32),
)


@given(SCHEDULES)
def test_a_schedule_is_json(schedule: Schedule) -> None:
    assert json.loads(schedule_text(schedule)) == schedule_data(schedule)
    assert json.loads(json.dumps(schedule_data(schedule))) == schedule_data(schedule)


@given(SCHEDULES, SCHEDULES)
def test_different_schedules_have_different_texts(first: Schedule, second: Schedule) -> None:
    assert (schedule_text(first) == schedule_text(second)) == (first == second)


def test_people_read_the_engine_the_tile_and_the_split_of_k() -> None:
    assert describe(replace(MMA, split_k=2, sliced_k=4)) == "mma 32x64x32, split_k=2, sliced_k=4"
    assert describe(replace(MMA, operands="u8")) == "mma 32x64x32, u8 operands, exact sums"
    assert describe(replace(SIMT, gemv_rows=4, weights=WeightLayout.ALONG_K)) == (
        "simt 64x64x16, weights along_k, gemv up to 4 rows"
    )
    assert describe(MULTI_PASS) == "multi_pass 16x64x64"
