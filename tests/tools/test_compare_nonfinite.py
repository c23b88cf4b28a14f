"""`compare --find nonfinite` names the node that makes the first infinity or NaN, and the option that prevents it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.common import provider_options
from ort_cuda_plugin.cli.exit_codes import ExitCode

Array = np.ndarray[Any, np.dtype[Any]]


def half(*values: float) -> Array:
    return np.array(values, np.float16)


@dataclass(frozen=True)
class Case:
    """A model with a planted overflow at ``node``, whose result is ``result``; ``keep`` is the option that helps."""

    text: str
    node: str
    op_type: str
    result: str
    keep: str
    x: Array = field(default_factory=lambda: half(300, 1, 2, 400))
    is_right: bool = True


CASES = {
    "a square": Case(
        """(float16[4] x) => (float16[4] y)
        { a = Abs(x) [square] s = Mul(a, a) r = Sqrt(s) y = Neg(r) }""",
        "square", "Mul", "s", "s,r",
    ),
    "a matrix product without a name": Case(
        """(float16[2, 2] x) => (float16[2, 2] y)
        { t = Transpose<perm = [1, 0]>(x) s = MatMul(x, t) p = Softmax(s) y = Neg(p) }""",
        "s", "MatMul", "s", "s,p", half(300, 1, 2, 400).reshape(2, 2),
    ),
    "a residual sum behind a mask with infinities": Case(
        """(float16[4] x) => (float16[4] y)
        { m = Where(chosen, x, low) p = Softmax(m) h = Add(x, large) d = Mul(h, small) y = Add(d, p) }""",
        "h", "Add", "h", "h,d", half(30000, 1, 2, 40000),
    ),
    "a body of a Loop": Case(
        """(float16[4] x) => (float16[4] y)
        { [repeat] y = Loop(trips, , x) <body = step (int64 i, bool on, float16[4] h) => (bool still, float16[4] next)
          { still = Identity(on) q = Mul(h, h) next = Sqrt(q) }> }""",
        "repeat", "Loop", "y", "still,q,next",
    ),
    "an exponential in bfloat16": Case(
        "(float16[4] x) => (float[4] y) { b = Cast<to = 16>(x) e = Exp(b) y = Cast<to = 1>(e) }",
        "e", "Exp", "e", "",
    ),
    "a logarithm of 0 in float32": Case(
        "(float16[4] x) => (float[4] y) { w = Cast<to = 1>(x) z = Sub(w, w) l = Log(z) y = Exp(l) }",
        "l", "Log", "l", "",
    ),
}  # fmt: skip
CONSTANTS = {
    "chosen": np.array([True, False, True, False]),
    "low": half(-np.inf),
    "large": half(40000),
    "small": half(2**-3),
    "trips": np.array(2),
}


def saved(text: str, folder: Path, *opsets: str) -> str:
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> planted {text}')
    read = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in CONSTANTS.items() if name in read
    )
    onnx.save(made, folder / "m.onnx")
    return str(folder / "m.onnx")


def found(capsys: pytest.CaptureFixture[str], path: str, x: Array, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON object and the text of the command."""
    file = Path(path).with_name("x.npy")
    np.save(file, x)
    given = ["compare", path, "--device", "emulated", "--find", "nonfinite", "--input", f"x={file}", *arguments]
    code = main([*given, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert main(given) == code
    return code, report, capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_the_node_with_the_planted_overflow_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    code, report, text = found(capsys, saved(case.text, tmp_path), case.x)
    assert code == ExitCode.MISMATCH
    first = report["nodes"][0]
    assert (first["name"], first["op_type"], first["result"]["name"]) == (case.node, case.op_type, case.result)
    assert report["keep_float32"] == case.keep
    assert f"{case.node} ({case.op_type}): result {case.result} (" in text
    if case.keep:
        assert report["outputs_kept"] == []
        assert f"--option keep_float32={case.keep}\nwith the option, all outputs are finite\n" in text
    else:
        kind = first["result"]["dtype"]
        assert kind in ("float32", "bfloat16")
        assert f"the option keep_float32 does not help, because the node's result is {kind}" in text


def test_counts_and_the_largest_input_are_those_of_the_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, report, text = found(capsys, saved(CASES["a square"].text, tmp_path), half(300, -301.5, 2, 0))
    (node,) = report["nodes"]
    assert node["largest_input"] == 301.5
    assert node["result"] == {
        "kind": "result", "name": "s", "dtype": "float16", "size": 4,
        "positive_infinities": 2, "negative_infinities": 0, "nans": 0,
    }  # fmt: skip
    assert report["given"] == []
    assert "number 1, square (Mul): result s (float16): 2 inf of 4 elements; largest finite input 301.5;" in text
    assert "output y (float16): 2 -inf of 4 elements" in text


def test_weights_with_infinities_are_named_and_blamed_for_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, report, text = found(
        capsys,
        saved("(float16[4] x) => (float16[4] y) { m = Where(chosen, x, low) y = Softmax(m) }", tmp_path),
        half(1, 2, 3, 4),
    )
    assert code == ExitCode.OK
    assert [(each["kind"], each["name"], each["negative_infinities"]) for each in report["given"]] == [
        ("weight", "low", 1)
    ]
    assert report["nodes"] == []
    assert text.startswith("weight low (float16): 1 -inf of 1 elements\n")


def test_the_first_node_with_nan_behind_infinities_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "(float16[4] x) => (float16[4] y) { m = Where(chosen, x, low) d = Sub(m, m) y = Abs(d) }"
    code, report, shown = found(capsys, saved(text, tmp_path), half(1, 2, 3, 4))
    assert code == ExitCode.MISMATCH
    assert report["nodes"] == []
    assert (report["first_nan"]["name"], report["first_nan"]["result"]["nans"]) == ("d", 2)
    assert "the first node with NaN in its result: number 1, d (Sub)" in shown


def test_nonfinite_inputs_come_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report, text = found(capsys, saved(CASES["a square"].text, tmp_path), half(np.nan, 1, np.inf, 2))
    assert code == ExitCode.MISMATCH
    assert [(each["kind"], each["nans"], each["positive_infinities"]) for each in report["given"]] == [("input", 1, 1)]
    assert report["nodes"] == []
    assert text.startswith("input x (float16): 1 inf, 1 NaN of 4 elements\n")
    assert text.endswith("no node returns nonfinite values for finite inputs: correct the inputs or weights\n")


def test_a_finite_run_is_right(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = saved(CASES["a square"].text, tmp_path)
    code, report, text = found(capsys, path, half(3, 1, 2, 4))
    assert code == ExitCode.OK
    assert report["nodes"] == report["outputs"] == []
    assert text == "all nodes return finite values for finite inputs, and all outputs are finite\n"
    code, report, _ = found(capsys, path, half(300, 1, 2, 4), "--option", "keep_float32=s,r")
    assert code == ExitCode.OK
    assert report["nodes"] == report["outputs"] == []


def test_nodes_of_a_function_are_listed_by_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        planted (float16[4] x) => (float16[4] y) { [norm] y = own.norm(x) }
        <domain: "own", opset_import: ["" : 20]> norm (h) => (r) { s = Mul(h, h) r = Sqrt(s) }"""
    )
    onnx.save(made, tmp_path / "m.onnx")
    code, report, _ = found(capsys, str(tmp_path / "m.onnx"), half(300, 1, 2, 400))
    assert code == ExitCode.MISMATCH
    assert (report["nodes"][0]["name"], report["nodes"][0]["op_type"]) == ("norm", "norm")
    assert (report["keep_float32"], report["outputs_kept"]) == ("Mul,Sqrt", [])


@pytest.mark.parametrize(
    "arguments", [["--against", "cpu"], ["--tolerance", "float16=1"], ["--save", "s.npz"], ["--no-bisect"]]
)
def test_an_argument_of_the_other_mode_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    path = saved(CASES["a square"].text, tmp_path)
    assert main(["compare", path, "--device", "emulated", "--find", "nonfinite", *arguments]) == ExitCode.USAGE
    assert f"{arguments[0]}: --find nonfinite runs the model on the plugin only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a=1,b=2", "c=3"], {"a": "1", "b": "2", "c": "3"}),
        (["keep_float32=Pow,/layer/Add,use_tf32=0"], {"keep_float32": "Pow,/layer/Add", "use_tf32": "0"}),
        (["keep_float32=Pow,,Add"], {"keep_float32": "Pow,,Add"}),
    ],
)
def test_the_value_of_an_option_may_be_a_list(texts: list[str], expected: dict[str, str]) -> None:
    assert provider_options(texts) == expected
