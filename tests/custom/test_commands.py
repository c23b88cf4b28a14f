"""Commands with models that have custom operators, which no other provider runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import ort_cuda_plugin
from browser import whole_text
from custom_operators import kept_registry
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode

OPERATORS = """
from ort_cuda_plugin.custom import Lowering, T, elementwise, op

@op("my.domain::Twice")
def twice(ctx: Lowering, x: T) -> T:
    return elementwise(ctx, lambda a: a * 2, x)
"""
MODEL = """
    <ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>
    example (float[n] x) => (y) { a = my.domain.Twice (x) y = Neg (a) }
"""


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    operators, model = tmp_path / "twice.py", tmp_path / "model.onnx"
    operators.write_text(OPERATORS)
    onnx.save(onnx.parser.parse_model(MODEL), model)
    ort_cuda_plugin.register(emulate=True)
    with kept_registry():
        yield [str(model), "--operators", str(operators)]


def test_run_says_why_nothing_is_compared(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments, "--device", "emulated", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["nodes_on_ep"] == 2
    assert (
        report["not_compared"]
        == "cpu: the provider has no custom operator my.domain::Twice, which only the plugin runs"
    )
    assert (report["compared"], report["error"], report["cpu_run"]) == ([], None, None)
    assert main(["run", *arguments, "--device", "emulated"]) == 0
    assert "the provider has no custom operator my.domain::Twice" in capsys.readouterr().out


def test_compare_says_that_nobody_else_has_it(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *arguments, "--device", "emulated"]) == ExitCode.UNAVAILABLE
    assert (
        "--against CPUExecutionProvider: the provider has no custom operator my.domain::Twice"
        in capsys.readouterr().err
    )


def test_bench_times_the_plugin_alone(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    options = ["--device", "emulated", "--runs", "1", "--warmup", "0"]
    assert main(["bench", *arguments, *options, "--json", str(report)]) == 0
    assert (
        "not compared: cpu: the provider has no custom operator my.domain::Twice, which only the plugin runs"
        in capsys.readouterr().out
    )
    (found,) = json.loads(report.read_text())
    assert list(found["sides"]) == ["plugin"]
    assert found["sides"]["plugin"]["error"] is None
    assert found["sides"]["plugin"]["cold_s"] > 0  # measured in a process that has registered the operator
    assert main(["bench", *arguments, *options, "--against", "cpu"]) == ExitCode.UNAVAILABLE


def test_a_gpu_is_estimated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments, "--shapes", "x=1000"]) == 0
    assert "(Twice)" in capsys.readouterr().out


def test_open_sizes_are_no_reason_why_a_model_cannot_be_loaded(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.parser.parse_model(MODEL)
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, arguments[0])
    assert main(["run", *arguments, "--device", "emulated"]) == ExitCode.MODEL_FAILED
    said = capsys.readouterr().err
    assert "my.domain::Unheard is not registered with the plugin" in said
    assert "--dim" not in said
    del model.graph.node[0], model.graph.output[:]
    model.graph.node[0].input[0] = "x"
    onnx.save(model, arguments[0])
    assert main(["run", *arguments, "--device", "emulated"]) == ExitCode.MODEL_FAILED
    assert "the model has no outputs, so nothing can be run" in capsys.readouterr().err


KERNELS = """
from numba import cuda
from ort_cuda_plugin.custom import Float32, Lowering, array_kernel, ceildiv, launch, op

@array_kernel
def shift(x, y):
    i = cuda.grid(1)
    if i < x.shape[0]:
        y[i + x.shape[0] // 4] = x[i]

@op("my.domain::Twice")
def twice(ctx: Lowering, x: Float32, *, tactic: int) -> Float32:
    y = ctx.empty(x.shape, x.dtype)
    launch(ctx, shift, ceildiv(x.size, tactic), tactic, [ctx.contiguous(x), y], writes=[y])
    return y

@twice.autotune
def blocks(ctx: Lowering, x: Float32) -> list[int]:
    return [32, 64]
"""
ALONE = """
    <ir_version: 8, opset_import: ["my.domain" : 1]>
    example (float[n] x) => (y) { y = my.domain.Twice (x) }
"""


@pytest.fixture
def with_kernel(arguments: list[str]) -> list[str]:
    """Return arguments for a model with a kernel that writes beyond its result if x has four or more elements."""
    Path(arguments[2]).write_text(KERNELS)
    onnx.save(onnx.parser.parse_model(ALONE), arguments[0])
    return [*arguments, "--device", "emulated"]


def test_explain_measures_tactics_for_given_shapes(with_kernel: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", *with_kernel, "--program", "--autotune", "--shapes", "x=3", "--shapes", "x=3"]
    assert main(command) == ExitCode.OK
    session, first, second = re.split(r"^a Run with x\[3\]$", capsys.readouterr().out, flags=re.MULTILINE)
    assert "tactic 32: the first tactic, not measured, because sizes are unknown before a Run" in session
    assert re.search(r"tactic (32|64): measured \S+ [um]s; (32|64) ", first)
    assert "built no program: a plan that existed serves these sizes" in second


def test_explain_checks_a_run_with_given_shapes(
    with_kernel: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", *with_kernel, "--html", str(page), "--check", "--shapes", "x=8"]) == ExitCode.OK
    assert "checked Run: x[8]" in capsys.readouterr().err
    text = whole_text(page.read_text())
    assert "checked Run: x[8]" in text
    assert "outside of all tensors; the nearest one is tensor 1 of the launch" in text
    twice = ["--shapes", "x=8", "--shapes", "x=9"]
    assert main(["explain", *with_kernel, "--html", str(page), "--check", *twice]) == ExitCode.USAGE
    assert "--check: got 2 times --shapes, expected one Run" in capsys.readouterr().err


def test_explain_prints_ptx(with_kernel: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *with_kernel, "--ptx", "sm_90"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert re.match(r"// shift_\w+\(\*f32, i64, \*f32, i64\)\n", printed)
    assert ".target sm_90" in printed


def test_an_unregistered_operator_names_the_argument_of_commands(
    with_kernel: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", with_kernel[0], "--device", "emulated"]) == ExitCode.MODEL_FAILED
    assert "pass --operators FILE.py" in capsys.readouterr().err
