"""The estimate as a web page that needs nothing else: a bar for every step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; width: 100% }
td, th { padding: 1px 8px; text-align: right; white-space: nowrap }
td.name, th.name { text-align: left; max-width: 26em; overflow: hidden; text-overflow: ellipsis }
td.bar { width: 40%; text-align: left } td.bar div { height: 14px; min-width: 1px }
tr:hover { background: #f2f2f2 }
summary { cursor: pointer; list-style: none } details[open] { white-space: normal }
pre { margin: 2px 0; white-space: pre-wrap; text-align: left }
.key span { display: inline-block; padding: 0 6px; margin: 2px; color: #fff }
"""


def page(title: str, found: Estimate, lines: Sequence[str]) -> str:
    """``lines`` stand above the bars."""
    longest = max((step.seconds for step in found.steps), default=1.0)
    used = dict.fromkeys(step.bound for step in found.steps)
    key = "".join(f'<span style="background:{_colour(bound)}">{bound}</span>' for bound in used)
    rows = "\n".join(_row(number, step, longest) for number, step in enumerate(found.steps))
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    heading = f"{escape(title)} on {escape(found.device.name)}, estimated"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{heading}</title><style>{_STYLE}</style></head><body>
<h1>{heading}</h1>{text}<p class="key">{key}</p>
<table><tr><th>#</th><th class="name">step</th><th>&micro;s</th><th>MB</th><th>DRAM MB</th><th>of peak</th>
<th>bound</th><th></th></tr>
{rows}
</table></body></html>
"""


def _colour(bound: str) -> str:
    return COLOURS.get(bound, "#666")


def _row(number: int, step: StepEstimate, longest: float) -> str:
    parts = "\n".join(f"{pipe}: {seconds * 1e6:.2f} us" for pipe, seconds in sorted(step.parts.items()))
    details = "\n".join(f"{name}: {_shown(value)}" for name, value in step.details.items() if value not in ("", [], {}))
    inside = escape("\n".join([", ".join(step.nodes), parts, details]))
    bar = f"width:{100 * step.seconds / longest:.2f}%;background:{_colour(step.bound)}"
    return (
        f'<tr><td>{number}</td><td class="name"><details><summary>{escape(step.name)}</summary><pre>{inside}</pre>'
        f"</details></td><td>{step.seconds * 1e6:.1f}</td><td>{step.touched / 1e6:.2f}</td>"
        f"<td>{step.dram / 1e6:.2f}</td><td>{step.share:.0%}</td><td>{step.bound}</td>"
        f'<td class="bar"><div style="{bar}" title="{escape(", ".join(step.nodes))}"></div></td></tr>'
    )


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "".join(f"\n  {each}" for each in value)
    return str(value)
