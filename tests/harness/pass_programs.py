"""Programs as text around each pass, of a model on any device kind; nothing is compiled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from onnx import ModelProto

from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.analysis.program_text import Block, ProgramText
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from ort_cuda_plugin.program.steps.trace import Launch, Step


def programs_after(
    model: ModelProto, device: DeviceProperties | None = None, options: LoweringOptions | None = None
) -> dict[str, str]:
    """The program after each pass that ran, by the pass's name; "lowering" is before the first."""
    cluster = CompiledCluster(read_model(model), device or DeviceProperties(), options or LoweringOptions())
    text = ProgramText([x.name for x in cluster.inputs], [y.name for y in cluster.outputs])
    found: dict[str, str] = {}
    cluster.watch = lambda name, steps: found.update({name: text.program(name, steps)})
    cluster.prepare()
    return found


def change_by(name: str, model: ModelProto, device: DeviceProperties) -> str:
    """What the pass did: a line for each step, "-" before, "+" after, with its kind, results, inputs and operators."""
    cluster = CompiledCluster(read_model(model), device)
    text = ProgramText([x.name for x in cluster.inputs], [y.name for y in cluster.outputs])
    states: list[tuple[str, list[str]]] = []

    def watch(after: str, steps: Sequence[Step]) -> None:
        states.append((after, [_line(*pair) for pair in zip(steps, text.blocks(steps), strict=True)]))

    cluster.watch = watch
    cluster.prepare()
    (number,) = (number for number, (after, _) in enumerate(states) if after == name)
    before, after = states[number - 1][1], states[number][1]
    lines = []
    for kind, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            lines += [f"  {line}" for line in before[i:j]]
        else:
            lines += [f"- {line}" for line in before[i:j]] + [f"+ {line}" for line in after[k:m]]
    return "\n".join(lines)


def _line(step: Step, block: Block) -> str:
    """A step without bytes, names of kernels and nodes, and notes."""
    text = re.sub(r" \d[\d.e+]* [kMG]?B( x \d+)?", "", block[0])
    if isinstance(step, Launch):
        text = re.sub(r"^\S+", "launch", text)
    operators = ", ".join(node.op_type for node in step.nodes) or "no node"
    return f"{re.sub(' +', ' ', text)} | {operators}"
