"""Writes a model's placement as a web page: the graph, the nodes and steps of each cluster, reasons and copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_cuda_plugin.api import Placement
from ort_cuda_plugin.cli.models import program_page
from ort_cuda_plugin.cli.models.program_page import KernelTexts, step_anchor
from ort_cuda_plugin.clusters.claims.claims import NodeVerdict
from ort_cuda_plugin.pages import html
from ort_cuda_plugin.pages.model_graph import SIGNS, GraphNode, GraphStep, ModelGraph, graph_data, node_anchor, shares
from ort_cuda_plugin.session_errors import NOWHERE

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
    found = list(copies(placement))
    clusters = _clusters(placement.verdicts)
    steps = plan_steps(list(clusters), plans)
    made = html.Page(title, lines, graph_data(model_graph(placement, steps, "MB")))
    if steps:
        body = html.legend(shares(steps)) + made.strip(blocks(steps, "MB"))
        made.section("One Run by memory traffic", body, "run")
    made.section("Graph", html.signs(SIGNS) + made.graph_view(), "graph")
    for number, (name, nodes) in enumerate(clusters.items()):
        heading = f"Cluster {number}: {len(nodes)} nodes"
        made.section(heading, _cluster(made, number, name, plans.get(name), texts), f"cluster-{number}")
    made.section("Copies between host and device", _copies(found), "copies")
    made.section("Nodes", _nodes(placement), "nodes")
    return made.document()


def place(verdict: NodeVerdict) -> str:
    """Return the provider that runs a node, as text, and its device if the session has several."""
    runs = "nowhere" if verdict.reason.endswith(NOWHERE) else verdict.provider or "another provider"
    return runs if verdict.device is None else f"{runs}, device {verdict.device}"


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


def plan_steps(clusters: Sequence[str], plans: Mapping[str, _Plan]) -> list[GraphStep]:
    """Return the steps of the clusters' plans, with the megabytes that each reads and writes."""
    return [
        GraphStep(
            step_anchor(number, index),
            step["name"] or step["kind"],
            step["kind"],
            name,
            tuple(step["nodes"]),
            tuple(step["op_types"]),
            (step["read"] + step["written"]) / 1e6,
            tuple(step["lines"]),
        )
        for number, name in enumerate(clusters)
        for index, step in enumerate(plans[name]["steps"] if name in plans else ())
    ]


def blocks(steps: Sequence[GraphStep], unit: str) -> Iterator[html.Block]:
    """Yield for each step one block of the bar that represents a Run."""
    for step in steps:
        nodes = ", ".join(step.nodes)
        yield step.amount, step.color, step.anchor, f"{step.name}: {step.amount:.3g} {unit}\n{nodes}"


def model_graph(placement: Placement, steps: Sequence[GraphStep], unit: str) -> ModelGraph:
    """Return the model's main graph for the page. Only the table of nodes has the bodies of control-flow nodes."""
    nodes = [
        GraphNode(
            verdict.label,
            verdict.op_type,
            verdict.inputs,
            verdict.outputs,
            verdict.cluster,
            place(verdict),
            verdict.supported,
            verdict.reason.endswith(NOWHERE),
            verdict.reason or verdict.note,
        )
        for verdict in placement.verdicts
        if not verdict.body_of
    ]
    copied = {copy.value: copy.to_device for copy in copies(placement)}
    return ModelGraph(nodes, steps, placement.values, unit, copied)


def _clusters(verdicts: Sequence[NodeVerdict]) -> dict[str, list[NodeVerdict]]:
    found: dict[str, list[NodeVerdict]] = {}
    for verdict in verdicts:
        if verdict.cluster:
            found.setdefault(verdict.cluster, []).append(verdict)
    return found


def _cluster(made: html.Page, number: int, name: str, plan: _Plan | None, texts: KernelTexts) -> str:
    if plan is None:
        return html.paragraphs([name, "The plan of this cluster is built in the first Run."])
    guessed = ["Sizes that the model does not fix are estimated."] if None in plan["shapes"] else []
    program = program_page.passes(made, plan) + program_page.steps(made, number, plan, texts)
    return html.paragraphs([name, *guessed]) + _steps(number, plan) + program


def _steps(cluster: int, plan: _Plan) -> str:
    rows: list[list[html.Cell]] = [
        [
            html.Link(str(number), step_anchor(cluster, number)),
            html.Name(step["name"] or step["kind"]),
            html.Name(", ".join(step["nodes"])),
            f"{step['read'] / 1e6:.3f}",
            f"{step['written'] / 1e6:.3f}",
        ]
        for number, step in enumerate(plan["steps"])
    ]
    return html.table(["step", "kernel", "nodes", "MB read", "MB written"], rows)


# ---- tables ----


def _copies(found: Sequence[CopiedValue]) -> str:
    if not found:
        return html.paragraphs(["None, except the inputs and outputs of the model."])
    rows: list[list[html.Cell]] = [
        [
            html.Name(copy.value),
            html.Name(copy.type),
            html.Name("to the device" if copy.to_device else "to the host"),
            html.Name(", ".join(cause.label for cause in copy.causes), "\n".join(map(_hint, copy.causes))),
            html.Name(copy.causes[0].reason),
        ]
        for copy in found
    ]
    return html.table(["value", "type", "goes", "because of", "reason"], rows, identity="copies")


def _hint(verdict: NodeVerdict) -> str:
    lines = [f"{verdict.label} ({verdict.op_type}-{verdict.since_version})", place(verdict)]
    return "\n".join([*lines, *([verdict.reason] if verdict.reason else [])])


def _nodes(placement: Placement) -> str:
    bodies = any(node.body_of for node in placement.verdicts)
    rows: list[list[html.Cell]] = [
        [
            html.Name(node.label),
            html.Name(f"{node.domain or 'ai.onnx'}.{node.op_type}-{node.since_version}"),
            html.Name(place(node)),
            *([html.Name(node.body_of)] if bodies else []),
            html.Name(node.reason or node.note),
        ]
        for node in placement.verdicts
    ]
    heads = ["node", "operator", "runs on", *(["in the body of"] if bodies else []), "reason"]
    anchors = [node_anchor(node.label) for node in placement.verdicts]
    return html.table(heads, rows, identity="nodes", anchors=anchors)
