"""Web page of benchmark reports, self-contained: for each model a row per provider, with a bar for the median Run."""

from __future__ import annotations

from collections.abc import Sequence

from ort_cuda_plugin.benchmark.figures import HEADS, figures, notes, title
from ort_cuda_plugin.benchmark.measure import ModelReport
from ort_cuda_plugin.benchmark.sides import PLUGIN
from ort_cuda_plugin.pages import html


def page(reports: Sequence[ModelReport], lines: Sequence[str]) -> str:
    """Return the HTML of the page. ``lines`` are paragraphs at the top."""
    made = html.Page(f"benchmark of {', '.join(dict.fromkeys(report.model for report in reports))}", lines)
    if len(reports) > 1:
        made.section("All models", _overview(reports), "all")
    for number, report in enumerate(reports):
        made.section(title(report), _table(report) + html.paragraphs(notes(report)), f"model-{number}")
    return made.document()


def _overview(reports: Sequence[ModelReport]) -> str:
    """Return a table of the plugin's speed relative to each other provider, by model."""
    others = list(dict.fromkeys(side for report in reports for side in report.sides if side != PLUGIN))
    rows: list[list[html.Cell]] = [
        [
            html.Name(report.model, target=f"section-model-{number}"),
            str(report.batch),
            *(f"{report.sides[side].ratio:.2f}" if side in report.sides else "-" for side in others),
        ]
        for number, report in enumerate(reports)
    ]
    return html.table(["model", "batch", *(f"times as fast as {side}" for side in others)], rows, identity="all")


def _table(report: ModelReport) -> str:
    longest = max((found.p50 for found in report.sides.values()), default=1.0) or 1.0
    rows: list[list[html.Cell]] = [
        [html.Name(side), html.Bar(found.p50 / longest, hint=f"{found.p50:.3f} ms"), *figures(found)]
        for side, found in report.sides.items()
    ]
    return html.table(["side", "", *HEADS], rows, is_filtered=False)
