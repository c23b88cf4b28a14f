"""The command `compare`: tolerances by type, the first node that differs, and results in files."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.comparison.bisection import Run, first_difference, prefix
from ort_cuda_plugin.comparison.differences import TOLERANCES, differences

CHAIN = """<ir_version: 9, opset_import: ["" : 18]> chain (float[n, 256] x) => (float[n, 256] y, int64[2] s)
    { a = Abs(x)  e = Exp(a)  y = Neg(e)  s = Shape(e) }"""
CPU, EP = "CPUExecutionProvider", "CudaPluginExecutionProvider"


@pytest.fixture
def model(tmp_path: Path) -> str:
    onnx.save(parser.parse_model(CHAIN), tmp_path / "chain.onnx")
    return str(tmp_path / "chain.onnx")


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["compare", *arguments, "--device", "emulated", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_outputs_may_differ_as_much_as_their_type_allows(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, found = compared(capsys, model, "--dim", "n=8")
    assert code == ExitCode.OK
    assert [(each["name"], each["type"], each["tolerance"]) for each in found["outputs"]] == [
        ("y", "float32", TOLERANCES["float32"]),
        ("s", "int64", 0.0),
    ]
    assert found["first_node"] is None


def test_the_first_node_that_differs_is_found(capsys: pytest.CaptureFixture[str], model: str) -> None:
    """The plugin's Exp differs from the CPU provider's in the last bits; its Abs does not differ."""
    code, found = compared(capsys, model, "--dim", "n=8", "--tolerance", "float32=0")
    assert code == ExitCode.MISMATCH
    first = found["first_node"]
    assert (first["number"], first["op_type"], first["name"]) == (1, "Exp", "e")
    assert 0 < first["found"][0]["error"] < 1e-5
    assert [each["name"] for each in first["alone"]] == ["e"]
    assert main(["compare", model, "--device", "emulated", "--dim", "n=8", "--tolerance", "float32=0"]) == 1
    assert "the first node that differs is number 1, e (Exp)" in capsys.readouterr().out


def test_results_are_saved_and_loaded(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    file = tmp_path / "results.npz"
    assert compared(capsys, model, "--dim", "n=8", "--save", str(file))[0] == ExitCode.OK
    with np.load(file) as saved:
        values = dict(saved)
    assert values.keys() == {"inputs/x", *(f"outputs/{ep}/{name}" for ep in (CPU, EP) for name in "ys")}
    np.testing.assert_allclose(values[f"outputs/{EP}/y"], -np.exp(np.abs(values["inputs/x"])), rtol=1e-5)
    values[f"outputs/{CPU}/y"][3, 4] *= 2
    np.savez(file, **values)
    code, found = compared(capsys, model, "--dim", "n=2", "--load", str(file))
    assert code == ExitCode.MISMATCH
    assert found["outputs"][0]["shape"] == [8, 256]
    assert "no node differs" in found["why_no_node"]
    assert "fusion, or the way in which the loaded outputs were computed" in found["why_no_node"]
    assert found["first_node"] is None


def test_a_file_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    file = str(tmp_path / "results.npz")
    assert compared(capsys, model, "--dim", "n=8", "--save", file)[0] == ExitCode.OK
    np.save(tmp_path / "x.npy", np.ones((8, 256), np.float32))
    options = ["--device", "emulated", "--load", file]
    assert main(["compare", model, *options, "--input", f"x={tmp_path / 'x.npy'}"]) == ExitCode.USAGE
    assert "--input x: --load" in capsys.readouterr().err
    renamed = CHAIN.replace("(float[n, 256] x)", "(float[n, 256] z)").replace("Abs(x)", "Abs(z)")
    onnx.save(parser.parse_model(renamed), tmp_path / "other.onnx")
    assert main(["compare", str(tmp_path / "other.onnx"), *options]) == ExitCode.USAGE
    assert "the file lacks input 'z'. Its inputs: x" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tolerance", "float32=-1"], ExitCode.USAGE, "--tolerance float32=-1: expected a number of at least 0"),
        (["--tolerance", "float=1"], ExitCode.USAGE, "--tolerance float: not an element type. Choose from float64"),
        (["--tolerance", "float32"], ExitCode.USAGE, "--tolerance float32: expected the form NAME=VALUE"),
        (["--against", "NoSuchProvider"], ExitCode.UNAVAILABLE, "NoSuchProvider: this ONNX Runtime has only "),
        (["--load", __file__], ExitCode.USAGE, "expected an archive of arrays (.npz) that --save wrote"),
        (["--load", "none.npz"], ExitCode.USAGE, "none.npz"),
        (["--option", "no_such_key=1"], ExitCode.MODEL_FAILED, "no_such_key"),
    ],
)
def test_what_cannot_be_done_is_named(
    capsys: pytest.CaptureFixture[str], model: str, arguments: list[str], code: int, message: str
) -> None:
    assert main(["compare", model, "--device", "emulated", "--dim", "n=8", *arguments]) == code
    assert message in capsys.readouterr().err


HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 4), }".ljust(117) + b"\n"
LIAR = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(HEADER)) + HEADER


@pytest.mark.parametrize("command", ["compare --load", "run --input"])
@pytest.mark.parametrize("kind", ["a header that lies", "a broken archive", "a pipe", "a folder"])
def test_a_file_of_arrays_that_is_none_is_one_line(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path, command: str, kind: str
) -> None:
    path = tmp_path / "x.npz"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif command == "run --input":
        path.write_bytes(LIAR if kind == "a header that lies" else b"PK\x03\x04")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("inputs/x.npy", LIAR)
        if kind == "a broken archive":
            path.write_bytes(path.read_bytes()[:-10])
    name, option = command.split()
    arguments = [option, str(path)] if name == "compare" else [option, f"x={path}"]
    assert main([name, model, "--device", "emulated", "--dim", "n=8", *arguments]) == ExitCode.USAGE
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert str(path) in error
    assert ("expected a regular file" in error) == (kind in ("a pipe", "a folder"))


def test_a_cut_keeps_what_bodies_and_the_application_read() -> None:
    graph = parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]> m (float[2] x, bool c)
        => (float[2] a, float[2] z) <float[2] w = {1, 2}>
        { a = Abs(x)  b = Neg(a)  d = Add(b, w)
          z = If(c) <then_branch = t () => (float[2] p) { p = Mul(b, w) },
                     else_branch = f () => (float[2] q) { q = Identity(d) }> }""")
    cut, names = prefix(graph, 2)
    assert names == ["a", "b"]
    assert [node.op_type for node in cut.graph.node] == ["Abs", "Neg"]
    assert ([value.name for value in cut.graph.input], len(cut.graph.initializer)) == (["x"], 0)
    cut, names = prefix(graph, 3)
    assert (names, [tensor.name for tensor in cut.graph.initializer]) == (["a", "b", "d"], ["w"])
    cut, names = prefix(graph, 4)
    assert (names, [value.name for value in cut.graph.input]) == (["a", "z"], ["x", "c"])


@pytest.mark.parametrize("wrong", [0, 1, 6, 13])
def test_bisection_runs_few_cuts(wrong: int) -> None:
    """In a chain of 14 nodes, one node is wrong on one side, and the nodes after it pass the difference on."""
    nodes = " ".join(f"v{number + 1} = Neg(v{number})" for number in range(14))
    graph = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> m (float[2] v0) => (float[2] v14) {{ {nodes} }}'
    )
    runs: list[int] = []

    def side(offset: float) -> Run:
        def run(model: onnx.ModelProto, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
            runs.append(len(model.graph.node))
            values = dict(feeds)
            for node in model.graph.node:
                values[node.output[0]] = -values[node.input[0]]
                if node.output[0] == f"v{wrong + 1}":
                    values[node.output[0]] = values[node.output[0]] + np.float32(offset)
            return [values[name] for name in names]

        return run

    feeds = {"v0": np.ones(2, np.float32)}
    found = first_difference(graph, feeds, side(1), side(0), TOLERANCES)
    assert found is not None
    assert (found.number, found.name, found.found[0].error) == (wrong, f"v{wrong + 1}", 1.0)
    assert [each.name for each in found.alone] == [f"v{wrong + 1}"]
    assert len(runs) <= 2 * (1 + 4) + 3
    assert first_difference(graph, feeds, side(0), side(0), {}) is None


def test_values_of_all_kinds_are_compared() -> None:
    big = np.array([2**62, 1])
    pairs: list[tuple[Any, Any, bool]] = [
        (big, big + [1, 0], False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([np.nan]), np.array([1.0]), False),
        (np.zeros(2, np.float32), np.zeros(3, np.float32), False),
        (np.zeros(2, np.float32), np.zeros(2), False),
        (np.array(["a"]), np.array(["a"]), True),
        (np.array(["a"]), np.array(["b"]), False),
        ([np.ones(1)], [np.ones(1)], True),
        ([np.ones(1)], [np.ones(1), np.ones(1)], False),
        (None, None, True),
        ([{"a": 1.0, "b": math.nan}], [{"b": math.nan, "a": 1 + 1e-6}], True),
        ([{1: 1.0}], [{1: 1.1}], False),
        ({1: 1.0}, {2: 1.0}, False),
        ({1: "a"}, {1: "a"}, True),
        ({1: "a"}, {1: "b"}, False),
        ({}, {}, True),
        (np.array([True]), np.array([False]), False),
        (np.ones(1, np.float16), np.full(1, 1.01, np.float16), True),
    ]
    for actual, expected, agree in pairs:
        found = differences(["v"], [actual], [expected], TOLERANCES)
        assert all(each.is_small for each in found) == agree, (actual, expected)
