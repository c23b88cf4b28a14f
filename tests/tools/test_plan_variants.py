"""Why something was built: plans by the guard that failed, kernels by name, in the log and by `explain --plans`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import ort_cuda_plugin
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.nodes.plan_history import BUILT, FIRST, PlanVariant, built_after
from ort_cuda_plugin.progress.events import Progress, on_progress

BROADCAST = """<ir_version: 9, opset_import: ["" : 18]> m (float[n, 4] a, float[m, 4] b) => (float[k, 4] c)
    { c = Add(a, b) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(BROADCAST), tmp_path / "add.onnx")
    return tmp_path / "add.onnx"


@pytest.fixture(autouse=True)
def full_memory() -> None:
    """Fill the record of built plans, as in a process that has built many."""
    BUILT.extend(PlanVariant("other", number, {}, {}, 0.0, FIRST) for number in range(BUILT.maxlen or 0))


def test_plans_say_which_shapes_made_them_and_which_guard_failed(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 1
    session = ort_cuda_plugin.session(model, emulate=True, sess_options=options)
    before, counted = ort_cuda_plugin.plan_variants(), ort_cuda_plugin.counters()["plan_variants_built"]
    for rows, others in ((1, 3), (3, 3), (1, 9)):
        session.run(None, {"a": np.ones((rows, 4), np.float32), "b": np.ones((others, 4), np.float32)})
    first, second = built_after(before)
    assert ort_cuda_plugin.counters()["plan_variants_built"] == counted + 2
    assert (first.number, first.shapes, first.reason) == (0, {"a": (1, 4), "b": (3, 4)}, "there was no earlier plan")
    assert (second.number, second.shapes) == (1, {"a": (3, 4), "b": (3, 4)})
    assert second.reason.startswith("plan 0: it requires 1 == a.shape[0], but a.shape[0] is 3")
    assert second.seconds > 0
    logged = capfd.readouterr().err
    assert str(first) in logged
    assert str(second) in logged


def test_explain_runs_the_shapes_and_prints_the_plans(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", str(model), "--device", "emulated", "--plans"]
    assert main([*arguments, "--shapes", "a=1x4,b=3x4", "--shapes", "a=3x4,b=3x4", "--shapes", "a=1x4,b=9x4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("a Run")] == [
        "a Run with a[1, 4], b[3, 4]: plans built: 1",
        "a Run with a[3, 4], b[3, 4]: plans built: 1",
        "a Run with a[1, 4], b[9, 4]: plans built: 0",
    ]
    assert "it requires 1 == a.shape[0], but a.shape[0] is 3" in "\n".join(lines)
    for wrong in (["--plans", "--shapes", "z=1"], ["--plans", "--shapes", "a=1"], ["--shapes", "a=1x4"]):
        assert main(["explain", str(model), "--device", "emulated", *wrong]) == ExitCode.USAGE


def test_compiled_kernels_are_logged_with_their_number(tmp_path: Path) -> None:
    source = "def kernel(x):\n    x[0] = x[0] + float32(1)\n"
    specs = [KernelSpec(name, ("*f32",), source) for name in ("one", "other")]
    lines: list[str] = []
    events: list[Progress] = []
    for _ in range(2):  # the second library finds the kernels in the cache
        library = KernelLibrary(KernelCache(tmp_path), count=lambda name, by: None)
        library.log = lines.append
        with on_progress(events.append):
            library.get_many(specs, Target.emulated())
    assert [(event.done, event.total, event.name.split("_")[0]) for event in events] == [
        (0, 2, ""),
        (1, 2, "one"),
        (2, 2, "other"),
    ]
    assert lines[0] == "compiling kernels: 2 of 2 are not in the cache"
    assert [line.split(" after ")[0].split("_")[0] for line in lines[1:]] == ["kernel one", "kernel other"]
    assert [": 1 of 2 after " in lines[1], ": 2 of 2 after " in lines[2], len(lines)] == [True, True, 3]
