"""Pages in headless Chromium: no errors, filter, sorting by keyboard, fragments, narrow windows, dark mode, size."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Tab, browser
from ort_cuda_plugin.api import Placement
from ort_cuda_plugin.benchmark import measure
from ort_cuda_plugin.benchmark import page as bench_page
from ort_cuda_plugin.cli.models import explain_page, inspect_page
from ort_cuda_plugin.clusters.claims.claims import NodeVerdict
from ort_cuda_plugin.pages.kinds import KINDS

NODES = 1000
KINDS_OF_STEPS = ("Conv", "Relu", "MatMul", "LayerNormalization", "Transpose")


def model(count: int) -> tuple[Placement, dict[str, Any]]:
    """Return the placement and the plan of a model with branches: a cluster, a node on the CPU, and another cluster.

    A step computes two nodes; its kernel has a source of its own.
    """
    verdicts, values = [], {"v0": "FLOAT32[1, 64, 56, 56]"}
    for number in range(1, count + 1):
        reads = [f"v{number - 1}"] + ([f"v{number - 8}"] if number % 10 == 9 else [])
        ours = number != count // 2
        verdicts.append(
            NodeVerdict(
                f"n{number}",
                KINDS_OF_STEPS[number // 2 % 5],
                "",
                1,
                ours,
                reason="" if ours else "a reason",
                cluster="" if not ours else "first" if number < count // 2 else "second",
                provider="CudaPluginExecutionProvider" if ours else "CPUExecutionProvider",
                inputs=tuple(reads),
                outputs=(f"v{number}",),
            )
        )
        values[f"v{number}"] = "FLOAT32[1, 64, 56, 56]"
    plans = {name: plan([node for node in verdicts if node.cluster == name]) for name in ("first", "second")}
    return Placement(verdicts, values), plans


def plan(nodes: list[NodeVerdict]) -> dict[str, Any]:
    pairs = [nodes[first : first + 2] for first in range(0, len(nodes), 2)]
    source = "def kernel(x, y, n):\n" + "\n".join(f"    y[{line}] = x[{line}] * n" for line in range(100))
    steps = [
        {
            "name": f"kernel_{pair[0].name}",
            "kind": "kernel",
            "nodes": [node.name for node in pair],
            "op_types": [node.op_type for node in pair],
            "read": 1000 * (index % 13 + 1),
            "written": 500,
            "note": "chosen by rules",
            "lines": [f"reads x{index} f32[1, 64, 56, 56]", "writes y f32[1, 64, 56, 56]"],
            "kernel": {
                "name": f"kernel_{index}",
                "signature": ["*f32", "*f32", "i32"],
                "source": source + f"\n    return {index}",
                "launch_bounds": 128,
                "resident": 1,
            },
        }
        for index, pair in enumerate(pairs)
    ]
    history = ["after lowering: some steps\n" + "\n".join(f"   {n}  map %{n} <- %{n - 1}" for n in range(len(nodes)))]
    history.append("changed by vertical_fusion: fewer steps\n@@ -0,2 +0,1 @@\n- map %1\n+ map %2")
    return {"steps": steps, "once": [], "history": history, "shapes": []}


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        opened.resize(1280, 900)
        yield opened


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "small.html"
    path.write_text(explain_page.page("small", *model(60), ["a line"]))
    return path


def chosen(tab: Tab) -> list[str]:
    found: list[str] = tab.evaluate("Array.from(document.querySelectorAll('.box.chosen'), box => box.dataset.anchor)")
    return found


def test_a_thousand_nodes_are_less_than_500_kb_and_drawn_without_an_error(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    path.write_text(explain_page.page("large", *model(NODES), []))
    assert path.stat().st_size < 500_000
    begun = time.monotonic()
    tab.open(path)
    seconds = time.monotonic() - begun
    assert tab.console == []
    # A box for each step, and one each for a node, the input and the output.
    assert tab.evaluate("document.querySelectorAll('.box').length") == NODES // 2 + 3
    spent = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert spent < 60_000, f"{seconds} s"  # lenient for busy machines: detects only quadratic work


GEOMETRY = """(() => {
    const box = each => { const r = each.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
    const boxes = Array.from(document.querySelectorAll('.box > .body'), box);
    const overlap = (a, b) => a[0] < b[2] - 1 && b[0] < a[2] - 1 && a[1] < b[3] - 1 && b[1] < a[3] - 1;
    let overlaps = 0, crossings = 0, points = 0;
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => { overlaps += overlap(a, b); }));
    for (const path of document.querySelectorAll('path.edge')) {
        const length = path.getTotalLength(), matrix = path.getScreenCTM();
        for (let step = 0; step <= 30; step++) {
            const point = path.getPointAtLength(length * step / 30).matrixTransform(matrix);
            points++;
            crossings += boxes.some(b => overlap([point.x, point.y, point.x, point.y], b));
        }
    }
    return [boxes.length, points, overlaps, crossings];
})()"""


@pytest.mark.parametrize("view", ["steps", "nodes"])
def test_boxes_do_not_overlap_and_no_edge_crosses_a_box(tab: Tab, small: Path, view: str) -> None:
    tab.open(small)
    number = {"steps": 0, "nodes": 1}[view]
    tab.evaluate(f"document.querySelectorAll('.bar button')[{number}].click()")
    boxes, points, overlaps, crossings = tab.evaluate(GEOMETRY)
    assert boxes == {"steps": 33, "nodes": 62}[view]
    assert points > 1000
    assert (overlaps, crossings) == (0, 0)


def test_filter_dims_boxes_hides_rows_and_goes_to_the_next_match(tab: Tab, small: Path) -> None:
    tab.open(small)
    tab.press("/")
    for letter in "n25":
        tab.press(letter)
    assert (
        tab.evaluate("document.querySelector('.count').textContent") == "2 of 60 nodes"
    )  # those of the step with the kernel kernel_n25
    assert tab.evaluate("document.querySelectorAll('.box:not(.dim):not(.port)').length") == 1
    assert tab.evaluate("document.querySelectorAll('#nodes tbody tr:not(.hidden)').length") == 1
    tab.press("Enter")
    assert tab.evaluate("decodeURIComponent(location.hash)") == f"#{chosen(tab)[0]}"
    tab.press("Escape")
    assert tab.evaluate("document.querySelectorAll('.dim, .hidden').length") == 0
    tab.evaluate("document.querySelector('.legend button[data-kind=conv]').click()")
    shown = tab.evaluate("Array.from(document.querySelectorAll('.box:not(.dim):not(.port)'), b => b.dataset.kind)")
    assert set(shown) == {"conv"}
    assert tab.console == []


def test_a_fragment_selects_a_node_or_a_step(tab: Tab, small: Path) -> None:
    tab.open(small, "#node%20n25")
    (anchor,) = chosen(tab)
    assert anchor == "step-0-12"
    assert "n25" in tab.evaluate("document.querySelector('.panel').textContent")
    assert tab.evaluate("document.querySelector('tr.chosen').id") == "node n25"
    tab.evaluate("location.hash = '#step-1-3'")
    tab.until("document.querySelector('.box.chosen').dataset.anchor === 'step-1-3'")
    assert tab.evaluate("document.getElementById('step-1-3').open") is True
    inside = "document.getElementById('step-1-3').querySelector('details')"
    tab.evaluate(f"{inside}.open = true")
    tab.until(f"{inside}.textContent.includes('def kernel(')")
    for hostile in ("#%zz", "#nothing", "#"):
        tab.open(small, hostile)
    assert tab.console == []


def test_arrow_keys_follow_edges(tab: Tab, small: Path) -> None:
    tab.open(small, "#step-0-3")
    tab.evaluate("document.querySelector('.canvas').focus()")
    for key, step in (("ArrowDown", "step-0-4"), ("ArrowUp", "step-0-3")):
        tab.press(key)
        tab.until(f"document.querySelector('.box.chosen').dataset.anchor === '{step}'")


def test_tables_are_sorted_by_keyboard(tab: Tab, small: Path) -> None:
    tab.open(small)
    head = "document.querySelectorAll('#section-cluster-0 th')[3]"
    rows = "document.querySelectorAll('#section-cluster-0 tbody tr')"
    cells = f"Array.from({rows}, row => +row.cells[3].textContent)"
    tab.evaluate(f"{head}.querySelector('button').focus()")
    before = tab.evaluate(cells)
    for order, sort in (("descending", sorted(before, reverse=True)), ("ascending", sorted(before))):
        tab.press("Enter")
        assert tab.evaluate(f"{head}.getAttribute('aria-sort')") == order
        assert tab.evaluate(cells) == sort
    assert before != sorted(before)


def contrast(first: list[int], second: list[int]) -> float:
    """Return the contrast of two colors as WCAG defines it."""

    def luminance(color: list[int]) -> float:
        parts = [value / 255 for value in color]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_follow_the_preferred_scheme_and_differ(tab: Tab, small: Path, scheme: str) -> None:
    """Text is readable in both schemes, and each kind of kernel has a color that nothing else has."""
    tab.prefer(scheme)
    tab.open(small)
    script = """(kinds => {
        const parsed = text => text.match(/[0-9]+/g).slice(0, 3).map(Number), body = getComputedStyle(document.body);
        const swatches = kinds.map(kind => {
            const made = document.body.appendChild(document.createElement('span'));
            made.className = 'swatch k-' + kind;
            return parsed(getComputedStyle(made).backgroundColor);
        });
        const root = getComputedStyle(document.documentElement);
        const rest = ['page', 'text', 'muted', 'line', 'card', 'mark', 'focus', 'edge', 'bar', 'gone', 'new']
            .map(name => root.getPropertyValue('--' + name));
        return { page: parsed(body.backgroundColor), text: parsed(body.color), swatches, rest };
    })"""
    found = tab.evaluate(f"{script}({json.dumps(list(KINDS))})")
    assert (sum(found["page"]) < 200) == (scheme == "dark")
    assert contrast(found["page"], found["text"]) > 10
    colors = {tuple(color) for color in found["swatches"]}
    assert len(colors) == len(KINDS)
    assert not colors & {tuple(bytes.fromhex(color.strip().lstrip("#"))) for color in found["rest"]}
    assert all(contrast(found["page"], color) > 2.5 for color in found["swatches"])


def other_pages(folder: Path) -> list[Path]:
    """Write the pages of `bench` and `inspect`."""
    report = measure.ModelReport("m<1>", "device", True, 1, "float32", 1e-3, 1, 0, 0, 0)
    report.sides["plugin"] = measure.summary([0.1, 0.2], 1, 1.0, 0.0)
    report.sides["cpu"] = measure.summary([0.3, 0.2], 1, 1.0, None)
    context = {
        "made_by": "1.0",
        "bytes": {"kernels": 3, "plans": 1},
        "kernels": [{"name": "k" * 90, "arch": "sm_90", "bytes": 9, "registers": None, "shared_bytes": 0}],
        "partitions": [{"name": "c", "nodes": 1, "inputs": ["x: FLOAT"], "outputs": ["y: FLOAT"], "targets": []}],
    }
    pages = {
        "bench": bench_page.page([report, report], ["a line"]),
        "inspect": inspect_page.page("compiled", {"a context": context}),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return [folder / f"{name}.html" for name in pages]


def test_pages_fit_into_a_narrow_window(tab: Tab, small: Path, tmp_path: Path) -> None:
    tab.resize(380, 800, is_mobile=True)
    try:
        for path in (small, *other_pages(tmp_path)):
            tab.open(path)
            assert tab.console == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= 380, path
    finally:
        tab.resize(1280, 900)
