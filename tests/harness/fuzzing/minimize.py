"""Minimizer: reduces a network with a wrong result to fewer outputs, nodes and Runs.

It removes a node by turning the node's results into inputs, which are fed with their expected contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from fuzzing.network import Case, Value
from mutation.oracle import Outcome


def minimize(case: Case, found: Outcome, judge: Callable[[Case], Outcome]) -> Case:
    """Return a smaller case with an outcome of the same kind. Each round removes something, so the search ends."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(case):
            if judge(candidate).kind is found.kind:
                case, smaller = candidate, True
                break
    return case


def _candidates(case: Case) -> Iterator[Case]:
    """Yield networks with fewer outputs, nodes, Runs or options, those that remove most first."""
    if len(case.outputs) > 1:
        half = len(case.outputs) // 2
        yield _alive(replace(case, outputs=case.outputs[:half]))
        yield _alive(replace(case, outputs=case.outputs[half:]))
        for name in case.outputs:
            yield _alive(replace(case, outputs=tuple(other for other in case.outputs if other != name)))
    for data in case.nodes[:-1]:
        # Yield the network that ends with this node.
        for name in onnx.NodeProto.FromString(data).output:
            if name and case.outputs != (name,):
                yield _alive(replace(case, outputs=(name,)))
    for index in range(len(case.nodes)):
        if (cut := _without(case, index)) is not None:
            yield cut
    if case.runs > 1:
        for run in range(case.runs):
            yield replace(case, values={name: _without_run(value, run) for name, value in case.values.items()})
    for key in case.options:
        yield replace(case, options={other: text for other, text in case.options.items() if other != key})
    if case.optimized:
        yield replace(case, optimized=False)


def _without_run(value: Value, run: int) -> Value:
    clean, noisy = (track[:run] + track[run + 1 :] for track in (value.clean, value.noisy))
    return replace(value, clean=clean, noisy=noisy)


def _without(case: Case, index: int) -> Case | None:
    """Return the network with the results of node ``index`` as inputs; None if no output is left."""
    nodes = [onnx.NodeProto.FromString(node) for node in case.nodes]
    results = {name for name in nodes[index].output if name}
    outputs = tuple(name for name in case.outputs if name not in results)
    if not outputs:
        return None
    # Sizes that differ between Runs are declared as unknown.
    inputs = {name: tuple(case.values[name].same_size(i) for i in range(case.values[name].rank)) for name in results}
    rest = case.nodes[:index] + case.nodes[index + 1 :]
    return _alive(replace(case, nodes=rest, inputs={**case.inputs, **inputs}, outputs=outputs))


def _alive(case: Case) -> Case:
    """Return the network without nodes that no output needs."""
    needed, kept = set(case.outputs), []
    for data in reversed(case.nodes):
        node = onnx.NodeProto.FromString(data)
        if needed & set(node.output):
            needed |= _reads(node)
            kept.append(data)
    made = {name for data in kept for name in onnx.NodeProto.FromString(data).output}
    return replace(
        case,
        nodes=tuple(reversed(kept)),
        inputs={name: dims for name, dims in case.inputs.items() if name in needed},
        constants={name: array for name, array in case.constants.items() if name in needed},
        values={name: value for name, value in case.values.items() if name in needed | made},
    )


def _reads(node: onnx.NodeProto) -> set[str]:
    """Return the names of the values that a node and its bodies read."""
    names = set(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names |= _reads(inner)
    return names - {""}


def write(folder: Path, stem: str, case: Case, outcome: Outcome) -> Path:
    """Write the model, the inputs and expected outputs of each Run, and a text about the finding."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.kind.name.lower()}_{stem}.onnx"
    path.write_bytes(case.model())
    arrays = {
        f"run{run}/{name}": np.asarray(case.values[name].clean[run], dtype=None)
        for run in range(case.runs)
        for name in (*case.inputs, *case.outputs)
    }
    np.savez(path.with_suffix(".npz"), allow_pickle=False, **{n: a for n, a in arrays.items() if a.dtype.num < 256})
    nodes = "\n".join(
        f"    {', '.join(node.output)} = {node.op_type}({', '.join(node.input)})"
        for node in map(onnx.NodeProto.FromString, case.nodes)
    )
    options = " ".join(f"{key}={text}" for key, text in case.options.items())
    text = f"{outcome.kind}: {outcome.detail}\noptimized={case.optimized} {options}\n{nodes}\n"
    path.with_suffix(".txt").write_text(text)
    return path
