"""Writes the estimate as a self-contained web page with a bar for every step."""

from __future__ import annotations

from collections.abc import Sequence

from ..gpus.accuracy import range_text, step_range
from ..pages import html
from .model import Estimate, StepEstimate

COLOURS = {
    "dram": "#4c78a8",
    "l2": "#72b7b2",
    "tensor": "#54a24b",
    "float32": "#88d27a",
    "float64": "#88d27a",
    "issue": "#f58518",
    "special": "#ffbf79",
    "lsu": "#eeca3b",
    "shared": "#b279a2",
    "waiting": "#e45756",
    "launch": "#9d9d9d",
}


def page(title: str, found: Estimate, lines: Sequence[str]) -> str:
    """Return the HTML of the page. ``lines`` are paragraphs above the table of the steps."""
    longest = max((step.seconds for step in found.steps), default=1.0)
    used = dict.fromkeys(step.bound for step in found.steps)
    heads = ["#", "step", "\N{MICRO SIGN}s", "roofline", "MB", "DRAM MB", "of peak", "bound", ""]
    rows = (_row(number, step, longest) for number, step in enumerate(found.steps))
    body = html.paragraphs(lines) + html.key((bound, colour(bound)) for bound in used) + html.table(heads, rows)
    return html.document(f"{title} on {found.label}, estimated", body)


def colour(bound: str) -> str:
    """Return the colour of the steps whose time the resource ``bound`` determines."""
    return COLOURS.get(bound, "#666")


def _row(number: int, step: StepEstimate, longest: float) -> list[html.Cell]:
    parts = "\n".join(f"{pipe}: {seconds * 1e6:.2f} us" for pipe, seconds in sorted(step.parts.items()))
    details = "\n".join(f"{name}: {_shown(value)}" for name, value in step.details.items() if value not in ("", [], {}))
    nodes = ", ".join(step.nodes)
    return [
        str(number),
        html.Name(step.name, "\n".join([nodes, parts, details])),
        range_text(step_range(step.seconds)),
        f"{step.roofline * 1e6:.1f}",
        f"{step.touched / 1e6:.2f}",
        f"{step.dram / 1e6:.2f}",
        f"{step.share:.0%}",
        step.bound,
        html.Bar(step.seconds / longest, colour(step.bound), nodes),
    ]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "".join(f"\n  {each}" for each in value)
    return str(value)
