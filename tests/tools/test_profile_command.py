"""The command `profile`: where the time of a Run goes, as tables, a page and a timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from browser import Page, browser
from encoder import encoder
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.profiles.collect import Plans, collect, known_gpu

HOSTILE = "</td><script>throw 1</script>&\"'"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    """Profile the encoder, one of whose MatMuls has a hostile name; return the JSON, the page and the timeline."""
    folder = tmp_path_factory.mktemp("profile")
    model = encoder(2, 96, 3)
    next(node for node in model.graph.node if node.op_type == "MatMul").name = HOSTILE
    onnx.save(model, folder / "encoder.onnx")
    page, timeline = folder / "profile.html", folder / "timeline.json"
    printed = folder / "printed.json"
    arguments = ["profile", str(folder / "encoder.onnx"), "--device", "emulated", "--gpu", "none", "--runs", "3"]
    arguments += ["--dim", "batch=2", "--dim", "sequence=7", "--html", str(page), "--timeline", str(timeline)]
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main([*arguments, "--json"]) == ExitCode.OK
    return json.loads(printed.read_text()), page, timeline


def test_nodes_account_for_the_time_of_the_device(profiled: tuple[dict[str, Any], Path, Path]) -> None:
    found, _, _ = profiled
    assert 0.95 <= found["accounted"] <= 1.0
    assert sum(node["microseconds"] for node in found["nodes"]) == pytest.approx(found["accounted"] * found["device"])
    assert sum(kernel["microseconds"] for kernel in found["kernels"]) == pytest.approx(found["device"])
    assert sum(kernel["launches"] for kernel in found["kernels"]) == len(found["steps"])
    times = [node["microseconds"] for node in found["nodes"]]
    assert times == sorted(times, reverse=True)
    (host,) = found["host"]
    assert host["provider"] == "CudaPluginExecutionProvider"


def test_steps_have_the_bytes_and_the_arithmetic_of_their_nodes(profiled: tuple[dict[str, Any], Path, Path]) -> None:
    found, _, _ = profiled
    assert all(step["bytes"] for step in found["steps"])
    products = sum(step["flops"] for step in found["steps"] if step["flops"])
    tokens, hidden, length = 2 * 7, 96, 7
    linear, attention = 2 * tokens * hidden * hidden * (3 + 1 + 4 + 4), 2 * 2 * tokens * length * hidden
    assert products == 2 * (linear + attention)  # the model has two layers


def test_page_names_the_most_expensive_nodes_and_needs_nothing_else(
    profiled: tuple[dict[str, Any], Path, Path],
) -> None:
    found, path, _ = profiled
    page = Page(path.read_text())
    assert page.faults == []
    listed = path.read_text().split('id="expensive"')[1].split("</ol>")[0]
    assert Page(listed + "</ol>").values("href") == [
        f"#{quote('node ' + each['name'], safe='')}" for each in found["nodes"][:5]
    ]
    assert HOSTILE in [node["name"] for node in found["nodes"]]
    assert "throw" not in "".join(path.read_text().split("<script>")[1:])
    assert "://" not in path.read_text()


def test_page_opens_in_a_browser_without_a_network(profiled: tuple[dict[str, Any], Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text('<!DOCTYPE html><img src="https://example.com/x.png"><script>missing()</script>')
    found, path, _ = profiled
    with browser() as tab:
        tab.open(broken)
        assert len(tab.console) >= 1  # so a fault of the page would be reported
        tab.console.clear()
        tab.open(path, "#" + quote(f"node {HOSTILE}", safe=""))
        assert tab.console == []
        assert tab.evaluate("document.querySelectorAll('.strip a').length") == len(found["steps"])
        assert HOSTILE in tab.evaluate("document.querySelector('.panel h3').textContent")


def test_timeline_keeps_host_and_device_apart(profiled: tuple[dict[str, Any], Path, Path]) -> None:
    found, _, path = profiled
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "host: ONNX Runtime", 2: f"device: {found['device_name']}"}
    assert sum(event["pid"] == 1 and event["name"] == "model_run" for event in events) == 7
    device = [event for event in events if event["pid"] == 2 and event["ph"] == "X"]
    assert len(device) >= 7 * len(found["steps"])
    assert all(event["args"]["read"] > 0 for event in device if event["cat"] == "kernel")


def test_estimate_of_a_gpu_stands_beside_the_emulated_device(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    weights = numpy_helper.from_array(np.ones((256, 512), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
        helper.make_node("Softmax", ["p"], ["y"], name="softmax"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 512])
    graph = helper.make_graph(nodes, "small", [x], [y], [weights])
    path = tmp_path / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    arguments = ["profile", str(path), "--device", "emulated", "--dim", "batch=64", "--runs", "1", "--gpu", "a100"]
    assert main([*arguments, "--json", "--timeline", str(tmp_path / "t.json")]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert "A100" in found["gpu"]
    assert all(node["estimated"] > 0 for node in found["nodes"])
    by_steps = sum(step["estimated"] for step in found["steps"] if step["estimated"])
    assert by_steps == pytest.approx(sum(node["estimated"] for node in found["nodes"]))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["dur"] for event in events if event["pid"] == 3 and event["ph"] == "X") == pytest.approx(by_steps)


def event(name: str, begin: int, nanoseconds: int, nodes: list[str], **arguments: object) -> dict[str, Any]:
    given = {"ort_event_id": 1, "kind": "kernel", "nodes": nodes, "op_types": ["Op"] * len(nodes), "cluster": "c"}
    given |= {"duration_ns": str(nanoseconds), **arguments}
    return {"name": name, "cat": "Kernel", "tid": 1, "ts": begin, "dur": nanoseconds // 1000, "args": given}


def test_known_gpu_gives_shares_of_its_peak() -> None:
    """A kernel that moves 3.352 GB in a millisecond is at the peak of an H100's memory."""
    run = {"name": "model_run", "cat": "Session", "tid": 1, "ts": 0, "dur": 3000, "args": {}}
    steps = [
        {"nodes": ["a"], "read": 3_000_000_000, "written": 352_000_000},
        {"nodes": ["b", "a"], "read": 1000, "written": 0},
    ]
    costs = {"a": {"bytes": 100, "flops": 0.0}, "b": {"bytes": 300, "flops": 0.0}}
    events = [run, event("k", 100, 1_000_000, ["a"], step="0"), event("l", 2000, 400_000, ["b", "a"], step="1")]
    found = collect(events, 1, Plans({"c": steps}, costs), "model", "NVIDIA H100 80GB HBM3")
    assert found.steps[0].peak == pytest.approx(1.0)
    assert [(node.name, node.microseconds) for node in found.nodes] == [("a", 1100.0), ("b", 300.0)]
    assert (found.run, found.host_alone) == (3000, 1600)
    costs["b"] |= {"flops": 494.7e12 * 200e-6, "type": 1}  # so all of the kernel's time is for b
    found = collect(events, 1, Plans({"c": steps}, costs), "model", "NVIDIA H100 80GB HBM3")
    assert found.steps[1].peak == pytest.approx(0.5)
    assert {node.name: node.microseconds for node in found.nodes} == {"a": 1000.0, "b": 400.0}


def test_kernels_of_one_library_call_share_its_bytes() -> None:
    run = {"name": "model_run", "cat": "Session", "tid": 1, "ts": 0, "dur": 3000, "args": {}}
    plan = [{"nodes": ["a"], "read": 60, "written": 40}, {"nodes": ["a"], "read": 8, "written": 0}]
    calls = [event(f"k{begin}", begin, 1000, ["a"], step="0", kind="library") for begin in (10, 20)]
    found = collect([run, *calls, event("l", 30, 1000, ["a"], step="1")], 1, Plans({"c": plan}, {}), "m", "GPU")
    assert [step.bytes for step in found.steps] == [50, 50, 8]


def test_the_documented_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "profiling.md").read_text()
    (line,) = text.split("```sh\n")[1].split("```")[0].splitlines()
    monkeypatch.chdir(tmp_path)
    program, *arguments = line.split()
    assert program == "ort-cuda-plugin"
    assert main([*arguments, "--device", "emulated", "--gpu", "none"]) == ExitCode.OK
    assert {path.name for path in tmp_path.iterdir()} == {"profile.html", "timeline.json"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", None),
        ("Emulated CUDA device", None),
    ],
)
def test_gpus_are_known_by_the_names_of_the_driver(name: str, key: str | None) -> None:
    found = known_gpu(name)
    assert (found.key if found else None) == key
