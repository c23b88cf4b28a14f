"""Draws reports as an SVG chart: the plugin's speed relative to each other provider, by model."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from ort_cuda_plugin.benchmark.measure import ModelReport
from ort_cuda_plugin.benchmark.sides import PLUGIN

_COLORS = ("#4477aa", "#ee6677", "#228833")
_LABEL, _WIDTH, _BAR, _GAP = 260, 520, 14, 12


def svg(reports: Sequence[ModelReport]) -> str:
    """Return an SVG document of horizontal bars; a line marks equal speed."""
    others = list(dict.fromkeys(side for report in reports for side in report.sides if side != PLUGIN))
    ratios = [report.sides[side].ratio for report in reports for side in others if side in report.sides]
    longest = max([1.0, *(ratio for ratio in ratios if math.isfinite(ratio))]) * 1.1
    parts, y = [], 40
    for index, side in enumerate(others):
        parts.append(_text(_LABEL + 160 * index, 20, f"against {side}", _COLORS[index % len(_COLORS)]))
    for report in reports:
        shown = [side for side in others if side in report.sides]
        name = f"{report.model}, batch {report.batch}"
        parts.append(_text(8, y + _BAR * max(1, len(shown)) / 2 + 4, name, "#222222"))
        for side in shown:
            ratio, color = report.sides[side].ratio, _COLORS[others.index(side) % len(_COLORS)]
            length = _WIDTH * ratio / longest if math.isfinite(ratio) else 0.0
            parts.append(f'<rect x="{_LABEL}" y="{y}" width="{length:.1f}" height="{_BAR - 2}" fill="{color}"/>')
            parts.append(_text(_LABEL + length + 6, y + _BAR - 4, f"{ratio:.2f}", "#222222"))
            y += _BAR
        y += _GAP
    even = _LABEL + _WIDTH / longest
    parts.append(f'<line x1="{even:.1f}" x2="{even:.1f}" y1="30" y2="{y}" stroke="#222222" stroke-dasharray="3"/>')
    width = _LABEL + _WIDTH + 80
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 10}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{y + 10}" fill="white"/>', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, color: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{color}">{html.escape(text)}</text>'
