"""The command `estimate`, and the work that it derives from a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_cuda_plugin.cli import main
from ort_cuda_plugin.estimate import gather
from ort_cuda_plugin.estimate.work import KernelStep, LibraryStep, from_json, to_json
from ort_cuda_plugin.gpus import gpu


def small_model() -> onnx.ModelProto:
    """Return a model of MatMul, bias, ReLU and a Softmax over rows, with a symbolic batch size."""
    weights = numpy_helper.from_array(np.ones((256, 512), np.float32), "w")
    bias = numpy_helper.from_array(np.ones(512, np.float32), "b")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
        helper.make_node("Add", ["p", "b"], ["s"], name="bias"),
        helper.make_node("Relu", ["s"], ["r"], name="relu"),
        helper.make_node("Softmax", ["r"], ["y"], name="softmax"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 512])
    graph = helper.make_graph(nodes, "small", [x], [y], [weights, bias])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.onnx"
    onnx.save(small_model(), path)
    return path


def test_work_has_the_steps_of_a_gpu_and_survives_json(model: Path) -> None:
    work = gather.work_of_model(gather.optimized(model), {"x": (4096, 256)})
    product, softmax = work.steps
    assert isinstance(product, LibraryStep)
    assert isinstance(softmax, KernelStep)
    assert product.sizes[:3] == (4096, 512, 256)
    assert {"BIAS", "RELU", "TF32"} <= product.flags
    assert [access.nbytes for access in product.writes] == [4096 * 512 * 4]
    assert sorted(access.nbytes for access in product.reads) == [512 * 4, 256 * 512 * 4, 4096 * 256 * 4]
    assert from_json(to_json(work)) == work


def test_the_plan_is_that_of_the_estimated_gpu() -> None:
    """An A100 gets other tiles than an H100, which has more multiprocessors and faster tensor cores."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float16[3136, 64] x, float16[64, 256] w) => (float16[3136, 256]'
        " y) { y = MatMul(x, w) }"
    )
    kernels = {}
    for name in ("a100", "h100"):
        (step,) = gather.work_of_model(model, {}, libraries=frozenset(), gpu=gpu(name)).steps
        assert isinstance(step, KernelStep)
        kernels[name] = step.kernel.name
    assert kernels["a100"] != kernels["h100"]
    (step,) = gather.work_of_model(model, {}, libraries=frozenset()).steps
    assert isinstance(step, KernelStep)
    assert step.kernel.name == kernels["h100"]


def test_wrong_shapes_name_the_input(model: Path) -> None:
    for shapes, named in (({"z": (1,)}, "'z' is not an input"), ({"x": (1, 2, 3)}, "'x': got 3 sizes, expected 2")):
        with pytest.raises(gather.ShapeError, match=named):
            gather.work_of_model(gather.optimized(model), shapes)


def test_command_prints_a_table_and_writes_json(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, shown = tmp_path / "estimate.json", tmp_path / "estimate.html"
    files = ["--json", str(target), "--html", str(shown)]
    assert main(["estimate", str(model), "--device", "a100", "--shapes", "x=64x256", *files]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA A100" in printed
    assert "roofline" in printed
    assert "Estimates, not measurements" in printed
    data = json.loads(target.read_text())
    weights = 2 * 256 * 512 + 4 * 512  # float32 weights as scaled float16, and a scale for each column
    assert data["compulsory_bytes"] == 4 * (64 * 256 + 512 + 64 * 512) + weights
    assert data["seconds"] == pytest.approx(sum(step["seconds"] for step in data["steps"]))
    low, high = data["seconds_range"]
    assert low < data["seconds"] < high
    assert f"A Run takes {low * 1e6:.0f}-{high * 1e6:.0f} us" in printed
    first, last = data["steps"][0]["seconds_range"]
    assert f"{first * 1e6:.1f}-{last * 1e6:.1f}" in printed
    assert [step["nodes"] for step in data["steps"]][1] == ["softmax (Softmax)"]
    html = shown.read_text()
    assert "Estimates, not measurements" in html
    assert f"{first * 1e6:.1f}-{last * 1e6:.1f}" in html
    assert html.split('<table id="steps"')[1].split("</table>")[0].count('class="bar"><div') == len(data["steps"])
    assert "://" not in html


def test_half_types_stay_as_the_model_has_them(tmp_path: Path) -> None:
    """For the CPU, ONNX Runtime decomposes a Softmax of float16, and merges the model's Cast with its own."""
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], name="cast", to=TensorProto.FLOAT16),
        helper.make_node("Sub", ["h", "w"], ["s"], name="sub"),
        helper.make_node("Softmax", ["s"], ["y"], name="softmax"),
    ]
    weights = numpy_helper.from_array(np.ones(8, np.float16), "w")
    x = helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["batch", 8])
    graph = helper.make_graph(nodes, "half", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "half.onnx")
    found = gather.optimized(tmp_path / "half.onnx")
    assert [node.op_type for node in found.graph.node] == ["Cast", "Sub", "Softmax"]
    assert found.graph.node[0].attribute[0].i == TensorProto.FLOAT16
    assert gather.work_of_model(found, {"x": (4, 8)}).elsewhere == ()


def test_command_estimates_types_that_the_cpu_provider_has_no_kernel_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The roofline of so little work rounds to 0, so no ratio is printed."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["n"]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["y"], name="square")], "bf16", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    assert main(["estimate", str(tmp_path / "m.onnx")]) == 0
    printed = capsys.readouterr().out
    assert "square (Mul)" in printed
    assert (
        "The roofline of the model is less than 1 us: 0.0 MB of inputs, weights and outputs, 0.00 GFLOP.\n" in printed
    )


@pytest.mark.parametrize(
    "arguments", [["--shapes", "x"], ["--shapes", "x=1xn"], ["--values", "x=y"], ["--shapes", "z=1"]]
)
def test_command_refuses_what_it_cannot_read(model: Path, arguments: list[str]) -> None:
    assert main(["estimate", str(model), *arguments]) == 2


def test_a_model_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = small_model()
    broken.graph.node[0].input[0] = "b"
    onnx.save(broken, tmp_path / "broken.onnx")
    assert main(["estimate", str(tmp_path / "broken.onnx")]) == 4
    assert f"estimate: {tmp_path / 'broken.onnx'}: " in capsys.readouterr().err
