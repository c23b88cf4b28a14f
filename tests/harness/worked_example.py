"""Generates the blocks of docs/architecture/worked_example.md: the output of each compiler stage for one small model.

    PYTHONPATH=. python tests/harness/worked_example.py

writes them again. A block follows a line ``<!-- made: NAME -->``. All stages are those for an H100 without vendor
libraries, so that they are the same on every machine. The launches are traced on the emulated device, which runs the
kernels of this GPU.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

from isolated import python
from ort_cuda_plugin.clusters.cluster import CompiledCluster, Variant
from ort_cuda_plugin.model.ir import Graph
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.plan.format import Param, Plan
from ort_cuda_plugin.program.analysis.program_text import ProgramText
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.program.steps.steps import Contract
from ort_cuda_plugin.program.steps.trace import Step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture" / "worked_example.md"
ROWS = 16
"""The batch size for which the plan is built."""
MODEL = """<ir_version: 9, opset_import: ["" : 20]>
mlp (float16[batch, 64] x) => (float16[batch, 128] y) {
    product = MatMul (x, w)
    sum = Add (product, b)
    y = Gelu (sum)
}"""
_block = re.compile(r"(<!-- made: (?P<name>[\w-]+) -->\n\n```\n)(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def model() -> onnx.ModelProto:
    """Return the model with weights of seeded noise."""
    noise = np.random.default_rng(0)
    made = parser.parse_model(MODEL)
    for name, shape in (("w", (64, 128)), ("b", (128,))):
        array = (noise.standard_normal(shape) / 8).astype(np.float16)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


@dataclass(frozen=True)
class Compiled:
    """The graph, the plan variant for `ROWS` rows, and the steps after each pass, also as text."""

    graph: Graph
    variant: Variant
    steps: dict[str, list[Step]]
    texts: dict[str, str]


@cache
def compiled() -> Compiled:
    graph = read_model(model())
    cluster = CompiledCluster(graph, DeviceProperties.gpu((9, 0), 132))
    cluster.prepare()
    steps: dict[str, list[Step]] = {}
    cluster.watch = lambda name, after: steps.update({name: list(after)})
    variant = cluster.build([(ROWS, 64)], [])
    text = ProgramText(["x"], ["y"])
    texts = {name: text.program(name, after).strip().split("\n", 1)[1] for name, after in steps.items()}
    return Compiled(graph, variant, steps, texts)


def plan() -> Plan:
    made = compiled().variant.plan
    assert made is not None
    return made


def graph_lines() -> Iterator[str]:
    for node in compiled().graph.nodes:
        inputs, outputs = (
            ", ".join(
                f"{x.name}: {x.dtype.short}{_dims(x.shape)}" for x in values if x is not None and x.dtype is not None
            )
            for values in (node.inputs, node.outputs)
        )
        yield f"{node.op_type}-{node.since_version}({inputs}) -> {outputs}"


def _dims(shape: Sequence[int | str | None] | None) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]" if shape is not None else ""


def changed() -> list[str]:
    """Return the names of the passes that changed something."""
    names = list(compiled().texts)
    return [name for before, name in itertools.pairwise(names) if compiled().texts[before] != compiled().texts[name]]


def pass_lines() -> Iterator[str]:
    yield "changed:         " + ", ".join(changed())
    others = [name for name in list(compiled().texts)[1:] if name not in changed()]
    yield from textwrap.wrap("changed nothing: " + ", ".join(others), 120, subsequent_indent=" " * 17)


def epilogue_lines() -> Iterator[str]:
    """Return the expression that the fused GEMM stores, one operation per line."""
    (step,) = compiled().steps[changed()[0]]
    assert isinstance(step, Contract)
    ((value, _),) = step.outputs
    names: dict[Scalar, str] = {step.total: "accumulator"}
    names |= {leaf: "bias" for leaf, _ in step.inputs}
    stack, count = [value], 0
    while stack:
        x = stack[-1]
        missing = [y for y in x.operands if y not in names] if x not in names else []
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if x in names:
            continue
        if x.op == "constant":
            names[x] = f"{x.value:.7g}"
            continue
        names[x] = f"v{count}"
        count += 1
        yield f"{names[x]} = {x.op}({', '.join(names[y] for y in x.operands)})  # {x.dtype.short}"
    yield f"store {names[value]}"


def kernel(number: int) -> str:
    """Return the source of the variant's kernel of that number."""
    return compiled().variant.kernels[number].source.rstrip()


def _between(text: str, first: str, last: str) -> str:
    """Return the lines from the first that contains ``first`` to the next that contains ``last``."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i in range(start, len(lines)) if last in lines[i])
    return "\n".join(lines[start : end + 1])


def registers() -> list[str]:
    """Return the expressions of the plan's registers, in terms of the input's dimensions."""
    made = plan()
    texts = [f"x.dim{i}" for i in range(made.inputs[0].rank)]
    for expr in made.exprs:
        operands = [texts[i] for i in (expr.a, expr.b, expr.c)]
        name = expr.op.name.lower()
        if name == "const":
            texts.append(str(expr.imm))
        else:
            texts.append(f"{name}({', '.join(operands[: 3 if name == 'select' else 2])})")
    return texts


def plan_lines() -> Iterator[str]:
    made, texts, variant = plan(), registers(), compiled().variant
    for guard in made.guards:
        yield f"guard   {texts[guard]}"
    for output in made.outputs:
        yield f"output  [{', '.join(texts[dim] for dim in output.dims)}]"
    for record in made.records:
        used = variant.kernels[record.index]
        yield f"launch  {used.name}"
        yield f"        grid   ({', '.join(texts[register] for register in record.grid)})"
        yield f"        block  {tuple(record.block)}"
        yield f"        params {', '.join(_param(param, texts) for param in record.params)}"


def _param(param: Param, texts: Sequence[str]) -> str:
    if param.ref is not None:
        return f"{param.ref.kind.name.lower()}{param.ref.index}"
    return str(param.imm) if param.register is None else texts[param.register]


def launch_lines() -> Iterator[str]:
    """Return the emulated device's launches in Runs of several batches, with the kernels of the same GPU."""
    code = """
        import sys
        import numpy as np
        import ort_cuda_plugin
        from worked_example import model

        session = ort_cuda_plugin.session(model().SerializeToString(), emulate=True)
        for rows in (16, 3, 200):
            done, before = len(open(sys.argv[1]).readlines()), ort_cuda_plugin.counters()
            session.run(None, {"x": np.full((rows, 64), 0.125, np.float16)})
            launches, after = open(sys.argv[1]).readlines()[done:], ort_cuda_plugin.counters()
            built = after["plan_variants_built"] - before["plan_variants_built"]
            print(f"Run with x [{rows}, 64]: plans built: {built}, launches: {len(launches)}")
            for line in launches:
                kernel, grid, block, _ = line.split()
                print(f"    {kernel.rsplit('_', 1)[0]} grid {grid} block {block}")
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "launches.txt")
        file.touch()
        environment = {
            "ORT_CUDA_PLUGIN_EMULATE_LOWERING": "sm_90:132",
            "ORT_CUDA_PLUGIN_EMULATE_PROFILE": str(file),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])),
        }
        yield from python(code, str(file), env=environment).stdout.splitlines()


BLOCKS = {
    "model": lambda: MODEL,
    "graph": lambda: "\n".join(graph_lines()),
    "lowered": lambda: next(iter(compiled().texts.values())),
    "fused": lambda: compiled().texts[changed()[0]],
    "passes": lambda: "\n".join(pass_lines()),
    "epilogue": lambda: "\n".join(epilogue_lines()),
    "emitted": lambda: compiled().texts[changed()[-1]],
    "mainloop": lambda: _between(kernel(1), "stage_at =", "multiplied = choose"),
    "signature": lambda: kernel(1).splitlines()[0],
    "gemv": lambda: _between(kernel(0), "if thread < 16", "e_y1["),
    "plan": lambda: "\n".join(plan_lines()),
    "launches": lambda: "\n".join(launch_lines()),
}
"""The text of each block."""


def blocks(page: str) -> dict[str, str]:
    """Return the blocks of a page by their names."""
    return {found["name"]: found["text"].rstrip("\n") for found in _block.finditer(page)}


def written(page: str) -> str:
    """Return the page with its blocks made again."""
    return _block.sub(lambda found: f"{found[1]}{BLOCKS[found['name']]()}\n```", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
