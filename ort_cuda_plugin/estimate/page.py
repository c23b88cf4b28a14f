"""Web page of an estimate, self-contained: the bar of a Run, the graph with times, and a row for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..gpus.accuracy import range_text, step_range
from ..pages import html
from ..pages.model_graph import SIGNS, GraphStep, ModelGraph, graph_data, node_anchor, shares
from .model import Estimate, StepEstimate

_MICRO = "\N{MICRO SIGN}s"


def page(title: str, found: Estimate, lines: Sequence[str], graph: ModelGraph) -> str:
    """Return the HTML of the page. ``lines`` are paragraphs at the top; ``graph`` is the model, without steps."""
    steps = graph_steps(found, graph)
    made = html.Page(
        f"{title} on {found.label}, estimated", lines, graph_data(replace(graph, steps=steps, unit=_MICRO))
    )
    strip = made.strip(
        (step.amount, step.color, step.anchor, f"{step.name}: {step.amount:.1f} {_MICRO}\n{', '.join(step.nodes)}")
        for step in steps
    )
    made.section("One Run", html.legend(shares(steps)) + strip, "run")
    made.section("What bounds the steps", _bounds(found), "bounds")
    made.section("Graph", html.signs(SIGNS) + made.graph_view(), "graph")
    made.section("Steps", _steps(made, found, steps), "steps")
    made.section("Nodes", _nodes(graph), "nodes")
    return made.document()


def graph_steps(found: Estimate, graph: ModelGraph) -> list[GraphStep]:
    """Return the steps of the estimate with their times, for the graph and the bar of a Run."""
    node_of = {f"{node.name} ({node.op_type})": node for node in graph.nodes}  # by the label that steps use
    steps = []
    for number, step in enumerate(found.steps):
        nodes = [node_of[name] for name in step.nodes if name in node_of]
        steps.append(
            GraphStep(
                f"step-{number}",
                step.name,
                step.kind,
                nodes[0].cluster if nodes else "",
                tuple(node.name for node in nodes),
                tuple(node.op_type for node in nodes),
                step.seconds * 1e6,
                (f"bound: {step.bound}, {step.share:.0%} of peak", *_facts(step)),
            )
        )
    return steps


def _bounds(found: Estimate) -> str:
    """Return a table of the resources that bound the steps, with the time of these steps."""
    seconds: dict[str, float] = {}
    for step in found.steps:
        seconds[step.bound] = seconds.get(step.bound, 0.0) + step.seconds
    whole = found.seconds or 1.0
    rows: list[list[html.Cell]] = [
        [
            html.Name(bound),
            str(sum(step.bound == bound for step in found.steps)),
            f"{seconds[bound] * 1e6:.1f}",
            f"{seconds[bound] / whole:.0%}",
            html.Bar(seconds[bound] / whole),
        ]
        for bound in sorted(seconds, key=lambda bound: -seconds[bound])
    ]
    return html.table(["bound", "steps", _MICRO, "share", ""], rows, identity="bounds", is_filtered=False)


def _steps(made: html.Page, found: Estimate, steps: Sequence[GraphStep]) -> str:
    longest = max((step.seconds for step in found.steps), default=1.0) or 1.0
    rows: list[list[html.Cell]] = [
        [
            str(number),
            made.name(step.name, "\n".join([", ".join(step.nodes), *_facts(step)])),
            range_text(step_range(step.seconds)),
            f"{step.roofline * 1e6:.1f}",
            f"{step.touched / 1e6:.2f}",
            f"{step.dram / 1e6:.2f}",
            f"{step.share:.0%}",
            html.Name(step.bound),
            html.Bar(step.seconds / longest, drawn.color, ", ".join(step.nodes)),
        ]
        for number, (step, drawn) in enumerate(zip(found.steps, steps, strict=True))
    ]
    heads = ["#", "step", _MICRO, "roofline", "MB", "DRAM MB", "of peak", "bound", ""]
    return html.table(heads, rows, identity="steps", anchors=[step.anchor for step in steps])


def _nodes(graph: ModelGraph) -> str:
    rows: list[list[html.Cell]] = [
        [html.Name(node.name), html.Name(node.op_type), html.Name(node.provider)] for node in graph.nodes
    ]
    anchors = [node_anchor(node.name) for node in graph.nodes]
    return html.table(["node", "operator", "runs on"], rows, identity="nodes", anchors=anchors)


def _facts(step: StepEstimate) -> list[str]:
    """Return the time of each pipe, and the counts of the kernel or call, as lines of text."""
    parts = [f"{pipe}: {seconds * 1e6:.2f} us" for pipe, seconds in sorted(step.parts.items())]
    details = [f"{name}: {_shown(value)}" for name, value in step.details.items() if value not in ("", [], {})]
    return [*parts, *details]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "".join(f"\n  {each}" for each in value)
    return str(value)
