"""Web page of a compiled model's contents: bytes by kind, plans with their guards, kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ort_cuda_plugin.context.describe import counts_of
from ort_cuda_plugin.pages import html
from ort_cuda_plugin.plan.format import version as plan_version


def page(title: str, contexts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the HTML of the page. ``contexts`` has the result of `describe` for each context, by its subject."""
    made = html.Page(title)
    for number, (subject, context) in enumerate(contexts.items()):
        made.section(subject, _bytes(context) + _clusters(made, context), f"context-{number}")
        made.section(f"Kernels of {subject}", _kernels(context), f"kernels-{number}")
    return made.document()


def _bytes(context: Mapping[str, Any]) -> str:
    total = sum(context["bytes"].values()) or 1
    rows: list[list[html.Cell]] = [
        [html.Name(kind), str(count), f"{count / total:.0%}", html.Bar(count / total)]
        for kind, count in context["bytes"].items()
    ]
    made_by = html.paragraphs([f"made by version {context['made_by']}"])
    return made_by + html.table(["kind", "bytes", "share", ""], rows, is_filtered=False)


def _clusters(made: html.Page, context: Mapping[str, Any]) -> str:
    parts = []
    for partition in context["partitions"]:
        targets = "".join(_target(target) for target in partition["targets"])
        ports = [f"{way}: {', '.join(partition[way])}" for way in ("inputs", "outputs")]
        inside = html.paragraphs(ports) + targets
        parts.append(made.opened(f"cluster {partition['name']}: {partition['nodes']} nodes", inside, is_open=True))
    return "".join(parts)


def _target(target: Mapping[str, Any]) -> str:
    made_by = f", made by CUDA {target['toolkit']}" if target["toolkit"] else ""
    lines = [f"{target['arch']}: {counts_of(target)}{made_by}"]
    if target["plan_version"] != plan_version:
        lines.append(
            f"plans of version {target['plan_version']}, which this plugin cannot run: it runs version {plan_version}."
            " Compile the model again"
        )
    if target["schedules"]:
        lines.append(f"schedules: {', '.join(target['schedules'])}")
    lines += [f"no plan for {failure}" for failure in target["failures"]]
    rows: list[list[html.Cell]] = [
        [
            str(number),
            html.Name(", ".join(f"{count} {kind}" for kind, count in plan["steps"].items()) or "nothing"),
            html.Name(" and ".join(plan["guards"]) or "always", "\n".join(plan["guards"])),
        ]
        for number, plan in enumerate(target["plans"])
    ]
    return html.paragraphs(lines) + html.table(["plan", "steps", "where"], rows, is_filtered=False)


def _kernels(context: Mapping[str, Any]) -> str:
    largest = max((kernel["bytes"] for kernel in context["kernels"]), default=1) or 1
    rows: list[list[html.Cell]] = [
        [
            html.Name(kernel["name"]),
            html.Name(kernel["arch"]),
            str(kernel["bytes"]),
            "-" if kernel["registers"] is None else str(kernel["registers"]),
            str(kernel["shared_bytes"]),
            html.Bar(kernel["bytes"] / largest),
        ]
        for kernel in context["kernels"]
    ]
    return html.table(["kernel", "architecture", "bytes", "registers", "shared bytes", ""], rows)
