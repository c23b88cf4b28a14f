"""Text of a model's program before and after each compiler pass, for any device kind; no kernel is compiled.

The cases are files of tests/passes: ``<pass>.txt``, and ``<pass>.<what>.txt`` for further cases. A file has a device
kind, constants, and a model in ONNX's text format; after a line ``----`` it has the change that the pass makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from unittest import mock

import numpy as np
from onnx import ModelProto, numpy_helper, parser

from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.passes.fusion import split_k_fusion
from ort_cuda_plugin.passes.layout import l2_batch_tiling
from ort_cuda_plugin.program.analysis.program_text import Block, ProgramText
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from ort_cuda_plugin.program.steps.trace import Launch, Step

FOLDER = Path(__file__).parents[1] / "passes"
DEVICES: Mapping[str, DeviceProperties] = {
    "emulated": DeviceProperties(),
    "gpu": DeviceProperties.gpu((9, 0)),
    "libraries": DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt", "cudnn"})),
}
SMALL_L2 = {(9, 0): 300_000}
"""Bytes of L2, by compute capability: so small that the images of a small model exceed it."""


@dataclass(frozen=True)
class Case:
    """A model that a pass changes on a device kind, and the expected change in the format of `change_by`."""

    name: str
    device: DeviceProperties
    model: ModelProto
    expected: str

    @property
    def pass_name(self) -> str:
        return self.name.partition(".")[0]


def case(name: str) -> Case:
    """Read a case from the file ``<name>.txt``."""
    given, expected = (FOLDER / f"{name}.txt").read_text().split("----\n")
    text = "\n".join(line for line in given.splitlines() if not line.startswith(("device ", "constant ")))
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    (device,) = re.findall(r"^device (\w+)$", given, flags=re.M)
    numbers = np.random.default_rng(0)
    for constant, values in re.findall(r"^constant (\w+) = \[(.*)\]$", given, flags=re.M):
        array = np.array([int(value) for value in values.split(",")])
        model.graph.initializer.append(numpy_helper.from_array(array, constant))
    for constant, dtype, sizes in re.findall(r"^constant (\w+) (\w+) \[(.*)\]$", given, flags=re.M):
        array = numbers.uniform(1, 9, [int(size) for size in sizes.split(",") if size]).astype(dtype)
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), constant))
    return Case(name, DEVICES[device], model, expected.rstrip("\n"))


def case_names(pass_name: str = "") -> list[str]:
    """Return the names of the cases of a pass; by default those of all passes."""
    names = sorted(path.name.removesuffix(".txt") for path in FOLDER.glob("*.txt"))
    return [name for name in names if pass_name in ("", name.partition(".")[0])]


@contextmanager
def small_models_count() -> Iterator[None]:
    """Within the block, let passes change small models that a cost model or the size of the L2 would exclude."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(l2_batch_tiling, "L2_BYTES", SMALL_L2))
        stack.enter_context(mock.patch.object(split_k_fusion, "fused_split_k", return_value=3))
        yield


def change_of(one: Case) -> str:
    """Return the change that the pass of a case makes, in the format of `change_by`."""
    if one.pass_name in ("l2_batch_tiling", "split_k_fusion"):
        with small_models_count():
            return change_by(one.pass_name, one.model, one.device)
    return change_by(one.pass_name, one.model, one.device)


def programs_after(
    model: ModelProto, device: DeviceProperties | None = None, options: LoweringOptions | None = None
) -> dict[str, str]:
    """Return the text of the program after each pass, by the pass's name; "lowering" is before the first pass."""
    cluster = CompiledCluster(read_model(model), device or DeviceProperties(), options or LoweringOptions())
    text = ProgramText([x.name for x in cluster.inputs], [y.name for y in cluster.outputs])
    found: dict[str, str] = {}
    cluster.watch = lambda name, steps: found.update({name: text.program(name, steps)})
    cluster.prepare()
    return found


def change_by(name: str, model: ModelProto, device: DeviceProperties) -> str:
    """Format the change of a pass: a line for each step, "-" before, "+" after, with its kind, results, inputs and
    operators.
    """
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
    """Return a step's line of text and its operators, without bytes and kernel names, which vary."""
    text = re.sub(r" \d[\d.e+]* [kMG]?B( x \d+)?", "", block[0])
    if isinstance(step, Launch):
        text = re.sub(r"^\S+", "launch", text)
    operators = ", ".join(node.op_type for node in step.nodes) or "no node"
    return f"{re.sub(' +', ' ', text)} | {operators}"
