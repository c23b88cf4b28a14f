"""The command line: what it prints and the exit codes."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import ort_cuda_plugin
from ort_cuda_plugin import cli
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.devices import add_device_argument
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library import kernel_library
from ort_cuda_plugin.compiler.library.kernel_library import MANIFEST_VARIABLE, record_specs


@pytest.fixture
def add_model(tmp_path: Path) -> str:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "abc"]
    nodes = [helper.make_node("Add", ["a", "b"], ["c"], name="sum")]
    graph = helper.make_graph(nodes, "add", values[:2], values[2:])
    path = tmp_path / "add.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return str(path)


def test_run_of_a_wheel_model_reports_every_node_on_the_ep_and_a_small_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "light_squeezenet", "--device", "emulated", "--runs", "3", "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert report["nodes_on_ep"] == report["nodes"] > 0
    assert report["emulated"] is True
    assert report["launches"] > 0
    assert report["graph_replays"] == 2  # the first of these runs was still a warm-up
    assert report["graph_fallbacks"] == {}
    assert 0 < report["error"] <= report["tolerance"]
    assert report["python_calls_in_steady_runs"] == 0


def test_profile_lists_kernels_with_their_nodes(
    capsys: pytest.CaptureFixture[str], add_model: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["profile", add_model, "--device", "emulated", "--runs", "3", "--dim", "n=3", "--gpu", "none"]
    assert main([*arguments, "--json", "--trace", str(trace)]) == ExitCode.OK
    work = json.loads(capsys.readouterr().out)["steps"]
    (kernel,) = (each for each in work if each["kind"] == "kernel")
    assert (kernel["nodes"], kernel["op_types"]) == (["sum"], ["Add"])
    assert [each["name"] for each in work if each["kind"] == "copy"] == [
        "memcpy_host_to_device",
        "memcpy_host_to_device",
        "memcpy_device_to_host",
    ]
    assert sum(each["share"] for each in work) == pytest.approx(1)
    assert any(event["name"] == "model_run" for event in json.loads(trace.read_text()))
    assert main(arguments) == ExitCode.OK
    assert "sum (Add)" in capsys.readouterr().out
    for view in ("nodes", "kernels", "host"):
        assert main([*arguments, "--by", view, "--top", "1"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert printed.count("add on ") == 3
    assert "node as ONNX Runtime runs it" in printed
    assert main(["profile", add_model, "--runs", "0"]) == ExitCode.USAGE


def test_run_prints_a_table(capsys: pytest.CaptureFixture[str], add_model: str) -> None:
    assert main(["run", add_model, "--device", "emulated", "--runs", "1", "--dim", "n=3"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "1 of 1" in printed
    assert "a 3x4, b 3x4" in printed
    assert "largest error" in printed


def test_run_says_why_there_was_no_graph(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])]
    results = [helper.make_tensor_value_info("y", TensorProto.INT64, [1, "k"])]
    nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("NonZero", ["a"], ["y"])]
    path = tmp_path / "nonzero.onnx"
    graph = helper.make_graph(nodes, "nonzero", values, results)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    assert main(["run", str(path), "--device", "emulated", "--runs", "5"]) == ExitCode.OK
    assert "4 not: read_back" in capsys.readouterr().out


def test_run_takes_inputs_from_files(capsys: pytest.CaptureFixture[str], add_model: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((2, 4), np.nan, np.float32))
    np.save(tmp_path / "b.npy", np.ones((2, 4), np.float32))
    inputs = [f"--input={name}={tmp_path / name}.npy" for name in "ab"]
    assert main(["run", add_model, "--device", "emulated", "--runs", "0", *inputs]) == ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no_such_model"], "light_resnet50"),
        (["run", "MODEL", "--input", "x=y.npy"], "the model has no input 'x'. Its inputs: "),
        (["run", "MODEL", "--input", "a"], "expected the form NAME=FILE.npy"),
        (["run", "MODEL", "--input", "a=/nonexistent.npy"], "nonexistent"),
        (["run", "MODEL", "--input", f"a={__file__}"], f"--input a={__file__}: expected an array"),
        (["run", "MODEL", "--dim", "n=x"], "--dim n=x: expected a size"),
        (["run", "MODEL", "--dim", "m=2"], "the model has no symbolic dimension 'm'. Its symbolic dimensions: n"),
        (["run", "MODEL", "--seed", "-1"], "--seed -1: must not"),
        (["run", "MODEL", "--runs", "-1"], "must not be negative"),
        (["explain", "no_such_model"], "light_resnet50"),
        (["explain", "resnet50:float17"], "such as resnet50:float16; the names are resnet50, "),
        (["bench", "MODEL", "--batch", "3"], "has no dimension named batch"),
        (["explain", "MODEL", "--shapes", "a=4"], "--shapes: only --plans, --program and --check use"),
        (["explain", "MODEL", "--autotune"], "--autotune: only --program shows its effect"),
        (["explain", "MODEL", "--plans", "--json"], "--json and --declined change the table of nodes"),
    ],
)
def test_wrong_arguments_end_with_the_usage_code_and_name_the_argument(
    capsys: pytest.CaptureFixture[str], add_model: str, arguments: list[str], message: str
) -> None:
    arguments = [add_model if argument == "MODEL" else argument for argument in arguments]
    assert main([*arguments, "--device", "emulated"]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["doctr"], "doctor"), (["explain", "light_resnet5"], "light_resnet50"), (["explain", "bert_bas"], "bert_base")],
)
def test_a_mistyped_command_or_model_gets_the_name_that_was_probably_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str
) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse raises it
        code = int(end.code or 0)
    assert code == ExitCode.USAGE
    assert f"did you mean {meant!r}?" in capsys.readouterr().err


def test_a_truncated_model_ends_with_the_model_code(
    capsys: pytest.CaptureFixture[str], add_model: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(Path(add_model).read_bytes()[:-20])
    assert main(["run", str(broken), "--device", "emulated"]) == ExitCode.MODEL_FAILED
    assert str(broken) in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "explain", "profile", "estimate"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "`git lfs pull` downloads the model"),
        (b"<!DOCTYPE html>\n<title>Not found</title>", "The file is text, which begins with '<!DOCTYPE html>"),
        (b"\x14\0\0\0ORTM\x0c\0\x10\0", "The file is a model in ONNX Runtime's own format"),
    ],
)
def test_a_file_that_is_something_else_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, content: bytes, message: str
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    device = ["--device", "emulated"] if command != "estimate" else []
    assert main([command, str(path), *device]) == ExitCode.MODEL_FAILED
    assert message in capsys.readouterr().err


def test_a_sequence_as_input_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No .npy file can give its value."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (seq(float[n]) s, int64 i) => (float[m] y)
        { x = SequenceAt(s, i)  y = Neg(x) }"""
    onnx.save(parser.parse_model(text), path := tmp_path / "model.onnx")
    assert main(["run", str(path), "--device", "emulated"]) == ExitCode.MODEL_FAILED
    assert "input 's' is a sequence, and this command feeds only tensors" in capsys.readouterr().err


def test_run_compares_sequences_and_maps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The tensors of the sequence have different shapes."""
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
        g (float[256, 3] x) => (seq(float[a, b]) s, seq(map(int64, float)) m)
        { y = Exp(x)  z = Transpose(y)  s = SequenceConstruct(y, z)
          m = ai.onnx.ml.ZipMap <classlabels_int64s = [4, 7, 9]> (y) }"""
    onnx.save(parser.parse_model(text), path := tmp_path / "model.onnx")
    assert main(["run", str(path), "--device", "emulated", "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert report["compared"] == ["s", "m"]
    assert 0 < report["error"] < 1e-5, "the plugin's Exp differs from the CPU provider's in the last bits"


def test_explain_names_each_node_and_why_it_runs_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xy"]
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="first"),
        helper.make_node("Cast", ["s"], ["y"], name="last", to=8),
    ]
    nodes.insert(1, helper.make_node("Sinh", ["r"], ["s"], name="middle"))
    values[1] = helper.make_tensor_value_info("y", TensorProto.STRING, [2, 2])
    graph = helper.make_graph(nodes, "mixed", values[:1], values[1:])
    path = tmp_path / "mixed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    assert main(["explain", str(path), "--device", "emulated", "--json"]) == ExitCode.OK
    verdicts = {verdict["name"]: verdict for verdict in json.loads(capsys.readouterr().out)}
    assert verdicts["first"]["supported"]
    assert not verdicts["last"]["supported"]
    assert "a cast to STRING" in verdicts["last"]["reason"]
    first, *_, last = map(str, ort_cuda_plugin.explain(path, emulate=True))
    assert first == "first (Relu): CudaPluginExecutionProvider"
    assert re.fullmatch(r"last \(Cast\): CPUExecutionProvider, .*a cast to STRING.*", last)


def test_explain_calls_a_node_without_a_name_by_its_output(capsys: pytest.CaptureFixture[str], add_model: str) -> None:
    model = onnx.load(add_model)
    model.graph.node[0].name = ""
    onnx.save(model, add_model)
    assert main(["explain", add_model, "--device", "emulated"]) == ExitCode.OK
    assert re.search(rf"│ {model.graph.node[0].output[0]} +│ ai\.onnx\.Add-", capsys.readouterr().out)


def test_explain_counts_nodes_in_bodies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]> m (float[4] x, int64 most) => (float[4] y)
        { y = Loop(most, , x) <body = step (int64 i, bool on, float[4] s) => (bool on, float[4] t)
          { a = Exp(s)  b = Log(a)  t = Add(b, x) }> }""")
    onnx.save(model, tmp_path / "loop.onnx")
    assert main(["explain", str(tmp_path / "loop.onnx"), "--device", "emulated", "--json"]) == ExitCode.OK
    verdicts = json.loads(capsys.readouterr().out)
    assert [(verdict["op_type"], verdict["supported"], verdict["body_of"]) for verdict in verdicts] == [
        ("Loop", True, ""),
        ("Exp", True, "y (Loop)"),
        ("Log", True, "y (Loop)"),
        ("Add", True, "y (Loop)"),
    ]
    assert main(["explain", str(tmp_path / "loop.onnx"), "--device", "emulated"]) == ExitCode.OK
    printed = " ".join(capsys.readouterr().out.split())
    assert "in y" in printed
    assert "4 of 4 nodes run on" in printed


def test_info_reports_versions_devices_and_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["onnx"] == onnx.__version__
    assert any(device["emulated"] == "1" for device in report["devices"])
    assert report["cache"]["folder"]


def test_info_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == ExitCode.OK
    assert "emulated" in capsys.readouterr().out


def test_kernels_reports_on_the_kernels_of_a_manifest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "kernels.jsonl"
    monkeypatch.setenv(MANIFEST_VARIABLE, str(manifest))
    monkeypatch.setattr(kernel_library, "recorded", set())
    source = "def kernel(x):\n    x[0] = x[0] + float32(1)\n"
    record_specs([KernelSpec("add_one", ("*f32",), source)])
    record_specs([KernelSpec("of_the_emulated_device", ("*f32",), source, launch_bounds=16)])
    assert main(["kernels", "--arch", "sm_90", "--manifest", str(manifest), "--json"]) == ExitCode.OK
    (usage,) = json.loads(capsys.readouterr().out)
    assert usage["arch"] == "sm_90"
    assert usage["kernel"].startswith("add_one")
    assert usage["registers"] > 0
    assert usage["spill_stores"] == usage["spill_loads"] == 0


def test_kernels_without_a_manifest_says_how_to_get_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["kernels", "--manifest", str(tmp_path / "none")]) == ExitCode.USAGE
    assert "--sample" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--write", "x.md", "--check"], "--write runs all tests"),
        (["--write", "x.md", "node/add"], "--write runs all tests"),
        (["--jobs", "0"], "--jobs 0"),
        (["--adversarial", "-1"], "--adversarial -1"),
        (["--lowering", "H100:ptx"], "--lowering: expected a GPU such as sm_90"),
        (["node/no_such_test"], "no test matches node/no_such_test"),
    ],
)
def test_conformance_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["conformance", *arguments]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_conformance_in_all_modes_prints_what_is_not_on_the_ep(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["conformance", "node/if", "node/string_concat", "--jobs", "1"]
    assert main([*arguments, "--check", "--adversarial", "3", "--lowering", "sm_90:ptx"]) == ExitCode.OK
    printed = capsys.readouterr()
    assert printed.out.startswith("node/string_concat: partly on the CPU provider: out of scope: strings: StringConcat")
    assert "2 tests in" in printed.err


@pytest.mark.parametrize("command", ["operators", "conformance"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    for path, reason in ((tmp_path, "is a folder"), (tmp_path / "missing" / "report.md", "cannot be written")):
        with pytest.raises(SystemExit) as exit:
            main([command, "--write", str(path)])
        assert exit.value.code == ExitCode.USAGE
        assert f"{path} {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(cli.COMMANDS.keys() - {"estimate"}))  # its --device is a GPU to estimate for
def test_each_command_that_takes_a_device_takes_emulate(command: str) -> None:
    options = argparse.ArgumentParser()
    importlib.import_module(f"{cli.__name__}.{cli.COMMANDS[command]}").add_arguments(options)
    devices = [action for action in options._actions if "--device" in action.option_strings]
    short = [action for action in options._actions if "--emulate" in action.option_strings]
    assert len(devices) == len(short)
    assert [action.const for action in short] == ["emulated"] * len(devices)


def test_emulate_and_device_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.ArgumentParser()
    add_device_argument(options)
    assert options.parse_args([]).device == "auto"
    assert options.parse_args(["--emulate"]).device == options.parse_args(["--device", "emulated"]).device == "emulated"
    with pytest.raises(SystemExit):
        options.parse_args(["--emulate", "--device", "cuda"])
    assert "not allowed with argument" in capsys.readouterr().err
