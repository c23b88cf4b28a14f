"""The commands ``ort-cuda-plugin compile`` and ``ort-cuda-plugin inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from browser import Page, whole_text
from contexts import BINARY, assert_same, load, nothing_compiled, row_model, rows
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.context.sample_shapes import sample_shapes
from ort_cuda_plugin.ep.contexts import context_session
from ort_cuda_plugin.ep.options.options import OptionError, parse
from ort_cuda_plugin.model.ir import DType, Value
from ort_cuda_plugin.progress.events import Progress, is_watched, on_progress


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.onnx"
    path.write_bytes(row_model())
    return path


@pytest.mark.parametrize("embed", [False, True])
def test_compile_writes_what_inspect_shows(
    source: Path, tmp_path: Path, embed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out_ctx.onnx"
    command = ["compile", str(source), "-o", str(out), "--arch", "sm_90,emulated", "--shapes", "x=2x3x16"]
    assert main(command + ["--embed"] * embed) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "3 nodes" in printed
    assert "inputs: x: FLOAT32" in printed
    assert "x.shape[" in printed
    assert "made by CUDA 1" in printed
    assert "schedules: gemm f32 gemv, gemm f32 simt " in printed
    assert (tmp_path / BINARY.format("out")).exists() is not embed
    with nothing_compiled():
        assert_same(load(out), source.read_bytes(), [{"x": rows(2, 3)}])
    page = tmp_path / "page.html"
    assert main(["inspect", str(out), "--html", str(page)]) == ExitCode.OK
    assert capsys.readouterr().out == printed
    assert Page(page.read_text()).faults == []
    assert "x.shape[" in whole_text(page.read_text())
    assert "sm_90: " in whole_text(page.read_text())
    assert main(["inspect", str(out if embed else tmp_path / BINARY.format("out")), "--json"]) == ExitCode.OK
    (context,) = json.loads(capsys.readouterr().out).values()
    (partition,) = context["partitions"]
    assert [target["arch"] for target in partition["targets"]] == ["sm_90", "emulated"]
    assert all(plan["guards"] and plan["steps"]["launch"] for t in partition["targets"] for plan in t["plans"])
    assert {kernel["registers"] is None for kernel in context["kernels"] if kernel["arch"] == "sm_90"} == {False}
    assert context["bytes"]["weights"] == 16 * 8 * 4
    for target in partition["targets"]:
        assert target["kernels"] == sum(kernel["arch"] == target["arch"] for kernel in context["kernels"])
    assert main(command) == ExitCode.USAGE
    assert "exists" in capsys.readouterr().err


def test_compilation_reports_its_progress(source: Path, tmp_path: Path) -> None:
    found: list[Progress] = []
    with on_progress(found.append):
        assert main(["compile", str(source), "-o", str(tmp_path / "out_ctx.onnx"), "--arch", "emulated"]) == 0
    clusters = [event for event in found if event.task == "planning clusters"]
    assert [event.done for event in clusters] == list(range(clusters[0].total + 1))
    assert not is_watched()


def test_for_the_emulated_device_nobody_looks_for_libraries_of_gpus(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated device needs no cuBLAS or cuDNN, and the search would warn about each missing library."""
    asked: list[str] = []

    def load_libraries() -> frozenset[str]:
        asked.append("asked")
        return frozenset()

    monkeypatch.setattr(context_session, "load_libraries", load_libraries)
    for arch, times in (("emulated", 0), ("emulated,sm_90", 1)):
        assert main(["compile", str(source), "-o", str(tmp_path / f"{arch}.onnx"), "--arch", arch]) == ExitCode.OK
        assert len(asked) == times


def test_what_cannot_be_compiled_or_inspected_is_an_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code, said in [
        (["compile", str(source), "-o", str(tmp_path / "o.onnx"), "--arch", "sm90"], ExitCode.MODEL_FAILED, "sm_90"),
        (
            ["compile", str(source), "-o", str(tmp_path / "o.onnx"), "--arch", "sm_61"],
            ExitCode.MODEL_FAILED,
            "use sm_75",
        ),
        (["compile", str(tmp_path / "none.onnx")], ExitCode.USAGE, "none.onnx"),
        (["inspect", str(tmp_path / "none.bin")], ExitCode.USAGE, "cannot be read"),
        (["inspect", str(source)], ExitCode.USAGE, "no EPContext node"),
        (["inspect", str(tmp_path / "text")], ExitCode.USAGE, "neither a context file nor an ONNX model"),
        (["inspect", str(tmp_path / "cut.bin")], ExitCode.MODEL_FAILED, "is damaged"),
    ]:
        (tmp_path / "text").write_text("text")
        (tmp_path / "cut.bin").write_bytes(b"\x89OCPCTX\n")
        assert main(arguments) == code, arguments
        assert said in capsys.readouterr().err
    assert not (tmp_path / "o.onnx").exists()


def test_shapes_that_are_wanted_come_last_and_bind_names() -> None:
    inputs = [Value("x", DType.FLOAT32, ("n", 3, None)), Value("past", DType.FLOAT32, ("n", "p"))]
    options = parse({"context_shapes": "x=5x3x7,past=5x2; x=6x3x1"})[0]
    wanted = [dict(alternative) for alternative in options.context_shapes]
    *_, last, newest = sample_shapes(inputs, {}, wanted)
    assert last == [(5, 3, 7), (5, 2)]
    assert newest == [(6, 3, 1), (6, 1)]
    unranked = Value("y", DType.FLOAT32, None)
    assert list(sample_shapes([unranked], {}, wanted)) == []
    assert len(next(sample_shapes([unranked], {"y": 2}))[0]) == 2
    for text in ("x", "x=", "=1x2", "x=1xx2", "x=-1", "x=1x2;", f"x={10**13}"):
        if text == "x=":  # no dimensions: a scalar
            assert parse({"context_shapes": text})[0].context_shapes == ((("x", ()),),)
            continue
        with pytest.raises(OptionError, match="context_shapes"):
            parse({"context_shapes": text})
