"""`explain --html`: the graph with its clusters, steps, reasons and copies, and the names of providers."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from browser import Page, browser, whole_text
from ort_cuda_plugin.api import Placement
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.cli.models import explain_page, program_page
from ort_cuda_plugin.cli.models.kernel_texts import checked_accesses
from ort_cuda_plugin.cli.models.program_page import KernelTexts
from ort_cuda_plugin.clusters.claims.claims import NodeVerdict
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.ep.nodes.program_files import ProgramFiles
from ort_cuda_plugin.pages import html as parts
from ort_cuda_plugin.pages.packed import unpacked
from ort_cuda_plugin.program.analysis.plan_record import read_plans

MIXED = """<ir_version: 9, opset_import: ["" : 18]> mixed (float[n, 64] x) => (float[n, 64] z)
    { a = Exp(x)  r = Relu(a)  s = Cast <to=8> (r)  f = Cast <to=1> (s)  b = Exp(f)  z = Add(b, r) }"""
PRODUCT = """<ir_version: 9, opset_import: ["" : 18]> product (float[n, 64] x) => (float[n, 32] z)
    { [p] p = MatMul(x, w)  [r] r = Relu(p)  [y] y = Softmax(r)  [z] z = Neg(y) }"""
KERNEL_FIELDS = ("name", "signature", "source", "launch_bounds", "resident")


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, object]], Path]:
    """Explain a model whose middle runs on the CPU; return the verdicts and the path of the page."""
    folder = tmp_path_factory.mktemp("explain")
    onnx.save(parser.parse_model(MIXED), folder / "mixed.onnx")
    page, printed = folder / "page.html", folder / "printed.json"
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as file:
        patch.setattr("sys.stdout", file)
        arguments = ["explain", str(folder / "mixed.onnx"), "--device", "emulated", "--html", str(page), "--json"]
        assert main(arguments) == ExitCode.OK
    return json.loads(printed.read_text()), page


def test_verdicts_name_clusters_values_and_providers(explained: tuple[list[dict[str, object]], Path]) -> None:
    verdicts, _ = explained
    assert [verdict["provider"] for verdict in verdicts] == [
        *["CudaPluginExecutionProvider"] * 2,
        *["CPUExecutionProvider"] * 2,
        *["CudaPluginExecutionProvider"] * 2,
    ]
    first, last = verdicts[0]["cluster"], verdicts[5]["cluster"]
    assert [verdict["cluster"] for verdict in verdicts] == [first, first, "", "", last, last]
    assert first != last
    assert verdicts[5]["inputs"] == ["b", "r"]


def test_page_has_clusters_steps_reasons_and_copies(explained: tuple[list[dict[str, object]], Path]) -> None:
    _, path = explained
    text = path.read_text()
    page = Page(text)
    assert page.faults == []
    assert [each for each in page.values("id") if each.startswith("section-cluster")] == [
        "section-cluster-0",
        "section-cluster-1",
    ]
    assert {unquote(value.removeprefix("#")) for value in page.values("href")} <= set(page.values("id"))
    copies = text.split('id="copies"')[1].split("</table>")[0]
    assert copies.count("a cast to STRING") == 2  # once in the cell, once in the text that it opens
    assert "FLOAT32[n, 64]" in copies
    assert "exp_relu" in text
    assert "://" not in whole_text(text)


def test_graph_has_frames_of_clusters_and_edges_of_copies(explained: tuple[list[dict[str, object]], Path]) -> None:
    graph = unpacked(explained[1].read_text())["graph"]
    for name, boxes in (("steps", 8), ("nodes", 10)):
        view = graph["views"][name]
        frames = [box for box in view["boxes"] if box["s"] == "cluster"]
        assert [frame["id"] for frame in frames] == ["cluster-0", "cluster-1"]
        inside = [box for box in view["boxes"] if box["s"] == "own"]
        assert all(any(contains(frame["p"], box["p"]) for frame in frames) for box in inside)
        assert len(view["boxes"]) == boxes  # with the frames, the input and the output
        copied = [branch[4] for edge in view["edges"] for branch in edge["e"] if branch[5]]
        assert sorted(copied) == [["f"], ["r"]]
    assert graph["copied"] == ["r", "f"]
    assert graph["values"]["r"] == "FLOAT32[n, 64]"


def contains(outer: list[int], inner: list[int]) -> bool:
    (x, y, width, height), (left, top, w, h) = outer, inner
    return x <= left and y <= top and left + w <= x + width and top + h <= y + height


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of a model with a MatMul and a row program, with PTX and checked accesses."""
    folder = tmp_path_factory.mktemp("explain")
    model = parser.parse_model(PRODUCT)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 32), np.float32), "w"))
    onnx.save(model, folder / "product.onnx")
    page = folder / "page.html"
    arguments = ["explain", str(folder / "product.onnx"), "--device", "emulated", "--html", str(page)]
    assert main([*arguments, "--ptx", "sm_90", "--check"]) == ExitCode.OK
    return page.read_text()


def test_page_has_what_each_pass_changed(with_kernels: str) -> None:
    shown = html.unescape(whole_text(with_kernels))
    assert "<summary>changed by vertical_fusion: " in shown
    assert re.search("^- map .*f32", shown, re.MULTILINE)
    assert re.search("^[+] product .*f32", shown, re.MULTILINE)
    assert re.search(r"[+] +%3 = max\(accumulator, 0\)|[+] +%3 = where", shown), "what a step computes"
    assert "passes that changed nothing: " in shown
    assert "<summary>after lowering: 4 steps" in shown


def opened(page: str, anchor: str) -> str:
    """Return what the section ``anchor`` shows when it and all sections in it are open."""
    texts = unpacked(page)["texts"]
    number = re.search(rf'data-html="(\d+)" id="{anchor}"', page)
    assert number is not None, anchor
    shown = texts[int(number[1])]
    while found := re.search(r' data-(html|text)="(\d+)"([^>]*)>', shown):
        inside = texts[int(found[2])]
        shown = shown.replace(found[0], f"{found[3]}>{inside if found[1] == 'html' else html.escape(inside)}", 1)
    return html.unescape(shown)


def test_a_step_leads_to_its_nodes_tensors_source_ptx_and_checked_accesses(with_kernels: str) -> None:
    page = Page(with_kernels)
    assert page.faults == []
    targets = {unquote(value.removeprefix("#")) for value in page.values("href")}
    assert targets <= set(page.values("id"))
    assert {"step-0-0", "step-0-1"} <= targets
    step = opened(with_kernels, "step-0-0")
    assert 'href="#node%20p"' in step
    assert "node p" in page.values("id")
    assert "reads x f32[n, 64] with strides (64, 1), of 256*n bytes" in step
    assert "schedule: " in step
    assert "def kernel(" in step
    assert "checked accesses: the checking mode reported nothing in a Run with random inputs" in step
    assert re.search(r"\d+ loads of \d+ bytes", step)
    assert "no PTX for sm_90: a kernel of the emulated device only" in step or ".visible .entry" in step


def test_what_a_checked_run_finds_stands_at_the_kernel() -> None:
    spec = KernelSpec("one", ("*f32",), "def kernel(x):\n    x[0] = 1")
    other = KernelSpec("two", ("*f32",), "def kernel(x):\n    x[0] = 2")
    found = f"out of bounds: kernel {spec.symbol}, block (0,0,0) reads 4 bytes"
    texts = KernelTexts(is_checked=True, finding=found)
    fields = {"name": "k", "kind": "kernel", "nodes": [], "op_types": [], "note": "", "lines": []}
    kernels = [{name: getattr(each, name) for name in KERNEL_FIELDS} for each in (spec, other)]
    plan = {"steps": [{**fields, "kernel": kernel} for kernel in kernels], "once": []}
    page = parts.Page("t")
    page.append(program_page.steps(page, 0, plan, texts))
    text = page.document()
    assert f"checked accesses: {found}" in opened(text, "step-0-0")
    assert "reported nothing" in opened(text, "step-0-1")
    assert list(checked_accesses([spec]).values()) == ["1 stores of 4 bytes"]


@pytest.mark.parametrize(
    "arguments",
    [["--ptx", "sm_1"], ["--ptx", "sm_90", "--plans"], ["--check"], ["--html", "page.html", "--ptx", "sm_1"]],
)
def test_what_a_page_would_show_needs_a_page_and_a_known_gpu(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(parser.parse_model(MIXED), tmp_path / "mixed.onnx")
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "mixed.onnx", "--device", "emulated", *arguments]) == ExitCode.USAGE
    assert arguments[-2 if "sm_1" in arguments else 0] in capsys.readouterr().err


def test_page_opens_in_a_browser_without_a_network(explained: tuple[list[dict[str, object]], Path]) -> None:
    with browser() as tab:
        tab.open(explained[1])
        assert tab.console == []
        assert tab.evaluate("document.querySelectorAll('.frame').length") == 2


def verdict(number: int, inputs: list[str], **fields: object) -> NodeVerdict:
    given = {"supported": False, "provider": "CPUExecutionProvider", "reason": "a reason", **fields}
    return NodeVerdict(f"n{number}", "Op", "", 1, inputs=tuple(inputs), outputs=(f"v{number}",), **given)  # type: ignore[arg-type]


def test_a_graph_of_thousands_of_nodes_is_drawn_in_few_boxes() -> None:
    """A chain of nodes on the CPU is one box; a large cluster is drawn by its steps."""
    elsewhere = [verdict(number, [f"v{number - 1}"]) for number in range(1, 2000)]
    ours = {"supported": True, "cluster": "c", "reason": "", "provider": "X"}
    own = [verdict(number, [f"v{number - 1}"], **ours) for number in range(2000, 4000)]
    steps = [
        {"name": f"k{step}", "kind": "kernel", "nodes": [f"n{number}" for number in range(first, first + 20)]}
        for step, first in enumerate(range(2000, 4000, 20))
    ]
    rest = {"op_types": ["Op"] * 20, "read": 1, "written": 1, "note": "", "lines": [], "kernel": None}
    plan = {"steps": [{**step, **rest} for step in steps], "once": [], "history": []}
    placement = Placement([*elsewhere, *own], {})
    text = explain_page.page("large", placement, {"c": {**plan, "shapes": []}}, [])
    view = unpacked(text)["graph"]["views"]["steps"]
    assert Counter(box["s"] for box in view["boxes"]) == {"port": 2, "other": 1, "cluster": 1, "own": 100}
    assert sum(branch[5] for edge in view["edges"] for branch in edge["e"]) == 1
    assert len(text) < 800_000


@pytest.mark.parametrize("name", ["usual_0", "../../outside/it", "x" * 400, "a\nb\0c", "\N{SNOWMAN}"])
def test_programs_are_written_below_their_folder_whatever_a_model_calls_its_nodes(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "below" / "folder"
    folder.mkdir(parents=True)
    ProgramFiles(folder, name + "2").append_program("text")
    ProgramFiles(folder, name).append_plan({"steps": [], "nodes": {}})
    assert list(read_plans(folder)) == [name]
    assert len(list(folder.iterdir())) == 4
    assert [path.name for path in tmp_path.rglob("*") if path.parent != folder] == ["below", "folder"]
