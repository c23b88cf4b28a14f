"""Writes a model's placement as a web page: the graph, the nodes and steps of each cluster, reasons and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_cuda_plugin.api import Placement
from ort_cuda_plugin.cli.models import program_page
from ort_cuda_plugin.cli.models.program_page import KernelTexts, node_anchor, step_anchor
from ort_cuda_plugin.clusters.claims.claims import NodeVerdict
from ort_cuda_plugin.pages import drawing, html
from ort_cuda_plugin.pages.drawing import Box, Edge
from ort_cuda_plugin.session_errors import NOWHERE

OWN, OTHER, NOBODY, OUTSIDE = "#b7dfb0", "#ffd3a1", "#f4a3a3", "#e3e3e3"
_STEPS = ("#b7dfb0", "#cfe0f3", "#f3e3b3", "#e0cfee", "#c9ece6", "#f0cfd8")
DRAWN_NODES = 300
"""Number of a cluster's nodes above which its drawing has a box for each step, not for each node."""
_OPEN = 60
"""Maximum number of nodes of a model with one cluster for which the cluster's section is open at first."""
_MANY = 150
"""Number of boxes of the overview above which each chain of nodes on another provider is drawn as one box."""
_SCRIPT = """
const show = () => {
  const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let outer = part; outer; outer = outer.parentElement) if (outer.tagName === "DETAILS") outer.open = true;
  if (part) part.scrollIntoView();
};
addEventListener("hashchange", show); show();
"""
_Plan = Mapping[str, Any]


@dataclass(frozen=True)
class CopiedValue:
    """A value that is copied between host and device, and the nodes of another provider that cause the copy."""

    value: str
    type: str
    to_device: bool
    causes: tuple[NodeVerdict, ...]


def page(
    title: str,
    placement: Placement,
    plans: Mapping[str, _Plan],
    lines: Sequence[str],
    texts: KernelTexts | None = None,
) -> str:
    """Return the page as HTML. ``plans`` has a `plan_record` of each cluster, if known; ``lines`` stand at the top."""
    texts = texts or KernelTexts()
    verdicts = [verdict for verdict in placement.verdicts if not verdict.body_of]
    found = list(copies(placement))
    clusters = _clusters(placement.verdicts)
    sections = [html.paragraphs(lines), html.key(_KEY), f"<h2>Graph</h2>{_overview(verdicts, found, clusters)}"]
    is_open = len(clusters) == 1 and len(placement.verdicts) <= _OPEN
    for number, (name, nodes) in enumerate(clusters.items()):
        sections.append(_cluster(number, name, nodes, plans.get(name), texts, is_open))
    sections += ["<h2>Copies between host and device</h2>" + _copies(found), "<h2>Nodes</h2>" + _nodes(placement)]
    return html.document(title, "\n".join(sections), drawing.STYLE, _SCRIPT)


_KEY = (("runs here", "#4f9a43"), ("another provider", "#d98a2b"), ("nowhere", "#c43b3b"), ("copy", "#d62728"))


def place(verdict: NodeVerdict) -> str:
    """Return the provider that runs a node, as text."""
    return "nowhere" if verdict.reason.endswith(NOWHERE) else verdict.provider or "another provider"


def copies(placement: Placement) -> Iterator[CopiedValue]:
    """Yield results of nodes that are copied between host and device, because a node on the other side reads them."""
    readers: dict[tuple[str, str], list[NodeVerdict]] = {}
    for verdict in placement.verdicts:
        for name in dict.fromkeys(verdict.inputs):
            readers.setdefault((verdict.body_of, name), []).append(verdict)
    for verdict in placement.verdicts:
        for name in verdict.outputs:
            across = [r for r in readers.get((verdict.body_of, name), ()) if r.supported != verdict.supported]
            if across:
                causes = tuple(across) if verdict.supported else (verdict,)
                yield CopiedValue(name, placement.values.get(name, ""), not verdict.supported, causes)


def _clusters(verdicts: Sequence[NodeVerdict]) -> dict[str, list[NodeVerdict]]:
    found: dict[str, list[NodeVerdict]] = {}
    for verdict in verdicts:
        if verdict.cluster:
            found.setdefault(verdict.cluster, []).append(verdict)
    return found


def _colour(verdict: NodeVerdict) -> str:
    return OWN if verdict.supported else NOBODY if verdict.reason.endswith(NOWHERE) else OTHER


def _hint(verdict: NodeVerdict) -> str:
    lines = [f"{verdict.label} ({verdict.op_type}-{verdict.since_version})", place(verdict)]
    return "\n".join([*lines, *([verdict.reason] if verdict.reason else [])])


# ---- the whole graph ----


def _overview(
    verdicts: Sequence[NodeVerdict], found: Sequence[CopiedValue], clusters: Mapping[str, Sequence[NodeVerdict]]
) -> str:
    """Draw the graph: a box for each cluster and for each node outside of clusters.

    If these are many, a chain of nodes outside of clusters is one box.
    """
    group: dict[int, Hashable] = {number: verdict.cluster or number for number, verdict in enumerate(verdicts)}
    if len(set(group.values())) > _MANY:
        group = _chained(verdicts, group)
    members: dict[Hashable, list[NodeVerdict]] = {}
    for number, verdict in enumerate(verdicts):
        members.setdefault(group[number], []).append(verdict)
    numbers: dict[Hashable, int] = {name: number for number, name in enumerate(clusters)}
    boxes: dict[Hashable, Box] = {}
    inputs, outputs = _borders(verdicts)
    for name in inputs:
        boxes["in", name] = Box((name, "input"), OUTSIDE, f"input {name}")
    for key, nodes in members.items():
        boxes[key] = _group_box(key, nodes, numbers)
    for name in outputs:
        boxes["out", name] = Box((name, "output"), OUTSIDE, f"output {name}")
    copied = {copy.value: copy for copy in found}
    made: dict[str, Hashable] = {name: ("in", name) for name in inputs}
    made |= {name: group[number] for number, verdict in enumerate(verdicts) for name in verdict.outputs}
    edges: dict[tuple[Hashable, Hashable, bool], list[str]] = {}
    for number, verdict in enumerate(verdicts):
        for name in verdict.inputs:
            if name in made and made[name] != group[number]:
                is_copy = name in copied and copied[name].to_device == verdict.supported
                edges.setdefault((made[name], group[number], is_copy), []).append(name)
    for name in outputs:
        edges.setdefault((made[name], ("out", name), False), []).append(name)
    arrows = [
        Edge(source, target, "\n".join(dict.fromkeys(names)), is_copy)
        for (source, target, is_copy), names in edges.items()
    ]
    return drawing.drawing(boxes, arrows)


def _borders(verdicts: Sequence[NodeVerdict]) -> tuple[list[str], list[str]]:
    """Return the values that no node of the graph produces, and the values that no node reads."""
    made = [name for verdict in verdicts for name in verdict.outputs]
    read = [name for verdict in verdicts for name in verdict.inputs]
    is_made, is_read = set(made), set(read)
    inputs = [name for name in dict.fromkeys(read) if name not in is_made]
    return inputs, [name for name in dict.fromkeys(made) if name not in is_read]


def _group_box(key: Hashable, nodes: Sequence[NodeVerdict], numbers: dict[Hashable, int]) -> Box:
    if key in numbers:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(n.op_type for n in nodes).most_common())
        link = f"cluster-{numbers[key]}"
        return Box((f"cluster {numbers[key]}: {len(nodes)} nodes", kinds), OWN, f"cluster {key}\n{kinds}", link)
    (first, *others) = nodes
    if not others:
        where = "kernel" if first.supported else place(first).removesuffix("ExecutionProvider")
        return Box((first.label, f"{first.op_type}, {where}"), _colour(first), _hint(first))
    hint = "\n".join(_hint(node) for node in nodes)
    return Box((f"{len(nodes)} nodes", place(first).removesuffix("ExecutionProvider")), _colour(first), hint)


def _chained(verdicts: Sequence[NodeVerdict], group: Mapping[int, Hashable]) -> dict[int, Hashable]:
    """Merge chains of nodes: give a node the group of its only source, if the node is the source's only reader.

    Only nodes that one other provider runs are merged. Since no second path connects the two, merging makes no cycle.
    """
    makers = {name: number for number, verdict in enumerate(verdicts) for name in verdict.outputs}
    sources: dict[int, set[int]] = {number: set() for number in range(len(verdicts))}
    readers: dict[int, set[int]] = {number: set() for number in range(len(verdicts))}
    for number, verdict in enumerate(verdicts):
        for name in verdict.inputs:
            if name in makers:
                sources[number].add(makers[name])
                readers[makers[name]].add(number)
    joined = dict(group)
    for number, verdict in enumerate(verdicts):
        if verdict.supported or len(sources[number]) != 1:
            continue
        (source,) = sources[number]
        if not verdicts[source].supported and len(readers[source]) == 1 and place(verdicts[source]) == place(verdict):
            joined[number] = joined[source]
    return joined


# ---- one cluster ----


def _cluster(
    number: int, name: str, nodes: Sequence[NodeVerdict], plan: _Plan | None, texts: KernelTexts, is_open: bool
) -> str:
    step_of: dict[str, int] = {}
    for index, step in enumerate(plan["steps"] if plan else ()):
        for node in step["nodes"]:
            step_of.setdefault(node, index)
    by_steps = len(nodes) > DRAWN_NODES and plan is not None
    keys: list[Hashable] = [
        ("step", step_of.get(node.label)) if by_steps else index for index, node in enumerate(nodes)
    ]
    boxes: dict[Hashable, Box] = {}
    for key, node in zip(keys, nodes, strict=True):
        step = step_of.get(node.label)
        colour = "#ffffff" if step is None else _STEPS[step % len(_STEPS)]
        told = "no step: a view, a size, or computed once" if step is None else f"step {step}"
        link = "" if step is None else step_anchor(number, step)
        if by_steps:
            boxes.setdefault(key, Box((told, _kind(plan, step)), colour, told, link))
        else:
            where = "" if plan is None else f", {told.partition(':')[0]}"
            boxes[key] = Box((node.label, f"{node.op_type}{where}"), colour, f"{_hint(node)}\n{told}", link)
    made = {value: key for key, node in zip(keys, nodes, strict=True) for value in node.outputs}
    arrows: dict[tuple[Hashable, Hashable], list[str]] = {}
    for key, node in zip(keys, nodes, strict=True):
        for value in node.inputs:
            if value in made and made[value] != key:
                arrows.setdefault((made[value], key), []).append(value)
    edges = [Edge(source, target, "\n".join(names)) for (source, target), names in arrows.items()]
    opened = " open" if is_open else ""
    steps = (
        "<p>The plan of this cluster is built in the first Run.</p>" if plan is None else _program(number, plan, texts)
    )
    return (
        f'<details id="cluster-{number}"{opened}><summary><h2>Cluster {number}: {len(nodes)} nodes</h2></summary>'
        f"{html.paragraphs([name])}{drawing.drawing(boxes, edges)}{steps}</details>"
    )


def _kind(plan: _Plan | None, step: int | None) -> str:
    return "" if plan is None or step is None else plan["steps"][step]["name"] or plan["steps"][step]["kind"]


def _program(cluster: int, plan: _Plan, texts: KernelTexts) -> str:
    return _steps(cluster, plan) + program_page.passes(plan) + program_page.steps(cluster, plan, texts)


def _steps(cluster: int, plan: _Plan) -> str:
    rows: list[list[html.Cell]] = [
        [
            html.Link(str(number), step_anchor(cluster, number)),
            html.Name(step["name"] or step["kind"], step["note"]),
            html.Name(
                ", ".join(step["nodes"]), "\n".join(map(" ".join, zip(step["nodes"], step["op_types"], strict=True)))
            ),
            f"{step['read'] / 1e6:.3f}",
            f"{step['written'] / 1e6:.3f}",
        ]
        for number, step in enumerate(plan["steps"])
    ]
    guessed = (
        "" if None not in plan["shapes"] else html.paragraphs(["Sizes that the model does not fix are estimated."])
    )
    return guessed + html.table(["step", "kernel", "nodes", "MB read", "MB written"], rows)


# ---- tables ----


def _copies(found: Sequence[CopiedValue]) -> str:
    if not found:
        return html.paragraphs(["None, except the inputs and outputs of the model."])
    rows: list[list[html.Cell]] = [
        [
            html.Name(copy.value),
            copy.type,
            "to the device" if copy.to_device else "to the host",
            html.Name(", ".join(cause.label for cause in copy.causes), "\n".join(map(_hint, copy.causes))),
            html.Name(copy.causes[0].reason),
        ]
        for copy in found
    ]
    return html.table(["value", "type", "goes", "because of", "reason"], rows, identity="copies")


def _nodes(placement: Placement) -> str:
    rows: list[list[html.Cell]] = [
        [
            html.Name(node.label, identity=node_anchor(node.label)),
            html.Name(f"{node.domain or 'ai.onnx'}.{node.op_type}-{node.since_version}"),
            html.Name(place(node)),
            html.Name(node.body_of),
            html.Name(node.reason or node.note),
        ]
        for node in placement.verdicts
    ]
    return html.table(["node", "operator", "runs on", "in the body of", "reason"], rows, identity="nodes")
