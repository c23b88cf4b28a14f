"""`ort-cuda-plugin bench`: what it measures, and what it does with wrong results."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from browser import Page
from ort_cuda_plugin.benchmark import creation, measure, plot, sides
from ort_cuda_plugin.benchmark.sides import Runner
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.cli.runs import bench


@pytest.fixture
def model(tmp_path: Path) -> str:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])]
    graph = helper.make_graph(nodes, "small", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


def test_a_model_is_measured_beside_the_cpu_provider(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "f.json", tmp_path / "f.svg", tmp_path / "f.html"
    arguments = ["bench", model, "--device", "emulated", "--runs", "6", "--batch", "2", "--batch", "3"]
    assert main([*arguments, "--json", str(files[0]), "--plot", str(files[1]), "--html", str(files[2])]) == ExitCode.OK
    two, three = json.loads(files[0].read_text())
    assert (two["batch"], three["batch"]) == (2, 3)
    for report in (two, three):
        assert report["launches"] == 1
        assert report["python_calls"] == 0
        assert report["estimate"]["microseconds"] > 0
        plugin, cpu = report["sides"]["plugin"], report["sides"]["cpu"]
        assert plugin["ratio"] == 1
        assert plugin["error"] <= report["tolerance"]
        assert 0 < plugin["p50"] <= plugin["p90"] <= plugin["p99"]
        assert plugin["throughput"] == pytest.approx(report["batch"] / plugin["p50"] * 1e3)
        assert 0 <= plugin["host_share"] <= 1
        assert plugin["device_bytes"] > 0
        assert plugin["cold_s"] > plugin["warm_s"] > 0
        assert cpu["device_bytes"] is None
    printed = capsys.readouterr().out
    assert "times of the emulated device" in printed
    assert "geometric mean of 2" in printed
    assert "…" not in printed
    page = Page(files[2].read_text())
    assert page.faults == []
    assert [each for each in page.values("id") if "model" in each] == ["section-model-0", "section-model-1"]
    assert f"{three['sides']['cpu']['p99']:.3f}" in files[2].read_text()
    texts = [each.text for each in ElementTree.fromstring(files[1].read_text()).iter() if each.text]
    assert f"{model}, batch 3" in texts


def test_a_wrong_result_is_said_and_ends_in_an_exit_code(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sides.runner

    def wrong(side: str, *arguments: object) -> Runner:
        made = real(side, *arguments)  # type: ignore[arg-type]
        if side == sides.PLUGIN:
            results = made.results
            made.results = lambda: [np.multiply(array, 1.5, dtype=np.float32) for array in results()]
        return made

    monkeypatch.setattr(sides, "runner", wrong)
    arguments = ["bench", model, "--device", "emulated", "--runs", "1", "--no-creation"]
    assert main(arguments) == ExitCode.MISMATCH
    assert "WRONG: the results of plugin differ by 5.0e-01, expected at most 1e-03" in capsys.readouterr().out


def test_a_provider_that_is_not_there_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", model, "--device", "emulated", "--against", "cuda", "--no-creation"]
    assert main(arguments) == ExitCode.UNAVAILABLE
    assert "has no CUDAExecutionProvider" in capsys.readouterr().err
    assert main(["bench", model, "--runs", "0"]) == ExitCode.USAGE


def test_sides_take_turns_at_being_first() -> None:
    order: list[str] = []
    runners = [Runner(side, lambda side=side: order.append(side), list) for side in "ab"]  # type: ignore[misc]
    times = measure.alternate(runners, range(3))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {side: len(seconds) for side, seconds in times.items()} == {"a": 3, "b": 3}


def test_the_work_of_the_device_is_that_of_the_last_runs() -> None:
    def events() -> Iterator[dict[str, object]]:
        for start, durations in ((0, [900]), (1000, [100, 50]), (2000, [120, 50])):
            yield {"name": "model_run", "ts": start, "dur": 950}
            for i, duration in enumerate(durations):
                yield {"name": "k", "ts": start + i + 1, "dur": duration, "args": {"ort_event_id": 1}}

    assert measure.device_work(list(events()), 2) == pytest.approx(0.16)
    assert measure.device_work([{"name": "model_run", "ts": 0, "dur": 9}], 1) is None


def test_the_suite_has_each_network_in_each_type() -> None:
    names = bench.suite()
    assert {"light_resnet50", "resnet50:int8", "bert_base:float16", "llama_decode:float16"} <= set(names)
    assert len(names) == len(set(names))


def test_a_failed_process_says_why(tmp_path: Path) -> None:
    feeds = {"x": np.zeros(1, np.float32)}
    task = measure.Task("none", str(tmp_path / "none.onnx"), feeds, ["y"], 1, "float32", True, 1, 1)
    with pytest.raises(creation.ChildError, match=r"none\.onnx"):
        creation.measure_creation(task, sides.CPU)


def test_a_plot_needs_no_other_side() -> None:
    report = measure.ModelReport("m<1>", "d", True, 1, "float32", 1e-3, 1, 0, 0, 0)
    report.sides["plugin"] = measure.summary([0.1, 0.2], 1, 1.0, 0.0)
    assert "m&lt;1&gt;" in plot.svg([report])
