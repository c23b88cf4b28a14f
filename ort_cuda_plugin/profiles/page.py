"""Web page of a profile, self-contained: the bar of a Run, the graph, nodes by cost, steps, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..gpus import accuracy
from ..pages import html
from ..pages.kinds import kind_of
from ..pages.model_graph import SIGNS, GraphStep, ModelGraph, graph_data, node_anchor, shares
from .collect import Profile, Step

EXPENSIVE = 5
_MICRO = "\N{MICRO SIGN}s"


def page(profile: Profile, lines: Sequence[str], graph: ModelGraph | None = None) -> str:
    """Return the HTML of the page. ``lines`` are paragraphs at the top; ``graph`` is the model, without steps."""
    steps = graph_steps(profile)
    drawn = None if graph is None else graph_data(replace(graph, steps=steps, unit=_MICRO))
    made = html.Page(f"{profile.model} on {profile.device_name}", lines, drawn)
    made.section("One Run on the device", html.legend(shares(steps)) + made.strip(_blocks(profile)), "run")
    expensive = "".join(
        f"<li>{html.link(f'{node.name} ({node.op_type})', node_anchor(node.name))}: {node.microseconds:.1f} &micro;s,"
        f" {node.share:.0%}</li>"
        for node in profile.nodes[:EXPENSIVE]
    )
    made.section("The most expensive nodes", f'<ol id="expensive">{expensive}</ol>', "expensive")
    if drawn is not None:
        made.section("Graph", html.signs(SIGNS) + made.graph_view(), "graph")
    made.section("Nodes", _nodes(profile), "nodes")
    made.section("Steps", _steps(made, profile), "steps")
    made.section("Kernels and copies", _kernels(profile), "kernels")
    made.section("Host", _host(profile), "host")
    return made.document()


def graph_steps(profile: Profile) -> list[GraphStep]:
    """Return the steps of the profile with their times, for the graph and the bar of a Run."""
    return [
        GraphStep(
            _anchor(number),
            step.name,
            step.kind,
            step.cluster,
            step.nodes,
            step.op_types,
            step.microseconds,
            tuple(_facts(step)),
        )
        for number, step in enumerate(profile.steps)
    ]


def _anchor(number: int) -> str:
    return f"step-{number}"


def _kind(step: Step) -> str:
    return kind_of(step.kind, step.op_types, step.name)


def _blocks(profile: Profile) -> Iterator[html.Block]:
    """Yield the blocks of a Run's bar: one for each step, and one for each gap in which the device is idle."""
    end = 0.0
    for number, step in enumerate(profile.steps):
        if step.begin > end:
            yield step.begin - end, "", "", f"the device is idle for {step.begin - end:.1f} {_MICRO}"
        hint = f"{step.name}: {step.microseconds:.1f} {_MICRO}, {step.share:.1%}\n{', '.join(step.nodes)}"
        yield step.microseconds, _kind(step), _anchor(number), hint
        end = max(end, step.begin + step.microseconds)
    if profile.run > end:
        yield profile.run - end, "", "", f"the device is idle for {profile.run - end:.1f} {_MICRO}"


def _nodes(profile: Profile) -> str:
    longest = max((node.microseconds for node in profile.nodes), default=1.0) or 1.0
    rows: list[list[html.Cell]] = [
        [
            html.Name(node.name),
            html.Name(node.op_type),
            f"{node.microseconds:.1f}",
            f"{node.share:.1%}",
            str(node.steps),
            *_estimate(profile, node.estimated),
            html.Bar(node.microseconds / longest, kind_of("", [node.op_type])),
        ]
        for node in profile.nodes
    ]
    heads = ["node", "operator", *_times(), "steps", *_heads(profile), ""]
    return html.table(heads, rows, identity="nodes", anchors=[node_anchor(node.name) for node in profile.nodes])


def _steps(made: html.Page, profile: Profile) -> str:
    longest = max((step.microseconds for step in profile.steps), default=1.0) or 1.0
    rows: list[list[html.Cell]] = [
        [
            str(number),
            made.name(step.name, "\n".join(_inside(step))),
            f"{step.microseconds:.1f}",
            f"{step.share:.1%}",
            megabytes(step.bytes),
            rate(step),
            percent(step.peak),
            *_estimate(profile, step.estimated),
            html.Bar(step.microseconds / longest, _kind(step), ", ".join(step.nodes)),
        ]
        for number, step in enumerate(profile.steps)
    ]
    heads = ["#", "step", *_times(), "MB", "GB/s", "of peak", *_heads(profile), ""]
    anchors = [_anchor(number) for number in range(len(profile.steps))]
    return html.table(heads, rows, identity="steps", anchors=anchors)


def _inside(step: Step) -> Iterator[str]:
    for name, op_type in zip(step.nodes, step.op_types, strict=True):
        yield f"{name} ({op_type})"
    yield from _facts(step)


def _facts(step: Step) -> Iterator[str]:
    yield f"kind: {step.kind}"
    if step.cluster:
        yield f"cluster: {step.cluster}"
    if step.bytes is not None:
        yield f"{megabytes(step.bytes)} MB, {rate(step)} GB/s, {percent(step.peak)} of peak"
    if step.flops:
        yield f"{step.flops / 1e9:.3f} GFLOP, {step.flops / max(step.microseconds, 1e-3) / 1e6:.3f} TFLOP/s"


def _kernels(profile: Profile) -> str:
    longest = max((kernel.microseconds for kernel in profile.kernels), default=1.0) or 1.0
    kinds = {(step.name, step.kind): _kind(step) for step in profile.steps}
    rows: list[list[html.Cell]] = [
        [
            html.Name(kernel.name),
            html.Name(kernel.kind),
            str(kernel.launches),
            f"{kernel.microseconds:.1f}",
            f"{kernel.share:.1%}",
            megabytes(kernel.bytes),
            html.Bar(kernel.microseconds / longest, kinds.get((kernel.name, kernel.kind), "other")),
        ]
        for kernel in profile.kernels
    ]
    return html.table(["kernel", "kind", "launches", *_times(), "MB", ""], rows, identity="kernels")


def _host(profile: Profile) -> str:
    longest = max((each.microseconds for each in profile.host), default=1.0) or 1.0
    rows: list[list[html.Cell]] = [
        [
            html.Name(each.name),
            html.Name(each.op_type),
            html.Name(each.provider),
            f"{each.microseconds:.1f}",
            html.Bar(each.microseconds / longest),
        ]
        for each in profile.host
    ]
    heads = ["node as ONNX Runtime runs it", "operator", "provider", f"{_MICRO} on the host", ""]
    return html.table(heads, rows, identity="host")


def _times() -> tuple[str, str]:
    return _MICRO, "share"


def _heads(profile: Profile) -> list[str]:
    return [f"{_MICRO} on {profile.gpu}, estimated"] if profile.gpu else []


def _estimate(profile: Profile, value: float | None) -> list[str]:
    return [estimated_range(value)] if profile.gpu else []


def estimated_range(microseconds: float | None) -> str:
    """Format an estimate as its range for a table; "-" if there is none."""
    return "-" if microseconds is None else accuracy.range_text(accuracy.step_range(microseconds * 1e-6))


def megabytes(count: int | None) -> str:
    """Format a number of bytes in megabytes for a table; "-" if it is unknown."""
    return "-" if count is None else f"{count / 1e6:.2f}"


def rate(step: Step) -> str:
    """Format the step's bytes per second in GB/s for a table; "-" if they are unknown."""
    return "-" if step.bytes is None or not step.microseconds else f"{step.bytes / step.microseconds / 1e3:.1f}"


def percent(share: float | None) -> str:
    """Format a fraction as a percentage for a table; "-" if it is unknown."""
    return "-" if share is None else f"{share:.0%}"
