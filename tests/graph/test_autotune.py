"""The autotuner: its choice of a schedule, its cache, and cases without measurement.

`Clock` replaces ``measure`` by simulated times.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import ort_cuda_plugin
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.clusters.cluster import CompiledCluster, Variant
from ort_cuda_plugin.clusters.tuning import MeasuringTuner
from ort_cuda_plugin.compiler.caches.timing_cache import TimingCache
from ort_cuda_plugin.ep.device import measuring
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import Compile, DeviceProperties, Lowering, LoweringOptions
from ort_cuda_plugin.program.steps.trace import Step
from ort_cuda_plugin.selftest.forced import Noting
from programs.models import network
from programs.states import DEVICES, Recorded, first_difference, record

HEAD = '<ir_version: 10, opset_import: ["": 23]>'
PRODUCT = "g (float16[200, 256] x, float16[256, 80] w) => (float16[200, 80] y) { m = MatMul(x, w) y = Relu(m) }"
ATTENTION = """g (float16[2, 64, 32] q, float16[2, 64, 32] k, float16[2, 64, 32] v) => (float16[2, 64, 32] y)
{ t = Transpose<perm=[0, 2, 1]>(k) s = MatMul(q, t) p = Softmax<axis=-1>(s) y = MatMul(p, v) }"""
CONVOLUTION = "g (float16[1, 24, 9, 9] x) => (float16[1, 48, 7, 7] y) <float16[48, 24, 3, 3] w> { y = Conv(x, w) }"
GPU = DeviceProperties.gpu((9, 0))
WITH_LIBRARIES = DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt", "cudnn"}))


class Clock:
    """A stand-in for ``measure``: programs for which ``is_fast`` is true take 1 second, others 2 seconds.

    ``measured`` is the number of programs that were measured.
    """

    def __init__(self, is_fast: Callable[[Variant], bool] = lambda program: False) -> None:
        self.is_fast = is_fast
        self.measured = 0

    def __call__(self, programs: Sequence[Variant]) -> list[float | None]:
        self.measured += len(programs)
        return [1.0 if self.is_fast(program) else 2.0 for program in programs]


def runs(kernel: str, count: int = 1) -> Callable[[Variant], bool]:
    """Return a predicate: whether a program has ``count`` kernels, and ``kernel`` occurs in one of their names."""
    return lambda program: len(program.kernels) == count and any(kernel in spec.name for spec in program.kernels)


def loaded(text: str) -> onnx.ModelProto:
    """Return the model in ``text``. Values declared in <...> become weights filled with ones."""
    model: onnx.ModelProto = parser.parse_model(f"{HEAD} {text}")
    for value in model.graph.value_info:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        ones = np.ones(shape, helper.tensor_dtype_to_np_dtype(kind.elem_type))
        model.graph.initializer.append(numpy_helper.from_array(ones, value.name))
    del model.graph.value_info[:]
    return model


def compiled(
    text: str,
    folder: Path,
    clock: Clock,
    device: DeviceProperties = GPU,
    options: LoweringOptions | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
) -> tuple[Variant, str]:
    """Return the variant that a cluster builds with the autotuner, and its program after emission as text."""
    tuner = MeasuringTuner(TimingCache(folder), "a device", clock)
    cluster = CompiledCluster(read_model(loaded(text)), device, options, tuner=tuner)
    texts: list[str] = []
    cluster.show_program = texts.append
    variant = cluster.prepare() if shapes is None else cluster.build(shapes, [])
    return variant, next(text for text in reversed(texts) if text.startswith("after emission"))


def names(variant: Variant) -> list[str]:
    return [spec.name for spec in variant.kernels]


@pytest.mark.parametrize(
    ("text", "device", "fast", "expected", "why"),
    [
        (PRODUCT, GPU, runs("32x64"), "matmul_mma_32x64x32_f16", "mma 32x64x32: measured 1e+03 ms; "),
        (PRODUCT, GPU, runs("split_32x64", 2), "matmul_mma_split_32x64x32_f16", "mma 32x64x32, split_k=2: me"),
        (PRODUCT, WITH_LIBRARIES, runs("split_64x64", 2), "matmul_mma_split_64x64x32_f16", "library 2e+03 ms"),
        (ATTENTION, GPU, runs("16x64x64_resident"), "attention_16x64x64_resident", "decomposed 2e+03 ms"),
        (ATTENTION, GPU, runs("matmul", 3), "matmul_mma_", "mma "),
        (ATTENTION, WITH_LIBRARIES, runs("8x64x64"), "attention_8x64x64", "multi_pass 8x64x64"),
        (CONVOLUTION, GPU, runs("conv2d_16x1_", 2), "conv2d_16x1_f16", "direct: measured"),
        (CONVOLUTION, GPU, runs("mma_32x64"), "conv2d_mma_32x64x32_f16", "direct 2e+03 ms"),
    ],
)
def test_the_schedule_that_takes_the_least_time_computes_the_step(
    tmp_path: Path, text: str, device: DeviceProperties, fast: Callable[[Variant], bool], expected: str, why: str
) -> None:
    clock = Clock(fast)
    variant, program = compiled(text, tmp_path, clock, device)
    assert any(name.startswith(expected) for name in names(variant)), names(variant)
    assert why in program
    assert clock.measured > 1
    # The next session finds the times in the cache.
    later = Clock()
    again, program = compiled(text, tmp_path, later, device)
    assert later.measured == 0
    assert names(again) == names(variant)
    assert why in program


def test_a_library_that_is_the_fastest_is_called(tmp_path: Path) -> None:
    for text, library in (
        (PRODUCT, "cuBLASLt: product"),
        (ATTENTION, "cuDNN: attention"),
        (CONVOLUTION, "cuDNN: conv"),
    ):
        variant, program = compiled(text, tmp_path, Clock(lambda program: bool(program.problems)), WITH_LIBRARIES)
        assert len(variant.problems) == 1
        assert library in program
        assert "(measured 1e+03 ms; " in program


def test_rules_choose_without_measuring_and_say_so(tmp_path: Path) -> None:
    for rows, why in (
        ("200", "faster than a library call; chosen by rules, not measured"),
        ("80000", "(chosen by rules, not measured)"),
    ):
        cluster = CompiledCluster(read_model(loaded(PRODUCT.replace("200", rows))), WITH_LIBRARIES)
        texts: list[str] = []
        cluster.show_program = texts.append
        cluster.prepare()
        assert any(why in text for text in texts)


def test_what_cannot_run_now_is_measured_another_time_and_what_never_can_is_not(tmp_path: Path) -> None:
    class Failing(Clock):
        def __call__(self, programs: Sequence[Variant]) -> list[float | None]:
            super().__call__(programs)
            return [None if "mma_32x64" in program.kernels[0].name else math.inf for program in programs]

    expected = names(CompiledCluster(read_model(loaded(PRODUCT)), GPU).prepare())
    first, second = Failing(), Failing()
    variant, program = compiled(PRODUCT, tmp_path, first)
    assert names(variant) == expected
    assert "chosen by rules" in program
    compiled(PRODUCT, tmp_path, second)
    assert 0 < second.measured < first.measured


def test_other_sizes_types_epilogues_and_options_are_other_problems(tmp_path: Path) -> None:
    compiled(PRODUCT, tmp_path, Clock())
    for text, options in (
        (PRODUCT.replace("200", "300"), None),
        (PRODUCT.replace("float16", "bfloat16"), None),
        (PRODUCT.replace("Relu", "Sigmoid"), None),
        (PRODUCT, LoweringOptions(wide_indices=True)),
    ):
        clock = Clock()
        compiled(text, tmp_path, clock, options=options)
        assert clock.measured > 1
    clock = Clock()
    compiled(PRODUCT.replace("200", "193"), tmp_path, clock)  # another size in the same bucket
    assert clock.measured == 0


def test_a_plan_holds_for_the_sizes_near_those_that_were_measured(tmp_path: Path) -> None:
    text = PRODUCT.replace("float16[200", "float16[rows")
    clock = Clock(runs("32x64"))
    small, _ = compiled(text, tmp_path, clock, shapes=[(100, 256), (256, 80)])
    assert small.plan is not None
    plan = Recorded(CompiledCluster(read_model(loaded(text)), GPU), small.plan, [])

    def is_served(rows: int) -> bool:
        return plan.values([np.zeros((rows, 256), np.float16), np.zeros((256, 80), np.float16)]) is not None

    assert [rows for rows in (64, 65, 100, 128, 129) if is_served(rows)] == [65, 100, 128]
    before = clock.measured
    compiled(text, tmp_path, clock, shapes=[(1000, 256), (256, 80)])
    assert clock.measured > before


def test_nothing_is_measured_for_sizes_that_nobody_knows(tmp_path: Path) -> None:
    clock = Clock()
    variant, _ = compiled(PRODUCT.replace("float16[200", "float16[rows"), tmp_path, clock)
    assert clock.measured == 0
    assert variant.plan is None


@pytest.mark.parametrize("seed", range(4))
def test_damaged_times_are_measured_again(tmp_path: Path, seed: int) -> None:
    compiled(PRODUCT, tmp_path, Clock())
    (path,) = tmp_path.iterdir()
    damage = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(seed + 1):
        data[damage.randrange(len(data))] ^= 1 << damage.randrange(8)
    path.write_bytes(data[: damage.randrange(len(data))] if seed == 0 else data)
    clock = Clock(runs("32x64"))
    variant, _ = compiled(PRODUCT, tmp_path, clock)
    assert clock.measured > 1
    assert names(variant) == ["matmul_mma_32x64x32_f16"]


def test_a_read_only_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(PRODUCT, tmp_path, Clock(runs("32x64")))
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **place: not mode & os.W_OK and access(path, mode, **place))
    clock = Clock()
    variant, _ = compiled(PRODUCT, tmp_path, clock)
    assert clock.measured == 0
    assert names(variant) == ["matmul_mma_32x64x32_f16"]
    compiled(PRODUCT.replace("200", "300"), tmp_path, clock)
    assert clock.measured > 1
    assert [path] == list(tmp_path.iterdir())
    assert path.read_bytes() == before


# ---- sessions ----

ROWS = "g (float[rows, 40] x, float[40, 24] w) => (float[rows, 24] y) { y = MatMul(x, w) }"


def check(model: onnx.ModelProto, rows: Sequence[int], **options: Any) -> None:
    """Run a session of `ROWS` for each number of rows, and compare with NumPy."""
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True, provider_options=options)
    w = np.random.default_rng(0).standard_normal((40, 24), np.float32)
    for count in rows:
        x = np.random.default_rng(count).standard_normal((count, 40), np.float32)
        np.testing.assert_allclose(session.run(None, {"x": x, "w": w})[0], x @ w, rtol=1e-4, atol=1e-4)


def test_a_session_measures_on_its_device_and_the_next_one_reads_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    measure = measuring.measure

    def counted(device: Any, programs: Sequence[Variant]) -> list[float | None]:
        asked.append(len(programs))
        return measure(device, programs)

    monkeypatch.setattr(measuring, "measure", counted)
    monkeypatch.setattr("ort_cuda_plugin.compiler.caches.timing_cache.cache_folder", lambda: tmp_path)
    model = parser.parse_model(f"{HEAD} {ROWS}")
    before = ort_cuda_plugin.counters()
    check(model, [5, 8], autotune=1)  # both numbers are in the bucket 4 < rows <= 8: one plan
    after = ort_cuda_plugin.counters()
    assert asked == [2]
    assert after["candidates_measured"] - before["candidates_measured"] == 2
    assert after["plan_variants_built"] - before["plan_variants_built"] == 1
    assert len(list((tmp_path / "timings").iterdir())) == 1
    check(model, [5], autotune=1)
    check(model, [5])
    assert asked == [2]
    assert ort_cuda_plugin.counters()["candidates_measured"] == after["candidates_measured"]


def test_deterministic_sessions_neither_measure_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("a deterministic session asked what was measured")

    monkeypatch.setattr(measuring, "measure", unexpected)
    monkeypatch.setattr(TimingCache, "__init__", unexpected)
    monkeypatch.setattr("ort_cuda_plugin.compiler.caches.timing_cache.cache_folder", lambda: tmp_path / "not there")
    programs = tmp_path / "programs"
    programs.mkdir()
    check(parser.parse_model(f"{HEAD} {ROWS}"), [5], autotune=1, deterministic=1, program_folder=str(programs))
    (text,) = [path.read_text() for path in programs.glob("*.txt")]
    assert "chosen by rules, since deterministic=1 forbids measuring" in text
    assert not (tmp_path / "not there").exists()


PROCESS = """
import sys
from pathlib import Path
import numpy as np
import ort_cuda_plugin
from ort_cuda_plugin.compiler.caches import timing_cache
timing_cache.cache_folder = lambda: Path(sys.argv[2])
session = ort_cuda_plugin.session(bytes.fromhex(sys.argv[1]), emulate=True, provider_options={"autotune": 1})
x, w = np.ones((5, 40), np.float32), np.ones((40, 24), np.float32)
assert (session.run(None, {"x": x, "w": w})[0] == 40).all()
print(ort_cuda_plugin.counters()["candidates_measured"])
"""


def test_two_processes_that_measure_at_once_leave_one_good_entry(tmp_path: Path) -> None:
    model = parser.parse_model(f"{HEAD} {ROWS}").SerializeToString().hex()
    command = [sys.executable, "-c", PROCESS, model, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert int(output) in (0, 2)
    (path,) = tmp_path.joinpath("timings").glob("*.times")
    assert path.read_bytes().startswith(TimingCache.magic)


def test_explain_shows_what_the_candidates_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(runs("lanes"))
    monkeypatch.setattr(measuring, "measure", lambda device, programs: clock(programs))
    monkeypatch.setattr("ort_cuda_plugin.compiler.caches.timing_cache.cache_folder", lambda: tmp_path)
    onnx.save(parser.parse_model(f"{HEAD} {ROWS.replace('rows', '5')}"), tmp_path / "model.onnx")
    command = ["explain", str(tmp_path / "model.onnx"), "--program", "--device", "emulated"]
    assert main([*command, "--autotune"]) == 0
    assert "gemv: measured 1e+03 ms; simt 16x64x16 2e+03 ms" in capsys.readouterr().out
    assert main(command) == 0
    assert "simt 16x64x16: chosen by rules" in capsys.readouterr().out


# ---- passes ----

PROJECTIONS = """g (float16[64, 128] x) => (float16[64, 48] a, float16[64, 80] b)
<float16[128, 48] v, float16[128, 80] w>
{ p = MatMul(x, v) q = MatMul(x, w) a = Softmax(p) b = Softmax(q) }"""
WITHOUT_MERGE = 4
"""Launches of `PROJECTIONS` with two GEMMs; with one merged GEMM the plan has one launch less."""


def has_launches(count: int) -> Callable[[Variant], bool]:
    """Return a predicate: whether a program has ``count`` launches in a Run."""
    return lambda program: program.plan is not None and len(program.plan.records) == count


@pytest.mark.parametrize("merged", [True, False])
def test_a_pass_runs_where_the_whole_plan_is_faster_with_it(
    tmp_path: Path, merged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ort_cuda_plugin")
    fast = WITHOUT_MERGE - merged
    clock = Clock(has_launches(fast))
    variant, _ = compiled(PROJECTIONS, tmp_path, clock)
    assert has_launches(fast)(variant)
    times = ("1e+03 ms", "2e+03 ms") if merged else ("2e+03 ms", "1e+03 ms")
    outcome = f"takes {times[0]}, without it {times[1]}: the pass is {'used' if merged else 'left out'}"
    assert f"autotune: the plan with the pass horizontal_gemm {outcome}" in caplog.text
    assert clock.measured > 2
    # The next session finds the times in the cache.
    later = Clock()
    again, _ = compiled(PROJECTIONS, tmp_path, later)
    assert later.measured == 0
    assert again.plan == variant.plan


def test_the_choice_of_a_pass_holds_for_sizes_near_the_measured_ones(tmp_path: Path) -> None:
    text = PROJECTIONS.replace("float16[64, ", "float16[n, ")
    clock = Clock(has_launches(WITHOUT_MERGE))
    cluster = CompiledCluster(
        read_model(loaded(text)), GPU, None, tuner=MeasuringTuner(TimingCache(tmp_path), "a device", clock)
    )
    assert cluster.prepare().plan is None or not clock.measured  # the size is unknown: nothing is measured
    variant = cluster.build([[50, 128]], [])
    assert has_launches(WITHOUT_MERGE)(variant)
    assert clock.measured


def test_a_program_that_reads_back_is_not_measured_as_a_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ort_cuda_plugin")
    text = PROJECTIONS.replace("b)", "b, int64[2, n] c)").replace("}", "c = NonZero(b) }")
    compiled(text, tmp_path, Clock())
    assert "with horizontal_gemm" not in caplog.text


FULL = pytest.mark.full


class Without(Noting):
    """A tuner that leaves out each pass that it may, and notes their names."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: set[str] = set()

    def pays(self, ctx: Lowering, name: str, before: Sequence[Step], after: Sequence[Step], compiled: Compile) -> bool:
        self.left_out.add(name)
        return False


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "dtype", "device", "passes"),
    [
        ("bert_base", "float32", "sm_90", "horizontal_gemm tf32_as_scaled_f16"),
        pytest.param("bert_base", "float16", "sm_90", "horizontal_gemm split_k_fusion", marks=FULL),
        pytest.param("bert_base", "int8", "sm_90", "horizontal_integer_gemm", marks=FULL),
        pytest.param("vit_b_16", "int8", "sm_90", "horizontal_integer_gemm layout_propagation", marks=FULL),
        pytest.param("llama_decode", "float16", "sm_90", "horizontal_fusion split_k_fusion", marks=FULL),
    ],
)
def test_programs_without_the_timed_passes_compute_the_same(name: str, dtype: str, device: str, passes: str) -> None:
    tuner, model = Without(), network(name, dtype)
    recorded = record(model.proto, model.feeds, DEVICES[device], tuner=tuner)
    assert tuner.left_out == set(passes.split())
    assert first_difference(recorded, model.feeds) is None


def test_queries_of_several_heads_may_share_keys_without_a_batch_dimension() -> None:
    """Quantized caches of one head lose their batch dimensions, and the queries keep theirs."""
    model = network("llama_decode", "int8")
    recorded = record(model.proto, model.feeds, DEVICES["sm_90"])
    assert first_difference(recorded, model.feeds) is None
