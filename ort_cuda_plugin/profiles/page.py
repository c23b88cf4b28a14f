"""Writes a profile as a self-contained web page: nodes by cost, steps, kernels, host events, timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ..gpus import accuracy
from ..pages import html
from .collect import Profile, Step

EXPENSIVE = 5
_COLOURS = {"kernel": "#4c78a8", "library": "#54a24b", "copy": "#f58518", "memset": "#9d9d9d"}
_HOST_COLOUR = "#b279a2"
_STYLE = """
.timeline { position: relative; height: 28px; background: #f2f2f2; margin: 1em 0 }
.timeline div { position: absolute; top: 0; height: 28px; min-width: 1px }
"""


def page(profile: Profile, lines: Sequence[str]) -> str:
    """Return the HTML of the page. ``lines`` are paragraphs above the tables."""
    expensive = "".join(
        f'<li data-node="{escape(node.name)}">{escape(node.name)} ({escape(node.op_type)}):'
        f" {node.microseconds:.1f} &micro;s, {node.share:.0%}</li>"
        for node in profile.nodes[:EXPENSIVE]
    )
    sections = [
        html.paragraphs(lines),
        f'<h2>The most expensive nodes</h2><ol id="expensive">{expensive}</ol>',
        "<h2>One Run on the device</h2>" + html.key(_COLOURS.items()) + _timeline(profile),
        "<h2>Nodes</h2>" + _nodes(profile),
        "<h2>Steps</h2>" + _steps(profile),
        "<h2>Kernels and copies</h2>" + _kernels(profile),
        "<h2>Host</h2>" + _host(profile),
    ]
    return html.document(f"{profile.model} on {profile.device_name}", "\n".join(sections), _STYLE)


def _timeline(profile: Profile) -> str:
    whole = max([profile.run, *(step.begin + step.microseconds for step in profile.steps)], default=1.0) or 1.0
    bars = "".join(
        f'<div style="left:{100 * max(step.begin, 0) / whole:.3f}%;width:{100 * step.microseconds / whole:.3f}%;'
        f'background:{_colour(step)}" title="{escape(f"{step.name}: {step.microseconds:.1f} us")}"></div>'
        for step in profile.steps
    )
    return f'<div class="timeline">{bars}</div>'


def _colour(step: Step) -> str:
    return _COLOURS.get(step.kind, "#666")


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
            html.Bar(node.microseconds / longest, _COLOURS["kernel"]),
        ]
        for node in profile.nodes
    ]
    return html.table(["node", "operator", *_times(), "steps", *_heads(profile), ""], rows, identity="nodes")


def _steps(profile: Profile) -> str:
    longest = max((step.microseconds for step in profile.steps), default=1.0) or 1.0
    rows: list[list[html.Cell]] = [
        [
            str(number),
            html.Name(step.name, "\n".join(_inside(step))),
            f"{step.microseconds:.1f}",
            f"{step.share:.1%}",
            megabytes(step.bytes),
            rate(step),
            percent(step.peak),
            *_estimate(profile, step.estimated),
            html.Bar(step.microseconds / longest, _colour(step), ", ".join(step.nodes)),
        ]
        for number, step in enumerate(profile.steps)
    ]
    heads = ["#", "step", *_times(), "MB", "GB/s", "of peak", *_heads(profile), ""]
    return html.table(heads, rows, identity="steps")


def _inside(step: Step) -> Iterator[str]:
    for name, op_type in zip(step.nodes, step.op_types, strict=True):
        yield f"{name} ({op_type})"
    yield f"kind: {step.kind}"
    if step.cluster:
        yield f"cluster: {step.cluster}"
    if step.flops:
        yield f"{step.flops / 1e9:.3f} GFLOP, {step.flops / max(step.microseconds, 1e-3) / 1e6:.3f} TFLOP/s"


def _kernels(profile: Profile) -> str:
    longest = max((kernel.microseconds for kernel in profile.kernels), default=1.0) or 1.0
    rows: list[list[html.Cell]] = [
        [
            html.Name(kernel.name),
            kernel.kind,
            str(kernel.launches),
            f"{kernel.microseconds:.1f}",
            f"{kernel.share:.1%}",
            megabytes(kernel.bytes),
            html.Bar(kernel.microseconds / longest, _COLOURS.get(kernel.kind, "#666")),
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
            each.provider,
            f"{each.microseconds:.1f}",
            html.Bar(each.microseconds / longest, _HOST_COLOUR),
        ]
        for each in profile.host
    ]
    heads = ["node as ONNX Runtime runs it", "operator", "provider", f"{_MICRO} on the host", ""]
    return html.table(heads, rows, identity="host")


_MICRO = "\N{MICRO SIGN}s"


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
