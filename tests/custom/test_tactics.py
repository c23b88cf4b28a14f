"""Tactics of operators in the short form: choice, measurement and the timing cache.

Times are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda
from onnx import helper

import ort_cuda_plugin
from custom_operators import DOMAIN, kept_registry, model, stock_session
from ort_cuda_plugin.clusters.cluster import CompiledCluster, Variant
from ort_cuda_plugin.clusters.tuning import MeasuringTuner
from ort_cuda_plugin.compiler.caches.timing_cache import TimingCache
from ort_cuda_plugin.custom import Lowering, Op, T, array_kernel, ceildiv, launch, op, tactics
from ort_cuda_plugin.custom.plugin import node
from ort_cuda_plugin.model.ir import DType, Graph, Node, Unsupported, Value
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Make, Tactic, Tensor, Tuner
from ort_cuda_plugin.program.steps.schedule import Choice
from ort_cuda_plugin.program.steps.steps import Sums
from ort_cuda_plugin.program.steps.trace import Launch
from plugins import ProbeCreator, context, lowered, tensor


@array_kernel
def scale(x: Any, y: Any, factor: Any) -> None:
    i = cuda.grid(1)
    if i < x.shape[0]:
        y[i] = x[i] * factor


@pytest.fixture
def scaled() -> Iterator[Op[Any, Tensor]]:
    with kept_registry():

        @op("my.domain::Scale")
        def scaled(ctx: Lowering, x: T, *, factor: float = 3.0, tactic: int) -> T:
            if tactic == 96:
                raise ValueError("a tactic that fails")
            y = ctx.empty(x.shape, x.dtype)
            launch(ctx, scale, ceildiv(x.size, tactic), tactic, [ctx.contiguous(x), y, factor], writes=[y])
            return y

        @scaled.autotune
        def blocks(ctx: Lowering, x: T, *, factor: float) -> list[int]:
            return [32, 64, 96]

        yield scaled


class Clock:
    """Returns simulated times, by which blocks of 64 threads are the fastest, and counts the measurements."""

    def __init__(self) -> None:
        self.measured = 0

    def __call__(self, programs: Sequence[Variant]) -> list[float | None]:
        self.measured += len(programs)
        return [1.0 if any(spec.launch_bounds == 64 for spec in program.kernels) else 2.0 for program in programs]


def cluster_of(tuner: MeasuringTuner | None, size: int = 100) -> CompiledCluster:
    x, y = Value("x", DType.FLOAT32, (size,)), Value("y", DType.FLOAT32, None)
    node = Node("here", "Scale", DOMAIN, 1, (x,), (y,))
    return CompiledCluster(Graph("g", [node], [x], [y], {DOMAIN: 1}), DeviceProperties(), tuner=tuner)


def blocks_of(tuner: MeasuringTuner | None, size: int = 100) -> list[int]:
    return [kernel.launch_bounds for kernel in cluster_of(tuner, size).prepare().kernels]


def test_the_first_is_taken_where_nothing_is_measured(scaled: Op[Any, Tensor]) -> None:
    assert blocks_of(None) == [32]


def test_the_record_of_a_plan_says_which_and_why(scaled: Op[Any, Tensor]) -> None:
    cluster = cluster_of(None)
    records: list[dict[str, Any]] = []
    cluster.show_plan = records.append
    cluster.prepare()
    assert [step["note"] for record in records for step in record["steps"]] == [
        "tactic 32: the first tactic, not measured"
    ]


def test_the_fastest_is_taken_and_remembered(scaled: Op[Any, Tensor], tmp_path: Path) -> None:
    clock = Clock()
    assert blocks_of(MeasuringTuner(TimingCache(tmp_path), "device", clock)) == [64]
    assert clock.measured == 2  # the third tactic fails
    later = Clock()
    assert blocks_of(MeasuringTuner(TimingCache(tmp_path), "device", later)) == [64]
    assert blocks_of(MeasuringTuner(TimingCache(tmp_path), "device", later), 99) == [64]  # for a similar size
    assert later.measured == 0
    blocks_of(MeasuringTuner(TimingCache(tmp_path), "another device", later))
    assert later.measured == 2
    scaled.autotune(lambda ctx, x, *, factor: [32, 64], timing_id="anew")
    blocks_of(MeasuringTuner(TimingCache(tmp_path), "device", later))
    assert later.measured == 4


def test_a_session_measures_and_steady_runs_call_no_python(scaled: Op[Any, Tensor]) -> None:
    built = model([helper.make_node("Scale", ["x"], ["y"], domain=DOMAIN)], {"x": ["n"]}, ["y"])
    session = stock_session(built, autotune="1")
    x = np.arange(70, dtype=np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], 3 * x)
    ort_cuda_plugin.reset_counters()
    session.run(None, {"x": x})
    assert ort_cuda_plugin.counters()["python_calls"] == 0


def test_tactics_need_a_parameter(scaled: Op[Any, Tensor]) -> None:
    @op("my.domain::Plain")
    def plain(ctx: Lowering, x: T) -> T:
        return x

    said = r"my\.domain::Plain-1: autotune passes .* Give the function a keyword-only parameter 'tactic'"
    with pytest.raises(TypeError, match=said):
        plain.autotune(lambda ctx, x: [1])


class FastestIs(Tuner):
    """A tuner that makes each candidate once and calls the last one the fastest."""

    def __init__(self) -> None:
        self.problems: list[tuple[str, list[str]]] = []

    def choice(self, ctx: Lowering, step: Sums, choices: Sequence[Choice]) -> None:
        raise AssertionError(f"an operator is measured, and no step: got {step}")

    def fastest(
        self, ctx: Lowering, problem: str, inputs: Sequence[Tensor | None], names: Sequence[str], make: Make
    ) -> Tactic:
        self.problems.append((problem, list(names)))
        for name in names:
            make(context(), inputs, name)
        return Tactic(names[-1], "measured")


def test_get_timing_cache_id() -> None:
    tuner, ctx = FastestIs(), context()
    ctx.tuner = tuner
    methods: dict[str, Any] = {
        "get_valid_tactics": lambda: [4, 9],
        "get_timing_cache_id": lambda: "double of floats",
        "supports_format_combination": lambda pos, in_out, nb_inputs: in_out[pos].desc.format is in_out[0].desc.format,
    }
    creator = ProbeCreator(**methods)
    lowered(creator, tensor([1, 8, 2, 2]), ctx=ctx)
    ((problem, names),) = tuner.problems
    assert problem == "plugin Probe-1 double of floats"
    assert names[0] == "4, LINEAR/LINEAR"
    assert len(names) > 2  # each tactic is offered with channels last as well
    assert {tactic for (tactic,) in creator.arguments("set_tactic")[:-1]} == {4, 9}
    assert creator.arguments("set_tactic")[-1] == (9,)
    (note,) = {step.note for step in ctx.trace.steps if isinstance(step, Launch)}
    assert note == f"tactic {names[-1]}: measured"
    lowered(ProbeCreator(**{**methods, "get_timing_cache_id": lambda: None}), tensor([1, 8, 2, 2]), ctx=ctx)
    assert len(tuner.problems) == 1  # without a timing-cache id nothing is stored, so nothing is measured


def test_nothing_is_measured_for_empty_inputs() -> None:
    tuner, ctx = FastestIs(), context()
    ctx.tuner = tuner
    creator = ProbeCreator(get_valid_tactics=lambda: [4, 9], get_timing_cache_id=lambda: "double")
    lowered(creator, tensor([0, 3]), ctx=ctx)
    assert not tuner.problems
    (note,) = {step.note for step in ctx.trace.steps if isinstance(step, Launch)}
    assert note == "tactic 4, LINEAR/LINEAR: the first tactic, not measured, because an input is empty"


def test_a_failing_tactic_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(tactics, "report_failure", lambda where, error: said.append(where))

    def refuse(tactic: int) -> None:
        if tactic == 9:
            raise ValueError("no memory")

    ctx = context()
    ctx.tuner = FastestIs()
    creator = ProbeCreator(get_valid_tactics=lambda: [4, 9], get_timing_cache_id=lambda: "double", set_tactic=refuse)
    with pytest.raises(Unsupported, match="tactic 9, LINEAR/LINEAR failed with PluginFailure"):
        lowered(creator, tensor([2]), ctx=ctx)
    assert said == ["tactic 9, LINEAR/LINEAR of plugin Probe-1 double"]


def test_autotune_without_a_timing_cache_id_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(node, "report", lambda text, level: said.append((level, text)))
    node.warn_unmeasured.cache_clear()
    for measures, candidates in ((False, [4, 9]), (True, [4]), (True, [4, 9]), (True, [4, 9])):
        ctx = context()
        ctx.tuner = FastestIs() if measures else None
        lowered(ProbeCreator(get_valid_tactics=lambda candidates=candidates: candidates), tensor([2]), ctx=ctx)
    ((level, text),) = said
    assert level == "WARNING"
    assert text.startswith("plugin Probe-1: autotune measures none of its tactics and formats")
