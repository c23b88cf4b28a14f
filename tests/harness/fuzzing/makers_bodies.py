"""Makers of If, Loop and Scan nodes whose bodies read tensors of the outer graph."""

from __future__ import annotations

import random

import numpy as np
import onnx
from onnx import helper

from fuzzing.network import BOOL, FLOAT, INT64, Grower, Value


def _same_sizes(value: Value, other: Value) -> bool:
    return value.kind == other.kind and value.shapes == other.shapes


def _body(rng: random.Random, names: list[str], prefix: str, steps: int) -> tuple[list[onnx.NodeProto], str]:
    """Make a chain of elementwise nodes from the first of ``names``, tensors of one shape; return it and its result."""
    nodes, current = [], names[0]
    for step in range(steps):
        result = f"{prefix}_{step}"
        if rng.random() < 0.5:
            nodes.append(helper.make_node(rng.choice(("Tanh", "Relu", "Neg")), [current], [result]))
        else:
            nodes.append(helper.make_node(rng.choice(("Add", "Max", "Sub")), [current, rng.choice(names)], [result]))
        current = result
    return nodes, current


def _float_pair(g: Grower) -> tuple[Value, Value] | None:
    x = g.pick(lambda value: value.kind == FLOAT)
    y = g.pick(lambda value: x is not None and _same_sizes(value, x))
    return (x, y) if x is not None and y is not None else None


def if_(g: Grower) -> object:
    pair = _float_pair(g)
    condition = g.pick(lambda value: value.kind == BOOL and value.rank == 0)
    if pair is None:
        return None
    if condition is None:
        size = g.add("Size", [pair[0]], [INT64])
        made = size and g.add("Greater", [size[0], g.constant(g.random.randint(0, 30), INT64)], [BOOL])
        if not made:
            return None
        condition = made[0]
    x, y = pair
    branches = {}
    prefix = f"if{len(g.nodes)}"
    for branch in ("then_branch", "else_branch"):
        nodes, result = _body(g.random, [x.name, y.name], f"{prefix}_{branch}", g.random.randint(1, 3))
        info = helper.make_tensor_value_info(result, FLOAT, None)
        branches[branch] = helper.make_graph(nodes, f"{prefix}_{branch}", [], [info])
    return g.add("If", [condition], [FLOAT], "element", captured=[x, y], **branches)


def loop(g: Grower) -> object:
    """Add a counted Loop with one carried state and one scan output."""
    pair = _float_pair(g)
    if pair is None:
        return None
    x, y = pair
    prefix = f"loop{len(g.nodes)}"
    names = [f"{prefix}_i", f"{prefix}_c", f"{prefix}_s"]
    nodes, result = _body(g.random, [names[2], y.name], prefix, g.random.randint(1, 3))
    nodes.append(helper.make_node("Identity", [names[1]], [f"{prefix}_go"]))
    nodes.append(helper.make_node("Neg", [result], [f"{prefix}_scan"]))
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        nodes,
        prefix,
        [info(names[0], INT64, []), info(names[1], BOOL, []), info(names[2], FLOAT, None)],
        [info(f"{prefix}_go", BOOL, []), info(result, FLOAT, None), info(f"{prefix}_scan", FLOAT, None)],
    )
    trips = g.pick(lambda value: value.kind == INT64 and value.rank == 0 and _is_short(value))
    count = trips if trips is not None and g.random.random() < 0.5 else g.constant(g.random.randint(0, 3), INT64)
    inputs = [count, g.constant(np.array(True)), x]
    return g.add("Loop", inputs, [FLOAT, FLOAT], "element", captured=[y], body=body)


def _is_short(value: Value) -> bool:
    return all(0 <= int(array) <= 4 for array in value.clean)


def scan(g: Grower) -> object:
    """Add a Scan over the first axis, with a sum as its state."""
    x = g.pick(lambda value: value.kind == FLOAT and value.rank >= 2)
    if x is None:
        return None
    start = g.add("ReduceSum", [x, g.constant([0])], [FLOAT], "sum", keepdims=0)
    if start is None:
        return None
    prefix = f"scan{len(g.nodes)}"
    info = helper.make_tensor_value_info
    sizes = [None] * (x.rank - 1)
    nodes = [
        helper.make_node("Add", [f"{prefix}_s", f"{prefix}_x"], [f"{prefix}_n"]),
        helper.make_node("Tanh", [f"{prefix}_n"], [f"{prefix}_y"]),
    ]
    body = helper.make_graph(
        nodes,
        prefix,
        [info(f"{prefix}_s", FLOAT, sizes), info(f"{prefix}_x", FLOAT, sizes)],
        [info(f"{prefix}_n", FLOAT, sizes), info(f"{prefix}_y", FLOAT, sizes)],
    )
    return g.add("Scan", [start[0], x], [FLOAT, FLOAT], "sum", num_scan_inputs=1, body=body)


MAKERS = {if_: 1, loop: 1, scan: 1}
