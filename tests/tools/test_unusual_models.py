"""Errors of commands about models with odd names, types, sizes and files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.table import Table

from ort_cuda_plugin.abi.message_texts import printable
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.common import output_console
from ort_cuda_plugin.cli.plain_text import json_text
from ort_cuda_plugin.comparison import differences
from ort_cuda_plugin.estimate import gather

ODD_NAME = "[/] [bold red]x :smile: \x1b[31m"


def save(path: Path, node: onnx.NodeProto, element_type: int, shape: list[int | str], opset: int = 20) -> str:
    """Save a model of one node, with output y, and return its path."""
    x, y = (helper.make_tensor_value_info(name, element_type, shape) for name in (node.input[0], "y"))
    graph = helper.make_graph([node], "small", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return str(path)


def test_a_table_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console = output_console()
    table = Table("name", title=ODD_NAME)
    table.add_row(ODD_NAME)
    console.print(table)
    console.print(ODD_NAME)
    printed = capsys.readouterr().out
    assert printed.count("[/] [bold red]x :smile: \\x1b[31m") == 3
    assert "\x1b" not in printed


def test_text_for_a_terminal_has_no_commands_for_it() -> None:
    assert printable("a\tb\nc \x1b]0;title\x07 \u202e ü☃") == "a\tb\nc \\x1b]0;title\\x07 \\u202e ü☃"


@pytest.mark.parametrize("command", ["run", "compare", "profile"])
def test_odd_names_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    model = save(tmp_path / "m.onnx", helper.make_node("Neg", [ODD_NAME], ["y"], name=ODD_NAME), TensorProto.FLOAT, [3])
    arguments = ["--by", "nodes", "--gpu", "none"] if command == "profile" else []
    assert main([command, model, *arguments, "--device", "emulated"]) == 0
    assert ("\\x1b[31m" in capsys.readouterr().out) == (command != "compare")


@pytest.mark.parametrize(
    "command", [["run"], ["compare"], ["explain", "--plans"], ["bench"], ["profile"], ["estimate"]]
)
def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(b"\x0a\xff\xff")
    assert main([*command, str(path)]) == 4
    error = capsys.readouterr().err
    assert error.startswith(f"ort-cuda-plugin {command[0]}: {path}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [["compare"], ["explain", "--plans"]])
@pytest.mark.parametrize(
    ("element_type", "shape", "code", "said"),
    [
        (
            TensorProto.FLOAT,
            [1 << 30, 1 << 30],
            2,
            "input 'x': not enough host memory for random values: Unable to allocate 4.00 EiB",
        ),
        (TensorProto.FLOAT, [-1, 3], 2, "input 'x': got the size -1 in its shape, expected at least 0"),
        (TensorProto.STRING, [3], 2, "input 'x' has strings, and only tensors of numbers can get random values"),
        (
            TensorProto.BFLOAT16,
            [3],
            4,
            "input 'x': ONNX Runtime cannot convert its element type bfloat16 to or from NumPy arrays",
        ),
    ],
)
def test_an_input_without_values_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    element_type: int,
    shape: list[int | str],
    code: int,
    said: str,
) -> None:
    model = save(tmp_path / "m.onnx", helper.make_node("Identity", ["x"], ["y"]), element_type, shape)
    assert main([*command, model, "--device", "emulated"]) == code
    assert said in capsys.readouterr().err


def test_weights_of_four_bits_agree_with_the_cpu_provider(tmp_path: Path) -> None:
    """By default, the CPU provider would round the other factor to 8 bits."""
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["d"], name="dequantize"),
        helper.make_node("MatMul", ["x", "d"], ["y"], name="product"),
    ]
    weights = helper.make_tensor("w", TensorProto.INT4, [8, 6], (np.arange(48) % 15 - 7).tolist())
    scale = numpy_helper.from_array(np.array(0.1, np.float32), "scale")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 8), ("y", 6)))
    graph = helper.make_graph(nodes, "int4", [x], [y], [weights, scale])
    path = tmp_path / "int4.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    assert main(["run", str(path), "--runs", "0", "--device", "emulated"]) == 0
    assert main(["compare", str(path), "--device", "emulated"]) == 0


def test_the_estimate_finds_external_weights(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.full((64, 64), 0.5, np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], "g", [x], [y], [weights])
    path = tmp_path / "external.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (found,) = gather.optimized(path).graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(found), 0.5)


def test_outputs_that_are_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` and `estimate` accept such outputs; `bench`, which keeps outputs on the device, names the first."""
    nodes = [
        helper.make_node("Constant", [], ["s"], value=numpy_helper.from_array(np.array(["a", "b"], object))),
        helper.make_node("Neg", ["x"], ["y"], name="minus"),
        helper.make_node("SequenceConstruct", ["y", "x"], ["q"], name="both"),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    s = helper.make_tensor_value_info("s", TensorProto.STRING, [2])
    q = helper.make_tensor_sequence_value_info("q", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y, q, s])
    path = str(tmp_path / "m.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    assert main(["run", path, "--runs", "0", "--device", "emulated"]) == 0
    assert main(["estimate", path]) == 0
    assert "minus (Neg)" in capsys.readouterr().out
    assert main(["bench", path, "--runs", "1", "--warmup", "0", "--no-creation", "--device", "emulated"]) == 4
    assert f"bench: {path}: output 'q' is not a tensor of numbers" in capsys.readouterr().err


def test_what_is_not_compiled_or_profiled_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = save(tmp_path / "nothing.onnx", helper.make_node("Neg", ["x"], ["y"]), TensorProto.FLOAT, [0, 3])
    assert main(["profile", nothing, "--gpu", "none", "--device", "emulated"]) == 3
    assert "a Run with these sizes launches no kernels" in capsys.readouterr().err
    strings = save(
        tmp_path / "strings.onnx", helper.make_node("StringConcat", ["x", "x"], ["y"]), TensorProto.STRING, [3]
    )
    assert main(["compile", strings, "-o", str(tmp_path / "out.onnx")]) == 4
    assert "`ort-cuda-plugin explain` says where each node runs" in capsys.readouterr().err
    unknown = save(tmp_path / "u.onnx", helper.make_node("Foo", ["x"], ["y"], domain="my.own"), TensorProto.FLOAT, [3])
    model = onnx.load(unknown)
    model.opset_import.append(helper.make_opsetid("my.own", 1))
    onnx.save(model, unknown)
    for command in (["compile", unknown, "-o", str(tmp_path / "out.onnx")], ["estimate", unknown]):
        assert main(command) == 4
        assert "my.own::Foo is not registered with the plugin" in capsys.readouterr().err


def test_json_has_no_number_that_json_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that cannot be compared differ by infinity, which Python's json writes as Infinity: invalid JSON."""
    monkeypatch.setattr(differences, "_error", lambda actual, expected: math.inf)
    model = save(tmp_path / "m.onnx", helper.make_node("Neg", ["x"], ["y"], name="minus"), TensorProto.FLOAT, [3])
    assert main(["run", model, "--json", "--runs", "0", "--device", "emulated"]) == 1
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["error"] is None
    assert json_text({"a": (1, math.inf, [math.nan])}) == json.dumps({"a": [1, None, [None]]}, indent=2)
