"""HTML of one cluster's program on explain's page: the change that each pass makes, and a section for each step.

The section of a step shows its nodes, its tensors in memory, the kernel's schedule with the reason, source and PTX, and
the accesses that the emulated device checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ort_cuda_plugin.cli.models.kernel_texts import spec_of
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.pages import html
from ort_cuda_plugin.pages.kinds import kind_of
from ort_cuda_plugin.pages.model_graph import node_anchor

_Plan = Mapping[str, Any]


@dataclass(frozen=True)
class KernelTexts:
    """PTX and checked accesses of kernels. ``finding`` is the finding of a checked Run, "" if it found nothing.

    ``architecture`` is the architecture of ``ptx``. ``is_checked`` says whether there was a checked Run; ``sizes`` are
    the shapes of its inputs, as text.
    """

    architecture: str = ""
    ptx: Mapping[KernelSpec, str] = field(default_factory=dict)
    accesses: Mapping[KernelSpec, str] = field(default_factory=dict)
    is_checked: bool = False
    finding: str = ""
    sizes: str = ""


def step_anchor(cluster: int, step: int) -> str:
    """Return the anchor of a step of a Run."""
    return f"step-{cluster}-{step}"


def passes(page: html.Page, plan: _Plan) -> str:
    """Return HTML of the program before the first pass, of what each pass changed, and of the launches."""
    shown = []
    for text in plan["history"]:
        title, _, rest = text.partition("\n")
        if title.startswith("passes that "):
            shown.append(html.paragraphs(text.splitlines()))
        elif title.startswith("changed by "):
            shown.append(page.opened(title, page.difference(rest)))
        else:
            shown.append(page.opened(title, page.text_block(rest)))
    return "<h3>Passes</h3>" + "".join(shown)


def steps(page: html.Page, cluster: int, plan: _Plan, texts: KernelTexts) -> str:
    """Return HTML with a section for each step of a Run, and for each step that runs once, before the first Run."""
    parts = [_step(page, step, f"step {number}", step_anchor(cluster, number), texts)
             for number, step in enumerate(plan["steps"])]  # fmt: skip
    once = [_step(page, step, f"once, step {number}", f"once-{cluster}-{number}", texts)
            for number, step in enumerate(plan["once"])]  # fmt: skip
    before = "<h3>Steps before the first Run</h3>" + "".join(once) if once else ""
    return f"<h3>Steps of a Run</h3>{''.join(parts)}{before}"


def _step(page: html.Page, step: Mapping[str, Any], name: str, anchor: str, texts: KernelTexts) -> str:
    spec = spec_of(step)
    nodes = ", ".join(html.link(f"{kind} {node}", node_anchor(node))
                      for node, kind in zip(step["nodes"], step["op_types"], strict=True))  # fmt: skip
    inside = [
        f"<p>computes {nodes or 'a constant that the plugin added'}</p>",
        page.text_block("\n".join(step["lines"])),
    ]
    if step["note"]:
        inside.append(html.paragraphs([f"schedule: {step['note']}"]))
    if spec is not None:
        inside += _kernel(page, spec, texts)
    kind = kind_of(step["kind"], step["op_types"], step["name"])
    return page.opened(f"{name}: {step['name'] or step['kind']}", "".join(inside), identity=anchor, kind=kind)


def _kernel(page: html.Page, spec: KernelSpec, texts: KernelTexts) -> Sequence[str]:
    found = [html.paragraphs([f"symbol {spec.symbol}, parameters ({', '.join(spec.signature)})"])]
    found.append(page.opened("source of the kernel", page.text_block(spec.source)))
    if spec in texts.ptx:
        found.append(page.opened(f"PTX for {texts.architecture}", page.text_block(texts.ptx[spec])))
    elif texts.architecture:
        found.append(html.paragraphs([f"no PTX for {texts.architecture}: a kernel of the emulated device only"]))
    if texts.is_checked:
        is_found = spec.symbol in texts.finding
        said = texts.finding if is_found else "the checking mode reported nothing in a Run with random inputs"
        accesses = texts.accesses.get(spec, "") or "none"
        found.append(page.opened(f"checked accesses: {said}", page.text_block(accesses), is_open=is_found))
    return found
